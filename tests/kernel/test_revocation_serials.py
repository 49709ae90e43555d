"""An agent that is revoked by its serials: what runs of them ends, and a newer serial of the same agent goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from policy.signing import change
from policy.signing import root as roots
from sandbox.kernel.cgroup import cgroup
from tests.kernel import revoking
from tests.kernel.live_runs import SLEEPS
from tests.kernel.world import World


def _up_to(world: World, agent_id: str, serial: int) -> Callable[[roots.RootDocument], Any]:
    return lambda document: change.revoke_serials(
        document, agent_id, serial, now_ms=world.now_ms, reason="the old ones leak"
    )


def _processes(run_id: str) -> list[int]:
    leaf = cgroup.Leaf(cgroup.Hierarchies.read(), run_id)
    leaf.adopt(leaf.plan())
    return leaf.pids()


def test_agents_old_serials_end_and_its_newer_one_goes_on(world: World) -> None:
    world.configure(on_newer_serial="finish")  # else the newer one would end the older by itself
    fields: dict[str, Any] = {"id": "leaks", "cpu_ms": 60_000}
    first, then = world.now_ms + 5000, world.now_ms + 6000
    package = world.sign(world.package({"main.py": SLEEPS}, **fields), serial=first)
    with contextlib.ExitStack() as stack:
        leaks = stack.enter_context(revoking.running(world, package))
        world.sign(package, serial=then)
        goes_on = stack.enter_context(revoking.running(world, package))
        raw = revoking.next_root(world, _up_to(world, "leaks", first))
        enforced = revoking.revoke(world, raw)
        assert enforced.failed == ()
        assert [one.run_id for one in enforced.ended] == [leaks.entry.run_id]
        assert _processes(leaks.entry.run_id) == []
        document = leaks.document()
        assert document["code"] == "revoked", document
        assert "the old ones leak" in document["message"]
        assert _processes(goes_on.entry.run_id) != []
        assert goes_on.process.poll() is None
    ended = [kind for row in world.rows() if (kind := row["kind"])["type"] == "run_ended"]
    assert {"run_id": leaks.entry.run_id, "code": "revoked"}.items() <= ended[0].items()
    assert not any(kind["code"] == "revoked" for kind in ended[1:])
