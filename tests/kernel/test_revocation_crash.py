"""kill -9 of the revoking process amid each step: marked runs end all the same, runs only stopped can be resumed."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sandbox.audit.log import Ledger
from sandbox.control import manager, revocation
from sandbox.kernel.cgroup import cgroup, kill
from sandbox.rundir import directory, marks, registry
from sandbox.storage.trust_state import State
from tests.kernel import revoking
from tests.kernel.conftest import leftovers
from tests.kernel.live_runs import SLEEPS, until
from tests.kernel.world import World

pytestmark = pytest.mark.kernel

ASKER = manager.Requester("operator@local", root=True)
# The point at which the revoking process dies: the first call of the next step.
POINTS: dict[str, tuple[Any, str]] = {
    "stopped, not marked": (revocation, "_mark"),
    "marked, not installed": (State, "replace_root"),
    "installed, not written down": (Ledger, "append"),
    "written down, not killed": (kill, "kill"),
}


def _die(*arguments: object, **more: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _revoked_until(world: World, raw: bytes, point: str) -> None:
    """By a process of its own, which comes so far."""
    place, name = POINTS[point]
    act: Callable[..., Any] = getattr(place, name)

    def die_or_act(self: Any, kind: Any, *arguments: Any, **more: Any) -> Any:
        return act(self, kind, *arguments, **more) if kind == "trust_changed" else _die()

    if (pid := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            setattr(place, name, die_or_act if place is Ledger else _die)
            revoking.revoke(world, raw)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL


def _leaf(one: registry.Entry) -> cgroup.Leaf:
    leaf = cgroup.Leaf(cgroup.Hierarchies.read(), one.run_id)
    leaf.adopt(directory.cgroups_of(one.path))
    return leaf


def test_nothing_revoked_runs_on_where_whoever_does_it_is_killed(world: World) -> None:
    packages: dict[str, Path] = {}
    for number, point in enumerate(POINTS):
        fields: dict[str, Any] = {"name": f"crash-{number}", "id": f"crash-{number}", "cpu_ms": 250_000}
        packages[point] = world.sign(world.package({"main.py": SLEEPS}, **fields))
    with contextlib.ExitStack() as stack:
        runs = {point: stack.enter_context(revoking.running(world, package)) for point, package in packages.items()}

        def present(run: revoking.Running) -> registry.Entry | None:
            live = registry.live(world.state / "runs")
            return next((one for one in live if one.run_id == run.entry.run_id), None)

        def started(run: revoking.Running) -> registry.Entry | None:
            one = present(run)
            return one if one is not None and one.state == "Running" else None

        for point, run in runs.items():
            one = until(functools.partial(started, run))
            raw = revoking.next_root(world, revoking.manifest_of(world, one.payload_digest))
            _revoked_until(world, raw, point)
            if point == "stopped, not marked":
                leaf = _leaf(one)
                until(leaf.frozen)
                assert (marks.revoked_of(one.path), one.state) == (None, "Running")
                manager.operate(world.state, ASKER, "resume", one.run_id)
                assert not leaf.frozen()
                # The same command again.
                enforced = revoking.revoke(world, raw)
                assert ([ended.run_id for ended in enforced.ended], enforced.failed) == ([one.run_id], ())
            document = run.document()
            assert (document["code"], document["message"]) == ("revoked", "the signed manifest was revoked: it leaks")
            assert present(run) is None
            if point == "marked, not installed":  # a package that is started now is still allowed: the command again
                assert revoking.revoke(world, raw) == revocation.NOTHING
    assert leftovers(world) == []
    kinds = [row["kind"] for row in world.rows()]
    ends = [(row["run_id"], row["code"]) for row in kinds if row["type"] == "run_ended"]
    assert sorted(ends) == sorted((one.entry.run_id, "revoked") for one in runs.values())
    named = [one["run_id"] for row in kinds if row["type"] == "runs_revoked" for one in row["runs"]]
    with_row = [runs[point].entry.run_id for point in ("stopped, not marked", "written down, not killed")]
    assert sorted(named) == sorted(with_row)
