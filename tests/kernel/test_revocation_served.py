"""A trust root with a revocation, installed by hand under a running supervisor: the whole tree and the standbys end."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox.rundir import registry
from sandbox.rundir.registry import Entry
from sandbox.storage.trust_state import State
from tests.kernel import revoking, serving
from tests.kernel.conftest import leftovers
from tests.kernel.families import BIG, SMALL, member, spawn
from tests.kernel.live_runs import until
from tests.kernel.serving import Served
from tests.kernel.test_standby import _ready, _states, _warmed
from tests.kernel.world import World

SLOW = "import time\ntime.sleep(600)"
MIDDLE: dict[str, Any] = {"memory_mb": 512, "resources": "pids_max = 128\ncpu_millis = 600\n"}


@pytest.fixture
def served(warm: Path) -> Iterator[Served]:
    with serving.open_place() as base, Served(World(base, warm=warm)) as made:
        yield made
        made.quiet()
        assert leftovers(made.world) == []


def _installed(world: World, digest: str) -> None:
    """Install the next root, and notify no process."""
    raw = revoking.next_root(world, revoking.manifest_of(world, digest))
    with State(world.state) as state:
        state.replace_root(raw, int(time.time() * 1000))


def _enforced(served: Served) -> dict[str, Any]:
    """Return the document of `covenant trust enforce`."""
    done = serving.covenant("trust", "enforce", "--json", served=served)
    assert done.returncode == 0, done
    said: dict[str, Any] = json.loads(done.stdout)
    assert said["not_done"] == []
    return said


def _tree(world: World) -> list[Entry]:
    live = [one for one in registry.live(world.state / "runs") if one.state == "Running" and one.agent_id != "beside"]
    return live if len(live) == 8 else []


def _kinds(world: World, kind: str) -> list[dict[str, Any]]:
    return [row["kind"] for row in world.rows() if row["kind"]["type"] == kind]


def test_tree_of_eight_under_supervisor_is_gone_and_each_of_it_has_its_rows(served: Served) -> None:
    world = served.world
    member(world, "leaf", SLOW, **SMALL)
    starts = "for _ in range({}): send('spawn', agent='{}', text='')\n"
    member(world, "middle", starts.format(2, "leaf") + SLOW, more=spawn(2, 2, "adopt"), **MIDDLE)
    code = starts.format(2, "middle") + starts.format(1, "leaf") + SLOW
    top = member(world, "top", code, more=spawn(3, 7, "adopt"), **BIG)
    beside = member(world, "beside", SLOW, **SMALL)
    with serving.asked(served.path, beside), serving.asked(served.path, top):
        tree = until(lambda: _tree(world))
        (root,) = (one for one in tree if one.agent_id == "top")
        assert sorted(one.depth for one in tree) == [0, 1, 1, 1, 2, 2, 2, 2]
        _installed(world, root.payload_digest)
        said = _enforced(served)
        # Whichever of its keepers saw the root before the command did had it enforced just the same.
        assert {one["run_id"] for one in said["ended"]} <= {one.run_id for one in tree}
        until(lambda: {one.agent_id for one in registry.live(world.state / "runs")} == {"beside"})
        until(lambda: len(_kinds(world, "run_ended")) == 8)
        ids = {one.run_id for one in tree}
        named = [one for row in _kinds(world, "runs_revoked") for one in row["runs"]]
        assert sorted(one["run_id"] for one in named) == sorted(ids)
        assert {one["because"] for one in named} == {root.run_id}
        assert {row["run_id"]: row["code"] for row in _kinds(world, "run_ended")} == dict.fromkeys(ids, "revoked")
        states = {run_id: _states(world, run_id) for run_id in ids}
        assert {tuple(found[-2:]) for found in states.values()} == {("Terminated", "Archived")}
        assert _enforced(served)["ended"] == []


def test_what_waits_for_intent_goes_with_what_it_rests_on_and_is_not_made_again(served: Served) -> None:
    world = served.world
    path, ready = _warmed(served, "waits", standby=2)
    ids = {one.run_id for one in ready}
    assert len(ids) == 2
    _installed(world, ready[0].payload_digest)
    _enforced(served)
    until(lambda: not any(one.path.exists() for one in ready))
    until(lambda: not registry.live(world.state / "runs"))
    named = {one["run_id"] for row in _kinds(world, "runs_revoked") for one in row["runs"]}
    # By the mark, or by their own look at the root that comes first: either is an end, and in the log.
    assert named <= ids
    # The last rows of one come after its directory is gone, which is all that was waited for.
    until(lambda: all(_states(world, run_id)[-2:] == ["Terminated", "Archived"] for run_id in ids))
    done = serving.covenant("run", str(path), "x", "--json", served=served)
    assert json.loads(done.stdout)["code"] == "revoked"
    assert not _ready(served, "waits")
