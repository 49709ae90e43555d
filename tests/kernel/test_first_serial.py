"""The first serial of an agent id, and an older package that is admitted while it is recorded (ADR 0062)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import pytest

from sandbox.control import succession
from sandbox.storage.trust_state import State
from tests.kernel import revoking
from tests.kernel.live_runs import SLEEPS, until
from tests.kernel.test_newer_serial import LONG, NEW, highest, is_running, order, refusal, signed, stopped_rows
from tests.kernel.world import World


@contextlib.contextmanager
def older_comes(monkeypatch: pytest.MonkeyPatch, start: Callable[[], None]) -> Any:
    """Call ``start`` after the newer package's start has read the highest serial, and before it records its own."""
    accepted = State.accepted
    inside = [False]
    real = succession.accept

    def accept(*rest: Any, **more: Any) -> None:
        inside[0] = True
        real(*rest, **more)

    def look(self: State, agent_id: str) -> Any:
        found = accepted(self, agent_id)
        if inside[0]:
            inside[0] = False
            start()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(succession, "accept", accept)
        patch.setattr(State, "accepted", look)
        yield


@pytest.mark.parametrize("known", [True, False], ids=["control: a serial is known", "the first serial"])
def test_older_admitted_meanwhile_is_ended_by_start(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    known: bool,
) -> None:
    if known:
        assert world.run(signed(world, "oldest", NEW)).error is None
    older, newer = signed(world, "old", SLEEPS), signed(world, "new", NEW)
    with contextlib.ExitStack() as stack:
        olds: list[revoking.Running] = []

        def start() -> None:
            olds.append(stack.enter_context(revoking.running(world, older)))
            until(lambda: is_running(world, olds[0].entry.run_id))

        with older_comes(monkeypatch, start):
            answer = world.run(newer)
        assert answer.error is None, answer.error
        (old,) = olds
        assert old.document()["code"] == "superseded"
    named, began = order(world, ("runs_stopped", old.entry.run_id), ("run_started", answer.run_id))
    assert named < began, "the newer run began while the older one was live and not stopped"


@pytest.mark.parametrize("known", [True, False], ids=["control: a serial is known", "the first serial"])
def test_refused_package_leaves_no_serial_and_ends_nothing(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    known: bool,
) -> None:
    second = revoking.second_operator(world)
    if known:
        assert world.run(signed(world, "oldest", NEW)).error is None
    older, newer = signed(world, "old", SLEEPS), signed(world, "new", NEW, key=second)
    with contextlib.ExitStack() as stack:
        olds: list[revoking.Running] = []
        serials: list[int] = []

        def start() -> None:
            olds.append(stack.enter_context(revoking.running(world, older)))
            until(lambda: is_running(world, olds[0].entry.run_id))
            serials.append(highest(world))

        with older_comes(monkeypatch, start):
            assert refusal(world, newer) == "rule_8_identity"
        time.sleep(6)
        found = {"serial left": highest(world) != serials[0], "runs on": is_running(world, olds[0].entry.run_id)}
        assert found == {"serial left": False, "runs on": True}, "a refused package of another operator ended the run"
    assert stopped_rows(world) == []


@pytest.mark.parametrize("serial", [1, 0], ids=["control: serial 1", "serial 0"])
def test_newer_serial_ends_run_of_any_serial(world: World, serial: int) -> None:
    made = world.package({"main.py": SLEEPS}, name="old", id="agent", **LONG)
    older, newer = world.sign(made, serial=serial), signed(world, "new", NEW)
    with revoking.running(world, older) as old:
        until(lambda: is_running(world, old.entry.run_id))
        answer = world.run(newer)
        assert answer.error is None
        assert old.document()["code"] == "superseded"
