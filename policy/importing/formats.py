"""The formats by name, and the one function that reads any of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from policy.importing import claude, codex, compose, docker, render, srt, tools_json
from policy.importing.units import service
from policy.importing.vocabulary import Context, Draft, Imported

_READERS: Final[Mapping[str, Callable[[bytes, Context], Draft]]] = {
    "srt": srt.read,
    "claude": claude.read,
    "codex": codex.read,
    "docker": docker.read,
    "compose": compose.read,
    "systemd": service.read,
    "tools-json": tools_json.read,
}
NAMES: Final = tuple(_READERS)


def read(name: str, raw: bytes, context: Context) -> Imported:
    """Return the manifest of a configuration in the format ``name``, and its losses.

    Raises:
        errors.ImportSourceError: the configuration is malformed, or no manifest grants at most as much.
    """
    return render.imported(_READERS[name](raw, context), name)
