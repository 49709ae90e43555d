"""Closures remembered across processes: hashing a runtime takes a second, looking at its files a millisecond.

A record holds the listing and a signature (device, inode, size, mtime, ctime) of what it was read from. What an
agent runs is the copy in the rootfs store, whose bytes are checked against the listing when it is made, so a
stale record can delay an update and can never let other bytes run.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from policy.host import Closure, ClosureFile

_VERSION = 1
_T = TypeVar("_T")
Build = Callable[[_T], str]
Signature = tuple[int, int, int, int, int]

# INVARIANT: looked at only together with the watched files' signatures.
_in_process: dict[tuple[str, str, str], tuple[Closure, dict[str, Signature]]] = {}


def signature(info: os.stat_result) -> Signature:
    """What changes when a file is replaced or written; a directory's, when an entry comes or goes."""
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns


def load(state: Path, key: str, extra: str) -> Closure | None:
    """The remembered closure, if nothing that it was made from has changed since."""
    name = (str(state), key, extra)
    held = _in_process.get(name) or _read(state / "closures" / f"{key}.json", extra)
    if held is None or not _unchanged(held[1]):
        return None
    _in_process[name] = held
    return held[0]


def store(state: Path, key: str, extra: str, closure: Closure, watch: Mapping[str, Signature]) -> None:
    """Remember a closure; a directory that cannot be written means only that it is made anew next time."""
    _in_process[str(state), key, extra] = (closure, dict(watch))
    rows = [[f.path, f.kind, f.mode, f.size, f.sha256, f.target, f.source] for f in closure.files]
    document = {"version": _VERSION, "extra": extra, "name": closure.name, "entry": closure.entry}
    text = json.dumps({**document, "files": rows, "watch": {p: list(s) for p, s in watch.items()}})
    folder = state / "closures"
    temporary = folder / f".{key}.{secrets.token_hex(8)}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "w") as stream:
            stream.write(text)
        os.replace(temporary, folder / f"{key}.json")


def forget(state: Path) -> None:
    """Drop every remembered closure of this state directory."""
    for name in [n for n in _in_process if n[0] == str(state)]:
        del _in_process[name]
    with contextlib.suppress(OSError):
        for path in (state / "closures").glob("*.json"):
            path.unlink()


def _unchanged(watch: Mapping[str, Signature]) -> bool:
    try:
        return all(signature(os.lstat(path)) == seen for path, seen in watch.items())
    except OSError:
        return False


def _read(path: Path, extra: str) -> tuple[Closure, dict[str, Signature]] | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as stream:
            info = os.fstat(fd)
            # Someone else's record would decide what runs: only our own counts.
            if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
                return None
            document: dict[str, Any] = json.load(stream)
        if document["version"] != _VERSION or document["extra"] != extra:
            return None
        files = tuple(ClosureFile(*row) for row in document["files"])
        watch = {str(p): _as_signature(s) for p, s in document["watch"].items()}
        return Closure(document["name"], document["entry"], files), watch
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _as_signature(values: list[int]) -> Signature:
    dev, ino, size, mtime, ctime = values
    return dev, ino, size, mtime, ctime
