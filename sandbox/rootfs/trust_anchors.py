"""The trust anchors of this host in the root of an agent that has a network: one file, and the link to it.

Without them every verified connection fails, since a closure has no certificate. They grant nothing: each name in them
is public, and what the agent reaches is the network grant's.
"""

from __future__ import annotations

from collections.abc import Collection

from policy import errors
from policy.compile.mounts import ANCHORS
from policy.host import Closure, ClosureFile
from sandbox.config import Config
from sandbox.rootfs import closure_cache, closure_files

_KEY = "trust-anchors"
BUNDLE, _LINK = ANCHORS


def closures(config: Config, mounted: Collection[str]) -> list[Closure]:
    """Return the files as one more closure of a root directory, and none where the host has no bundle of root's.

    A file that a mount of the run covers is left out: the grant counts.
    """
    found = closure_cache.load(config.state, _KEY, BUNDLE) or _made(config)
    if found is None:
        return []
    left_out = {BUNDLE, _LINK}.difference(closure_files.uncovered((BUNDLE, _LINK), mounted))
    return [Closure(found.name, found.entry, tuple(file for file in found.files if file.path not in left_out))]


def _made(config: Config) -> Closure | None:
    builder = closure_files.Builder()
    try:
        builder.add(BUNDLE)
    except (errors.HostError, OSError):
        return None
    above = (_LINK.rsplit("/", count)[0] for count in range(1, _LINK.count("/")))
    link = [*(ClosureFile(path, "dir", closure_files.DIRECTORY_MODE) for path in above)]
    link.append(ClosureFile(_LINK, "symlink", target=BUNDLE))
    bundle = builder.closure(_KEY, "")
    made = Closure(_KEY, "", tuple(sorted((*bundle.files, *link))))
    closure_cache.store(config.state, _KEY, BUNDLE, made, builder.watch)
    return made
