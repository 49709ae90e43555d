"""The cache of the DNS gate: bounded, and no answer outlives its time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sandbox.network.dns import wire
from sandbox.network.dns.cache import AnswerCache, Resolution

KEY = ("a.example", wire.A)


def _outcome(ttl: int = 60, fresh: int = 60, size: int = 4) -> Resolution:
    return Resolution(wire.NOERROR, (b"x" * size,), ttl, fresh)


def test_kept_answer_counts_down_and_ends() -> None:
    cache = AnswerCache()
    cache.put(KEY, _outcome(), 100.0)
    assert [cache.get(KEY, at).ttl for at in (100.0, 100.9, 110.5, 159.9)] == [60, 60, 50, 1]  # type: ignore[union-attr]
    assert cache.get(KEY, 160.0) is None
    assert len(cache) == 0


def test_type_is_part_of_the_question() -> None:
    cache = AnswerCache()
    cache.put(KEY, _outcome(), 0.0)
    assert cache.get(("a.example", wire.AAAA), 0.0) is None


def test_oldest_makes_room() -> None:
    cache = AnswerCache(entries=2)
    for index in range(3):
        cache.put((f"n{index}.example", wire.A), _outcome(), 0.0)
    assert [cache.get((f"n{index}.example", wire.A), 0.0) is None for index in range(3)] == [True, False, False]


def test_entry_larger_than_all_is_not_kept() -> None:
    cache = AnswerCache(size=1000)
    cache.put(KEY, _outcome(), 0.0)
    cache.put(("b.example", wire.A), _outcome(size=2000), 0.0)
    assert cache.get(KEY, 0.0) is not None
    assert cache.get(("b.example", wire.A), 0.0) is None


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 400), st.integers(1, 50)), max_size=60))
def test_bounds_hold_for_any_sequence(steps: list[tuple[int, int, int]]) -> None:
    cache = AnswerCache(entries=5, size=2000)
    for now, (name, size, fresh) in enumerate(steps):
        cache.put((f"n{name}", wire.A), _outcome(fresh, fresh, size), float(now))
        found = [cache.get((f"n{index}", wire.A), float(now)) for index in range(10)]
        kept = [one for one in found if one is not None]
        assert len(kept) <= 5
        assert sum(256 + 2 + sum(map(len, one.data)) for one in kept) <= 2000
        assert all(one.ttl <= one.fresh for one in kept)
