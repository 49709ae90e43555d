"""The daemon's clock never goes back by itself, and is taken back only by the operator's request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from covenant import daemon_stores
from covenant.settings import Settings
from covenant.stores import clock as clocks
from covenant.wire import requests
from covenant.wire.types import A2ATask, AgentId
from policy import errors
from tests import server_kit
from tests.server_kit import NOW_MS

DAY = 86_400_000
AGENT = AgentId(display="hello@agent", pubkey="8qbHbw2BbbTHBW1sbeqakYXVKRQM8Ne7pLK7m6CVfeR")

pytestmark = pytest.mark.anyio


@pytest.fixture
def home(tmp_path: Path) -> Path:
    made = tmp_path / "home"
    made.mkdir(mode=0o700)
    return made


async def test_clock_set_back_keeps_the_latest_time(home: Path) -> None:
    wall = server_kit.Clock()
    clock = clocks.SteadyClock.open(home, wall)
    wall.at_ms += DAY
    assert clock() == NOW_MS + DAY
    await clock.keep()
    wall.at_ms -= DAY
    assert clock() == NOW_MS + DAY
    assert clock.behind_ms == DAY
    after_restart = clocks.SteadyClock.open(home, wall)
    assert after_restart() == NOW_MS + DAY
    assert after_restart.set() == (NOW_MS + DAY, NOW_MS)
    await after_restart.write()
    assert clocks.SteadyClock.open(home, wall)() == NOW_MS


@pytest.mark.parametrize("raw", ["", "{}", '{"greatest_time_ms": -1}', '{"greatest_time_ms": true}', "[]"])
async def test_damaged_clock_is_an_error(home: Path, raw: str) -> None:
    (home / clocks.FILE).write_text(raw)
    (home / clocks.FILE).chmod(0o600)
    with pytest.raises(errors.StoreError, match="is damaged"):
        clocks.SteadyClock.open(home, server_kit.Clock())
    (home / clocks.FILE).unlink()  # the fix
    clocks.SteadyClock.open(home, server_kit.Clock())


async def _grant(server: Any, operator: Any, expires_at: int) -> None:
    asked = requests.GrantCapability(action="memory.read", scope={}, expires_at=expires_at)
    answer = await server.respond(operator, asked)
    assert answer.kind == "capability_granted", answer


async def test_expired_grant_stays_so_after_set_back(home: Path) -> None:
    wall = server_kit.Clock()
    async with daemon_stores.opened(Settings(home=home), clock=wall) as opened:
        me = opened.server.identity.agent
        operator = server_kit.caller(me, operator=True)
        await _grant(opened.server, operator, NOW_MS + 1000)
        assert opened.server.capabilities.find(me.pubkey, "memory.read", opened.server.now_ms()) is not None
        wall.at_ms += 2000
        assert opened.server.capabilities.find(me.pubkey, "memory.read", opened.server.now_ms()) is None
    wall.at_ms -= 2000
    async with daemon_stores.opened(Settings(home=home), clock=wall) as opened:
        assert opened.server.capabilities.find(me.pubkey, "memory.read", opened.server.now_ms()) is None


async def test_step_forward_is_mended_by_one_request(home: Path) -> None:
    wall = server_kit.Clock()
    async with daemon_stores.opened(Settings(home=home), clock=wall) as opened:
        server = opened.server
        me, operator = server.identity.agent, server_kit.caller(server.identity.agent, operator=True)
        await _grant(server, operator, NOW_MS + 2 * DAY)
        await server.budget.set_capacity(AGENT, 3600)
        wall.at_ms += 60 * DAY
        await server.budget.try_debit(AGENT, 3600, "r1")
        await server.mailbox.send(A2ATask(id="t1", sender=me, recipient=AGENT, intent_text="x"))
        leased = await server.mailbox.lease(AGENT.pubkey)
        await server.audit.append("daemon_stopped", {"reason": "of then"})
        assert server.capabilities.find(me.pubkey, "memory.read", server.now_ms()) is None
        wall.at_ms -= 60 * DAY
        wall.at_ms += 1000
        assert server.budget.tokens(AGENT) == 0
        answer = await server.respond(operator, requests.SetClock())
        assert (answer.kind, answer.changed) == ("clock_set", True)  # type: ignore[attr-defined]
        assert server.now_ms() == wall.at_ms
        assert server.capabilities.find(me.pubkey, "memory.read", server.now_ms()) is not None
        wall.at_ms += 2000
        assert server.budget.tokens(AGENT) == 2
        assert leased is not None
        entry = server.mailbox.get(leased.task.id)
        assert entry is not None
        assert entry.lease is not None
        assert entry.lease.expires_at_ms <= wall.at_ms + server.mailbox.limits.lease_ms
        rows = await server.audit.recent(1)
        await server.audit.append("daemon_stopped", {"reason": "of now"})
        newest = await server.audit.recent(2)
        assert rows[0].kind["type"] == "clock_set"
        assert newest[0].timestamp_ms == wall.at_ms
        assert (await server.audit.verify()).valid
        again = await server.respond(operator, requests.SetClock())
        assert again.changed is False  # type: ignore[attr-defined]
    async with daemon_stores.opened(Settings(home=home), clock=wall) as opened:
        assert opened.server.now_ms() == wall.at_ms
        assert opened.server.budget.tokens(AGENT) == 2
        wall.at_ms += 1000
        assert opened.server.budget.tokens(AGENT) == 3
        assert [one.paired_receipt for one in opened.server.budget.unsettled()] == ["r1"]


async def test_cut_takes_rows_of_a_clock_ahead(home: Path) -> None:
    wall = server_kit.Clock()
    async with daemon_stores.opened(Settings(home=home), clock=wall) as opened:
        server, operator = opened.server, server_kit.caller(opened.server.identity.agent, operator=True)
        wall.at_ms += 60 * DAY
        await server.audit.append("daemon_stopped", {"reason": "ahead"})
        wall.at_ms -= 60 * DAY
        await server.respond(operator, requests.SetClock())
        for _ in range(2):
            await server.audit.append("daemon_stopped", {"reason": "back"})
            wall.at_ms += 1000
        await server.audit.append("daemon_stopped", {"reason": "kept"})
        done = await server.audit.purge(wall.at_ms)
        left = [row.kind for row in await server.audit.recent(10)]
        assert done.purged == 4
        assert [row["reason"] for row in left if row["type"] == "daemon_stopped"] == ["kept"]
        assert (await server.audit.verify()).valid


async def test_only_the_operator_sets_the_clock(home: Path) -> None:
    async with daemon_stores.opened(Settings(home=home), clock=server_kit.Clock()) as opened:
        answer = await opened.server.respond(server_kit.caller(AGENT), requests.SetClock())
        assert answer.code == "operator_only"  # type: ignore[attr-defined]
