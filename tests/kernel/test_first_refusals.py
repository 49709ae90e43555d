"""The first call of an agent that the filter refuses is told, with the tries of a run and without them."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from policy import errors
from sandbox.attest import live_runs as attest_live_runs
from sandbox.attest import reference
from sandbox.kernel.cgroup import cgroup
from sandbox.rundir import directory
from sandbox.shim import control_socket
from sandbox.supervisor import RunResult
from tests.kernel import live_runs
from tests.kernel.live_runs import Live
from tests.kernel.test_denied_calls import told
from tests.kernel.world import HEAD, TAIL, World, refused

ONCE = {("syscall", "getcpu", "not_granted"): 1}
GETCPU = "import ctypes\nctypes.CDLL(None).syscall(309, 0, 0, 0)\n"
# An agent that lives long enough to be attested.
STAYS = GETCPU + HEAD + "import time\ntime.sleep(4)\nanswer = 1" + TAIL
FIRST = HEAD + "import ctypes\nctypes.CDLL(None).syscall(309, 0, 0, 0)\nanswer = 1" + TAIL


@pytest.fixture(autouse=True)
def same_descriptors() -> Iterator[None]:
    """The shim's process has after a run the descriptors that it had before."""
    before = _descriptors()
    yield
    assert _descriptors() - before == set()


def _descriptors() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
    return {one for one in found if "/proc/" not in one}


@pytest.mark.parametrize("self_test", [True, False])
def test_first_refused_call_is_told(world: World, *, self_test: bool) -> None:
    world.configure(self_test=self_test)
    answer = world.run_code(FIRST)
    assert answer.error is None, (answer.error, answer.stderr)
    assert told(world, answer.run_id) == ONCE


def test_attested_from_first_moment_is_no_drift(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attest as soon as the run's record is there, before its sandbox is complete."""
    monkeypatch.setattr(attest_live_runs, "PATIENCE_SECONDS", live_runs.WAIT_SECONDS)
    world.configure(self_test=True)
    package = world.sign(world.package({"main.py": STAYS}))
    answers: list[RunResult] = []
    thread = threading.Thread(target=lambda: answers.append(world.run(package)))
    thread.start()
    try:
        runs = world.state / "runs"
        (run_id,) = live_runs.until(lambda: attest_live_runs.live(runs))
        made = reference.ReferenceValues.read(runs / run_id)
        assert made is not None
        found = attest_live_runs.answer(world.state, run_id, {run_id: made.policy_digest})
        assert found is not None
        assert found.holds, found.layers
    finally:
        thread.join(live_runs.WAIT_SECONDS)
    assert answers[0].error is None
    assert told(world, run_id) == ONCE


AGAIN = "import os, sys\nif len(sys.argv) == 1: os.execv(sys.orig_argv[0], [*sys.orig_argv, 'again'])\n"


def test_program_that_executes_itself_goes_on(world: World) -> None:
    world.configure(self_test=True)
    more = '[permissions.executables]\nallow = ["/usr/bin/python3.11"]\n'
    answer = world.run_code(AGAIN + HEAD + "answer = sys.argv[1:]" + TAIL, more=more)
    assert answer.error is None, (answer.error, answer.stderr)
    assert answer.result is not None
    assert answer.result.text == '["again"]'


def test_sandbox_attested_starts_at_debug(world: World) -> None:
    for self_test in (True, False):
        world.configure(self_test=self_test)
        with live_runs.live(world) as one:
            report = one.report()
            assert report.holds, report
            assert "--debug=true" in one.family().sandbox.arguments


def _killed(one: Live) -> None:
    control_socket.ask(one.directory, "kill", by="tester", reason="test")


def _crashed(one: Live) -> None:
    os.kill(one.family().sandbox.name.pid, signal.SIGKILL)


def test_run_killed_at_its_start_says_why(world: World) -> None:
    world.configure(self_test=True)
    answer = _ended_by(world, _killed)
    refused(errors.KilledError, answer.error)
    assert _last_code(world) == errors.KilledError.code


def test_sandbox_crashed_at_its_start_says_why(world: World) -> None:
    """An agent that began before the kill is told otherwise: repeat until a kill comes first."""
    world.configure(self_test=True)
    for _ in range(8):
        answer = _ended_by(world, _crashed)
        assert answer.error is not None
        if type(answer.error) is errors.SandboxCrashedError:
            assert _last_code(world) == errors.SandboxCrashedError.code
            return
        assert "the agent or its sandbox was killed by SIGKILL" in refused(errors.AgentFailedError, answer.error)
        assert _last_code(world) == errors.AgentFailedError.code
    raise AssertionError("every kill came after the agent's start")


def _ended_by(world: World, act: Callable[[Live], None]) -> RunResult:
    with live_runs.live(world, GETCPU + live_runs.SLEEPS) as one:
        act(one)
        return one.wait()


def _last_code(world: World) -> str:
    *_, row = [row["kind"] for row in world.rows() if row["kind"]["type"] == "run_ended"]
    return str(row["code"])


@contextlib.contextmanager
def _stopped_by_signal(one: Live) -> Iterator[None]:
    pid = one.family().sandbox.name.pid
    os.kill(pid, signal.SIGSTOP)
    yield
    os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def _frozen(one: Live) -> Iterator[None]:
    leaf = cgroup.Leaf(cgroup.Hierarchies.read(), one.made.run_id)
    leaf.adopt(directory.cgroups_of(one.directory))
    leaf.freeze(live_runs.WAIT_SECONDS)
    yield
    leaf.thaw(live_runs.WAIT_SECONDS)


@pytest.mark.parametrize("stopped", [_stopped_by_signal, _frozen], ids=["signal", "freezer"])
def test_sandbox_stopped_at_its_start_is_waited_for(
    world: World, stopped: Callable[[Live], contextlib.AbstractContextManager[None]]
) -> None:
    world.configure(self_test=True)
    with live_runs.live(world, STAYS) as one:
        with stopped(one):
            time.sleep(1)
            assert one.answers == [], "it does not end while it stands"
        answer = one.wait()
    assert answer.error is None, (answer.error, answer.stderr)
    assert told(world, answer.run_id) == ONCE
