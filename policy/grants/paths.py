"""Filesystem grants: sets of paths, each with everything below it, and the mode.

Paths compare by component: ``/data/x`` lies under ``/data``, ``/data2`` does not. A set is kept as its shortest
description, sorted by component; then the only member that can cover a path is its predecessor, which makes
``meet`` one merge and a look-up one bisection.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from policy import errors
from policy.grants.sets.domain import EMPTY, NameSet, at_most, lower
from policy.manifest import text

Mode = Literal["read-only-package", "ephemeral", "host"]
MODES: tuple[Mode, ...] = ("read-only-package", "ephemeral", "host")
SHARED = "write beside other runs"


def check_normalised(path: str) -> str:
    """``path`` itself when it is absolute and normalised.

    Raises ManifestError for a relative path, an empty, ``.`` or ``..`` component, a trailing slash or NUL: two
    spellings of one place must not be two grants.
    """
    if path == "/":
        return path
    head, *rest = path.split("/")
    if head or not rest or any(part in {"", ".", ".."} for part in rest) or "\0" in path:
        raise errors.ManifestError(
            f"path {text.quote(path)} is not absolute and normalised",
            hint="write it from `/`, without `.`, `..`, doubled or trailing slashes",
        )
    return path


def _key(path: str) -> str:
    """Sort key that orders by component: NUL stands for the slash, since no name holds it."""
    return "" if path == "/" else path.replace("/", "\0")


def _covers(key: str, other: str) -> bool:
    """Whether the path of ``key`` is, or lies above, the path of ``other``."""
    return other.startswith(key) and (len(other) == len(key) or other[len(key)] == "\0")


def _shortest(keys: Iterable[str]) -> tuple[str, ...]:
    """The keys, sorted, without those that another covers."""
    out: list[str] = []
    for key in sorted(set(keys)):
        if not out or not _covers(out[-1], key):
            out.append(key)
    return tuple(out)


@dataclass(frozen=True, slots=True)
class PathSet:
    """A set of host paths with all that lies below them; ``paths`` holds no path below another."""

    paths: tuple[str, ...] = ()
    _keys: tuple[str, ...] = field(default=(), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        keys = _shortest(_key(check_normalised(p)) for p in self.paths)
        object.__setattr__(self, "_keys", keys)
        object.__setattr__(self, "paths", tuple(k.replace("\0", "/") or "/" for k in keys))

    @classmethod
    def _of_keys(cls, keys: tuple[str, ...]) -> Self:
        """A set from keys that are already sorted and do not cover one another."""
        new = object.__new__(cls)
        object.__setattr__(new, "_keys", keys)
        object.__setattr__(new, "paths", tuple(k.replace("\0", "/") or "/" for k in keys))
        return new

    @classmethod
    def of(cls, paths: Iterable[str]) -> Self:
        """The set of these paths and all below them. Raises ManifestError as ``check_normalised`` does."""
        return cls(tuple(paths))

    @classmethod
    def top(cls) -> Self:
        """Every path."""
        return cls(("/",))

    def __iter__(self) -> Iterator[str]:
        return iter(self.paths)

    def __len__(self) -> int:
        return len(self.paths)

    def _holds(self, key: str) -> bool:
        at = bisect.bisect_right(self._keys, key)
        return at > 0 and _covers(self._keys[at - 1], key)

    def covers(self, path: str) -> bool:
        """Whether ``path`` is one of these or lies below one."""
        return self._holds(_key(check_normalised(path)))

    def meet(self, other: Self, /) -> Self:
        """The paths that lie in both."""
        if self._keys == other._keys:
            return self
        # Most members of a child are its parent's too: those need no look-up.
        mine, theirs = set(self._keys), set(other._keys)
        both = mine & theirs
        both.update(k for k in mine - both if other._holds(k))
        both.update(k for k in theirs - both if self._holds(k))
        return self._of_keys(tuple(sorted(both)))

    def union(self, other: Self, /) -> Self:
        """The paths that lie in either."""
        if not other._keys or self._keys == other._keys:
            return self
        return self._of_keys(_shortest(self._keys + other._keys)) if self._keys else other

    def is_subset(self, other: Self, /) -> bool:
        """Whether each of these lies in ``other``."""
        return all(other._holds(k) for k in set(self._keys) - set(other._keys))

    def difference(self, other: Self, /) -> Self:
        """The members, whole, that do not lie in ``other``."""
        theirs = set(other._keys)
        return self._of_keys(tuple(k for k in self._keys if k not in theirs and not other._holds(k)))


@dataclass(frozen=True, slots=True)
class FilesystemGrants:
    """The host files that an agent sees.

    ``write`` paths can be read and written, ``read`` paths only read: one that ``write`` already covers is not
    listed again. ``mode`` is ordered as in ``MODES``. ``shared``: other runs may write them at the same time.
    ``volumes`` are written too, each as ``NAME:/place``: a child has one only where its parent has it.
    """

    mode: Mode = "read-only-package"
    read: PathSet = PathSet()
    write: PathSet = PathSet()
    shared: bool = False
    volumes: NameSet = EMPTY

    def __post_init__(self) -> None:
        if self.write and self.read:
            object.__setattr__(self, "read", self.read.difference(self.write))

    @classmethod
    def of(
        cls,
        mode: Mode,
        read: Iterable[str] = (),
        write: Iterable[str] = (),
        *,
        shared: bool = False,
        volumes: Iterable[str] = (),
    ) -> Self:
        """The grants of a manifest. Raises ManifestError for a path that is not normalised."""
        return cls(mode, PathSet.of(read), PathSet.of(write), shared, NameSet.of(volumes))

    @classmethod
    def bottom(cls) -> Self:
        """The package, read-only."""
        return cls()

    @classmethod
    def top(cls) -> Self:
        """Every path and volume, written beside others."""
        return cls("host", PathSet(), PathSet.top(), shared=True, volumes=NameSet.top())

    def readable(self) -> PathSet:
        """Everything that can be read: a writable mount is readable as well."""
        return self.read.union(self.write)

    def meet(self, other: Self, /) -> Self:
        """Return the paths that both show."""
        write, mode = self.write.meet(other.write), lower(MODES, self.mode, other.mode)
        read, volumes = self.readable().meet(other.readable()), self.volumes.meet(other.volumes)
        return type(self)(mode, read, write, self.shared and other.shared, volumes)

    def is_subset(self, other: Self, /) -> bool:
        """Whether ``other`` shows all of this."""
        return (
            at_most(MODES, self.mode, other.mode)
            and self.write.is_subset(other.write)
            and self.readable().is_subset(other.readable())
            and self.shared <= other.shared
            and self.volumes.is_subset(other.volumes)
        )

    def difference(self, other: Self, /) -> Self:
        """The paths, whole, and the mode that ``other`` does not cover."""
        mode = MODES[0] if at_most(MODES, self.mode, other.mode) else self.mode
        read, write = self.read.difference(other.readable()), self.write.difference(other.write)
        return type(self)(mode, read, write, self.shared and not other.shared, self.volumes.difference(other.volumes))

    def describe(self) -> tuple[str, ...]:
        """The mode when it is more than the package, and a line a path."""
        mode = () if self.mode == MODES[0] else (f"mode {self.mode}",)
        read, write = (f"read {p}" for p in self.read), (f"write {p}" for p in self.write)
        return (*mode, *read, *write, *self.volume_lines(), *((SHARED,) if self.shared else ()))

    def volume_lines(self) -> tuple[str, ...]:
        """A line a volume."""
        return tuple(f"write volume {one}" for one in self.volumes.listing())

    def canonical(self) -> dict[str, Any]:
        """Mode, paths and volumes."""
        more: dict[str, Any] = {"shared": True} if self.shared else {}
        more |= {"volumes": listed} if (listed := self.volumes.listing()) else {}
        return {"mode": self.mode, "read": list(self.read), "write": list(self.write), **more}
