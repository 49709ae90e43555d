"""A grant is taken back at the daemon: the sandboxes that work under it end at once, with those that they started."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import anyio
import pytest

from policy import errors
from sandbox.rundir import registry
from tests import daemon_kit
from tests.doubles import async_client
from tests.kernel import serving
from tests.kernel.conftest import leftovers
from tests.kernel.families import BIG, SMALL, member, spawn
from tests.kernel.serving import Served
from tests.kernel.world import SLOWNESS, World

pytestmark = pytest.mark.anyio

SLOW = "import time\ntime.sleep(600)"


def _live(world: World) -> set[str]:
    return {one.agent_id for one in registry.live(world.state / "runs") if one.state == "Running"}


def _ended(world: World) -> dict[str, Any]:
    rows = [row["kind"] for row in world.rows() if row["kind"]["type"] == "run_ended"]
    return {row["agent_id"]: row["code"] for row in rows}


async def test_what_works_under_grant_ends_with_it_and_all_that_it_started(warm: Path) -> None:
    with serving.open_place() as base:
        world = World(base, warm=warm)
        home = base / "daemon"
        (home / "agents").mkdir(parents=True, mode=0o700)
        home.chmod(0o700)
        # Would outlive its parent, if that only ended.
        outlives = member(world, "outlives", SLOW, more=spawn(1, 1, "adopt"), **SMALL)
        code = "send('spawn', agent='outlives', text='')\n" + SLOW
        top = member(world, "top", code, more=spawn(2, 4, "adopt"), **BIG)
        for package in (top, outlives):
            shutil.copytree(package, home / "agents" / package.name)
        with Served(world, agents=[str(home / "agents")]) as served:
            async with daemon_kit.running(home, socket=served.path) as daemon:
                held = (await daemon.ask("grant_capability", action="memory.write", scope={}))["signature_b58"]
                said: list[errors.CovenantError] = []

                async def asks() -> None:
                    with pytest.raises(errors.CovenantError) as raised:
                        await daemon.ask("submit_intent", text="x", agent="top")
                    said.append(raised.value)

                with anyio.fail_after(60 * SLOWNESS):
                    async with anyio.create_task_group() as group:
                        group.start_soon(asks)
                        while _live(world) != {"top", "outlives"}:
                            assert not said, said
                            await anyio.sleep(0.02)
                        async with async_client.connected(home) as another:
                            revoked = await another.ask("revoke_capability", signature_b58=held)
                        assert revoked["removed"] is True
                        # By the time that it is answered nothing of it runs.
                        assert registry.live(world.state / "runs") == []
                assert [one.code for one in said] == ["revoked"]
                with anyio.fail_after(60 * SLOWNESS):
                    while set(_ended(world)) != {"top", "outlives"}:  # noqa: ASYNC110 - the last row comes after the end
                        await anyio.sleep(0.02)
                assert _ended(world)["top"] == "stopped"
        assert leftovers(world) == []
