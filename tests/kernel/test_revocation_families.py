"""Revoked agents in a family: runs above go on, and runs below end under any manifest."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from sandbox.control import revocation
from sandbox.rundir import registry
from tests.kernel import revoking
from tests.kernel.families import BIG, SMALL, member, spawn
from tests.kernel.live_runs import until
from tests.kernel.test_command_line import call, document
from tests.kernel.world import World

SLOW = "import time\ntime.sleep(600)"
MEDIUM: dict[str, Any] = {"memory_mb": 1024, "resources": "pids_max = 256\ncpu_millis = 1000\n"}


def _running(world: World, names: set[str]) -> dict[str, registry.Entry]:
    live = {one.agent_id: one for one in registry.live(world.state / "runs") if one.state == "Running"}
    return live if set(live) == names else {}


def _revoke(world: World, one: registry.Entry) -> revocation.Enforced:
    return revoking.revoke(world, revoking.next_root(world, revoking.manifest_of(world, one.payload_digest)))


def test_what_is_below_ends_and_what_is_above_hears_of_it(world: World) -> None:
    member(world, "below", SLOW, **SMALL)
    # Would outlive its parent, if that only ended.
    member(world, "outlives", SLOW, more=spawn(1, 1, "adopt"), **SMALL)
    code = "send('spawn', agent='outlives', text='')\nanswer = child('below')"
    member(world, "middle", code, more=spawn(2, 4, "adopt"), **MEDIUM)
    member(world, "beside", SLOW, **SMALL)
    code = "send('spawn', agent='beside', text='')\nanswer = child('middle')\n" + SLOW
    top = member(world, "top", code, more=spawn(3, 8, "adopt"), **BIG)
    names = {"top", "beside", "middle", "below", "outlives"}
    with revoking.running(world, top) as run:
        live = until(lambda: _running(world, names))
        enforced = _revoke(world, live["middle"])
        assert enforced.failed == ()
        assert {one.agent_id: one.because for one in enforced.ended} == dict.fromkeys(
            ("middle", "below", "outlives"), live["middle"].run_id
        )
        # A run that is still being cleaned up is live, and would be named once more.
        until(lambda: {one.agent_id for one in registry.live(world.state / "runs")} == {"top", "beside"})
        # The control: an agent that was not revoked goes on until its turn.
        second = _revoke(world, live["top"])
        assert {one.agent_id for one in second.ended} == {"top", "beside"}
        assert run.document()["code"] == "revoked"
        until(lambda: not registry.live(world.state / "runs"))
    ended = [row["kind"] for row in world.rows() if row["kind"]["type"] == "run_ended"]
    assert {row["agent_id"]: row["code"] for row in ended} == dict.fromkeys(names, "revoked"), json.dumps(ended)


def test_orphan_that_was_adopted_ends_with_its_dead_parents_manifest(world: World) -> None:
    member(world, "orphan", SLOW, more=spawn(1, 1, "adopt"), **SMALL)
    code = "answer = ask('spawn', agent='orphan', text='')"
    top = member(world, "top", code, more=spawn(fate="adopt"), **BIG)
    with revoking.running(world, top) as run:
        live = until(lambda: _running(world, {"orphan"}))
        digest = run.entry.payload_digest
        assert live["orphan"].payload_digest != digest
        enforced = revoking.revoke(world, revoking.next_root(world, revoking.manifest_of(world, digest)))
        assert [(one.agent_id, one.because) for one in enforced.ended] == [("orphan", run.entry.run_id)]
        until(lambda: not registry.live(world.state / "runs"))


def test_command_that_revokes_says_what_it_ended_and_operator_can_ask_again(world: World) -> None:
    shutil.rmtree(world.state / "trust")
    for words in ("keys new ann --no-passphrase", "trust init --key ann"):
        assert call(world.home, *words.split()).returncode == 0
    package = world.package({"main.py": SLOW}, cpu_ms=250_000)
    assert call(world.home, "manifest", "sign", package, "--key", "ann").returncode == 0
    with revoking.running(world, package) as run:
        until(lambda: _running(world, {"probe"}))
        assert document(call(world.home, "trust", "enforce", "--json"))["ended"] == []
        terms: list[str | Path] = ["--package", package, "--reason", "it leaks", "--sign-with", "ann", "--json"]
        said = document(call(world.home, "trust", "revoke", *terms))
        assert (said["kind"], said["decides"], said["not_done"]) == ("trust_changed", True, [])
        reason = "the signed manifest was revoked: it leaks"
        assert [(one["run_id"], one["reason"]) for one in said["ended"]] == [(run.entry.run_id, reason)]
        assert run.document()["code"] == "revoked"
    assert document(call(world.home, "trust", "enforce", "--json"))["ended"] == []
    # And it does not start again.
    again = call(world.home, "run", package, "hi", "--json")
    assert (again.returncode, document(again)["code"]) == (1, "revoked")
