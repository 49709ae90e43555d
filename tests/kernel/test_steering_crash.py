"""kill -9 of a shim amid an operation on its run: the client is told, and the next start clears up.

Also kill -9 of the process that ends a whole tree: the shims of the tree do the rest.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from policy import errors, lifecycle
from sandbox.audit import run_archive
from sandbox.control import manager, tree_kill
from sandbox.kernel.cgroup import cgroup
from sandbox.rundir import marks, registry
from tests.kernel.conftest import leftovers
from tests.kernel.live_runs import SLEEPS, until
from tests.kernel.world import HEAD, TAIL, World

pytestmark = pytest.mark.kernel

ROOT = Path(__file__).resolve().parents[2]
ASKER = manager.Requester("operator@local", root=True)
# A keeper that dies at one point of what it is asked.
KEEPER = """\
import os, runpy, signal, sys
from sandbox.shim import control_socket as control
from sandbox.kernel.cgroup.cgroup import Leaf
point = sys.argv.pop(1)

def die(*arguments, **more):
    os.kill(os.getpid(), signal.SIGKILL)

def act_then_die(act):
    def acted(self, **more):
        act(self, **more)
        die()
    return acted

match point:
    case "written down, not stopped": Leaf.freeze = die
    case "stopped, not answered": Leaf.freeze = act_then_die(Leaf.freeze)
    case "written down, not let go on": Leaf.thaw = die
    case "let go on, not answered": Leaf.thaw = act_then_die(Leaf.thaw)
    case "to be ended, not answered": control.ControlServer._send = die
sys.argv[0] = "covenant"
runpy.run_module("covenant", run_name="__main__")
"""
# What is asked until it dies.
POINTS: dict[str, tuple[manager.Operation, ...]] = {
    "written down, not stopped": ("suspend",),
    "stopped, not answered": ("suspend",),
    "written down, not let go on": ("suspend", "resume"),
    "let go on, not answered": ("suspend", "resume"),
    "to be ended, not answered": ("kill",),
}


@pytest.fixture
def keepers(world: World) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    package = world.sign(world.package({"main.py": SLEEPS}, cpu_ms=250_000))
    environment = {**os.environ, "COVENANT_HOME": str(world.home), "PYTHONPATH": str(ROOT)}
    started: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for point in POINTS:
            command = [sys.executable, "-c", KEEPER, point, "run", str(package), "hi"]
            started[point] = subprocess.Popen(
                command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
        yield started
    finally:
        for one in started.values():
            one.kill()
            one.wait()


def test_whoever_asks_keeper_that_dies_of_it_is_told_and_nothing_of_it_stays(
    world: World, keepers: dict[str, subprocess.Popen[bytes]]
) -> None:
    def running() -> dict[int, str] | None:
        found = {one.keeper: one.run_id for one in registry.live(world.state / "runs") if one.state == "Running"}
        return found if len(found) == len(POINTS) else None

    runs: dict[int, str] = until(running)
    for point, operations in POINTS.items():
        for operation in operations[:-1]:
            manager.operate(world.state, ASKER, operation, runs[keepers[point].pid])
        with pytest.raises(errors.NoRunError):
            manager.operate(world.state, ASKER, operations[-1], runs[keepers[point].pid])
        assert keepers[point].wait(60) == -9
    # Neither a lock nor a socket of theirs keeps the next one from starting, and it ends what they left.
    assert world.run_code(HEAD + "answer = 1" + TAIL, name="next").error is None
    assert leftovers(world) == []
    lawful = {(move.source, move.target) for move in lifecycle.TRANSITIONS}
    for run_id in runs.values():
        rows: list[dict[str, Any]] = [row["kind"] for row in world.rows() if row["kind"].get("run_id") == run_id]
        assert [row["code"] for row in rows if row["type"] == "run_ended"] == ["cut_off"]
        states = [row["state"] for row in rows if row["type"] == "run_state"]
        assert states[-1] == "Archived"
        assert set(itertools.pairwise(states)) <= lawful
        record = run_archive.read(world.state, run_id)
        assert record is not None
        assert record.code == "cut_off"


# A shim whose run is below another's by its label. It notices the death of the process that ends it when the test says
# so.
MEMBER = """\
import os, runpy, sys
from sandbox.rundir import admission; from sandbox.shim import operations
above, told = sys.argv.pop(1), sys.argv.pop(1)
label, forsaken = admission.AdmissionRequest.label, operations.RunOperations._forsaken
operations.ENDING_SECONDS = 0.0
more = {"parent": above, "ancestors": above, "depth": "1"} if above else {}
admission.AdmissionRequest.label = lambda self, **fields: label(self, **fields) | more
operations.RunOperations._forsaken = lambda self: forsaken(self) if os.path.exists(told) else None
sys.argv[0] = "covenant"
runpy.run_module("covenant", run_name="__main__")
"""
# The process that ends a tree of two is killed at one step; the number is how many are marked by then.
STEPS = {"both stand": 0, "the first is marked": 1, "both are marked": 2, "and named in the log": 2}


def _end_and_die(world: World, run_id: str, step: str) -> None:
    """End the tree in another process, which dies at the step."""
    mark, left = marks.mark_stopped, iter(range(STEPS[step]))

    def die(*arguments: Any, **more: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def mark_or_die(*arguments: Any, **more: Any) -> None:
        if next(left, None) is None:
            die()
        mark(*arguments, **more)

    if (pid := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            marks.mark_stopped = mark_or_die
            if step == "both are marked":
                manager._Ask._tell = die  # type: ignore[method-assign]
            tree_kill.end_together = die
            manager.operate(world.state, ASKER, "kill", run_id, reason="enough", tree=True)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL


def _stands(entry: registry.Entry) -> bool:
    leaf = cgroup.Leaf(cgroup.Hierarchies.read(), entry.run_id)
    leaf.adopt(entry.cgroups)
    return leaf.frozen()


def test_tree_ends_whose_end_was_begun_by_another_who_is_killed(world: World) -> None:
    package = world.sign(world.package({"main.py": SLEEPS}, cpu_ms=250_000, memory_mb=64))
    environment = {**os.environ, "COVENANT_HOME": str(world.home), "PYTHONPATH": str(ROOT)}
    told, processes = world.home / "told", list[subprocess.Popen[bytes]]()
    with contextlib.ExitStack() as stack:

        def member(above: str) -> int:
            command = [sys.executable, "-c", MEMBER, above, str(told), "run", str(package), "hi"]
            quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            processes.append(stack.enter_context(subprocess.Popen(command, env=environment, **quiet)))
            stack.callback(processes[-1].kill)
            return processes[-1].pid

        def shown(keepers: list[int]) -> dict[int, registry.Entry] | None:
            found = {one.keeper: one for one in registry.live(world.state / "runs") if one.state == "Running"}
            return found if set(keepers) <= set(found) else None

        tops = [member("") for _ in STEPS]
        found = until(lambda: shown(tops))
        below = [member(found[one].run_id) for one in tops]
        found = until(lambda: shown([*tops, *below]))
        for keeper, step in zip(tops, STEPS, strict=True):
            _end_and_die(world, found[keeper].run_id, step)
        # No run was marked: they stay suspended, and a second kill ends them.
        untold = found[tops[0]], found[below[0]]
        until(lambda: all(_stands(one) for one in untold))
        assert registry.under_way(untold[1].path)
        ended = manager.operate(world.state, ASKER, "kill", untold[0].run_id, reason="enough", tree=True)
        assert sorted(ended) == sorted(one.run_id for one in untold)
        told.touch()
        until(lambda: all(one.poll() is not None for one in processes))
    ids = {one.run_id for one in found.values()}
    rows = [row["kind"] for row in world.rows()]
    ends = [(row["run_id"], row["code"]) for row in rows if row["type"] == "run_ended"]
    assert sorted(ends) == sorted((one, "stopped") for one in ids)
    records = [run_archive.read(world.state, one) for one in ids]
    assert {record and record.message for record in records} == {"ended by operator@local: enough"}
    # The child of the one that was marked alone was told by its parent, as may be one that was about to see its mark.
    suspended = {row["run_id"]: row["reason"] for row in rows if row.get("state") == "Suspended"}
    assert found[below[1]].run_id in suspended
    assert set(suspended) <= {found[one].run_id for one in below[1:]}
    assert set(suspended.values()) == {"to be ended, asked by operator@local: enough"}
    # A killed process has named no run; each run says for itself why it ended.
    named = [{one["run_id"] for one in row["runs"]} for row in rows if row["type"] == "runs_stopped"]
    last = {found[tops[-1]].run_id, found[below[-1]].run_id}
    assert named == [last, {one.run_id for one in untold}]
    assert leftovers(world) == []
