"""Check the logs of ended runs: the source of the answer, the offset in stderr, and no answer to other callers."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from policy import errors
from sandbox.audit import open_runs, run_archive
from sandbox.audit.log import Ledger
from sandbox.control import manager
from sandbox.control.manager import Requester
from sandbox.rundir import registry
from sandbox.shim import control_socket
from tests.unit.sandbox.audit.test_open_runs import ISSUER, start
from tests.unit.sandbox.audit.test_run_archive import FIELDS

ROOT, SOMEBODY, OTHER = (
    Requester("operator@local", root=True),
    Requester("uid7@local", root=False),
    Requester("uid8@local", root=False),
)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    folder = tmp_path / "state"
    folder.mkdir(mode=0o700)
    (folder / "runs").mkdir()
    return folder


def ended(state: Path, number: int, **fields: Any) -> str:
    run_id = f"{number:08d}-0000-4000-8000-000000000000"
    run_archive.store(state, run_archive.ArchivedRun(run_id=run_id, **{**FIELDS, "issuer": SOMEBODY.display, **fields}))
    return run_id


@pytest.mark.parametrize("kept", ["", "x", "a line\nanother\n", "äöü" * 100])
@pytest.mark.parametrize("dropped", [0, 5, 70_000])
@pytest.mark.parametrize("stream", ["stderr", "stdout"])
def test_log_of_ended_run_is_read_on_from_anywhere(
    state: Path, kept: str, dropped: int, stream: manager.Stream
) -> None:
    total = dropped + len(kept.encode())
    run_id = ended(state, 1, **{stream: kept, f"{stream}_bytes": total})
    whole = manager.logs(state, SOMEBODY, run_id, stream=stream)
    assert whole == {"run_id": run_id, "live": False, "begins": dropped, "next": total, "ends": total, "text": kept}
    for offset in range(0, total + 3, max(1, total // 50)):
        piece = manager.logs(state, SOMEBODY, run_id, offset, stream=stream)
        assert piece["begins"] == max(offset, dropped)
        assert piece["next"] == max(offset, total)
        assert piece["text"] == kept.encode()[max(0, offset - dropped) :].decode(errors="replace")


def test_beginning_one_runs_alone_names_it(state: Path) -> None:
    one, two = ended(state, 11), ended(state, 12)
    assert manager.logs(state, ROOT, two[:8])["run_id"] == two
    for text in ("0", "9", "", "../audit", one + "x"):
        with pytest.raises(errors.NoRunError):
            manager.logs(state, ROOT, text)
        with pytest.raises(errors.NoRunError):
            manager.ended(state, ROOT, text)


def test_what_is_anothers_is_not_there(state: Path) -> None:
    run_id = ended(state, 1)
    for requester in (ROOT, SOMEBODY):
        record = manager.ended(state, requester, run_id)
        assert record is not None
        assert record.run_id == run_id
    with pytest.raises(errors.NoRunError) as mine:
        manager.logs(state, OTHER, run_id)
    with pytest.raises(errors.NoRunError) as nobodys:
        manager.logs(state, OTHER, run_id.replace("1", "2"))
    # The refusal does not tell the two apart either.
    assert str(mine.value).replace("1", "2") == str(nobodys.value)


def test_who_asked_for_first_may_see_what_came_of_all_below_it(state: Path) -> None:
    top = ended(state, 1)
    below = ended(state, 2, issuer=f"top@{top}", parent=top)
    deepest = ended(state, 3, issuer=f"mid@{below}", parent=below)
    orphan = ended(state, 4, issuer="x@y", parent="00000009-0000-4000-8000-000000000000")
    for run_id in (top, below, deepest):
        assert manager.logs(state, SOMEBODY, run_id)["run_id"] == run_id
        with pytest.raises(errors.NoRunError):
            manager.logs(state, OTHER, run_id)
    with pytest.raises(errors.NoRunError):
        manager.logs(state, SOMEBODY, orphan)


def test_who_asked_for_first_may_see_what_ended_below_one_that_outlived_it(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent is live and its label names the first run, which has ended, with its record or without."""
    top, parent = (f"0000000{n}-0000-4000-8000-000000000000" for n in (1, 2))
    run_id = ended(state, 3, issuer=f"mid@{parent}", parent=parent)
    live = SimpleNamespace(
        run_id=parent, ancestors=(top,), issuer={"display": f"top@{top}"}, label={"caller": SOMEBODY.display}
    )
    monkeypatch.setattr(registry, "live", lambda runs: [live])
    monkeypatch.setattr(registry, "agents", lambda entries: [])
    assert manager.logs(state, SOMEBODY, run_id)["run_id"] == run_id
    with pytest.raises(errors.NoRunError):
        manager.logs(state, OTHER, run_id)
    live.label = {}
    with pytest.raises(errors.NoRunError):
        manager.logs(state, SOMEBODY, run_id)


def test_what_is_anothers_makes_nothing_ambiguous(state: Path) -> None:
    mine, theirs = ended(state, 11), ended(state, 12, issuer=OTHER.display)
    for requester, run_id in ((SOMEBODY, mine), (OTHER, theirs)):
        assert manager.logs(state, requester, mine[:7])["run_id"] == run_id
    with pytest.raises(errors.NoRunError, match="2 runs have"):
        manager.logs(state, ROOT, mine[:7])
    # A damaged record affects no other run, and only its owner gets an error.
    (state / "archive" / f"{theirs}.json").write_text("{")
    assert manager.logs(state, SOMEBODY, mine[:7])["run_id"] == mine
    with pytest.raises(errors.StateError):
        manager.logs(state, OTHER, theirs)
    # The caller's own runs are ambiguous as before.
    ended(state, 13)
    with pytest.raises(errors.NoRunError):
        manager.logs(state, SOMEBODY, mine[:7])


def test_records_that_name_each_other_as_parents_end_look(state: Path) -> None:
    one, two = (f"0000000{n}-0000-4000-8000-000000000000" for n in (1, 2))
    ended(state, 1, parent=two)
    ended(state, 2, parent=one)
    with pytest.raises(errors.NoRunError):
        manager.logs(state, OTHER, one)


def test_name_is_no_path(state: Path) -> None:
    """A caller names a run by the start of its id and can reach no other file by it."""
    ended(state, 1)
    (state / "unended").mkdir()
    (state / "unended" / ".settled").touch()
    os.symlink("/etc/passwd", state / "archive" / "passwd.json")
    for text in ("../state", ".", ".settled", "passwd", "\0", "a/b"):
        with pytest.raises((errors.NoRunError, errors.StateError)):
            manager.logs(state, ROOT, text)


@pytest.mark.parametrize("look", [(run_archive, "ids"), (open_runs, "named")], ids=["archive", "marks"])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("requester", [ROOT, SOMEBODY])
def test_run_that_ends_between_looks_is_found(
    state: Path, monkeypatch: pytest.MonkeyPatch, look: tuple[Any, str], after: bool, requester: Requester
) -> None:
    """Its shim writes the record and removes the mark while the supervisor reads the one and then the other."""
    run_id, real = "00000007-0000-4000-8000-000000000000", getattr(*look)
    with Ledger.open(state / "audit", head=state / "audit-head" / "head.json") as ledger:
        mark = open_runs.OpenRunMarker(ledger, run_id)
        start(ledger, run_id, issuer={**ISSUER, "display": SOMEBODY.display})

    def ends(*given: Any) -> Any:
        found = real(*given) if after else None
        ended(state, 7)
        mark.clear()
        return found if after else real(*given)

    monkeypatch.setattr(*look, ends)
    record = manager.ended(state, requester, run_id)
    assert record is not None
    assert record.run_id == run_id


@pytest.fixture
def just_ended(state: Path, tmp_path: Path) -> Iterator[str]:
    """Make a run without a directory, for an ordinary caller, whose end a live process will still write."""
    run_id = "00000007-0000-4000-8000-000000000000"
    with Ledger.open(state / "audit", head=state / "audit-head" / "head.json") as ledger:
        mark = open_runs.OpenRunMarker(ledger, run_id)
        start(ledger, run_id, issuer={**ISSUER, "display": SOMEBODY.display})
    yield run_id
    mark.clear()


def test_only_who_may_see_it_waits_for_what_is_still_to_be_written(
    state: Path, just_ended: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[str] = []

    def record(where: Path, run_id: str, until: float, *, unseen: bool = False) -> run_archive.ArchivedRun:
        waited.append(run_id)
        ended(state, 7)
        found = run_archive.read(where, run_id)
        assert found is not None
        return found

    monkeypatch.setattr(manager, "await_record", record)
    for ask in (manager.logs, manager.ended):
        with pytest.raises(errors.NoRunError):
            ask(state, OTHER, just_ended)
    assert waited == []
    assert manager.logs(state, SOMEBODY, just_ended)["run_id"] == just_ended
    assert waited == [just_ended]


def test_root_waits_for_what_log_does_not_show(state: Path, just_ended: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(open_runs, "start_of", lambda state, run_id: None)
    with pytest.raises(errors.KeeperError, match="is still being begun, or its end written"):
        manager.logs(state, ROOT, just_ended)


def test_what_has_mark_and_cannot_be_seen_yet_is_asked_once_it_can(
    state: Path, just_ended: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its shim is alive: it makes the run's directory after the mark."""
    place, real, seen = state / "runs" / just_ended, manager.visible_runs, list[int]()

    def comes(where: Path, requester: manager.Requester) -> list[Any]:
        seen.append(len(seen))
        return [SimpleNamespace(run_id=just_ended, path=place)] if len(seen) > 1 else real(where, requester)

    monkeypatch.setattr(manager, "visible_runs", comes)
    monkeypatch.setattr(registry, "under_way", lambda path: path == place and len(seen) > 0 and waited())
    monkeypatch.setattr(control_socket, "ask", lambda path, operation, **fields: {"text": "it lives"})
    looks: list[int] = []

    def waited() -> bool:
        looks.append(1)
        return len(looks) > 2

    assert manager.logs(state, ROOT, just_ended) == {"run_id": just_ended, "live": True, "text": "it lives"}
    assert seen == [0, 1]


def test_one_that_was_seen_and_ends_is_not_taken_for_one_that_begins(
    state: Path, just_ended: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its label remains a moment longer than its socket, and the caller may have waited for hours."""
    monkeypatch.setattr(registry, "under_way", lambda path: True)
    with pytest.raises(errors.KeeperError, match="its end written"):
        manager.await_record(state, just_ended, time.monotonic() + 0.1)
    ended(state, 7)
    assert manager.await_record(state, just_ended, time.monotonic()).run_id == just_ended


def test_whoever_stays_unseen_is_not_waited_for_for_good(
    state: Path, just_ended: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "PATIENCE_SECONDS", 0.1)
    looks: list[int] = []

    def comes_and_goes(path: Path) -> bool:
        looks.append(1)
        return len(looks) % 2 == 0

    monkeypatch.setattr(registry, "under_way", comes_and_goes)
    with pytest.raises(errors.KeeperError, match="does not answer"):
        manager.logs(state, ROOT, just_ended)
    assert len(looks) > 2


def test_nothing_is_asked_of_what_is_not_live(state: Path) -> None:
    run_id = ended(state, 1)
    for operation in ("suspend", "resume", "kill"):
        for tree in (False, True):
            with pytest.raises(errors.NoRunError, match="no live run"):
                manager.operate(state, ROOT, operation, run_id, tree=tree)
    assert manager.listed(state, ROOT) == []


def test_whoever_is_pushed_out_while_waiting_does_not_come_back_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        """A connection to a shim that another client always replaces."""

        def __init__(self, path: Path) -> None:
            turns.append("asked")

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *exc: object) -> None:
            pass

        def closed(self, seconds: float) -> bool:
            return True

    turns: list[str] = []
    (tmp_path / control_socket.NAME).touch()
    live = SimpleNamespace(run_id="a", path=tmp_path)
    monkeypatch.setattr(manager, "visible_runs", lambda state, requester: [live])
    monkeypatch.setattr(control_socket, "ControlConnection", Full)
    monkeypatch.setattr(time, "sleep", lambda seconds: turns.append("slept"))
    assert manager.ended(tmp_path, ROOT, "a", left=lambda: len(turns) >= 6) is None
    assert turns == ["asked", "slept"] * 3


@pytest.mark.parametrize("begins", [True, False])
def test_run_that_can_be_seen_and_listens_only_later_has_not_ended(
    state: Path, monkeypatch: pytest.MonkeyPatch, *, begins: bool
) -> None:
    """No process owes the log its end, because no row is written yet. A run that disappears meanwhile is cut off."""

    def ask(path: Path, operation: str, **fields: Any) -> dict[str, Any]:
        asked.append(operation)
        if len(asked) < 4:
            raise errors.NoRunError("it does not listen")
        return {"begins": 0, "next": 2, "text": "hi"}

    asked: list[str] = []
    live = SimpleNamespace(run_id="00000001-0000-4000-8000-000000000000", path=state / "runs")
    monkeypatch.setattr(manager, "visible_runs", lambda state, requester: [live])
    monkeypatch.setattr(control_socket, "ask", ask)
    monkeypatch.setattr(registry, "under_way", lambda path: begins or len(asked) < 2)
    if begins:
        assert manager.logs(state, ROOT, live.run_id)["text"] == "hi"
        assert asked == ["logs"] * 4
    else:
        with pytest.raises(errors.CutOffError):
            manager.logs(state, ROOT, live.run_id)
        assert asked == ["logs"] * 2


def test_newest_run_of_agent_is_one_requester_may_see(state: Path) -> None:
    def at(number: int, **fields: Any) -> str:
        run_id = ended(state, number, **fields)
        os.utime(state / "archive" / f"{run_id}.json", (number, number))
        return run_id

    mine = at(1, agent_id="a")
    at(2, agent_id="b")
    theirs = at(3, agent_id="a", issuer=OTHER.display)
    damaged = at(4, agent_id="a")
    (state / "archive" / f"{damaged}.json").write_text("{")
    assert manager.newest(state, SOMEBODY, "a") == mine
    assert manager.newest(state, OTHER, "a") == manager.newest(state, ROOT, "a") == theirs
    for requester, agent_id in ((OTHER, "b"), (ROOT, "c"), (ROOT, "")):
        with pytest.raises(errors.NoRunError, match="has a record"):
            manager.newest(state, requester, agent_id)
