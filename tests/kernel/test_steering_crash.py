"""kill -9 of a keeper amid what somebody asked of its run: they hear of it, and the next start clears up."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from policy import errors, lifecycle
from sandbox import archive, oversight, registry
from tests.kernel.conftest import leftovers
from tests.kernel.live_runs import SLEEPS, until
from tests.kernel.world import HEAD, TAIL, World

pytestmark = pytest.mark.kernel

ROOT = Path(__file__).resolve().parents[2]
ASKER = oversight.Asker("operator@local", root=True)
# A keeper that dies at one point of what it is asked.
KEEPER = """\
import os, runpy, signal, sys
from sandbox import control
from sandbox.kernel.cgroupfs import Leaf
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
    case "to be ended, not answered": control.Server._send = die
sys.argv[0] = "covenant"
runpy.run_module("covenant", run_name="__main__")
"""
# What is asked until it dies.
POINTS: dict[str, tuple[oversight.Operation, ...]] = {
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


def test_whoever_asks_a_keeper_that_dies_of_it_is_told_and_nothing_of_it_stays(
    world: World, keepers: dict[str, subprocess.Popen[bytes]]
) -> None:
    def running() -> dict[int, str] | None:
        found = {one.keeper: one.run_id for one in registry.live(world.state / "runs") if one.state == "Running"}
        return found if len(found) == len(POINTS) else None

    runs: dict[int, str] = until(running)
    for point, operations in POINTS.items():
        for operation in operations[:-1]:
            oversight.act(world.state, ASKER, operation, runs[keepers[point].pid])
        with pytest.raises(errors.NoRunError):
            oversight.act(world.state, ASKER, operations[-1], runs[keepers[point].pid])
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
        record = archive.read(world.state, run_id)
        assert record is not None
        assert record.code == "cut_off"
