"""A run's pen: what is written together, and when others are shown the state."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from policy import base58, denials
from policy.audit_log import chain
from policy.lifecycle import State
from sandbox.audit import open_runs
from sandbox.audit.log import MOST_RECORDS, Ledger, Record
from sandbox.audit.run_events import RunEvents
from sandbox.rundir import registry

CALLED = {
    "agent_id": "a", "uri": "u", "side_effect_class": "read", "arguments_hash_hex": "0" * 64, "argument_bytes": 2,
    "call": "c",
}  # fmt: skip


class Log:
    """Remembers each write, and what the run's directory showed at that moment."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.writes: list[tuple[list[str], str]] = []

    def append_all(
        self,
        records: Sequence[Record],
        *,
        issuer: Mapping[str, Any],
        carried: bool = False,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> list[str]:
        meanwhile()
        place = self.directory / registry.STATE
        shown = place.read_text().strip() if place.exists() else ""
        self.writes.append(([one.fields["state"] for one in records], shown))
        return []


def test_rows_written_together_are_one_write_and_state_is_shown_once_asked(tmp_path: Path) -> None:
    log = Log(tmp_path)
    rows = RunEvents(cast("Ledger", log), "r", {"display": "somebody", "pubkey": ""})
    rows.transition(State.PROVISIONED, "", waits=True)
    rows.show_state(tmp_path)
    rows.transition(State.VALIDATED, "")
    meanwhile: list[int] = []
    with rows.together(lambda: meanwhile.append(len(log.writes))):
        rows.transition(State.ISOLATED, "")
        rows.transition(State.RUNNING, "")
        assert len(log.writes) == 1
        assert meanwhile == []
    assert meanwhile == [1]
    assert log.writes == [(["Provisioned", "Validated"], "Provisioned"), (["Isolated", "Running"], "Validated")]
    assert (tmp_path / registry.STATE).read_text() == "Validated\n"
    rows.show()
    assert (tmp_path / registry.STATE).read_text() == "Running\n"


def test_rows_whose_block_fails_are_written_all_same_with_next(tmp_path: Path) -> None:
    log = Log(tmp_path)
    rows = RunEvents(cast("Ledger", log), "r", {"display": "somebody", "pubkey": ""})
    rows.transition(State.PROVISIONED, "")

    def fails() -> None:
        with rows.together(lambda: None):
            rows.transition(State.VALIDATED, "")
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    rows.transition(State.REJECTED, "")
    assert [states for states, _ in log.writes] == [["Provisioned"], ["Validated", "Rejected"]]


def test_mark_made_ahead_is_taken_away_where_no_start_was_written(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "audit", head=tmp_path / "head" / "head.json") as ledger:
        rows = RunEvents(ledger, "r", {"display": "somebody@local", "pubkey": "1" * 44})
        rows.expect_start()
        rows.expect_start()
        assert open_runs.is_open(tmp_path, "r")
        rows.leave()
        assert list((tmp_path / "unended").iterdir()) == []
        # Control: the end of a started run is written by another process.
        rows.expect_start()
        rows.started = True
        rows.leave()
        assert [one.name for one in (tmp_path / "unended").iterdir()] == ["r"]
        assert not open_runs.is_open(tmp_path, "r")


def test_rows_of_call_are_carried_and_then_settled(tmp_path: Path) -> None:
    place = tmp_path / "head" / "head.json"
    with Ledger.open(tmp_path / "audit", head=place) as log:
        issuer = {"display": "somebody@local", "pubkey": base58.encode(log.public_key.public_bytes_raw())}
        rows = RunEvents(log, "r", issuer)
        rows.note("the first write of a log is never carried")
        rows.tool("tool_called", CALLED)
        rows.sync()
        head = chain.read_head(place.read_bytes(), log.public_key)
        assert head is not None
        assert head.carried is not None
        assert head.carried.count == 1
        rows.settle()
        # A refused call that is read with a granted one has a row that is written at once, with all that wait.
        rows.tool("tool_called", {**CALLED, "call": "d"})
        rows.agent_id = "a"
        rows.denied(denials.Row(denials.Denial("tool", "u", "not_granted"), 1))
        rows.sync()
        assert [json.loads(line)["kind"]["type"] for _, line in log.lines()] == [
            *("run_state", "tool_called", "tool_called", "denied"),
        ]


@pytest.mark.parametrize("count", [MOST_RECORDS - 1, MOST_RECORDS, 5 * MOST_RECORDS])
def test_any_number_of_waiting_rows_is_written(tmp_path: Path, count: int) -> None:
    uri = "matrix://tool/mcp/a/b@1"
    called = {"uri": uri, "side_effect_class": "read", "arguments_hash_hex": "0" * 64, "argument_bytes": 2}
    with Ledger.open(tmp_path / "audit", head=tmp_path / "head" / "head.json") as ledger:
        rows = RunEvents(ledger, "r", {"display": "somebody@local", "pubkey": "1" * 44})
        for number in range(count):
            rows.tool("tool_called", {**called, "agent_id": "hello", "call": str(number)})
        # Beside the longest text of an intent, too.
        rows.intent_dispatched("i", "x" * 8_380_000, "0" * 64)
        rows.sync()
        kinds = [json.loads(line)["kind"] for _, line in ledger.lines()]
    assert [one.get("call") for one in kinds] == [*map(str, range(count)), None]
