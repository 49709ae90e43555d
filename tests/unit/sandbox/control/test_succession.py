"""Check the acceptance of a serial, and a shim's look at it, without a sandbox."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from policy import errors
from policy.rules.case import Claimant
from policy.rules.succession import OnNewer
from policy.signing import trust
from sandbox.control import succession
from sandbox.rundir import admission, directory, lock, marks, registry
from sandbox.rundir import label as rundir_label
from sandbox.storage.trust_state import State
from tests import signing_kit as kit

NOW = kit.NOW


@pytest.fixture
def state(tmp_path: Path) -> Iterator[State]:
    (tmp_path / "state").mkdir(mode=0o700)
    (tmp_path / "runs").mkdir()
    with State(tmp_path / "state") as made:
        made.init_root(kit.root_bytes(kit.root_document(), 1), NOW)
        yield made


class Asks:
    """A claim that counts its calls and refuses when the test says so."""

    def __init__(self, trusted: trust.TrustedPackage) -> None:
        self.claimant = Claimant(trusted.statement.serial, frozenset({"k"}), frozenset({"k"}))
        self.refused: errors.CovenantError | None = None
        self.asked = 0

    def check(self, entries: object) -> None:
        self.asked += 1
        if self.refused is not None:
            raise self.refused


def _trusted(state: State, serial: int) -> trust.TrustedPackage:
    return kit.verify(kit.signed(serial=serial), state.trust_root(NOW), serials=state)


def _accept(state: State, trusted: trust.TrustedPackage, asks: Asks, rows: list[Any]) -> None:
    succession.accept(
        trusted,
        cast("admission.AdmissionRequest", asks),
        state,
        state.path.parent / "runs",
        setting="end",
        write=rows.append,
        now_ms=NOW,
    )


def _highest(state: State, agent_id: str) -> int | None:
    last = state.accepted(agent_id)
    return None if last is None else last.serial


def test_unchanged_serial_takes_no_gate_and_no_sync(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    first = _trusted(state, 5)
    _accept(state, first, Asks(first), [])
    synced: list[int] = []
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, synced.append)
    again = Asks(first)
    monkeypatch.setattr(lock, "gate", lambda runs: pytest.fail("no gate"))
    _accept(state, first, again, [])
    assert (synced, again.asked) == ([], 0)
    monkeypatch.undo()
    # The control: a newer serial applies the rules again and is durable.
    newer = _trusted(state, 6)
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, synced.append)
    asks = Asks(newer)
    _accept(state, newer, asks, [])
    assert asks.asked == 1
    assert synced


def test_refused_newer_serial_is_not_recorded(state: State) -> None:
    first, newer = _trusted(state, 5), _trusted(state, 6)
    _accept(state, first, Asks(first), [])
    asks = Asks(newer)
    asks.refused = errors.IdentityViolation("it is another's")
    with pytest.raises(errors.IdentityViolation):
        _accept(state, newer, asks, [])
    assert _highest(state, newer.statement.agent_id) == 5
    asks.refused = None
    _accept(state, newer, asks, [])
    assert _highest(state, newer.statement.agent_id) == 6


def test_older_run_is_marked_and_named(state: State) -> None:
    first, newer = _trusted(state, 5), _trusted(state, 6)
    _accept(state, first, Asks(first), [])
    runs, rows = state.path.parent / "runs", list[Any]()
    agent = {"agent_id": first.statement.agent_id}
    labels = {
        "old": {**agent, registry.SERIAL: "5"},
        "below": {"agent_id": "below", registry.SERIAL: "9", "ancestors": "old", "parent": "old", "depth": "1"},
        "same": {**agent, registry.SERIAL: "6"},
        "waits": {**agent, registry.SERIAL: "5", rundir_label.STANDBY: "yes"},
        "dev": {**agent, registry.SERIAL: ""},
        "other": {"agent_id": "other", registry.SERIAL: "1"},
    }
    made = {name: directory.RunDirectory(runs / name, label) for name, label in labels.items()}
    for one in made.values():
        one.__enter__()
    try:
        _accept(state, newer, Asks(newer), rows)
        marked = {name for name in made if isinstance(marks.verdict(runs / name), errors.SupersededError)}
        assert marked == {"old", "below"}
        (row,) = rows
        assert {one["run_id"] for one in row["runs"]} == {"old", "below"}
        assert "serial 6" in row["reason"]
    finally:
        for one in made.values():
            one.__exit__()


@dataclasses.dataclass
class Setting:
    """The operator's present setting, and the number of times it was read."""

    value: OnNewer = "end"
    read: int = 0

    def __call__(self) -> OnNewer:
        self.read += 1
        return self.value


def _watch(state: State, setting: Setting, serial: str, rows: list[Any]) -> succession.SerialWatch:
    path = state.path.parent / "runs" / "gone"
    label = {"agent_id": _trusted(state, 9).statement.agent_id, registry.SERIAL: serial}
    return succession.SerialWatch(path, label, state, setting, rows.append)


def test_watch_ends_older_run_at_second_look(state: State) -> None:
    setting, trusted = Setting(), _trusted(state, 5)
    watch = _watch(state, setting, "5", [])
    assert watch.look() is None, "nothing was accepted"
    state.accept(trusted, now_ms=NOW)
    assert watch.look() is None
    assert setting.read == 0, "a run of the highest serial reads no configuration"
    state.accept(_trusted(state, 6), now_ms=NOW)
    assert watch.look() is None, "whoever accepted it ends the run next"
    assert isinstance(watch.look(), errors.SupersededError)


def test_watch_goes_by_setting_of_now(state: State) -> None:
    setting = Setting("finish")
    watch = _watch(state, setting, "5", [])
    state.accept(_trusted(state, 6), now_ms=NOW)
    assert [watch.look() for _ in range(3)] == [None] * 3
    setting.value = "end"
    assert watch.look() is None
    assert isinstance(watch.look(), errors.SupersededError)


def test_watch_ends_no_run_without_serial(state: State) -> None:
    watch = _watch(state, Setting(), "", [])
    state.accept(_trusted(state, 6), now_ms=NOW)
    assert [watch.look() for _ in range(3)] == [None] * 3


def test_damaged_record_ends_no_run(state: State) -> None:
    watch = _watch(state, Setting(), "5", [])
    state.accept(_trusted(state, 6), now_ms=NOW)
    (record,) = (state.path / "serials").iterdir()
    whole = record.read_bytes()
    record.write_bytes(b"{")
    assert [watch.look() for _ in range(3)] == [None] * 3
    record.write_bytes(whole)
    assert [watch.look() is None for _ in range(2)] == [True, False]
