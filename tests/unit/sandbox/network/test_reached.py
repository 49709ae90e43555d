"""Destinations of a run: summed, in order, and bounded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sandbox.network import reached
from sandbox.network.reached import Reached, ReachedRow


def test_counts_of_one_destination_are_one_row() -> None:
    counts = Reached()
    counts.add("a.example:443/tls", 1, 0)
    counts.add("b.example:80/tcp", 2, None)
    counts.add("a.example:443/tls", 0, 700)
    counts.add("a.example:443/tls", 1, 300)
    assert list(counts.rows()) == [
        ReachedRow("a.example:443/tls", 2, 1000),
        ReachedRow("b.example:80/tcp", 2, None),
    ]
    assert list(counts.rows()) == []


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 5), st.integers(0, 100)), max_size=400))
def test_no_count_is_lost_and_rows_are_few(told: list[tuple[int, int, int]]) -> None:
    counts = Reached()
    for number, connections, carried in told:
        counts.add(f"n{number}.example:443/tls", connections, carried)
    rows = list(counts.rows())
    assert len(rows) <= reached.TARGETS + 1
    assert sum(row.connections for row in rows) == sum(one[1] for one in told)
    assert sum(row.bytes or 0 for row in rows) == sum(one[2] for one in told)
