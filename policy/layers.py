"""Layers: their names, their canonical listing and digest, and the union of several layers into one root.

A layer is named ``NAME@sha256:HEX``. The digest is the SHA-256 of the canonical listing, so a layer cannot change under
its name. Owner, times and permission bits other than the execute bit are no part of a layer.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from msgspec import Struct, structs

from policy import errors

EntryKind = Literal["dir", "file", "link"]

MAX_PATH_BYTES, MAX_NAME_BYTES, MAX_TARGET_BYTES = 4095, 255, 4095
_MAX_HOPS = 40
_HEAD = "covenant layer 1"
_FIELDS = 6
_KINDS: Mapping[str, EntryKind] = {"dir": "dir", "file": "file", "link": "link"}
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class LayerRef(Struct, frozen=True, order=True):
    """Name a layer in a manifest. ``digest`` is 64 hexadecimal digits."""

    name: str
    digest: str

    def __str__(self) -> str:
        return f"{self.name}@sha256:{self.digest}"


class LayerEntry(Struct, frozen=True, order=True):
    """One path of a layer, as it is in a root directory: absolute, without `.` and `..`.

    ``executable``, ``size`` (bytes) and ``sha256`` (hex) belong to files, ``target`` to links.
    """

    path: str
    kind: EntryKind
    executable: bool = False
    size: int = 0
    sha256: str = ""
    target: str = ""


def parse_ref(text: str) -> LayerRef:
    """Parse ``NAME@sha256:HEX``.

    Raises:
        errors.LayerError: Raised when the text has another form.
    """
    name, at, digest = text.partition("@sha256:")
    if not at or not _DIGEST.fullmatch(digest):
        raise errors.LayerError(
            f"`{text[:160]}` names no layer", hint="write NAME@sha256: and 64 digits, as `covenant layer list` shows it"
        )
    return LayerRef(check_name(name), digest)


def check_name(name: str) -> str:
    """Return the name of a layer.

    Raises:
        errors.LayerError: Raised when it has a character that no name may have, or is too long.
    """
    if not _NAME.fullmatch(name):
        raise errors.LayerError(
            f"`{name[:80]}` cannot name a layer",
            hint="use at most 64 of a-z, 0-9, `.`, `_` and `-`, beginning with a letter or digit",
        )
    return name


def is_digest(text: str) -> bool:
    """Whether the text is the hexadecimal form of a SHA-256."""
    return _DIGEST.fullmatch(text) is not None


def check_path(path: str) -> None:
    """Check the one spelling of a path in a layer.

    Raises:
        errors.LayerError: Raised when it is relative, `/`, not normal, too long, not UTF-8, or has a NUL.
    """
    try:
        raw = path.encode()
    except UnicodeEncodeError:
        raise errors.LayerError(f"the name `{_shown(path)}` is not UTF-8", where=_shown(path)) from None
    parts = path.split("/")
    if parts[0] or len(parts) < 2 or any(part in ("", ".", "..") for part in parts[1:]) or "\0" in path:
        raise errors.LayerError(
            f"`{_shown(path)}` cannot be a path in a layer",
            hint="write an absolute path such as /opt/app, without `..` and control characters",
            where=_shown(path),
        )
    if len(raw) > MAX_PATH_BYTES or (
        len(raw) > MAX_NAME_BYTES and any(len(part.encode()) > MAX_NAME_BYTES for part in parts)
    ):
        raise errors.LayerError(f"the path `{_shown(path)}` is too long for a layer", where=_shown(path))


def check(entries: Sequence[LayerEntry]) -> None:
    """Check that the entries are the listing of one tree: plain paths, each once, each in a directory.

    A link may have any target. Where it leads is decided in the root that it will be in, and never leads out of that.

    Raises:
        errors.LayerError: Raised for the first entry that is wrong.
    """
    kinds: dict[str, str] = {"": "dir"}
    for e in sorted(entries):
        check_path(e.path)
        if e.path in kinds:
            raise errors.LayerError(f"`{_shown(e.path)}` is twice in the layer", where=_shown(e.path))
        if kinds.get(e.path.rpartition("/")[0]) != "dir":
            raise errors.LayerError(f"`{_shown(e.path)}` is in no directory of the layer", where=_shown(e.path))
        kinds[e.path] = e.kind
        if not _is_sound(e):
            raise errors.LayerError(f"the entry of `{_shown(e.path)}` is malformed", where=_shown(e.path))


def _is_sound(e: LayerEntry) -> bool:
    if e.kind == "file":
        return is_digest(e.sha256) and e.size >= 0 and not e.target
    if e.executable or e.size or e.sha256:
        return False
    if e.kind == "link":
        try:
            raw = e.target.encode()
        except UnicodeEncodeError:
            return False
        return 0 < len(raw) <= MAX_TARGET_BYTES and b"\0" not in raw
    return not e.target


def canonical(entries: Iterable[LayerEntry]) -> bytes:
    """Return the canonical listing: a head, then six fields an entry, each ended by NUL, in byte order of the paths."""
    # Code point order of str is the byte order of UTF-8. No field has a NUL, so no two listings have the same bytes.
    fields = [_HEAD]
    for e in sorted(entries):
        fields += (e.path, e.kind, "x" if e.executable else "-", str(e.size), e.sha256, e.target)
    return ("\0".join(fields) + "\0").encode()


def parsed(raw: bytes) -> tuple[LayerEntry, ...]:
    """Return the entries of a canonical listing.

    Raises:
        errors.LayerError: Raised when the bytes are no canonical listing.
    """
    try:
        head, *fields, last = raw.decode().split("\0")
        if head != _HEAD or last or len(fields) % _FIELDS:
            raise ValueError
        columns = [fields[i::_FIELDS] for i in range(_FIELDS)]
        entries = tuple(
            LayerEntry(path, _KINDS[kind], mark == "x", int(size), sha256, target)
            for path, kind, mark, size, sha256, target in zip(*columns, strict=True)
        )
    except (ValueError, KeyError):
        raise errors.LayerError("the listing of a layer is damaged") from None
    check(entries)
    if canonical(entries) != raw:
        raise errors.LayerError("the listing of a layer is damaged: it is not in its canonical form")
    return entries


def digest_of(entries: Iterable[LayerEntry]) -> str:
    """Return the digest that names the layer: the hex SHA-256 of its canonical listing."""
    return hashlib.sha256(canonical(entries)).hexdigest()


class Placed(Struct, frozen=True):
    """One path of a union. ``source`` counts the trees that were laid, from 0; ``entry`` is the entry of that tree.

    The path differs from ``entry.path`` when a lower tree has a link to a directory on the way.
    """

    path: str
    entry: LayerEntry
    source: int


class _Node:
    """One path of a union: its entry, the tree that it is from, and the directory that it is in."""

    __slots__ = ("children", "entry", "name", "parent", "source")

    def __init__(self, entry: LayerEntry, source: int, parent: _Node | None = None, name: str = "") -> None:
        self.entry, self.source, self.parent, self.name = entry, source, parent, name
        self.children: dict[str, _Node] = {}

    def put(self, name: str, entry: LayerEntry, source: int) -> _Node:
        """Make an entry of this directory, in place of the one that had the name."""
        node = self.children[name] = _Node(entry, source, self, name)
        return node

    def trail(self) -> list[_Node]:
        """Return the nodes from the root to this one."""
        nodes = [self]
        while (above := nodes[-1].parent) is not None:
            nodes.append(above)
        return nodes[::-1]

    def path(self) -> str:
        """Return the path of this node."""
        return "/".join(node.name for node in self.trail())

    def is_current(self) -> bool:
        """Whether the union still has this node."""
        nodes = self.trail()
        return all(above.children.get(node.name) is node for above, node in itertools.pairwise(nodes))


class Union:
    """The union of trees. A tree that is laid later replaces earlier entries of the same path.

    A directory joins a directory. Any other meeting replaces the earlier entry with all below it. One case is special:
    where a tree has a directory and the union has a link to a directory, as `/bin` on a merged /usr, the tree's files
    go into the directory that the link names. Links are resolved within the union: `/..` is `/`.
    """

    def __init__(self) -> None:
        self._root = _Node(LayerEntry("/", "dir"), -1)
        self._laid = 0

    def lay(self, entries: Iterable[LayerEntry]) -> None:
        """Lay one tree over the union.

        Raises:
            errors.LayerError: Raised when a link of an earlier tree leads two entries of this one to the same path.
        """
        source, self._laid = self._laid, self._laid + 1
        # By components, so that a directory's entries follow it without another between.
        into: dict[str, _Node] = {"": self._root}
        for e in sorted(entries, key=lambda e: e.path.split("/")):
            above, _, name = e.path.rpartition("/")
            parent = into[above]
            there = parent.children.get(name)
            if e.kind == "dir":
                into[e.path] = self._directory(parent, name, there, e, source)
            elif there is None or there.source != source:
                parent.put(name, e, source)
            elif structs.replace(there.entry, path=e.path) != e:
                raise _meeting(e.path, there.path())
        for path, node in into.items():
            if not node.is_current():
                raise _meeting(path, node.path())

    def _directory(self, parent: _Node, name: str, there: _Node | None, e: LayerEntry, source: int) -> _Node:
        if there is None:
            return parent.put(name, e, source)
        if there.entry.kind == "dir":
            return there
        if there.source == source:
            raise _meeting(e.path, there.path())
        if there.entry.kind == "link":
            found = self._resolved([name], parent.trail())
            if found is not None and found[-1].entry.kind == "dir":
                return found[-1]
        return parent.put(name, e, source)

    def _resolved(self, parts: Iterable[str], trail: list[_Node]) -> list[_Node] | None:
        """Return the nodes from the root to the end of the path, with every link on the way resolved."""
        pending, hops = deque(parts), 0
        while pending:
            part = pending.popleft()
            if part in ("", "."):
                continue
            if part == "..":
                # `/..` is `/`, as in a root directory of the kernel.
                trail = trail[:-1] or trail
                continue
            node = trail[-1].children.get(part)
            if node is None:
                return None
            if node.entry.kind == "link":
                hops += 1
                if hops > _MAX_HOPS:
                    return None
                target = node.entry.target
                pending.extendleft(reversed(target.split("/")))
                trail = [self._root] if target.startswith("/") else trail
                continue
            if node.entry.kind == "file" and pending:
                return None
            trail = [*trail, node]
        return trail

    def resolve(self, path: str) -> Placed | None:
        """Return the file or directory that a path leads to, within the union. None if it leads nowhere, or to `/`."""
        trail = self._resolved(path.split("/"), [self._root])
        if trail is None or len(trail) < 2:
            return None
        return Placed(trail[-1].path(), trail[-1].entry, trail[-1].source)

    def at(self, path: str) -> LayerEntry | None:
        """Return the entry at a path, whose own link is not followed. None if there is none."""
        above, _, name = path.rpartition("/")
        trail = self._resolved(above.split("/"), [self._root])
        node = None if trail is None else trail[-1].children.get(name)
        return None if node is None else node.entry

    def entries(self) -> list[Placed]:
        """Return every path of the union, sorted, so that a directory comes before its entries."""
        found, pending = [], [("", self._root)]
        while pending:
            path, top = pending.pop()
            for name, node in top.children.items():
                place = f"{path}/{name}"
                found.append(Placed(place, node.entry, node.source))
                if node.children:
                    pending.append((place, node))
        return sorted(found, key=lambda p: p.path)


def _meeting(one: str, other: str) -> errors.LayerError:
    return errors.LayerError(
        f"`{_shown(one)}` of a layer and another path of the same layer are both `{_shown(other)}` in the root",
        hint="a lower layer has a link on the way; leave that layer out, or build this one without the path",
        where=_shown(one),
    )


def _shown(path: str) -> str:
    start = path if len(path) <= 160 else path[:160] + "..."
    return start.encode("utf-8", "backslashreplace").decode()
