"""Cache closures across processes: hashing a runtime takes a second, checking its files a millisecond.

A record holds the listing and a signature (device, inode, size, mtime, ctime) of what it was read from. What an
agent runs is the copy in the rootfs store, whose bytes are checked against the listing when it is made, so a
stale record can delay an update and can never let other bytes run.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from policy.host import Closure, ClosureFile
from sandbox.storage import json_cache

_VERSION = 1
_T = TypeVar("_T")
Build = Callable[[_T], str]
Signature = tuple[int, int, int, int, int]

# INVARIANT: used only together with the watched files' signatures.
in_process: dict[tuple[str, str, str], tuple[Closure, dict[str, Signature]]] = {}


def signature(info: os.stat_result) -> Signature:
    """Return a signature that changes when a file is replaced or written, or a directory gets or loses an entry."""
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns


def load(state: Path, key: str, extra: str) -> Closure | None:
    """Return the remembered closure, if none of its sources has changed since."""
    name = (str(state), key, extra)
    held = in_process.get(name) or _read(state, key, extra)
    if held is None or not _unchanged(held[1]):
        return None
    in_process[name] = held
    return held[0]


def store(state: Path, key: str, extra: str, closure: Closure, watch: Mapping[str, Signature]) -> None:
    """Remember a closure. If the directory cannot be written, the closure is made anew next time."""
    in_process[str(state), key, extra] = (closure, dict(watch))
    rows = [[f.path, f.kind, f.mode, f.size, f.sha256, f.target, f.source] for f in closure.files]
    document = {"version": _VERSION, "extra": extra, "name": closure.name, "entry": closure.entry}
    json_cache.write(_place(state, key), {**document, "files": rows, "watch": {p: list(s) for p, s in watch.items()}})


def forget(state: Path) -> None:
    """Drop every remembered closure of this state directory."""
    for name in [n for n in in_process if n[0] == str(state)]:
        del in_process[name]
    with contextlib.suppress(OSError):
        for path in (state / "closures").glob("*.json"):
            path.unlink()


def _unchanged(watch: Mapping[str, Signature]) -> bool:
    try:
        return all(signature(os.lstat(path)) == seen for path, seen in watch.items())
    except OSError:
        return False


def _read(state: Path, key: str, extra: str) -> tuple[Closure, dict[str, Signature]] | None:
    document = json_cache.read(_place(state, key))
    try:
        if document is None or document["version"] != _VERSION or document["extra"] != extra:
            return None
        files = tuple(ClosureFile(*row) for row in document["files"])
        watch = {str(p): _as_signature(s) for p, s in document["watch"].items()}
        return Closure(document["name"], document["entry"], files), watch
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _place(state: Path, key: str) -> Path:
    return state / "closures" / f"{key}.json"


def _as_signature(values: list[int]) -> Signature:
    dev, ino, size, mtime, ctime = values
    return dev, ino, size, mtime, ctime
