"""Records, and the stores that hold them, for the tests of memory."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from covenant.stores.memory.durable import DurableMemory
from covenant.stores.memory.interface import Memory
from covenant.wire.types import AgentId, MemoryRecord, SettlementReceipt, Tier
from tests.doubles.memory import InMemory

ALICE = AgentId(display="alice@local", pubkey="A1ice1111111111111111111111111111111111111")
BOB = AgentId(display="bob@local", pubkey="Bob11111111111111111111111111111111111111111")
STORES = ("durable", "in_memory")

# Version 1's database: what its daemon makes, with names of indexes that are its own.
V1_SCHEMA = """
CREATE TABLE memories (id TEXT PRIMARY KEY, tier TEXT NOT NULL, owner_display TEXT NOT NULL,
    owner_pubkey TEXT NOT NULL, text TEXT NOT NULL, embedding BLOB NOT NULL, metadata TEXT NOT NULL,
    created_at INTEGER NOT NULL, parent TEXT);
CREATE INDEX idx_tier ON memories (tier, created_at DESC);
CREATE INDEX idx_created ON memories (created_at DESC);
"""


def name(number: int) -> str:
    """A UUID for a number, in the numbers' order."""
    return str(uuid.UUID(int=0x4000_8000_0000_0000_0000 + number))


def record(
    number: int,
    text: str = "something",
    *,
    tier: Tier = Tier.WORKING,
    owner: AgentId = ALICE,
    embedding: Sequence[float] = (),
    metadata: Any = None,
    created_at: int | None = None,
    parent: str | None = None,
) -> MemoryRecord:
    """A record whose time is its number unless another is given."""
    return MemoryRecord(
        id=name(number),
        tier=tier,
        owner=owner,
        text=text,
        embedding=tuple(embedding),
        metadata=metadata,
        created_at=number if created_at is None else created_at,
        parent=parent,
    )


def receipt(number: int, *, memory: int | None = None, payer: AgentId = ALICE, settled_at: int) -> SettlementReceipt:
    """A receipt for memory."""
    return SettlementReceipt(
        id=name(1_000_000 + number),
        payer=payer,
        resource="memory",
        memory_record_id=None if memory is None else name(memory),
        credits_consumed=1,
        settled_at=settled_at,
    )


@contextlib.asynccontextmanager
async def opened(kind: str, path: Path, *, space: str = "test") -> AsyncIterator[Memory]:
    """A store of either kind."""
    store: Memory = InMemory(space=space) if kind == "in_memory" else await DurableMemory.open(path, space=space)
    try:
        yield store
    finally:
        await store.close()
