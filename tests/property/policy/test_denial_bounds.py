"""Record denials in any order: sums count each one, rows stay bounded, and first ones are written at once."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from policy.denials import LAYERS, MAX_ROWS, MAX_SUMMARIES, Bounds, Denial, Row

LAYER = st.sampled_from([*LAYERS, "kernel"])
DENIALS = st.builds(Denial, LAYER, st.text(max_size=3), st.sampled_from(["not_granted", "rate", "Bad Code"]))
# One event: time passes, one of a few known targets is refused, or a range of new targets is.
EVENTS = st.one_of(
    st.tuples(st.just("pass"), st.integers(0, 3000)),
    st.tuples(st.just("told"), DENIALS),
    st.tuples(st.just("scan"), st.integers(1, 700)),
)


@given(st.lists(EVENTS, max_size=60))
def test_sums_hold_and_rows_are_bounded(events: list[tuple[str, int | Denial]]) -> None:
    bounds, now_ms, told, port = Bounds(), 0, Counter[str](), 0
    rows: list[Row] = []
    for what, value in events:
        if isinstance(value, Denial):
            told[value.layer if value.layer in LAYERS else "unknown"] += 1
            rows += bounds.told(value, now_ms=now_ms)
        elif what == "scan":
            for _ in range(value):
                port += 1
                told["packet"] += 1
                rows += bounds.told(Denial("packet", f"192.0.2.1:{port}/tcp", "not_granted"), now_ms=now_ms)
        else:
            now_ms += value
            rows += bounds.due(now_ms=now_ms)
    rows += bounds.wind_up()
    written: Counter[str] = Counter()
    for row in rows:
        assert row.count > 0
        written[row.denial.layer] += row.count
    assert written == told
    assert len(rows) == bounds.rows <= MAX_ROWS
    assert bounds.wind_up() == []


@given(st.lists(DENIALS, min_size=1, max_size=MAX_SUMMARIES))
def test_first_of_each_is_written_when_it_comes(told: list[Denial]) -> None:
    bounds, seen = Bounds(), set[str]()
    for denial in told:
        rows = bounds.told(denial, now_ms=0)
        assert len(rows) <= 1
        for row in rows:
            assert row.denial.id not in seen
            assert row.count == 1
            seen.add(row.denial.id)


@given(st.tuples(st.text(), st.text(), st.text()), st.tuples(st.text(), st.text(), st.text()))
def test_two_denials_with_one_id_are_one(one: tuple[str, str, str], other: tuple[str, str, str]) -> None:
    assert (Denial(*one).id == Denial(*other).id) == (one == other)
