"""A record whose receipt or rows found no room, or whose request was cancelled, gets them once there is room."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from covenant import daemon_stores
from covenant.handlers.audit import consistency
from covenant.handlers.caller import Caller
from covenant.handlers.memory import records
from covenant.handlers.server import Server
from covenant.settings import Settings
from covenant.stores.audit.interface import AuditEntry
from covenant.wire import requests
from covenant.wire.types import Tier
from policy import errors
from tests import full_disk, server_kit
from tests.intents_kit import granted

pytestmark = pytest.mark.anyio


@pytest.fixture
def home(tmp_path: Path) -> Path:
    place = tmp_path / "home"
    place.mkdir(mode=0o700)
    return place


@contextlib.asynccontextmanager
async def _serving(home: Path) -> AsyncIterator[tuple[Server, Caller]]:
    """A server on disk, and its operator, who may write memory."""
    async with daemon_stores.opened(Settings(home=home), clock=server_kit.Clock()) as opened:
        operator = server_kit.caller(opened.server.identity.agent, operator=True)
        await granted(opened.server, operator, "memory.write")
        yield opened.server, operator


async def _refused(entries: Sequence[AuditEntry]) -> list[str]:
    raise errors.StoreFullError("no room for rows")


@pytest.mark.parametrize("refuses", ["receipt", "rows"])
async def test_stored_record_gets_its_receipt_and_rows_once_there_is_room(
    home: Path, monkeypatch: pytest.MonkeyPatch, refuses: str
) -> None:
    async with _serving(home) as (server, operator):
        put = server.memory.put

        async def fills(*given: Any, **more: Any) -> None:
            await put(*given, **more)
            if refuses == "receipt":
                full_disk.refuse(monkeypatch, "working.jsonl")
            else:
                monkeypatch.setattr(server.audit, "append_all", _refused)

        monkeypatch.setattr(server.memory, "put", fills)
        asked = requests.PutMemory(tier=Tier.WORKING, text="words")
        with pytest.raises(errors.StoreFullError, match="receipt of record") as refused:
            await records.put_memory(server, operator, asked)
        assert "do not repeat" in (refused.value.hint or "")
        # No second record is stored while the first waits for its receipt.
        with pytest.raises(errors.StoreFullError):
            await records.put_memory(server, operator, asked)
        monkeypatch.undo()
        await server.unfinished.write()
        (stored,) = await server.memory.recent(None, 9)
        assert [one.memory_record_id for one in await server.receipts.recent(9)] == [stored.id]
        assert (await consistency.verify(server, operator, requests.Verify(window=9))).drift == ()


@pytest.mark.parametrize("during", ["record", "receipt", "rows"])
async def test_record_of_cancelled_request_gets_one_receipt_and_its_rows_once(
    home: Path, monkeypatch: pytest.MonkeyPatch, during: str
) -> None:
    async with _serving(home) as (server, operator):
        store, name = {
            "record": (server.memory, "put"),
            "receipt": (server.receipts, "append"),
            "rows": (server.audit, "append_all"),
        }[during]
        act = getattr(store, name)
        with anyio.CancelScope() as scope:

            async def cut_off(*given: Any, **more: Any) -> Any:
                # The disk takes it, and the answer finds its request cancelled.
                done = await act(*given, **more)
                if during != "rows" or given[0][0].kind == "memory_written":
                    scope.cancel()
                    await anyio.sleep(60)
                return done

            monkeypatch.setattr(store, name, cut_off)
            await records.put_memory(server, operator, requests.PutMemory(tier=Tier.WORKING, text="words"))
        assert scope.cancelled_caught
        monkeypatch.undo()
        await server.unfinished.write()
        (stored,) = await server.memory.recent(None, 9)
        (receipt,) = await server.receipts.recent(9)
        assert receipt.memory_record_id == stored.id
        rows = [row.kind["type"] for row in await server.audit.recent(99)]
        assert (rows.count("receipt_written"), rows.count("memory_written")) == (1, 1)
        assert (await consistency.verify(server, operator, requests.Verify(window=9))).drift == ()


async def test_request_cancelled_before_its_record_is_stored_leaves_no_receipt(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _serving(home) as (server, operator):
        with anyio.CancelScope() as scope:

            async def never(*given: Any, **more: Any) -> None:
                scope.cancel()
                await anyio.sleep(60)

            monkeypatch.setattr(server.memory, "put", never)
            await records.put_memory(server, operator, requests.PutMemory(tier=Tier.WORKING, text="words"))
        monkeypatch.undo()
        await server.unfinished.write()
        assert (len(server.unfinished), list(await server.receipts.recent(9))) == (0, [])
