"""The supervisor's report to a caller on its runs, once some of the tree have ended and others live on."""

from __future__ import annotations

import pytest

from policy import errors
from sandbox.control import manager
from sandbox.rundir import registry
from tests.kernel import revoking
from tests.kernel.families import BIG, SMALL, member, spawn
from tests.kernel.live_runs import until
from tests.kernel.world import World

MIDDLE = {"memory_mb": 512, "resources": "pids_max = 128\ncpu_millis = 1000\n"}


@pytest.mark.parametrize("top_ends", [False, True])
def test_what_ended_below_run_that_lives_is_still_its_callers(world: World, *, top_ends: bool) -> None:
    """Also where that run has outlived the one that they asked for themselves."""
    member(world, "leaf", "import sys\nprint('hello', file=sys.stderr)\nanswer = 1", **SMALL)
    member(world, "mid", "import time\nchild('leaf')\ntime.sleep(600)", more=spawn(2, 2, "adopt"), **MIDDLE)
    ends = "answer = 1" if top_ends else "time.sleep(600)"
    code = f"import time\nask('spawn', agent='mid', text='')\n{ends}"
    top = member(world, "top", code, more=spawn(3, 8, "adopt"), **BIG)
    living = {"mid"} if top_ends else {"mid", "top"}
    root, caller, other = (
        manager.Requester("operator@local", root=True),
        manager.Requester("operator@local", root=False),
        manager.Requester("uid7@local", root=False),
    )
    with revoking.running(world, top):
        run_id = until(lambda: _ended(world, "leaf"))
        until(lambda: {one.agent_id for one in registry.live(world.state / "runs")} == living)
        try:
            told = [manager.logs(world.state, one, run_id)["text"] for one in (root, caller)]
            with pytest.raises(errors.NoRunError):
                manager.logs(world.state, other, run_id)
        finally:
            for one in manager.listed(world.state, root)[:1]:
                manager.operate(world.state, root, "kill", one["run_id"], tree=True)
    assert told == ["hello\n"] * 2


def _ended(world: World, agent_id: str) -> str | None:
    kinds = (row["kind"] for row in world.rows() if row["kind"]["type"] == "run_ended")
    return next((kind["run_id"] for kind in kinds if kind["agent_id"] == agent_id), None)
