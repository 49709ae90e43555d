"""/etc/passwd and /etc/group of an agent's root, so that programs that ask who they are get an answer.

Every uid of the range that runs take theirs from has a line, so that all runs share one root directory. Each has the
name `agent`. Source: passwd(5), group(5).
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from pathlib import Path

from policy.host import Closure
from sandbox.rootfs import closure_files

FILES = ("/etc/passwd", "/etc/group")
NAME, HOME, SHELL = "agent", "/tmp", "/bin/sh"  # noqa: S108 - of the agent's own root
_NOBODY, _NO_LOGIN = 65534, "/usr/sbin/nologin"


def closure(directory: Path, uids: range, mounted: Collection[str]) -> Closure:
    """Return the two files as one more closure of a root directory; their copies are in ``directory``.

    A file that a mount of the run covers is left out: the grant counts.
    """
    return _of(directory, uids, closure_files.uncovered(FILES, mounted))


@functools.lru_cache(maxsize=8)
def _of(directory: Path, uids: range, paths: tuple[str, ...]) -> Closure:
    content = {"/etc/passwd": _passwd(uids), "/etc/group": _group(uids)}
    return closure_files.derived(directory, "identity", {path: content[path] for path in paths})


def _passwd(uids: range) -> bytes:
    own = [f"root:x:0:0:root:/root:{_NO_LOGIN}", f"nobody:x:{_NOBODY}:{_NOBODY}:nobody:/nonexistent:{_NO_LOGIN}"]
    lines = [*own, *(f"{NAME}:x:{uid}:{uid}:{NAME}:{HOME}:{SHELL}" for uid in uids)]
    return ("\n".join(lines) + "\n").encode()


def _group(uids: range) -> bytes:
    lines = ["root:x:0:", f"nogroup:x:{_NOBODY}:", *(f"{NAME}:x:{uid}:" for uid in uids)]
    return ("\n".join(lines) + "\n").encode()
