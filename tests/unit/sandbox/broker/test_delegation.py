"""Check that a killed tree's end is completed: each run below has its end promised by its own shim."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from policy import errors
from sandbox.broker import delegation
from sandbox.rundir import registry
from sandbox.shim import control_socket
from tests.unit.sandbox.control.test_revocation import live


class Keeper:
    """A shim's double that answers ``suspend`` with ``error`` and records its requests."""

    def __init__(self, path: Path, error: errors.CovenantError | None) -> None:
        self._error = error
        self.asked: list[tuple[str, Mapping[str, Any]]] = []
        self.server = control_socket.ControlServer(path, {"suspend": self._suspend, "kill": self._kill})

    def _suspend(self, request: Mapping[str, Any]) -> control_socket.Reply:
        self.asked.append(("suspend", request))
        if self._error is not None:
            raise self._error
        return control_socket.Reply({})

    def _kill(self, request: Mapping[str, Any]) -> control_socket.Reply:
        self.asked.append(("kill", request))
        return control_socket.Reply({})


@contextlib.contextmanager
def served(*keepers: Keeper) -> Iterator[None]:
    """Serve all of these shims in one thread."""
    watches = {fd: act for one in keepers for fd, act in one.server.watches.items()}
    over = threading.Event()

    def serve() -> None:
        while not over.is_set():
            for fd in select.select(list(watches), [], [], 0.01)[0]:
                with contextlib.suppress(errors.LedgerError):  # which ends the run, once it has answered
                    watches[fd]()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        for one in keepers:
            one.server.close()


def test_all_below_is_asked_once_and_whoever_cannot_be_stopped_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delegation, "PATIENCE_SECONDS", 0.05)
    refusals = {
        "stands": None,
        "bare": errors.NotEnforceableError("it has no cgroup"),
        "starts": errors.WrongStateError("it is Isolated"),
        "stuck": errors.KernelError("it does not stop"),
        "full": errors.LedgerError("no space left"),
    }
    with contextlib.ExitStack() as stack:
        own = Keeper(stack.enter_context(live(tmp_path, "top", ())), None)
        beside = Keeper(stack.enter_context(live(tmp_path, "beside", ())), None)
        below = {
            name: Keeper(stack.enter_context(live(tmp_path, name, (), "top")), error)
            for name, error in refusals.items()
        }
        stack.enter_context(live(tmp_path, "deaf", (), "top"))  # it never listens, and delays no other's end
        with served(own, beside, *below.values()):
            delegation.end_below(tmp_path, "top", "uid7@local", "enough")
    words = {"by": "uid7@local", "reason": "enough"}
    stand, end = ("suspend", {**words, "ending": True}), ("kill", words)
    assert own.asked == beside.asked == []
    assert {name: one.asked for name, one in below.items()} == {
        "stands": [stand],
        "bare": [stand, end],
        "starts": [stand, end],
        "stuck": [stand, end],
        "full": [stand],
    }


@pytest.mark.parametrize("fate", ["terminate", "wind-down", "adopt"])
def test_run_starts_nothing_while_it_stands_or_is_ended_or_winds_down(tmp_path: Path, fate: str) -> None:
    alive, ours = os.pipe2(os.O_CLOEXEC)
    try:
        for state, kind in (("Running", None), ("Suspended", errors.WrongStateError)):
            (tmp_path / registry.STATE).write_text(state)
            assert _kind(delegation.ending(tmp_path, alive, fate)) == kind
        (tmp_path / registry.STATE).write_text("Terminated")
        assert _kind(delegation.ending(tmp_path, None, fate)) == errors.ParentEndedError
        (tmp_path / registry.STATE).write_text("Running")
    finally:
        os.close(ours)
    try:
        # Its parent has ended now.
        found = _kind(delegation.ending(tmp_path, alive, fate))
        assert found == (None if fate == "adopt" else errors.ParentEndedError)
    finally:
        os.close(alive)


def _kind(error: errors.CovenantError | None) -> type[errors.CovenantError] | None:
    return None if error is None else type(error)
