"""``[llm]`` and ``[search]`` of a home's secrets.toml (Covenant version 1, section 13) as tables of providers.toml.

Agents ask models and searches at their service gate, whose providers the operator writes. Version 1 read the two
sections in the agent's own process, with the key inside; here they are written over once, without their keys.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import pydantic
from msgspec import Struct

from covenant.providers import secrets_file
from policy import errors

OLLAMA: Final = "http://localhost:11434"
# The model of each provider where the section names none.
MODELS: Final[Mapping[str, str]] = {
    "anthropic": "claude-haiku-4-5",
    "deepseek": "deepseek-chat",
    "mock": "mock",
    "ollama": "llama3.1",
    "openai": "gpt-4o-mini",
}
_DEEPSEEK: Final = "https://api.deepseek.com/v1"


class LlmSection(pydantic.BaseModel):
    """The section ``[llm]``."""

    model_config = pydantic.ConfigDict(frozen=True, extra="ignore", strict=True)

    provider: Literal["mock", "ollama", "anthropic", "openai", "deepseek"] = "ollama"
    api_key: str = ""
    model: str = ""
    endpoint: str = ""


class SearchSection(pydantic.BaseModel):
    """The section ``[search]``."""

    model_config = pydantic.ConfigDict(frozen=True, extra="ignore", strict=True)

    provider: Literal["mock", "brave", "serpapi"] = "mock"
    api_key: str = ""


class Imported(Struct, frozen=True):
    """``text`` is a providers.toml, ``secrets`` names the keys that the vault needs, ``manifest`` grants all of it."""

    text: str
    secrets: tuple[str, ...]
    manifest: str


def imported(home: Path) -> Imported:
    """Return what the sections of a home are as providers, in version 1's order of fallback.

    Raises:
        errors.SettingError: The file or a value of it cannot be used. No error contains a part of the file.
    """
    where = str(home / secrets_file.NAME)
    sections = secrets_file.document(secrets_file.read(home), where=where)
    llm = _section(LlmSection, sections, "llm", where)
    search = _section(SearchSection, sections, "search", where)
    tables, secrets = [*_llm(llm), *_search(search)], []
    lines = []
    for name, values in tables:
        secrets += [values["secret"]] if "secret" in values else []
        lines += [f"[providers.{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items()), ""]
    model = json.dumps(llm.model or MODELS[llm.provider])
    granted = ", ".join(f'{{ provider = "{name}", models = [{model}] }}' for name, _ in _llm(llm))
    searched = ", ".join(f'"{name}"' for name, _ in _search(search))
    manifest = f"[services.models]\nallow = [{granted}]\n\n[services.search]\nallow = [{searched}]\n"
    return Imported("\n".join(lines), tuple(secrets), manifest)


def _llm(section: LlmSection) -> Iterator[tuple[str, dict[str, Any]]]:
    """The section's provider, then Ollama on this host, then the mock."""
    kind = "openai-compatible" if section.provider == "deepseek" else section.provider
    endpoint = section.endpoint or {"deepseek": _DEEPSEEK, "ollama": OLLAMA}.get(section.provider, "")
    if section.provider in ("anthropic", "openai") and section.endpoint and not endpoint.rstrip("/").endswith("/v1"):
        endpoint = f"{endpoint.rstrip('/')}/v1"
    if section.provider != "mock":
        values = {"kind": kind, "endpoint": endpoint, "secret": "llm" if section.api_key else ""}
        yield "llm", {key: value for key, value in values.items() if value}
    if section.provider != "ollama" and section.provider != "mock":
        yield "llm-ollama", {"kind": "ollama", "endpoint": OLLAMA}
    yield "llm-mock", {"kind": "mock"}


def _search(section: SearchSection) -> Iterator[tuple[str, dict[str, Any]]]:
    """The section's provider, then the mock."""
    if section.provider != "mock":
        yield "search", {"kind": section.provider, "secret": "search", "timeout_seconds": 20}
    yield "search-mock", {"kind": "mock"}


_Section = TypeVar("_Section", bound=pydantic.BaseModel)


def _section(kind: type[_Section], sections: Mapping[str, Any], name: str, where: str) -> _Section:
    try:
        return kind.model_validate(sections.get(name, {}))
    except pydantic.ValidationError as e:
        field = ".".join(str(part) for part in e.errors(include_input=False)[0]["loc"])
        raise errors.SettingError(f"`{name}.{field}` has a value that cannot be used", where=where) from None
