"""Many writers of the daemon's log at once, beside readers, a purge, a full disk and the end of the daemon."""

from __future__ import annotations

import asyncio
import resource
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from covenant.stores.audit import files, paths
from covenant.stores.audit.durable import DurableAudit
from covenant.wire.types import AgentId
from policy import base58, errors
from policy.audit_log import chain as audit_log_chain
from policy.audit_log import verify

pytestmark = pytest.mark.anyio

DAEMON = AgentId(display="user@local", pubkey=base58.encode(b"d" * 32))
BIG = {"transport": "ipc", "reason": "x" * files.PENDING_BYTES}


async def opened(home: Path) -> DurableAudit:
    return await DurableAudit.open(home, issuer=DAEMON, now_ms=lambda: 1_000)


async def row(log: DurableAudit, n: object) -> str:
    return await log.append("authentication_failed", {"transport": "ipc", "reason": f"row {n}"})


async def crowd(log: DurableAudit, count: int, name: str = "w") -> list[str]:
    return await asyncio.gather(*[row(log, f"{name}{n}") for n in range(count)])


def offline(home: Path) -> verify.Report:
    key = audit_log_chain.read_public_key((home / "audit-head" / "ledger.pub").read_bytes())
    names = ("audit/events.jsonl", "audit/events.chain.jsonl", "audit-head/head.json")
    log, chain, head = ((home / name).read_bytes() for name in names)
    return verify.verify(log, chain, head, key)


async def there(home: Path) -> set[str]:
    async with await opened(home) as log:
        assert (await log.verify()).valid
        return {one.id for one in await log.recent(10**6)}


async def test_crowd_of_writers_has_every_row_once(home: Path) -> None:
    async with await opened(home) as log:
        made = [one for turn in range(4) for one in await crowd(log, 100, f"{turn}-")]
        assert (await log.verify()).events == len(made) == len(set(made))
    assert (offline(home).valid, offline(home).events) == (True, len(made))
    assert await there(home) == set(made)


async def test_closing_writes_what_waits(home: Path) -> None:
    log = await opened(home)
    waiting = [asyncio.ensure_future(row(log, n)) for n in range(200)]
    await anyio.lowlevel.checkpoint()
    await log.close()
    assert await there(home) == set(await asyncio.gather(*waiting))
    with pytest.raises(errors.StoreError, match="it was closed"):
        await row(log, "late")


async def test_writer_cancelled_early_has_no_row(home: Path) -> None:
    async with await opened(home) as log:
        gone = asyncio.ensure_future(row(log, "gone"))
        await anyio.lowlevel.checkpoint()
        gone.cancel()
        stays = await row(log, "stays")
        await log.caught_up()
        assert [one.id for one in await log.recent(9)] == [stays]


async def test_cancelled_purge_leaves_log_whole(home: Path) -> None:
    async with await opened(home) as log:
        made = await crowd(log, 40)
        purge = asyncio.ensure_future(log.purge(1))
        await anyio.lowlevel.checkpoint()
        purge.cancel()
        made += await crowd(log, 40, "b")
        assert (await log.verify()).events == len(made)
    assert await there(home) == set(made)


async def test_readers_and_rows_beside_purge_are_served(home: Path) -> None:
    async with await opened(home) as log:
        made = await crowd(log, 40)
        asked = [asyncio.ensure_future(log.verify()) for _ in range(3)]
        with anyio.fail_after(60):
            purged, late = await asyncio.gather(log.purge(1), crowd(log, 40, "late"))
            assert all(report.valid for report in await asyncio.gather(*asked))
        assert purged.purged == 0
    assert await there(home) == {*made, *late}


async def test_more_readers_than_threads_are_answered(home: Path) -> None:
    many = int(anyio.to_thread.current_default_thread_limiter().total_tokens) + 20
    async with await opened(home) as log:
        await row(log, 1)
        with anyio.fail_after(60):
            reports = await asyncio.gather(*[log.verify() for _ in range(many)])
        assert {(report.events, report.valid) for report in reports} == {(1, True)}


async def test_second_opening_waits_for_first(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = await opened(home)
    made = await row(log, 1)
    monkeypatch.setattr(paths, "LOCK_SECONDS", 0.05)
    with pytest.raises(errors.LedgerError, match="another process has had the log open"):
        await opened(home)
    monkeypatch.setattr(paths, "LOCK_SECONDS", 60.0)
    waiting = asyncio.ensure_future(there(home))
    with pytest.raises(TimeoutError):
        with anyio.fail_after(0.2):
            await asyncio.shield(waiting)
    await log.close()
    assert await waiting == {made}


async def test_no_room_refuses_rows_and_later_takes_others(home: Path) -> None:
    async with await opened(home) as log:
        made = [await row(log, 1)]
        size = (home / "audit" / "events.jsonl").stat().st_size
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (files.PENDING_BYTES, hard))
        try:
            with pytest.raises(errors.StoreFullError, match="could not take 1 rows"):
                await log.append("authentication_failed", BIG)
            assert (home / "audit" / "events.jsonl").stat().st_size == size
            made += await crowd(log, 40)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        made.append(await log.append("authentication_failed", BIG))
        assert (await log.verify()).events == 42
    assert await there(home) == set(made)


async def test_listener_that_fails_holds_up_no_row(home: Path) -> None:
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))

    def fails(event: object) -> None:
        raise ValueError("not so")

    try:
        async with await opened(home) as log:
            log.listen(fails)
            with anyio.fail_after(60):
                assert len(await crowd(log, 100)) == 100
    finally:
        asyncio.get_running_loop().set_exception_handler(None)
    assert {str(context["exception"]) for context in told} == {"not so"}
