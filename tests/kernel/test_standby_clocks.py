"""The time before an instance's intent: its waiting, which no clock counts, and a self-test."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from policy import errors
from sandbox.run_result import RunResult
from tests.kernel import serving
from tests.kernel.conftest import leftovers
from tests.kernel.serving import Served, open_place
from tests.kernel.test_standby import ECHO, _await, _ready, _said, _until, _warmed
from tests.kernel.world import SLOWNESS, World

TTL_SECONDS = 3 * SLOWNESS
# Between a clock and the end of what it ends, with its last rows and the answer.
LATER_SECONDS = 5 * SLOWNESS


@pytest.mark.parametrize(("on_expiry", "seconds"), [("terminate", TTL_SECONDS), ("suspend", 2 * TTL_SECONDS)])
def test_its_clocks_count_from_its_intent_and_not_from_when_it_was_made(
    warm: Path, on_expiry: str, seconds: float
) -> None:
    """With the control of one that never waited: a run from cold, which is what the instances wait through."""
    lifetime = f'[lifetime]\nttl_seconds = {TTL_SECONDS}\non_expiry = "{on_expiry}"\n'
    with open_place() as place:
        world = World(place, warm=warm)
        with Served(world) as served:
            path, ready = _warmed(served, "timed", standby=2, more=lifetime)
            never = world.package({"main.py": ECHO}, name="cold", id="cold", memory_mb=64, more=lifetime)
            cold = served.run(world.sign(never), "stay")
            waited = {one.run_id for one in ready}
            assert _said(served.run(path, "x"))["run"] in waited
            stays = served.run(path, "stay")
            assert stays.run_id in waited
        for one in (cold, stays):
            assert isinstance(one.error, errors.DeadlineError), one
            assert "(clock: ttl_seconds)" in one.error.message
            assert one.usage.wall_ms is not None
            assert seconds <= one.usage.wall_ms / 1000 < seconds + LATER_SECONDS
            stood = _seconds_until(world, one, "Suspended")
            assert len(stood) == (on_expiry == "suspend")
            assert all(TTL_SECONDS <= after < TTL_SECONDS + LATER_SECONDS for after in stood), stood
        assert leftovers(world) == []


def _seconds_until(world: World, answer: RunResult, state: str) -> list[float]:
    """How long after its intent a run was written down as in this state, each time that it was."""
    rows = _rows(world, answer.run_id)
    (given,) = (row["timestamp_ms"] for row in rows if row["kind"].get("state") == "Running")
    return [(row["timestamp_ms"] - given) / 1000 for row in rows if row["kind"].get("state") == state]


_BEFORE = ("Provisioned", "Validated", "self_test_started", "self_test")
# Once there is such a file, a canary finds allowed what it tries as forbidden, as it would in a sandbox that is wider
# than its policy (test_canaries.py).
_WIDER = """
import errno, os
from sandbox.probes import denial_probes as canary
def widened(artefacts, plan=canary.plan):
    made = plan(artefacts)
    if os.path.exists(PLACE):
        made.denial("what is allowed", made.call("getpid"), errno.EPERM)
    return made
canary.plan = widened
"""


def test_none_is_kept_of_policy_that_fails_its_self_test(warm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_place() as place:
        world, wider = World(place, warm=warm), place / "wider"
        monkeypatch.setattr(serving, "_MAIN", _WIDER.replace("PLACE", repr(str(wider))) + serving._MAIN)
        record = world.state / "closures" / "canaries.json"
        with Served(world, self_test=True) as served:
            path, (first,) = _warmed(served, "tried")
            record.unlink()
            assert _said(served.run(path, "x"))["run"] == first.run_id
            # The control, which no run has tried before it.
            (second,) = _await(served, "tried")
            assert _steps(world, second.run_id) == [*_BEFORE, "Isolated"]
            assert _tests(world, second.run_id) == [("standby@local", True)]
            record.unlink()
            wider.touch()
            os.kill(second.keeper, signal.SIGTERM)
            _until(lambda: bool(_failed(world)), served)
            refused = _failed(world)[0]
            _until(lambda: _steps(world, refused)[-1] == "manifest_rejected", served)
            assert _steps(world, refused) == [*_BEFORE, "Rejected", "manifest_rejected"]
            assert _tests(world, refused) == [("standby@local", False)]
            assert not _ready(served, "tried")
            with pytest.raises(errors.SelfTestError):
                served.run(path, "y")
            assert not _ready(served, "tried")
            wider.unlink()
            assert _said(served.run(path, "z"))["text"] == "z"
            _await(served, "tried")
        assert leftovers(world) == []


def _rows(world: World, run_id: str) -> list[dict[str, Any]]:
    return [row for row in world.rows() if row["kind"].get("run_id") == run_id]


def _steps(world: World, run_id: str) -> list[str]:
    return [row["kind"].get("state", row["kind"]["type"]) for row in _rows(world, run_id)]


def _tests(world: World, run_id: str) -> list[tuple[str, bool]]:
    """For whom its policy was tried, and whether that passed."""
    tests = (row for row in _rows(world, run_id) if row["kind"]["type"] == "self_test")
    return [(row["issuer"]["display"], row["kind"]["passed"]) for row in tests if row["kind"]["name"] == "canaries"]


def _failed(world: World) -> list[str]:
    kinds = (row["kind"] for row in world.rows())
    return [kind["run_id"] for kind in kinds if kind["type"] == "self_test" and not kind["passed"]]
