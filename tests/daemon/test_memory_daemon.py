"""Memory of a whole daemon, over its socket and across a restart."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from covenant.stores.memory.durable import DurableMemory
from policy import errors
from tests import daemon_kit

pytestmark = pytest.mark.anyio

ACTIONS = ("memory.read", "memory.write", "memory.purge", "memory.repair.apply", "memory.compact.apply")


async def test_what_was_put_is_found_again_after_restart_and_nothing_drifts(covenant_home: Path) -> None:
    async with daemon_kit.running(covenant_home) as daemon:
        await daemon.grant(*ACTIONS)
        texts = ("The database connection failed", "Recipe for apple pie", "Quarterly revenue report")
        stored = [(await daemon.ask("put_memory", tier="working", text=text))["record"] for text in texts]
        await daemon.ask("promote_memory", id=stored[0]["id"], tier="longterm")
        command = {"action": "backfill_provenance", "id": stored[1]["id"], "provenance": {"by": "test"}}
        await daemon.ask("repair_memory", request={"mode": "apply", "command": command, "reason": "to show it"})
        (covenant_home / ".covenantignore").write_text("top of\n")
        with pytest.raises(errors.CovenantError, match="top of"):
            await daemon.ask("put_memory", tier="working", text="the top of it")
    async with daemon_kit.running(covenant_home) as daemon:
        for query, number in (("errors connecting to databases", 0), ("apple pies", 1), ("revenues", 2)):
            found = (await daemon.ask("search_memory", query=query, limit=1))["records"]
            assert [record["id"] for record in found] == [stored[number]["id"]]
        recent = (await daemon.ask("recent_memory", tier="longterm"))["records"]
        assert [record["id"] for record in recent] == [stored[0]["id"]]
        assert (await daemon.ask("ignore_check", text="on top of"))["matched_pattern"] == "top of"
        report = await daemon.ask("verify")
        assert report["drift"] == []
        assert all(check["passed"] for check in report["checks"])
        assert (await daemon.ask("purge_memory", tier="working", before_ms=2**63))["purged"] == 2
        assert (await daemon.ask("verify"))["drift"] == []


async def test_vectors_are_read_once_it_serves_and_before_anybody_searches(
    covenant_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warmed, warm = anyio.Event(), DurableMemory.warm

    async def told(store: DurableMemory) -> None:
        await warm(store)
        warmed.set()

    monkeypatch.setattr(DurableMemory, "warm", told)
    async with daemon_kit.running(covenant_home) as daemon:
        with anyio.fail_after(60):
            await warmed.wait()
        assert daemon.server.memory._cache._matrices is not None  # type: ignore[attr-defined]


@pytest.mark.parametrize("ends", [True, False])
async def test_daemon_serves_and_ends_whatever_becomes_of_its_reading_ahead(
    covenant_home: Path, monkeypatch: pytest.MonkeyPatch, *, ends: bool
) -> None:
    begun = anyio.Event()

    async def warm(store: DurableMemory) -> None:
        begun.set()
        if ends:
            raise errors.MemoryStoreError("disk is broken")
        await anyio.sleep_forever()

    monkeypatch.setattr(DurableMemory, "warm", warm)
    async with daemon_kit.running(covenant_home) as daemon:
        with anyio.fail_after(60):
            await begun.wait()
        await daemon.grant("memory.read", "memory.write")
        await daemon.ask("put_memory", tier="working", text="apple pie")
        assert len((await daemon.ask("search_memory", query="apple pies"))["records"]) == 1
