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

HOSTS = "/etc/hosts"
FILES = {
    HOSTS: b"127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n",
    "/etc/nsswitch.conf": b"passwd: files\ngroup: files\nhosts: files dns\n",
}


def closure(directory: Path, mounted: Collection[str], hosts: tuple[tuple[str, str], ...] = ()) -> Closure:
    """Return the files as one more closure of a root directory; their copies lie in ``directory``.

    ``hosts`` are further names with their addresses. A file that a mount of the run covers is left out: the grant
    counts.
    """
    return _of(directory, closure_files.uncovered(FILES, mounted), hosts)


@functools.lru_cache(maxsize=16)
def _of(directory: Path, paths: tuple[str, ...], hosts: tuple[tuple[str, str], ...]) -> Closure:
    lines = "".join(f"{address} {name}\n" for name, address in hosts).encode()
    content = {path: FILES[path] + (lines if path == HOSTS else b"") for path in paths}
    return closure_files.derived(directory, "local-names", content)
