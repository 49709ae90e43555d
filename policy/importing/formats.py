"""The formats by name, and the one function that reads any of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from policy.importing import render, srt, systemd
from policy.importing.vocabulary import Context, Draft, Imported

_READERS: Final[Mapping[str, Callable[[bytes, Context], Draft]]] = {
    "srt": srt.read,
    "systemd": systemd.read,
}
NAMES: Final = tuple(_READERS)


def read(name: str, raw: bytes, context: Context) -> Imported:
    """Return the manifest of a configuration in the format ``name``, and its losses.

    Raises:
        errors.ImportSourceError: the configuration is malformed, or no manifest grants at most as much.
    """
    return render.imported(_READERS[name](raw, context), name)
