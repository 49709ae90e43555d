"""A run that is told to stop ends its agent, clears up and reports it, without waiting for the next start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from policy import errors
from sandbox.audit import run_archive
from sandbox.audit.denials import DenialLog
from sandbox.audit.run_events import RunEvents
from sandbox.control import manager
from sandbox.kernel.cgroup import cgroup
from sandbox.kernel.proc import spawn
from sandbox.rundir import directory as rundir_directory
from sandbox.rundir import registry
from tests.kernel.conftest import leftovers
from tests.kernel.live_runs import until
from tests.kernel.world import HEAD, TAIL, World

ROOT = Path(__file__).resolve().parents[2]


def begun(world: World, path: Path) -> subprocess.Popen[str]:
    """`covenant run` of a package, as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "covenant", "run", str(path), "hi", "--json"],
        env={**os.environ, "COVENANT_HOME": str(world.home), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _runs(world: World) -> bool:
    """Whether its agent was given the intent."""
    return any(row["kind"]["type"] == "run_state" and row["kind"]["state"] == "Running" for row in world.rows())


BURNS = """
import sys, time
until = time.process_time() + 0.8
while time.process_time() < until:
    pass
print("BURNT", file=sys.stderr, flush=True)
time.sleep(60)
answer = 1
"""
ASKER = manager.Requester("operator@local", root=True)


@pytest.mark.parametrize("backend", ["linux-gvisor", "trusted-local"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stopped_run_leaves_nothing_but_what_it_said_and_used(
    world: World, number: signal.Signals, backend: str
) -> None:
    code = {"main.py": HEAD + BURNS + TAIL}
    path = world.sign(world.package(code, backend=backend, required=str(backend == "linux-gvisor").lower()))
    process = begun(world, path)
    until(lambda: _runs(world))
    (run,) = registry.agents(registry.live(world.state / "runs"))
    until(lambda: "BURNT" in manager.logs(world.state, ASKER, run.run_id)["text"])
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 1, err
    assert json.loads(out)["message"] == "interrupted"
    assert leftovers(world) == []
    ended = world.rows()[-1]["kind"]
    assert (ended["type"], ended["status"], ended["code"]) == ("run_ended", "failed", "interrupted")
    assert ended["cpu_ms"] >= 150, "gVisor counts by ticks: 0.8 s of the agent's are less of the cgroup's now and then"
    assert ended["stderr_bytes"] == len("BURNT\n")
    assert manager.logs(world.state, ASKER, run.run_id)["text"] == "BURNT\n"


@pytest.mark.parametrize("answers", [True, False])
@pytest.mark.parametrize(
    ("owner", "name"), [(rundir_directory.RunDirectory, "__exit__"), (RunEvents, "run_ended"), (run_archive, "store")]
)
def test_signal_while_run_is_cleared_away_cuts_nothing_short(
    world: World, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, answers: bool
) -> None:
    """Nor while its end is written down. One that has answered has; of one that has not, nothing goes on that asked for
    it."""
    real = getattr(owner, name)

    def told(*args: Any, **fields: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return real(*args, **fields)

    path = world.sign(world.package({"main.py": HEAD + ("answer = 1" if answers else "sys.exit(3)") + TAIL}))
    world.run(path)  # with its canaries, which are runs as well
    monkeypatch.setattr(owner, name, told)
    before = len(world.rows())
    if answers:
        assert world.run(path).error is None
    else:
        with pytest.raises(KeyboardInterrupt):
            world.run(path)
    assert leftovers(world) == []
    kinds = [row["kind"] for row in world.rows()[before:]]
    ends = [one["code"] for one in kinds if one["type"] == "run_ended"]
    assert (ends, kinds[-1]["type"]) == ([None if answers else errors.AgentFailedError.code], "run_ended")


def test_canary_interrupted_has_not_failed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next run tries it again, and is not refused for a fault that was not found."""
    world.configure(self_test=True)
    leave, signals = rundir_directory.RunDirectory.__exit__, [signal.SIGTERM]

    def told(directory: rundir_directory.RunDirectory, *exc: Any) -> None:
        if signals:
            os.kill(os.getpid(), signals.pop())
        leave(directory, *exc)

    path = world.sign(world.package({"main.py": HEAD + "answer = 1" + TAIL}))
    monkeypatch.setattr(rundir_directory.RunDirectory, "__exit__", told)
    with pytest.raises(KeyboardInterrupt):
        world.run(path)
    assert leftovers(world) == []
    assert world.run(path).error is None


def test_run_that_was_told_to_outlive_its_terminal_does(world: World) -> None:
    """nohup(1): who started it ignores SIGHUP, and so does the run."""
    path = world.sign(world.package({"main.py": HEAD + "import time; time.sleep(2)\nanswer = 1" + TAIL}))
    process = subprocess.Popen(
        ["/usr/bin/nohup", sys.executable, "-m", "covenant", "run", str(path), "hi", "--json"],
        env={**os.environ, "COVENANT_HOME": str(world.home), "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until(lambda: _runs(world))
    process.send_signal(signal.SIGHUP)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert json.loads(out)["kind"] == "intent_result"


def test_run_that_supervisor_cannot_go_on_with_is_dead_before_what_surrounds_it_is_taken_away(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its gateway gone and its last rows written, a living agent would act without a log."""
    leaves: list[cgroup.Leaf] = []
    alive: list[list[int]] = []
    enter, leave = cgroup.Leaf.__enter__, spawn.Child.__exit__

    def entered(leaf: cgroup.Leaf) -> cgroup.Leaf:
        leaves.append(leaf)
        return enter(leaf)

    def left(child: spawn.Child, *exc: Any) -> None:
        alive.append([pid for leaf in leaves for pid in leaf.pids()])
        leave(child, *exc)

    def full(_: DenialLog) -> None:
        raise errors.LedgerError("no space left")

    monkeypatch.setattr(cgroup.Leaf, "__enter__", entered)
    monkeypatch.setattr(spawn.Child, "__exit__", left)
    assert world.run_code(HEAD + "answer = 1" + TAIL).error is None
    monkeypatch.setattr(DenialLog, "_look", full)
    with pytest.raises(errors.LedgerError, match="no space left"):
        world.run_code(HEAD + "import time; time.sleep(60)\nanswer = 1" + TAIL)
    assert alive == [[], []]
    assert leftovers(world) == []
