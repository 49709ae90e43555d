"""The memory of the daemon that a single peer can take by asking for many long entries at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from covenant.handlers import paging
from covenant.handlers.audit import audit
from covenant.handlers.memory import records
from covenant.handlers.state import refusal_summary
from covenant.stores.audit import event_text
from covenant.stores.memory import sqlite
from covenant.stores.memory.interface import Room
from policy import errors
from tests import daemon_kit
from tests.capability_kit import ADA, BOB
from tests.doubles import async_client

pytestmark = pytest.mark.anyio

LONG = 1_000_000


def _counted(monkeypatch: pytest.MonkeyPatch, store: Any) -> list[int]:
    """How many each look at the store brought."""
    brought: list[int] = []
    recent = store.recent

    async def counting(*args: Any, **more: Any) -> Any:
        found = await recent(*args, **more)
        brought.append(len(found))
        return found

    monkeypatch.setattr(store, "recent", counting)
    return brought


async def test_many_long_rows_are_not_read_at_once(covenant_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "AT_FIRST", 8)
    # Of a flood only the first few would stand there.
    monkeypatch.setattr(refusal_summary, "MOST_BYTES", 2**40)
    async with daemon_kit.running(covenant_home) as daemon:
        made = await daemon.ask("enroll_peer", display="eve@local", actions=["memory.write"])
        async with async_client.connected(covenant_home, token=made["token_b58"]) as eve:
            # The row of a peer that may write contains the whole text of an intent.
            for _ in range(20):
                assert (await eve.ask("submit_intent", text="/.env " + "x" * LONG))["status"] == "ignored"
            brought = _counted(monkeypatch, daemon.server.audit)
            shown = (await eve.ask("recent_audit", extended=True, limit=10_000))["events"]
            assert 1 <= len(shown) < 8
            assert brought == [8]


async def test_many_short_rows_are_all_there(covenant_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "AT_FIRST", 2)
    async with daemon_kit.running(covenant_home) as daemon:
        for number in range(11):
            await daemon.ask("submit_intent", text=f"/.env {number}")
        for limit in (1, 2, 3, 8, 11):
            rows = (await daemon.ask("recent_audit", limit=limit))["events"]
            assert [row["kind"]["intent_text"] for row in rows] == [f"/.env {10 - n}" for n in range(limit)]


async def test_many_long_records_are_not_read_at_once(covenant_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_AT_FIRST", 8)
    async with daemon_kit.running(covenant_home) as daemon:
        await daemon.grant("memory.read", "memory.write")
        for number in range(20):
            await daemon.ask("put_memory", tier="working", text=f"{number} " + "x" * LONG)
        brought = _counted(monkeypatch, daemon.server.memory)
        shown = (await daemon.ask("recent_memory", limit=1000))["records"]
        assert [one["text"][:2] for one in shown] == ["19", "18", "17", "16", "15", "14", "13"][: len(shown)]
        assert brought == [8]
        assert len((await daemon.ask("search_memory", query="19", limit=1000))["records"]) <= 8


async def test_mailbox_of_long_tasks_is_shown_as_far_as_answer_goes(covenant_home: Path) -> None:
    async with daemon_kit.running(covenant_home) as daemon:
        tokens = {}
        for one, action in ((ADA, f"a2a.send.{BOB.display}"), (BOB, f"a2a.recv.{ADA.display}")):
            made = await daemon.ask("enroll_peer", display=one.display, pubkey=one.pubkey, actions=[action])
            tokens[one.display] = made["token_b58"]
        ends = {"sender": ADA.model_dump(), "recipient": BOB.model_dump()}
        async with async_client.connected(covenant_home, token=tokens[ADA.display]) as ada:
            for number in range(12):
                task = {"id": f"t{number}", **ends, "intent_text": "x" * LONG}
                await ada.ask("send_a2_a_task", task=task)
        async with async_client.connected(covenant_home, token=tokens[BOB.display]) as bob:
            shown = (await bob.ask("recent_a2_a_tasks", limit=1000))["tasks"]
            assert [one["id"] for one in shown] == [f"t{11 - number}" for number in range(paging.ROOM // LONG)]
            assert len((await bob.ask("a2_a_queue", limit=1000))["tasks"]) == paging.ROOM // 2 // LONG


async def test_short_rows_before_long_ones_do_not_have_them_all_held(
    covenant_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_text, "MOST_HELD_BYTES", 4 * LONG)
    async with daemon_kit.running(covenant_home) as daemon:
        await daemon.grant("memory.write")
        for number in range(20):
            await daemon.ask("submit_intent", text=f"/.env {number} " + "x" * LONG)
        for number in range(70):
            await daemon.ask("submit_intent", text=f"/.env {number}")
        log = daemon.server.audit
        assert 70 + 3 <= len(await log.recent(10_000)) <= 70 + 5
        found = await log.scan(lambda row: True, 10_000)
        assert found.cut
        assert len(found.events) <= 70 + 5
        assert not (await log.scan(lambda row: True, 70)).cut
        report = await daemon.ask("verify", window=10_000)
        assert report["orphans_total"] == 0


async def test_short_records_before_long_ones_do_not_have_them_all_held(
    covenant_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "PAGE", 4)
    monkeypatch.setattr(sqlite, "MOST_HELD_BYTES", 4 * LONG)
    async with daemon_kit.running(covenant_home) as daemon:
        await daemon.grant("memory.write")
        for number in range(12):
            await daemon.ask("put_memory", tier="working", text=f"word{number} common " + "x" * LONG)
        for number in range(8):
            await daemon.ask("put_memory", tier="working", text=f"word{12 + number} common")
        store = daemon.server.memory
        assert [one.text[:6] for one in await store.recent(None, 10)] == [f"word{19 - n}" for n in range(10)]
        assert 8 < len(await store.recent(None, 1000)) <= 8 + 8
        assert len(await store.search((), "common", None, 1000, None)) <= 8 + 8


async def test_peer_that_fills_memory_fills_its_own_room_alone(
    covenant_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MAX_OWN", Room(records=3, bytes=10_000))
    async with daemon_kit.running(covenant_home) as daemon:
        await daemon.grant("memory.write")
        tokens = [
            (await daemon.ask("enroll_peer", display=who, actions=["memory.write", "memory.purge"]))["token_b58"]
            for who in ("eve@local", "bob@local")
        ]
        async with (
            async_client.connected(covenant_home, token=tokens[0]) as eve,
            async_client.connected(covenant_home, token=tokens[1]) as bob,
        ):
            with pytest.raises(errors.CovenantError, match="10000 bytes") as caught:
                await eve.ask("put_memory", tier="working", text="x" * 10_001)
            assert caught.value.code == "memory_full"
            for number in range(3):
                await eve.ask("put_memory", tier="working", text=f"eve {number}")
            with pytest.raises(errors.CovenantError, match="3 records"):
                await eve.ask("put_memory", tier="episodic", text="eve once more")
            # The other peers' quotas are not reduced.
            await bob.ask("put_memory", tier="working", text="bob")
            for number in range(4):
                await daemon.ask("put_memory", tier="working", text=f"operator {number}")
            # A refused record left neither a receipt nor a row that says that it was kept.
            assert len(await daemon.server.receipts.recent(100)) == 3 + 1 + 4
            rows = await daemon.server.audit.recent(1000)
            assert sum(row.kind.get("type") == "memory_written" for row in rows) == 3 + 1 + 4
            assert (await eve.ask("purge_memory", tier="working", before_ms=2**62))["purged"] == 3
            await eve.ask("put_memory", tier="working", text="eve again")
