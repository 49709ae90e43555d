"""Check that a scan for rows delays no other reader, for a log of any size."""

from __future__ import annotations

import threading
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from covenant.stores.audit.durable import DurableAudit
from covenant.stores.audit.interface import AuditEntry
from covenant.wire import parts
from covenant.wire.types import AgentId
from policy import base58

pytestmark = pytest.mark.anyio

OPERATOR, ADA, EVE = (
    AgentId(display=f"{name}@local", pubkey=base58.encode(name[:1].encode() * 32)) for name in ("me", "ada", "eve")
)
PATIENCE = 60


async def test_one_who_looks_without_end_leaves_others_thread(tmp_path: Path) -> None:
    """One peer's scans leave threads to other peers.

    A peer may ask for rows that do not exist on all of its connections. This once took all threads of the daemon, so no
    other peer could read the log and no agent could start.
    """
    tmp_path.chmod(0o700)
    over, looks = threading.Event(), threading.Semaphore(0)

    def no(row: parts.AuditEvent) -> bool:
        looks.release()
        assert over.wait(PATIENCE)
        return False

    async with await DurableAudit.open(tmp_path, issuer=OPERATOR, now_ms=lambda: 1) as log:
        failed = {"transport": "ipc", "reason": "x"}
        await log.append_all([AuditEntry("authentication_failed", failed, who) for who in (OPERATOR, ADA, EVE)])

        async def look(who: AgentId) -> None:
            assert (await log.scan(no, 1, issuer_pubkey=who.pubkey)).events == ()

        try:
            async with anyio.create_task_group() as group:
                for _ in range(200):
                    group.start_soon(look, EVE)
                with anyio.fail_after(PATIENCE):
                    for _ in range(2):
                        await anyio.to_thread.run_sync(looks.acquire, limiter=anyio.CapacityLimiter(1))
                    await anyio.wait_all_tasks_blocked()
                    assert [row.issuer for row in await log.recent(9, issuer_pubkey=ADA.pubkey)] == [ADA]
                    assert len(await log.recent(9)) == 3
                    assert await anyio.to_thread.run_sync(lambda: True)
                    assert not looks.acquire(blocking=False), "no more than two look for her at one time"
                over.set()
        finally:
            over.set()
    # All requested scans were done.
    assert sum(iter(lambda: looks.acquire(blocking=False), False)) == 198
