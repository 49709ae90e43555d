"""Follow symbolic links by their text, as the kernel does: component by component.

Those of an agent's root are followed from `/`. Those of a package have to lead to a file or directory of it, and no
step may leave it: ``npm install`` makes ``node_modules/.bin`` of such links. The text of a link is signed, so what it
leads to is decided here once: the kernel follows the same text in the copy that runs. openat2(2) with RESOLVE_BENEATH
is the oracle of the tests (ADR 0150).
"""

from __future__ import annotations

import posixpath
from collections import deque
from collections.abc import Iterable, Mapping, Set
from typing import Final

from policy import errors

MOST_LINKS: Final = 40  # MAXSYMLINKS of linux/namei.h
# PATH_MAX of a path in a package (policy.package.MAX_PATH_BYTES).
_TEXT_BYTES: Final = 1024
# Names that programs of this project read: what they say is what is signed under that name.
_FILES_ALONE: Final = frozenset({"agent.toml", "agent.dsse.json", "tools.json", "tools.lock.json"})
_COPY: Final = "put the file that it leads to in its place: `cp -rL PACKAGE COPY` does so for each"
_OUT: Final = "take the link out: `rm`"


def follow(path: str, links: Mapping[str, str]) -> str | None:
    """Return the place that an absolute ``path`` leads to. ``links`` maps the path of each link to its text.

    Returns:
        The place, absolute and normalised, or None for more links than the kernel follows.
    """
    pending, current, hops = deque(path.split("/")), "", 0
    while pending:
        part = pending.popleft()
        if part in ("", "."):
            continue
        if part == "..":
            current = current.rpartition("/")[0]
            continue
        here = f"{current}/{part}"
        target = links.get(here)
        if target is None:
            current = here
            continue
        hops += 1
        if hops > MOST_LINKS:
            return None
        pending.extendleft(reversed(target.split("/")))
        current = "" if target.startswith("/") else current
    return current or "/"


def check_package(links: Mapping[str, str], files: Iterable[str]) -> None:
    """Check every link of a package, whose paths are checked already.

    (1) The link is none of the package's own documents, and no file has its path.
    (2) Its text is relative, in the one plain spelling, with ``..`` in front alone.
    (3) No step on its way leaves the package.
    (4) It is in no loop, and passes at most the links that a kernel follows.
    (5) It ends at a file or a directory of the package that does not contain the link.

    Raises:
        errors.PackageError: it is another.
    """
    if not links:
        return
    files = frozenset(files)
    directories = {path[:at] for path in (*files, *links) for at, ch in enumerate(path) if ch == "/"}
    walk = _Walk(links, files, directories)
    for path, text in links.items():
        # (1) documents
        if path in _FILES_ALONE:
            raise _refused(path, "is a symlink, and has to be a file", _COPY)
        if path in files:
            raise _refused(path, "is both a file and a symlink", _OUT)
        # (2) text
        _check_text(path, text)
    for path in links:
        place, _ = walk.of(path)
        # (5) end
        if place == "" or path.startswith(f"{place}/"):
            raise _refused(path, f"is a loop: it leads to `{place or '.'}`, which contains it", _OUT)
        if place not in files and place not in directories:
            raise _refused(path, f"leads to `{place}`, which the package does not have", _OUT)


def follow_in_package(path: str, links: Mapping[str, str]) -> str | None:
    """Return where a path of a checked package leads, relative to it; None where it leaves the package."""
    walk = _Walk(links, frozenset(), frozenset())
    try:
        return walk.along("", path.split("/"), path)[0]
    except errors.PackageError:
        return None


def _check_text(path: str, text: str) -> None:
    if text.startswith("/"):
        raise _refused(path, "is a symlink with an absolute path", _COPY)
    if not text or text != posixpath.normpath(text) or text == ".":
        raise _refused(path, "is a symlink whose text is not the plain spelling of a path", _COPY)
    if len(text.encode()) > _TEXT_BYTES:
        raise _refused(path, f"is a symlink whose text has more than {_TEXT_BYTES} bytes", _COPY)


class _Walk:
    """Follows links by their text, component by component. Each link is followed once."""

    def __init__(self, links: Mapping[str, str], files: Set[str], directories: Set[str]) -> None:
        self._links, self._files, self._directories = links, files, directories
        self._known: dict[str, tuple[str, int]] = {}
        self._open: set[str] = set()

    def of(self, path: str) -> tuple[str, int]:
        """Return the place where a link leads to, which is no link, and the number of links on the way."""
        known = self._known.get(path)
        if known is not None:
            return known
        # (4) The kernel gives up after MOST_LINKS, also where they are no loop.
        if path in self._open:
            raise _refused(path, "is a symlink in a loop", _OUT)
        if len(self._open) >= MOST_LINKS:
            raise _refused(path, f"leads through more than {MOST_LINKS} symlinks", _COPY)
        self._open.add(path)
        place, hops = self.along(posixpath.dirname(path), self._links[path].split("/"), path)
        self._open.discard(path)
        if hops >= MOST_LINKS:
            raise _refused(path, f"leads through more than {MOST_LINKS} symlinks", _COPY)
        self._known[path] = place, hops + 1
        return self._known[path]

    def along(self, start: str, parts: Iterable[str], link: str) -> tuple[str, int]:
        """Return the place that ``parts`` lead to from the directory ``start``, and the number of links on the way."""
        current, hops = start, 0
        for part in parts:
            # (3) escape
            if part == "..":
                if not current:
                    raise _refused(link, "is a symlink that leaves the package", _COPY)
                current = posixpath.dirname(current)
                continue
            if current in self._files:
                raise _refused(link, f"leads through `{current}`, which is no directory", _OUT)
            current = f"{current}/{part}" if current else part
            if current in self._links:
                current, more = self.of(current)
                hops += more
        return current, hops


def _refused(path: str, what: str, hint: str) -> errors.PackageError:
    return errors.PackageError(f"`{path}` {what}", hint=hint, where=path)
