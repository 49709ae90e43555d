"""The daemon's background tasks: each is started, and works as configured, without a request."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from covenant import daemon, daemon_stores
from covenant.handlers.intents import budget
from covenant.handlers.state import pending_writes, refusal_summary
from covenant.settings import PeerRate, Retry
from covenant.stores.budget.durable import DurableBudgetLedger
from policy import errors
from tests import daemon_kit
from tests.capability_kit import ADA

pytestmark = pytest.mark.anyio

SECONDS = 60.0
ME = "operator@local"


async def _row(one: daemon_kit.Daemon, kind: str, wanted: Callable[[Any], bool] = lambda row: True) -> Any:
    """The first row of this kind that is wanted, once there is one."""
    with anyio.fail_after(SECONDS):
        while True:
            found = [event.kind for event in reversed(await one.server.audit.recent(1000))]
            if rows := [row for row in found if row["type"] == kind and wanted(row)]:
                return rows[0]
            await anyio.sleep(0.02)


async def test_stale_leases_are_put_back_where_that_was_asked_for(covenant_home: Path) -> None:
    retry = Retry(scheduler=True, interval_ms=20, min_lease_age_ms=0)
    async with daemon_kit.running(covenant_home, retry=retry) as one:
        await one.grant(f"a2a.send.{ME}", f"a2a.recv.{ME}")
        me = one.server.identity.agent.model_dump()
        safe = {"duplicate_safety": "idempotent", "key": "once"}
        task = {"id": "t", "sender": me, "recipient": me, "intent_text": "x", "idempotency": safe}
        await one.ask("send_a2_a_task", task=task)
        first = await one.ask("try_recv_a2_a_task")
        scan = await _row(one, "a2_a_auto_retry_scheduler_scan", lambda row: row["requeued"] == 1)
        assert (scan["enabled"], scan["min_lease_age_ms"], scan["max_attempts"]) == (True, 0, retry.max_attempts)
        again = await one.ask("try_recv_a2_a_task")
        assert (again["task"]["id"], again["lease_id"] != first["lease_id"]) == ("t", True)


async def test_nobody_looks_for_stale_leases_unasked(covenant_home: Path) -> None:
    async with daemon_kit.running(covenant_home, retry=Retry(scheduler=False, interval_ms=1)) as one:
        # Long enough for a scheduler with a period of a millisecond to run.
        await anyio.sleep(0.1)
        found = await one.server.audit.recent(1000)
    kinds = {event.kind["type"] for event in found}
    assert "daemon_started" in kinds
    assert "a2_a_auto_retry_scheduler_scan" not in kinds


async def test_whose_token_has_ended_has_row_although_nobody_looks(
    covenant_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "_PEERS_SECONDS", 0.02)
    async with daemon_kit.running(covenant_home) as one:
        # Let in before its end: however slow this machine is, one of these is.
        for ahead_ms in (200, 2000, 20_000):
            ends = daemon_stores.now_ms() + ahead_ms
            made = await one.server.peers.enroll(ADA, ends)
            if daemon_stores.now_ms() < ends:
                break
        row = await _row(one, "peer_expired", lambda row: bool(row["token_prefix"] == made.token[:6]))
        assert row["peer_display"] == ADA.display


async def test_old_debits_leave_ledger_at_start(covenant_home: Path) -> None:
    covenant_home.mkdir(mode=0o700)
    long_ago = daemon_stores.now_ms() - budget.KEPT_MS - 1000
    ledger = await DurableBudgetLedger.open(covenant_home / "budget" / "ledger.jsonl", lambda: long_ago)
    await ledger.set_capacity(ADA, 10)
    await ledger.try_debit(ADA, 3, "r")
    await ledger.settle(ADA, "r", 0)
    await ledger.close()
    async with daemon_kit.running(covenant_home) as one:
        assert (await _row(one, "budget_compacted"))["dropped"] > 0
        assert (await one.ask("recent_debits"))["debits"] == []
        assert one.server.budget.tokens(ADA) == 10


async def test_refusals_that_were_only_counted_are_in_log_at_end(
    covenant_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusal_summary, "MOST", 1)
    async with daemon_kit.running(covenant_home) as one, daemon_kit.peer(one, ADA) as ada:
        for _ in range(3):
            with pytest.raises(errors.CovenantError) as refused:
                await ada.ask("recent_memory")
            assert refused.value.code == errors.CapabilityMissingError.code
    kinds = [json.loads(line)["kind"] for line in (covenant_home / "audit" / "events.jsonl").read_text().splitlines()]
    (summed,) = [kind for kind in kinds if kind["type"] == "refusals_summed"]
    assert (summed["peer_display"], summed["count"]) == (ADA.display, 2)


async def test_what_no_disk_took_is_written_again_although_nobody_asks(
    covenant_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending_writes, "_AGAIN_SECONDS", 0.02)
    tried: list[str] = []
    done = anyio.Event()

    async def write() -> None:
        tried.append("again")
        if len(tried) == 1:
            raise errors.StoreError("the disk is full")
        done.set()

    async with daemon_kit.running(covenant_home) as one:
        one.server.unfinished.keep("intent-1", write)
        with anyio.fail_after(SECONDS):
            await done.wait()
        assert len(tried) == 2


async def test_how_often_peer_may_ask_is_what_was_set(covenant_home: Path) -> None:
    rate = PeerRate(requests_per_second=7, burst=9)
    async with daemon_kit.running(covenant_home, peer_rate=rate) as one:
        assert one.server.rates._rate == rate
