"""Executable grants: program files that the agent may start, each by path and, when pinned, by digest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

from msgspec import Struct

from policy.grants.paths import check_normalised


class Executable(Struct, frozen=True, order=True):
    """One program file. ``sha256`` is the hex digest of the only content that is allowed, empty for any content."""

    path: str
    sha256: str = ""

    def __str__(self) -> str:
        return f"{self.path} sha256:{self.sha256}" if self.sha256 else self.path


@dataclass(frozen=True, slots=True)
class ExecutableSet:
    """A sorted set of program files and of ``trees`` of them, or every program (``any``, which only a ceiling has).

    A pinned file lies under the same path without a pin; two different pins have nothing in common. A tree (``root``,
    ``layer:NAME``) is every program of that part of the agent's own root, and covers no path of another's list.
    """

    files: tuple[Executable, ...] = ()
    any: bool = False
    trees: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        open_paths = {f.path for f in self.files if not f.sha256}
        kept = {f for f in self.files if not f.sha256 or f.path not in open_paths}
        object.__setattr__(self, "files", () if self.any else tuple(sorted(kept)))
        if self.any and self.trees:
            object.__setattr__(self, "trees", frozenset())

    @classmethod
    def of(cls, files: Iterable[tuple[str, str | None]], trees: Iterable[str] = ()) -> Self:
        """The set of these (path, digest or None) and trees. Raises ManifestError for a path that is not normalised."""
        listed = tuple(Executable(check_normalised(path), sha256 or "") for path, sha256 in files)
        return cls(listed, trees=frozenset(trees))

    @classmethod
    def bottom(cls) -> Self:
        """No program."""
        return cls()

    @classmethod
    def top(cls) -> Self:
        """Every program."""
        return cls(any=True)

    def __iter__(self) -> Iterator[Executable]:
        return iter(self.files)

    def __bool__(self) -> bool:
        return self.any or bool(self.files) or bool(self.trees)

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths, sorted, each once."""
        return tuple(sorted({f.path for f in self.files}))

    def meet(self, other: Self, /) -> Self:
        """The files that both allow."""
        if self.any or other.any:
            return other if self.any else self
        mine, theirs = frozenset(self.files), frozenset(other.files)
        both = mine & theirs
        both |= {f for f in mine - both if Executable(f.path) in theirs}
        both |= {f for f in theirs - both if Executable(f.path) in mine}
        return type(self)(tuple(both), trees=self.trees & other.trees)

    def is_subset(self, other: Self, /) -> bool:
        """Whether ``other`` allows all of these."""
        return other.any or (not self.any and not self.difference(other))

    def difference(self, other: Self, /) -> Self:
        """The files and trees that ``other`` does not allow."""
        if other.any or self.any:
            return self.bottom() if other.any else self
        theirs = frozenset(other.files)
        left = tuple(f for f in self.files if f not in theirs and Executable(f.path) not in theirs)
        return type(self)(left, trees=self.trees - other.trees)

    def describe(self) -> tuple[str, ...]:
        """A line a tree, and a line a program."""
        if self.any:
            return ("execute *",)
        trees = (f"execute every program of {tree.replace(':', ' ')}" for tree in sorted(self.trees))
        return (*trees, *(f"execute {f}" for f in self.files))

    def canonical(self) -> dict[str, Any]:
        """Paths and digests, and the trees where there are any."""
        listed = [{"path": f.path, "sha256": f.sha256 or None} for f in self.files]
        return {"allow": ["*"] if self.any else listed, **({"trees": sorted(self.trees)} if self.trees else {})}
