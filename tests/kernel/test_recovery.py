"""kill -9 of the supervisor at any moment: the next start leaves no sandbox, cgroup, mount or run directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from sandbox.kernel.cgroup import cgroup
from tests.kernel.conftest import leftovers
from tests.kernel.world import HEAD, TAIL, World, worlds_ended

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("after_ms", [0, 40, 120, 250, 500, 1200])
def test_killed_supervisor_leaves_nothing_after_next_start(world: World, after_ms: int) -> None:
    sleeper = world.sign(world.package({"main.py": HEAD + "import time; time.sleep(60)\nanswer = 1" + TAIL}))
    environment = {**os.environ, "COVENANT_HOME": str(world.home), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "covenant", "run", str(sleeper), "hi"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    runs = world.state / "runs"
    until = time.monotonic() + 30
    while time.monotonic() < until and not any(runs.glob("*-*")):
        time.sleep(0.001)
    time.sleep(after_ms / 1000)
    process.send_signal(signal.SIGKILL)
    process.wait()

    # The kernel ends the sandbox with its supervisor; what is left then are names, and the next start takes them.
    quick = world.sign(world.package({"main.py": HEAD + "answer = 'next'" + TAIL}, name="next", id="next"))
    answer = world.run(quick)
    assert answer.error is None
    assert leftovers(world) == []


def test_two_runs_at_once_do_not_take_each_others_directories(world: World) -> None:
    slow = world.sign(world.package({"main.py": HEAD + "import time; time.sleep(1.5)\nanswer = 1" + TAIL}))
    environment = {**os.environ, "COVENANT_HOME": str(world.home), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "covenant", "run", str(slow), "hi", "--json"]
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(3)
    ]
    for process in processes:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, (out, err)
    ended = [row["kind"] for row in world.rows() if row["kind"]["type"] == "run_ended"]
    assert [row["status"] for row in ended] == ["ok"] * 3


def test_world_that_leaves_cgroup_fails_and_removes_it(tmp_path: Path) -> None:
    world, run_id = World(tmp_path), str(uuid.uuid4())
    (world.state / "runs" / run_id).mkdir(parents=True)
    process = subprocess.Popen(["/bin/sleep", "600"])
    with pytest.raises(AssertionError, match="start a supervisor"), worlds_ended(tmp_path, wait_seconds=0):
        _leave_cgroup(run_id, process.pid)
    assert world.cgroups() == []
    assert process.wait(60) == -signal.SIGKILL


def _leave_cgroup(run_id: str, pid: int) -> None:
    """Make the leaf of a run as its shim does, and do not leave the block, as a killed shim."""
    leaf = cgroup.Leaf(cgroup.Hierarchies.read(), run_id)
    leaf.__enter__()
    (next(iter(leaf.paths.values())) / "cgroup.procs").write_text(str(pid))
