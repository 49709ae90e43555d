"""Path grants against a naive reading: a path is granted when one of its own prefixes, by component, is."""

from __future__ import annotations

from hypothesis import given

from policy.grants.paths import FilesystemGrants, PathSet
from tests.property.policy import grants_strategies as gs


def naive(granted: list[str], path: str) -> bool:
    parts = [p for p in path.split("/") if p]
    prefixes = {"/" + "/".join(parts[:n]) for n in range(len(parts) + 1)}
    return any(one in prefixes for one in granted)


@given(gs.path_lists, gs.path_lists, gs.paths)
def test_sets_cover_what_lies_below_and_nothing_beside(a: list[str], b: list[str], path: str) -> None:
    one, two = PathSet.of(a), PathSet.of(b)
    assert one.covers(path) == naive(a, path)
    assert one.meet(two).covers(path) == (naive(a, path) and naive(b, path))
    assert one.union(two).covers(path) == (naive(a, path) or naive(b, path))
    assert PathSet.of(reversed(a)) == one


@given(gs.path_lists, gs.path_lists, gs.path_lists, gs.path_lists, gs.paths)
def test_what_is_written_can_be_read(r1: list[str], w1: list[str], r2: list[str], w2: list[str], path: str) -> None:
    a, b = FilesystemGrants.of("host", r1, w1), FilesystemGrants.of("host", r2, w2)
    both = a.meet(b)
    reads = [naive(r + w, path) for r, w in ((r1, w1), (r2, w2))]
    writes = [naive(w, path) for w in (w1, w2)]
    assert both.readable().covers(path) == all(reads)
    assert both.write.covers(path) == all(writes)
    # A compiler mounts `read` read-only and `write` writable: no path is in both.
    assert not any(both.write.covers(p) for p in both.read)
