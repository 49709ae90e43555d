"""Check what confirms that a removed secret is not used any more: an honest answer of each shim, or its end."""

from __future__ import annotations

import contextlib
import select
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from policy import errors
from sandbox.control import withdrawn_secrets
from sandbox.control.withdrawn_secrets import SecretChecks
from sandbox.shim import control_socket
from tests.unit.sandbox.control.test_revocation import live


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


class Holder:
    """Holds a secret that is gone: it is checked for ``turns`` looks, and may end the run."""

    def __init__(self, turns: int = 0, end: errors.RunError | None = None) -> None:
        self.turns, self.end = turns, end
        self.looks: list[bool] = []

    @property
    def is_checking(self) -> bool:
        return self.turns > 0

    def look(self, *, anew: bool = False) -> errors.RunError | None:
        self.looks.append(anew)
        self.turns -= not anew
        return self.end


@contextlib.contextmanager
def served(path: Path, table: Mapping[str, control_socket.Handler]) -> Iterator[None]:
    """Serve a run's socket until the block ends, or the run does."""
    server, over = control_socket.ControlServer(path, table), threading.Event()
    ((fd, act),) = server.watches.items()

    def serve() -> None:
        with contextlib.closing(server):
            while not over.is_set():
                if select.select([fd], [], [], 0.01)[0] and act() is not None:
                    return

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def checked(*holders: Holder) -> dict[str, control_socket.Handler]:
    checks = SecretChecks()
    for one in holders:
        checks.add(one)
    return {withdrawn_secrets.OPERATION: checks.answer}


def test_run_confirms_when_each_part_has_checked(runs: Path) -> None:
    at_once, slow = Holder(), Holder(turns=3)
    with live(runs, "one", ()) as path, served(path, checked(at_once, slow)):
        assert withdrawn_secrets.announce(runs.parent) == []
    assert (slow.looks, slow.turns) == ([True, False, False, False], 0)


def test_run_that_ends_confirms_by_its_end(runs: Path) -> None:
    ends = checked(Holder(turns=9, end=errors.RunRevokedError("gone")))
    with live(runs, "one", ()) as path, served(path, ends):
        assert withdrawn_secrets.announce(runs.parent) == []
        with pytest.raises(errors.NoRunError):
            control_socket.ask(path, "state")


def test_run_that_does_not_confirm_is_named(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(withdrawn_secrets, "CONFIRM_SECONDS", 4.0)
    with contextlib.ExitStack() as stack:
        paths = {name: stack.enter_context(live(runs, name, ())) for name in ("busy", "old", "silent", "honest")}
        tables: dict[str, Any] = {"busy": checked(Holder(turns=1 << 30)), "old": {}, "honest": checked(Holder())}
        for name, table in tables.items():
            stack.enter_context(served(paths[name], table))
        stack.enter_context(control_socket.ControlServer(paths["silent"], {}))  # nothing serves it
        assert sorted(withdrawn_secrets.announce(runs.parent)) == ["busy", "old", "silent"]


def test_runs_that_hang_cost_no_other_its_question(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(withdrawn_secrets, "CONFIRM_SECONDS", 4.0)
    monkeypatch.setattr(withdrawn_secrets, "AT_ONCE", 2)
    hung, honest = [f"hung-{number}" for number in range(4)], Holder()
    with contextlib.ExitStack() as stack:
        for name in hung:
            path = stack.enter_context(live(runs, name, ()))
            stack.enter_context(control_socket.ControlServer(path, {}))  # nothing serves it
        path = stack.enter_context(live(runs, "zz-last", ()))
        stack.enter_context(served(path, checked(honest)))
        assert sorted(withdrawn_secrets.announce(runs.parent)) == hung
    assert honest.looks[0] is True


def test_run_that_is_asked_twice_begins_one_check(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(withdrawn_secrets, "CONFIRM_SECONDS", 4.0)
    slow = Holder(turns=1 << 30)
    with live(runs, "one", ()) as path, served(path, checked(slow)):
        assert withdrawn_secrets.announce(runs.parent) == ["one"]
    assert slow.looks.count(True) == 1


def test_run_that_does_not_listen_has_no_agent_yet(runs: Path) -> None:
    with live(runs, "one", ()):
        assert withdrawn_secrets.announce(runs.parent) == []


def test_client_that_is_disconnected_asks_again(runs: Path) -> None:
    """An end of file is no end of the run while something listens."""
    first, second = Holder(turns=1 << 30), Holder()
    with live(runs, "one", ()) as path, contextlib.ExitStack() as stack:
        old = stack.enter_context(control_socket.ControlServer(path, checked(first)))

        def replace() -> None:
            ((fd, act),) = old.watches.items()
            while not first.looks:
                if select.select([fd], [], [], 0.01)[0]:
                    act()
            (path / control_socket.NAME).unlink()
            stack.enter_context(served(path, checked(second)))
            old.close()

        thread = threading.Thread(target=replace)
        thread.start()
        assert withdrawn_secrets.announce(runs.parent) == []
        thread.join()
    assert (first.looks, second.looks) == ([True], [True])


@pytest.mark.parametrize("fields", [{"anew": 1}, {"anew": None}, {"other": True}])
def test_other_fields_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(errors.UsageError):
        SecretChecks().answer(fields)
