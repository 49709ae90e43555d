"""``covenant audit show`` and the filters of ``audit recent``: a tree in time order, and no row twice."""

from __future__ import annotations

import json
from typing import Any

import pytest

from covenant.cli.audit import show
from covenant.cli.audit.show import Filter, Row
from policy import errors

INTENT, RUN, CHILD, OTHER = (f"{n}" * 8 + "-0000-4000-8000-000000000000" for n in "1234")


def _row(number: int, kind: str, **fields: Any) -> Row:
    return {"id": f"e{number}", "timestamp_ms": number, "origin": "supervisor", "kind": {"type": kind, **fields}}


COST = {"duration_ms": 1234, "cpu_ms": 7, "memory_peak_bytes": 3 << 20}
ROWS = [
    _row(1, "capability_check", intent_id=INTENT, agent_id="hello"),
    _row(2, "run_started", run_id=RUN, intent_id=INTENT, agent_id="hello", parent=None),
    _row(3, "denied", run_id=RUN, agent_id="hello", denial="d-1", target="example.org", count=4),
    _row(5, "run_started", run_id=CHILD, intent_id=OTHER, agent_id="helper", parent=RUN),
    _row(6, "reached", run_id=CHILD, agent_id="helper"),
    _row(8, "run_ended", run_id=RUN, agent_id="hello", status="ok", **COST),
    _row(9, "intent_dispatched", intent_id=INTENT, run_id=None, matched_agent="hello"),
    _row(10, "run_started", run_id="5" * 8 + "-0000-4000-8000-000000000000", intent_id="x", parent=None),
]


def _copied(kind: Row) -> Row | None:
    return json.loads(kind["line"]) if kind.get("type") == "supervisor_row" else None


def _copy(number: int, row: Row) -> Row:
    return _row(number, "supervisor_row", intent_id=INTENT, run_id=RUN, line=json.dumps(row)) | {"origin": "daemon"}


def test_tree_holds_children_between_rows_of_their_parent() -> None:
    root, nodes = show.tree(ROWS, INTENT[:8])
    said = list(show.lines(root, nodes, lambda row: f"{row['timestamp_ms']} {row['kind']['type']}"))
    assert [line.strip() for line in said] == [
        INTENT,
        "1 capability_check",
        f"{RUN}: hello, ok after 1.2 s, CPU 7 ms, memory 3 MiB, 4 denied",
        "2 run_started",
        "3 denied",
        f"{CHILD}: helper, no end in the logs",
        "5 run_started",
        "6 reached",
        "8 run_ended",
        "9 intent_dispatched",
    ]
    assert said[2].startswith("  ")
    assert said[5].startswith("    ")


def test_tree_of_a_run_is_what_is_below_it() -> None:
    root, nodes = show.tree(ROWS, RUN)
    document = show.document(root, nodes)
    assert [row["kind"]["type"] for row in document["events"]] == ["run_started", "denied", "run_ended"]
    assert [one["id"] for one in document["children"]] == [CHILD]
    assert set(nodes) == {RUN, CHILD}


def test_row_in_both_logs_is_there_once() -> None:
    rows = show.once(
        [*ROWS, _copy(11, ROWS[2]), _copy(12, _row(4, "denied", run_id=RUN, target="gone"))], _copied, unwrap=True
    )
    assert [row["id"] for row in rows] == ["e1", "e2", "e3", "e4", "e5", "e6", "e8", "e9", "e10"]
    assert rows[3]["origin"] == "supervisor"
    kept = show.once([_copy(12, _row(4, "denied", run_id=RUN, target="gone"))], _copied)
    assert kept[0]["kind"]["type"] == "supervisor_row"


def test_denial_and_result_of_both_logs_are_there_once() -> None:
    result = {"run_id": RUN, "status": "ok", "result_hash_hex": "ab"}
    mine = [_row(3, "denied", run_id=RUN, denial="d-1", count=4), _row(4, "intent_dispatched", **result)]
    theirs = [row | {"id": f"d{row['id']}", "origin": "daemon"} for row in mine]
    assert show.once([*mine, *theirs], _copied) == mine
    # Also where the supervisor's rows are only there as copies.
    assert show.once([*theirs, _copy(11, mine[0]), _copy(12, mine[1])], _copied, unwrap=True) == mine
    # The controls: the daemon's rows alone stay, and so do another denial and another result.
    assert show.once(theirs, _copied) == theirs
    other = [
        _row(5, "denied", run_id=RUN, denial="d-2") | {"origin": "daemon"},
        _row(6, "intent_dispatched", **{**result, "status": "error"}) | {"origin": "daemon"},
    ]
    assert show.once([*mine, *other], _copied) == [*mine, *other]


def test_rows_leave_out_what_their_node_says() -> None:
    root, nodes = show.tree(ROWS, INTENT)
    said = [line.strip() for line in show.lines(root, nodes, lambda row: " ".join(row["kind"]))]
    assert said[1:5] == ["type agent_id", said[2], "type intent_id parent", "type denial target count"]
    assert said[2].startswith(f"{RUN}: hello")
    # --json has every row whole.
    assert show.document(root, nodes)["events"][0]["kind"] == ROWS[0]["kind"]


def test_credits_are_in_summary() -> None:
    node = show.Node(INTENT, [_row(1, "receipt_written", intent_id=INTENT, credits=n) for n in (4, 2)])
    assert show.summary(node) == "6 credits"


def test_summary_names_why_a_run_failed() -> None:
    ended = _row(2, "run_ended", run_id=RUN, status="failed", code="stopped", **COST)
    node = show.Node(RUN, [_row(1, "run_started", run_id=RUN, agent_id="hello"), ended])
    assert show.summary(node) == "hello, failed (stopped) after 1.2 s, CPU 7 ms, memory 3 MiB"
    node.rows[-1]["kind"] |= {"code": "cut_off", "duration_ms": 0}
    assert show.summary(node) == "hello, failed (cut_off), CPU 7 ms, memory 3 MiB"
    node.rows += [_row(3, "model_asked", run_id=RUN, input_tokens=10, output_tokens=n) for n in (5, None)]
    assert show.summary(node).endswith("memory 3 MiB, models asked 2 times for 25 tokens")


@pytest.mark.parametrize(("named", "error"), [("zz", errors.UsageError), ("99999999", errors.NoRunError)])
def test_unknown_id_is_refused(named: str, error: type[errors.CovenantError]) -> None:
    with pytest.raises(error):
        show.tree(ROWS, named)


def test_loop_of_parents_ends() -> None:
    rows = [_row(1, "run_started", run_id=RUN, parent=CHILD), _row(2, "run_started", run_id=CHILD, parent=RUN)]
    root, nodes = show.tree(rows, RUN)
    assert len(list(show.lines(root, nodes, str))) == 4
    show.document(root, nodes)


@pytest.mark.parametrize(
    ("wanted", "ids"),
    [
        (Filter(run=RUN[:6]), ["e2", "e3", "e8"]),
        (Filter(intent=INTENT[:8]), ["e1", "e2", "e9"]),
        (Filter(agent="helper"), ["e5", "e6"]),
        (Filter(kinds=("denied", "reached")), ["e3", "e6"]),
        (Filter(since_ms=8), ["e8", "e9", "e10"]),
        (Filter(run=RUN, kinds=("run_ended",)), ["e8"]),
    ],
)
def test_filters(wanted: Filter, ids: list[str]) -> None:
    assert [row["id"] for row in ROWS if wanted.admits(row)] == ids
