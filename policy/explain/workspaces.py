"""Compare the terms of two workspaces: each line is something that the first allows and the second does not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from policy.decompile.mounts import ReadWorkspace

# Who applies the changes, the strictest first.
_APPLY: Final = ("never", "operator", "ask")
_SAYS: Final = {
    "operator": "changes are applied, with an operator's approval",
    "ask": "the caller applies changes without an operator",
}


def wider(mine: ReadWorkspace | None, other: ReadWorkspace | None) -> tuple[str, ...]:
    """Return the terms of ``mine`` that ``other`` does not cover, as lines."""
    return () if mine is None else tuple(_lines(mine, other))


def _lines(mine: ReadWorkspace, other: ReadWorkspace | None) -> Iterator[str]:
    if other is None:
        yield f"a directory of the caller at {mine.place}, below {', '.join(mine.below)}"
        if mine.apply in _SAYS:
            yield _SAYS[mine.apply]
        return
    if _APPLY.index(mine.apply) > _APPLY.index(other.apply):
        yield _SAYS[mine.apply]
    for path in mine.below:
        if not any(path == one or path.startswith(f"{one.rstrip('/')}/") for one in other.below):
            yield f"the caller's directory may be below {path}"
    for pattern in sorted(set(other.mask) - set(mine.mask)):
        yield f"{pattern} is shown"
    for pattern in sorted(set(other.protect) - set(mine.protect)):
        yield f"changes of {pattern} can be applied"
    if mine.max_mb > other.max_mb:
        yield f"changes of {mine.max_mb} MiB"
