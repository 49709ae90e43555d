"""A newer serial beside parents and children, instances of standby, and a supervisor that serves the same state."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from policy import errors
from sandbox.rundir import registry
from tests.kernel import revoking
from tests.kernel.conftest import leftovers
from tests.kernel.families import BIG, SMALL, answered, member, spawn
from tests.kernel.live_runs import SLEEPS, until
from tests.kernel.serving import Served, asked, open_place
from tests.kernel.test_after_a_restart import _said as code_of
from tests.kernel.test_newer_serial import is_running, refusal, stopped_rows
from tests.kernel.test_standby import ECHO, _await, _said, _until, _warmed
from tests.kernel.world import World

pytestmark = pytest.mark.kernel

STAYS = "import time\ntime.sleep(600)\nanswer = 1"


def run_of(world: World, agent_id: str) -> str:
    """The id of the one run of an agent once it is Running."""

    def found() -> str | None:
        live = registry.live(world.state / "runs")
        return next((one.run_id for one in live if one.agent_id == agent_id and one.state == "Running"), None)

    return str(until(found))


def newer(world: World, agent_id: str, code: str = "answer = 'new'", **fields: Any) -> Path:
    """A package that is signed later, and lies where no parent looks for children."""
    made = member(world, f"{agent_id}-new", code, **{"id": agent_id, **fields})
    return made.rename(world.base / made.name)


def test_newer_serial_ends_older_tree(world: World) -> None:
    member(world, "kid", STAYS, more=spawn(1, 1, "adopt"), **SMALL)
    elder = member(world, "elder", "answer = child('kid')", more=spawn(2, 4, "adopt"), **BIG)
    next_elder = newer(world, "elder")
    with revoking.running(world, elder) as old:
        kid = run_of(world, "kid")
        assert world.run(next_elder).error is None
        assert old.document()["code"] == "superseded"
    (row,) = stopped_rows(world)
    assert {one["run_id"] for one in row["runs"]} == {old.entry.run_id, kid}
    ended = {row["kind"]["run_id"]: row["kind"]["code"] for row in world.rows() if row["kind"]["type"] == "run_ended"}
    assert (ended[old.entry.run_id], ended[kid]) == ("superseded", "superseded")


def test_newer_serial_ends_child_and_not_parent(world: World) -> None:
    member(world, "kid", STAYS, **SMALL)
    member(world, "sibling", "answer = 'control'", **SMALL)
    asks = "answer = [child('kid'), child('kid'), child('sibling')]"
    elder = member(world, "elder", asks, more=spawn(2, 4), **BIG)
    next_kid = newer(world, "kid", **SMALL)
    with revoking.running(world, elder) as parent:
        run_of(world, "kid")
        assert world.run(next_kid).error is None
        ended, again, control = json.loads(parent.document()["text"])
    assert ended["error"]["code"] == "superseded", ended
    assert again["error"]["code"] == "serial_rollback", "the older child starts no more"
    assert json.loads(control["ok"]["text"]) == "control"


def test_spawned_newer_serial_ends_older_run(world: World) -> None:
    older = member(world, "kid-old", STAYS, id="kid", **SMALL)
    older = older.rename(world.base / older.name)
    member(world, "kid", "answer = 'new'", **SMALL)
    elder = member(world, "elder", "answer = child('kid')", more=spawn(2, 4), **BIG)
    with revoking.running(world, older) as old:
        until(lambda: is_running(world, old.entry.run_id))
        assert json.loads(answered(world, elder)["ok"]["text"]) == "new"
        assert old.document()["code"] == "superseded"
    assert refusal(world, older) == "serial_rollback"


@pytest.mark.parametrize("by", ["the supervisor", "another process"])
def test_newer_serial_ends_run_of_instance(warm: Path, by: str) -> None:
    """An instance of standby that was given an intent, in a supervisor; and the instance that waits after it."""
    with open_place() as place:
        world = World(place, warm=warm)
        with Served(world) as served:
            path, (instance,) = _warmed(served, "kept", "import time\n" + ECHO, cpu_ms=250_000)
            with asked(served.path, path, "stay") as sock:
                _until(lambda: is_running(world, instance.run_id), served)
                (waits,) = _await(served, "kept")
                older = place / "older"
                shutil.copytree(path, older)
                world.sign(path)
                answer = served.run(path, "x") if by == "the supervisor" else world.run(path, "x")
                assert answer.error is None, answer
                assert code_of(sock) == "superseded"
            with pytest.raises(errors.SerialError):
                served.run(older, "z")
            # The control: the newer one is served as ever, and the instance of the older one was given nothing.
            assert served.run(path, "y").error is None
            _until(lambda: not waits.path.exists(), served)
            used = [row["kind"]["run_id"] for row in world.rows() if row["kind"]["type"] == "run_started"]
            assert waits.run_id not in used
            (fresh,) = _await(served, "kept")
            assert _said(served.run(path, "w"))["run"] == fresh.run_id
        assert leftovers(world) == []


def test_newer_serial_ends_detached_run(warm: Path) -> None:
    with open_place() as place:
        world = World(place, warm=warm)
        with Served(world) as served:
            about = {"id": "long", "cpu_ms": 250_000}
            older = world.sign(world.package({"main.py": SLEEPS}, name="old", **about))
            with asked(served.path, older, detach=True):
                run_id = run_of(world, "long")
            assert is_running(world, run_id), "nobody waits for it"
            assert served.run(newer(world, "long")).error is None
            _until(lambda: not is_running(world, run_id), served)
            ended = [row["kind"] for row in world.rows() if row["kind"]["type"] == "run_ended"]
            assert [row["code"] for row in ended if row["run_id"] == run_id] == ["superseded"]
            with pytest.raises(errors.SerialError):
                served.run(older)
            served.quiet()
        assert leftovers(world) == []
