"""Variables that lead the clients of a session to its service gate: a base URL and a key that is none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from covenant.session.typed import ModelWord
from policy import errors
from policy.manifest import text
from sandbox.network.service import providers

BASE: Final = "http://models.covenant"
# A client wants a key; the gate removes it.
PLACEHOLDER: Final = "covenant-has-the-key"
_OPENAI: Final = {"OPENAI_API_BASE": f"{BASE}/v1", "OPENAI_API_KEY": PLACEHOLDER, "OPENAI_BASE_URL": f"{BASE}/v1"}
_ANTHROPIC: Final = {"ANTHROPIC_API_KEY": PLACEHOLDER, "ANTHROPIC_BASE_URL": BASE}
_GEMINI: Final = {"GEMINI_API_KEY": PLACEHOLDER, "GOOGLE_GEMINI_BASE_URL": BASE}
_OLLAMA: Final = {"OLLAMA_HOST": BASE}
VARIABLES: Final[Mapping[str, Mapping[str, str]]] = {
    "anthropic": _ANTHROPIC,
    "gemini": _GEMINI,
    "mock": {**_OPENAI, **_ANTHROPIC, **_GEMINI, **_OLLAMA},
    "ollama": {**_OLLAMA, **_OPENAI},
    "openai": _OPENAI,
    "openai-compatible": _OPENAI,
}


def variables(state: Path, words: Sequence[ModelWord]) -> tuple[tuple[str, str], ...]:
    """Return the variables for these models, by the kinds of their providers.

    Raises:
        errors.UsageError: the operator has no such provider.
        errors.ConfigError: providers.toml is malformed.
    """
    known = providers.load(state) if words else {}
    return tuple(sorted(dict(_pairs(known, words)).items()))


def _pairs(known: Mapping[str, providers.Provider], words: Sequence[ModelWord]) -> Iterator[tuple[str, str]]:
    for one in words:
        if one.provider not in known:
            named = f"known: {', '.join(known)}" if known else "there is none"
            raise errors.UsageError(
                f"--model {text.quote(one.provider)} is no provider of this host",
                hint=f"{named}; write [providers.{one.provider}] in providers.toml (docs/models.md)",
            )
        yield from VARIABLES[known[one.provider].kind].items()
