"""Read a tool manifest of Matrix, the operator's program and the servers beside the file, as one package in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from policy import errors
from policy import package as packages
from policy.importing import single_file
from policy.importing.single_file import SingleFile
from policy.manifest.tools import document, pins
from sandbox.storage import package_reader

ENDING: Final = ".json"


def read(file: Path, entry: Path | None) -> SingleFile:
    """Return the package of ``file``, whose agent is the program ``entry``.

    Raises:
        errors.CovenantError: a file cannot be read, or as ``single_file.package_of``.
    """
    if entry is None:
        raise errors.UsageError(
            f"`{file}` is a tool manifest, which names no program", hint="covenant run FILE TEXT --entry PROGRAM"
        )
    raw = _read(file, document.MAX_BYTES)
    beside: dict[str, bytes] = {}
    links: dict[str, str] = {}
    for server in document.parse(raw).servers:
        inside = pins.directory(server.alias)
        files, found = package_reader.files_of(file.parent / inside)
        beside |= {f"{inside}{name}": data for name, data in files.items()}
        links |= {f"{inside}{name}": text for name, text in found.items()}
    lock = file.parent / pins.LOCK
    if lock.exists():
        beside[pins.LOCK] = _read(lock, pins.MAX_BYTES)
    return single_file.package_of(raw, entry.name, _read(entry, packages.MAX_BYTES), beside, links)


def _read(path: Path, most: int) -> bytes:
    """Return the bytes of a file, one more than ``most`` at most, for what reads it to refuse."""
    try:
        with path.open("rb") as file:
            return file.read(most + 1)
    except OSError as e:
        raise errors.PackageError(f"`{path}` cannot be read: {e.strerror}", where=str(path)) from e
