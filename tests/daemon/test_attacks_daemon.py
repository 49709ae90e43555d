"""A daemon as whoever can reach it attacks it: names in its home that stop its watch, texts that stop its loop,
and what its own rows would tell a peer of others."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from covenant.respond import ignore
from covenant.wire import async_client
from covenant.wire.async_client import AsyncClient
from policy import errors
from tests import daemon_kit
from tests.capability_kit import ADA, BOB, EVE
from tests.daemon_kit import Daemon

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@contextlib.asynccontextmanager
async def peer(daemon: Daemon, agent: Any, *actions: str) -> AsyncIterator[AsyncClient]:
    """Somebody who was let in, connected."""
    made = await daemon.ask("enroll_peer", display=agent.display, pubkey=agent.pubkey, actions=list(actions))
    async with async_client.connected(daemon.home, token=made["token_b58"]) as client:
        yield client


async def test_a_name_that_is_no_utf8_stops_neither_the_daemon_nor_its_watch(
    covenant_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with daemon_kit.running(covenant_home) as daemon:
        agents = covenant_home / "agents"
        with anyio.fail_after(30):
            # The watcher reads names as text, and raises what it cannot read. It may not have begun: so until it says.
            number = 0
            while "begins anew" not in caplog.text:
                await anyio.sleep(0.3)
                if agents.is_dir():
                    bad = os.fsencode(agents) + b"/bad\xff%d" % number
                    os.mkdir(bad)
                    Path(os.fsdecode(bad + b"/agent.toml")).write_text("x=")
                    number += 1
            assert (await daemon.ask("ping"))["kind"] == "pong"
            # What comes afterwards is seen without being asked for.
            (agents / "later").mkdir()
            (agents / "later" / "agent.toml").write_text("x=")
            seen: set[str] = set()
            while "later" not in seen:
                await anyio.sleep(0.1)
                seen = {one["directory"] for one in (await daemon.ask("list_agents"))["agents"]}


@pytest.mark.parametrize("also", [(), ("!**/none.env",)])
def test_of_a_text_full_of_places_no_more_are_counted_than_may_be(also: tuple[str, ...], monkeypatch: Any) -> None:
    monkeypatch.setattr(ignore, "MOST_PLACES", 50)
    looked: list[int] = []
    paths = ignore.Rule._paths

    def counted(*args: Any) -> Any:
        for span in paths(*args):
            looked.append(1)
            yield span

    monkeypatch.setattr(ignore.Rule, "_paths", staticmethod(counted))
    # Where nothing is taken back one place is enough; where something is, as many as may be are.
    rules = ignore.parse("\n".join((*ignore.SEEDED, *also)))
    assert ignore.matched(rules, "x/.env.a " * 10_000) in ("**/.env", "**/.env.*")
    assert len(looked) <= (50 if also else 1)
    assert ignore.matched(rules, "none.txt " * 10_000) is None


async def test_a_peers_own_feed_does_not_say_whose_tasks_there_are(covenant_home: Path) -> None:
    async with (
        daemon_kit.running(covenant_home) as daemon,
        peer(daemon, ADA, f"a2a.send.{BOB.display}") as ada,
        peer(daemon, BOB, f"a2a.recv.{ADA.display}") as bob,
        peer(daemon, EVE) as eve,
    ):
        agent = {"ada": ADA.model_dump(), "bob": BOB.model_dump()}
        task = {"id": "secret-1", "sender": agent["ada"], "recipient": agent["bob"], "intent_text": "x"}
        await ada.ask("send_a2_a_task", task=task)
        assert (await bob.ask("try_recv_a2_a_task"))["task"]["id"] == "secret-1"
        for task_id in ("secret-1", "secret-2"):
            with pytest.raises(errors.CovenantError):
                await eve.ask("post_a2_a_result", result={"task_id": task_id, "status": "ok"})
        rows = (await eve.ask("recent_audit", limit=100))["events"]
        rejected = [row["kind"] for row in rows if row["kind"]["type"] == "a2_a_result_rejected"]
        assert {row["task_id"] for row in rejected} == {"secret-1", "secret-2"}
        assert len({row["reason"] for row in rejected}) == 1
