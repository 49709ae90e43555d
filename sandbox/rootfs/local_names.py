"""The files of an agent's root by which `localhost` is the loopback, without a question to the gateway.

A C library without nsswitch.conf asks the resolver first, and the resolver of a run knows granted names alone. Source:
RFC 6761, section 6.3; nsswitch.conf(5); hosts(5).
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from pathlib import Path

from policy.host import Closure
from sandbox.rootfs import closure_files

FILES = {
    "/etc/hosts": b"127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n",
    "/etc/nsswitch.conf": b"passwd: files\ngroup: files\nhosts: files dns\n",
}


def closure(directory: Path, mounted: Collection[str]) -> Closure:
    """Return the files as one more closure of a root directory; their copies lie in ``directory``.

    A file that a mount of the run covers is left out: the grant counts.
    """
    return _of(directory, closure_files.uncovered(FILES, mounted))


@functools.lru_cache(maxsize=8)
def _of(directory: Path, paths: tuple[str, ...]) -> Closure:
    return closure_files.derived(directory, "local-names", {path: FILES[path] for path in paths})
