"""Observations of a run: files opened, programs started, hosts reached, with counts and first times. Bounded."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator
from typing import Final, Literal, TypeVar

from msgspec import Struct

from policy import denials

K = TypeVar("K")
# A program is started by the path of a call (exec); what the kernel then loads is a link's target or an interpreter.
# `lost` is a message that the sandbox could not send.
Kind = Literal["exec", "load", "open", "look", "connect", "lost"]
# So many different paths and hosts of one run are kept; the others are counted.
LARGEST: Final = 20_000
# And so many names of processes for each.
_NAMES = 8
# A path of Linux has at most so many bytes.
_PATH_BYTES = 4096
_WRITES: Final = 0o1 | 0o2 | 0o100 | 0o1000  # O_WRONLY, O_RDWR, O_CREAT, O_TRUNC
_DIRECTORY: Final = 0o200000


class SeenAccess(Struct, frozen=True):
    """One access to a path of the sandbox, or a connection to ADDRESS:PORT.

    ``by`` is the name of the process. ``errno`` is 0 for success.
    """

    kind: Kind
    path: str
    by: str = ""
    at_ns: int = 0
    errno: int = 0
    writes: bool = False
    lists: bool = False


class Evidence(Struct):
    """How often something was seen, when first (nanoseconds since 1970), and by which processes."""

    count: int = 0
    first_ns: int = 0
    by: tuple[str, ...] = ()
    writes: bool = False
    lists: bool = False

    def add(self, one: SeenAccess) -> None:
        """Count an access."""
        self.count += 1
        self.first_ns = min(self.first_ns or one.at_ns, one.at_ns)
        self.writes, self.lists = self.writes or one.writes, self.lists or one.lists
        if one.by and one.by not in self.by and len(self.by) < _NAMES:
            self.by = (*self.by, one.by)


class Observed:
    """All that was seen of one run. ``missed`` counts what was not kept."""

    def __init__(self) -> None:
        self._found: dict[tuple[Kind, str], Evidence] = {}
        self._failed: dict[tuple[Kind, str, int], Evidence] = {}
        self.hosts: dict[str, Evidence] = {}
        self.refused: dict[tuple[str, str], Evidence] = {}
        self.missed = 0
        self.run_id = self.package_digest = ""

    def saw(self, one: SeenAccess) -> None:
        """Count an access to a path."""
        if one.kind == "lost":
            self.missed += 1
        elif one.errno:
            self._add(self._failed, (one.kind, one.path, one.errno), one)
        else:
            self._add(self._found, (one.kind, one.path), one)

    def reached(self, target: str, connections: int, at_ns: int) -> None:
        """Count connections to a host, as ``NAME:PORT``."""
        self._put(self.hosts, target, connections, at_ns)

    def ended(self, run_id: str, package_digest: str, refused: Iterable[denials.Row], at_ns: int) -> None:
        """Count the refusals of a run that has ended, and keep the digest of the package that was run."""
        self.run_id, self.package_digest = run_id, package_digest
        for row in refused:
            self._put(self.refused, (row.denial.layer, row.denial.target), row.count, at_ns)

    def succeeded(self, *kinds: Kind) -> Iterator[tuple[str, Evidence]]:
        """Return each path that was accessed in one of these ways, in the order of first sight."""
        return ((path, one) for (kind, path), one in self._found.items() if kind in kinds)

    def failed(self, errno: int) -> Iterator[tuple[str, Evidence]]:
        """Return each path whose access failed so."""
        return ((path, one) for (_, path, found), one in self._failed.items() if found == errno)

    def _add(self, table: dict[K, Evidence], key: K, one: SeenAccess) -> None:
        found = table.get(key)
        if found is None:
            if len(table) >= LARGEST:
                self.missed += 1
                return
            found = table[key] = Evidence()
        found.add(one)

    def _put(self, table: dict[K, Evidence], key: K, count: int, at_ns: int) -> None:
        self._add(table, key, SeenAccess("look", "", at_ns=at_ns))
        if key in table:
            table[key].count += count - 1


def access(
    kind: Kind, path: str, folder: str, *, by: str = "", at_ns: int = 0, errno: int = 0, flags: int = 0
) -> SeenAccess | None:
    """Return the access to a path that was given relative to a folder. None where it names no place."""
    if not path or "\0" in path or len(path) > _PATH_BYTES:
        return None
    whole = posixpath.normpath(posixpath.join(folder or "/", path))
    if not whole.startswith("/"):
        return None
    whole = "/" + whole.lstrip("/")
    # O_CREAT alone opens for reading what is there; the file may still be made.
    return SeenAccess(kind, whole, by, at_ns, errno, bool(flags & _WRITES), bool(flags & _DIRECTORY))
