"""Embedders: text to a vector, and the name of the vector's space.

Vectors of two spaces are never compared (``covenant.stores.memory``), so the name changes with the algorithm. The
default needs no model and no network; ``ollama`` and ``minilm`` are selected in ``secrets.toml``:

    [embed]
    provider = "local"        # or "ollama", or "minilm"; version 1's "mock" is read as "local"
    model = "nomic-embed-text"
    endpoint = "http://localhost:11434"
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Protocol

import anyio.to_thread
import pydantic

from covenant.providers import secrets_file
from covenant.providers.embed.hashed import HashEmbedder
from policy import errors

DEFAULT_MODEL: Final = "nomic-embed-text"
DEFAULT_ENDPOINT: Final = "http://localhost:11434"


class Embedder(Protocol):
    """Makes vectors of one space."""

    @property
    def name(self) -> str:
        """The space: vectors with the same name may be compared."""
        ...

    @property
    def dimensions(self) -> int | None:
        """The number of dimensions of a vector; None while unknown."""
        ...

    async def embed(self, text: str) -> tuple[float, ...]:
        """Return the vector of a text; empty for a text without features.

        Raises:
            errors.EmbedderError: no vector is available.
        """
        ...

    async def close(self) -> None:
        """Release resources."""
        ...


class EmbedSettings(pydantic.BaseModel):
    """The section ``[embed]``; other sections are ignored."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    provider: Literal["local", "mock", "ollama", "minilm"] = "local"
    model: str = DEFAULT_MODEL
    endpoint: str = DEFAULT_ENDPOINT


def read_settings(home: Path) -> EmbedSettings:
    """Read the section ``[embed]`` of ``secrets.toml`` in the home; defaults if there is none.

    Raises:
        errors.SettingError: the file is a symlink, another user's, readable by others, or malformed.
    """
    return parse_settings(secrets_file.read(home), where=str(home / secrets_file.NAME))


def parse_settings(raw: bytes, *, where: str) -> EmbedSettings:
    """Parse the section ``[embed]``. No error ever contains a part of the file: it holds secrets.

    Raises:
        errors.SettingError: no TOML, a key that the section does not have, or a value that cannot be used.
    """
    document = secrets_file.document(raw, where=where)
    secrets_file.refuse_unknown(document, "embed", tuple(EmbedSettings.model_fields), raw, where=where)
    try:
        return EmbedSettings.model_validate(document.get("embed", {}))
    except pydantic.ValidationError as e:
        field = ".".join(str(part) for part in e.errors(include_input=False)[0]["loc"])
        hint = "provider is `local`, `ollama` or `minilm`; model and endpoint are texts"
        raise errors.SettingError(f"`embed.{field}` has a value that cannot be used", hint=hint, where=where) from None


@dataclass(frozen=True, slots=True)
class Picked:
    """The embedder to use; ``warning`` is empty if all is well."""

    embedder: Embedder
    warning: str = ""


async def pick(settings: EmbedSettings) -> Picked:
    """Return the embedder that the settings select. It is never replaced by another, which would fill a space of its
    own.

    An Ollama that does not answer now is used anyway, since it may be started later; until then records are stored
    without a vector.

    Raises:
        errors.EmbedderError: the extra `minilm` is not installed, or its model is not the pinned one.
    """
    match settings.provider:
        case "local" | "mock":
            return Picked(HashEmbedder())
        case "minilm":
            # Imported here, because only this embedder needs the extra; reads the model.
            from covenant.providers.embed import minilm

            return Picked(await anyio.to_thread.run_sync(minilm.load))
        case "ollama":
            from covenant.providers.embed.ollama import OllamaEmbedder

            embedder = OllamaEmbedder(settings.endpoint, settings.model)
            try:
                await embedder.probe()
            except errors.EmbedderError as e:
                return Picked(embedder, f"{e.message}: records get no vector until it answers")
            return Picked(embedder)
