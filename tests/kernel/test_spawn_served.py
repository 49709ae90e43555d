"""Children of runs that a supervisor keeps: with their caller's rights, and through their supervisor's end."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from sandbox.rundir import registry
from tests.kernel import serving
from tests.kernel.conftest import leftovers, unfinished
from tests.kernel.families import BIG, SMALL, member, spawn
from tests.kernel.live_runs import until
from tests.kernel.serving import CALLER, Served
from tests.kernel.world import World


def test_callers_agent_starts_what_lies_beside_it(warm: Path) -> None:
    with serving.open_place() as base, Served(World(base, warm=warm), on_supervisor_exit="continue") as served:
        world = served.world
        member(world, "leaf", "answer = intent['issuer']['display']", **SMALL)
        hidden = member(world, "hidden", "answer = 1", **SMALL)
        top = member(world, "top", "answer = [child('leaf'), child('hidden')]", more=spawn(), **BIG)
        # What is no directory that it may look into is no package to its caller's agent.
        hidden.chmod(0o700)
        done = serving.covenant("run", str(top), "hi", "--json", served=served, uid=CALLER)
        said = json.loads(done.stdout)
        assert done.returncode == 0, done
        leaf, other = json.loads(said["text"])
        assert leaf["ok"]["text"] == json.dumps(f"top@{said['run_id']}")
        assert other["error"]["code"] == "package_invalid"
        rows = [row for row in world.rows() if row["kind"]["type"] == "run_started"]
        assert [row["kind"]["agent_id"] for row in rows][:2] == ["top", "leaf"]

        # A killed supervisor leaves the family to its own keepers, which write its end themselves.
        member(world, "slow", "import time\ntime.sleep(600)", **SMALL)
        path = member(world, "holds", "answer = child('slow')", more=spawn(), **BIG)
        with serving.asked(served.path, path):
            live = until(lambda: _running(world, {"holds", "slow"}))
            assert served.process is not None
            os.kill(served.process.pid, signal.SIGKILL)
            served.process.wait()
            os.kill(live["holds"].keeper, signal.SIGKILL)
            until(lambda: not registry.live(world.state / "runs"))
        served.start()
        served.quiet()
        until(lambda: unfinished(world) == [])
        ended = [row["kind"] for row in world.rows() if row["kind"]["type"] == "run_ended"]
        ends = {kind["agent_id"]: kind["code"] for kind in ended}
        assert (ends["holds"], ends["slow"]) == ("cut_off", "parent_ended")


def test_what_outlives_its_parent_ends_with_supervisor_where_runs_do(warm: Path) -> None:
    """And when its keeper is killed, which is not one of the supervisor's own, it is cleaned up all the same."""
    with serving.open_place() as base, Served(World(base, warm=warm), on_supervisor_exit="end") as served:
        world = served.world
        member(world, "slow", "import time\ntime.sleep(600)", more=spawn(1, 1, "adopt"), **SMALL)
        top = member(world, "top", "answer = ask(kind='spawn', agent='slow', text='')", more=spawn(fate="adopt"), **BIG)
        assert served.run(top).error is None
        os.kill(until(lambda: _running(world, {"slow"}))["slow"].keeper, signal.SIGKILL)
        until(lambda: [kind for kind in _ends(world) if kind["code"] == "cut_off"])
        until(lambda: unfinished(world) == [])

        assert served.run(top).error is None
        until(lambda: _running(world, {"slow"}))
        served.kill()
        until(lambda: not registry.live(world.state / "runs"))
        served.start()
        served.quiet()
        until(lambda: unfinished(world) == [])
        assert [kind["code"] for kind in _ends(world)] == [None, "cut_off", None, "stopped"]
        assert leftovers(world) == []


def test_what_outlives_its_parent_counts_among_its_callers_runs_and_is_theirs_to_end(warm: Path) -> None:
    with serving.open_place() as base, Served(World(base, warm=warm), caller_requests=2) as served:
        world = served.world
        member(world, "slow", "import time\ntime.sleep(600)", more=spawn(1, 1, "adopt"), **SMALL)
        top = member(world, "top", "answer = ask(kind='spawn', agent='slow', text='')", more=spawn(fate="adopt"), **BIG)

        def orphans() -> list[str]:
            return [one.run_id for one in registry.live(world.state / "runs") if one.agent_id == "slow"]

        def asked(*words: str, uid: int = CALLER) -> dict[str, Any]:
            found: dict[str, Any] = json.loads(serving.covenant(*words, "--json", served=served, uid=uid).stdout)
            return found

        for _ in range(2):
            assert "text" in asked("run", str(top), "hi")
        assert len(orphans()) == 2
        assert asked("run", str(top), "hi")["code"] == "too_many_requests"
        assert {one["run_id"] for one in asked("ps")["runs"]} == set(orphans())
        # They hold up no other caller, and each that ends makes room for another.
        assert "text" in asked("run", str(top), "hi", uid=0)
        assert asked("run", str(top), "hi")["code"] == "too_many_requests"
        first = asked("ps")["runs"][0]["run_id"]
        assert "code" not in asked("kill", first)
        assert "text" in asked("run", str(top), "hi")
        for run_id in orphans():
            asked("kill", run_id, uid=0)
        served.quiet()
        assert leftovers(world) == []


def _ends(world: World) -> list[dict[str, Any]]:
    return [row["kind"] for row in world.rows() if row["kind"]["type"] == "run_ended"]


def _running(world: World, names: set[str]) -> dict[str, registry.Entry]:
    live = {one.agent_id: one for one in registry.live(world.state / "runs") if one.state == "Running"}
    return live if set(live) == names else {}
