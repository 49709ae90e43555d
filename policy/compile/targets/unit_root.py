"""The root of an agent under systemd: the runtime's closure, the package and the granted paths, as bind mounts.

A closure is bound file by file, so that nothing beside it is there. One part of one runtime is too large for that:
python3's library of some 1,200 files is bound as the directory that holds ``os.py``, and what else lies in it on the
host is there too (``systemd.library-tree``). systemd makes no symlinks in a root, so a file that is reached through one
is bound at that place as well.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator

from msgspec import Struct

from policy.host import Closure, ClosureFile

# A file that marks the directory to be bound whole, by runtime.
TREES = {"python3": "os.py"}
_MOST_NAMES = 64  # of one file, through symlinks


class Bind(Struct, frozen=True, order=True):
    """One read-only bind mount. ``runs``: code may be loaded or started from it."""

    destination: str
    source: str
    runs: bool


def binds(closures: Iterable[Closure]) -> tuple[Bind, ...]:
    """The mounts of these closures, sorted, each destination once."""
    found: dict[str, Bind] = {}
    for closure in closures:
        tree = _tree(closure)
        links = {f.path: _target(f) for f in closure.files if f.kind == "symlink"}
        whole = [Bind(tree, _source_of(closure, tree), True)] if tree else []
        single = (
            Bind(f.path, f.source or f.path, _runs(f, closure))
            for f in closure.files
            if f.kind == "file" and not (tree and f.path.startswith(tree + "/"))
        )
        for one in (*whole, *single):
            for name in _names(one.destination, links):
                found.setdefault(name, Bind(name, one.source, one.runs))
    return tuple(sorted(found.values()))


def _tree(closure: Closure) -> str:
    """The directory that is bound whole, empty when there is none."""
    marker = TREES.get(closure.name)
    return next((posixpath.dirname(f.path) for f in closure.files if posixpath.basename(f.path) == marker), "")


def _source_of(closure: Closure, tree: str) -> str:
    marker = f"{tree}/{TREES[closure.name]}"
    source = next(f.source or f.path for f in closure.files if f.path == marker)
    return posixpath.dirname(source)


def _runs(file: ClosureFile, closure: Closure) -> bool:
    return file.path == closure.entry or ".so" in posixpath.basename(file.path)


def _target(link: ClosureFile) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(link.path), link.target))


def _names(path: str, links: dict[str, str]) -> Iterator[str]:
    """``path`` and every other way to it through ``links``."""
    seen = {path}
    todo = [path]
    while todo and len(seen) < _MOST_NAMES:
        name = todo.pop()
        yield name
        for link, target in links.items():
            if name == target or name.startswith(target.rstrip("/") + "/"):
                other = link + name[len(target) :]
                if other not in seen:
                    seen.add(other)
                    todo.append(other)
