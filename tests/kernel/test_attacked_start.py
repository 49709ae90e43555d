"""Whoever comes between an agent's start and the moment when its sandbox's log is on: nothing that is refused goes
untold, and the run ends with the word for what happened."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from policy import errors
from sandbox.attest import live_runs as attest_live_runs
from sandbox.attest import processes, reference
from sandbox.kernel.cgroup import cgroup
from sandbox.kernel.runsc.log_level import Raising
from sandbox.rundir import directory
from sandbox.runner import gvisor
from sandbox.shim import control_socket
from sandbox.shim.stdio import Exchange
from sandbox.supervisor import Answer
from tests.kernel import live_runs
from tests.kernel.live_runs import Live
from tests.kernel.test_denied_calls import told
from tests.kernel.world import HEAD, TAIL, World, refused

# A call that is refused and told of, were it reached.
FIRST = "import ctypes\nctypes.CDLL(None).syscall(309, 0, 0, 0)\n"
ONCE = {("syscall", "getcpu", "not_granted"): 1}


class Slow:
    """A sandbox that does not say whether its log is on before ``let`` is set; ``asked`` once it was asked, and then
    what ``on_asked`` has is done, by the keeper."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked, self.let = threading.Event(), threading.Event()
        self.on_asked: Callable[[], None] = lambda: None
        poll = Raising.poll

        def slow(raising: Raising) -> bool:
            self.asked.set()
            self.on_asked()
            return self.let.is_set() and poll(raising)

        monkeypatch.setattr(Raising, "poll", slow)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    one = Slow(monkeypatch)
    yield one
    one.let.set()


@pytest.fixture(autouse=True)
def same_descriptors() -> Iterator[None]:
    """Whatever a run's end was, its keeper has the descriptors that it had."""
    before = _descriptors()
    yield
    assert _descriptors() - before == set()


def _descriptors() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
    return {one for one in found if "/proc/" not in one}


def _code(world: World) -> str:
    *_, row = [row["kind"] for row in world.rows() if row["kind"]["type"] == "run_ended"]
    return str(row["code"])


def test_a_sandbox_that_never_answers_did_not_start_and_has_failed_no_test(
    world: World, slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[Exchange] = []

    class Noted(Exchange):
        def run(self) -> None:
            held.append(self)
            super().run()

    def over() -> None:
        held[-1]._deadline = time.monotonic()

    monkeypatch.setattr(gvisor, "Exchange", Noted)
    slow.on_asked = over
    world.configure(self_test=True)
    answer = world.run_code(FIRST + HEAD + "answer = 1" + TAIL)
    assert "did not start" in refused(errors.StartTimeoutError, answer.error)
    assert slow.asked.is_set()
    assert told(world, answer.run_id) == {}


def test_who_attests_from_the_first_moment_on_sees_no_drift(
    world: World, slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever of it is made when they come, until it stands; and then although nobody has let its agent go."""
    monkeypatch.setattr(attest_live_runs, "_PATIENCE_SECONDS", live_runs.WAIT_SECONDS)
    world.configure(self_test=True)
    package = world.sign(world.package({"main.py": FIRST + HEAD + "answer = 1" + TAIL}))
    answers: list[Answer] = []
    thread = threading.Thread(target=lambda: answers.append(world.run(package)))
    thread.start()
    try:
        runs = world.state / "runs"
        (run_id,) = live_runs.until(lambda: attest_live_runs.live(runs))
        made = reference.Made.read(runs / run_id)
        assert made is not None
        found = attest_live_runs.answer(world.state, run_id, {run_id: made.policy_digest})
        assert found is not None
        assert found.holds, found.layers
    finally:
        slow.let.set()
        thread.join(live_runs.WAIT_SECONDS)
    assert answers[0].error is None
    assert told(world, run_id) == ONCE


def _killed(one: Live) -> None:
    # It cannot be asked to stand: it has not begun.
    with pytest.raises(errors.WrongStateError):
        control_socket.ask(one.directory, "suspend")
    report = one.report()
    assert report.holds, report
    control_socket.ask(one.directory, "kill", by="tester", reason="test")


def _crashed(one: Live) -> None:
    os.kill(one.family().sandbox.name.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("act", "kind"), [(_killed, errors.KilledError), (_crashed, errors.SandboxCrashedError)], ids=["killed", "crashed"]
)
def test_one_that_ends_while_its_agent_is_held(
    world: World, slow: Slow, act: Callable[[Live], None], kind: type[errors.RunError]
) -> None:
    world.configure(self_test=True)
    with live_runs.live(world, FIRST + live_runs.SLEEPS) as one:
        assert slow.asked.wait(live_runs.WAIT_SECONDS)
        act(one)
        answer = one.wait()
    refused(kind, answer.error)
    assert _code(world) == kind.code
    assert told(world, answer.run_id) == {}


@pytest.mark.parametrize("by", ["signal", "freezer"])
def test_a_sandbox_that_somebody_stops_as_it_is_asked_is_waited_for(
    world: World, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    ask = Raising.ask
    stopped = threading.Event()
    goes_on: list[Callable[[], Any]] = []

    def stops(raising: Raising) -> None:
        made = reference.Made.read(raising._root.parent)
        assert made is not None
        found = processes.family(made.runner)
        assert found is not None
        if by == "signal":
            pid = found.sandbox.name.pid
            os.kill(pid, signal.SIGSTOP)
            goes_on.append(lambda: os.kill(pid, signal.SIGCONT))
        else:
            leaf = cgroup.Leaf(cgroup.Hierarchies.read(), made.run_id)
            leaf.adopt(directory.cgroups_of(raising._root.parent))
            leaf.freeze(live_runs.WAIT_SECONDS)
            goes_on.append(lambda: leaf.thaw(live_runs.WAIT_SECONDS))
        ask(raising)
        assert not raising.poll()
        stopped.set()

    monkeypatch.setattr(Raising, "ask", stops)
    world.configure(self_test=True)
    with live_runs.live(world, FIRST + HEAD + "answer = 1" + TAIL) as one:
        assert stopped.wait(live_runs.WAIT_SECONDS)
        goes_on.pop()()
        answer = one.wait()
    assert answer.error is None, (answer.error, answer.stderr)
    assert told(world, answer.run_id) == ONCE
