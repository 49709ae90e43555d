"""``verify``: memory, log, receipts and grants held against each other. Nothing is changed.

It takes no grant, as in version 1. The operator sees drift in everybody's things, anybody else in its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from covenant.handlers import paging
from covenant.handlers.audit import drift, drift_kinds
from covenant.handlers.audit.drift import Granted, History, Window
from covenant.stores.memory.interface import BadRow
from covenant.wire import parts, requests, responses
from covenant.wire.types import MemoryRecord, SettlementReceipt

if TYPE_CHECKING:
    from covenant.handlers.caller import Caller
    from covenant.handlers.server import Handler, Server

# However large a window is asked for.
MAX_WINDOW: Final = 10_000
MAX_DRIFT: Final = 2_000
# How many rows that tell of acts are learnt at most; what is older than the last of them is not judged.
MAX_LOG: Final = 100_000
# How far a chain of parents is followed beyond the window.
_MAX_HOPS: Final = 256
# What tells of an act is written after it, and its vector may take its time.
_BEFORE_MS: Final = 120_000

_TELLING: Final = frozenset(
    {
        "intent_dispatched",
        "intent_failed",
        "memory_written",
        "memory_write_ignored",
        "memory_repair_applied",
        "memory_compaction_applied",
        "memory_purged",
        "capability_granted",
        "capability_attenuated",
        "audit_purged",
    }
)


async def verify(server: Server, caller: Caller, asked: requests.Verify) -> responses.VerifyReport:
    """Every check over the newest of each store, and each drift with its mend."""
    size = min(asked.window, MAX_WINDOW)
    # Anybody may ask, and each look reads the whole log: many of them at once leave the loop no turn.
    async with contextlib.nullcontext() if caller.operator else server.verifying:
        found = drift.found(await gather(server, caller, size))
    checks = tuple(_check(name, found) for name in drift_kinds.CHECKS)
    orphans = sum(drift_kinds.KINDS[one.kind].orphan for one in found)
    shown = paging.that_fit(found[:MAX_DRIFT])
    return responses.VerifyReport(window=size, checks=checks, drift=shown, orphans_total=orphans)


def _check(name: str, found: Sequence[parts.Drift]) -> parts.Check:
    count = sum(drift_kinds.KINDS[one.kind].check == name for one in found)
    message = "no drift" if not count else f"{count} found"
    return parts.Check(name=name, passed=not count, message=message)


async def gather(server: Server, caller: Caller, size: int) -> Window:
    """Read what the checks look at: the newest ``size`` of each store, and what these name."""
    me = caller.agent.pubkey
    owner = None if caller.operator else me
    records: Sequence[MemoryRecord] = await server.memory.recent(None, size, owner=owner, vectors=False)
    bad: Sequence[BadRow] = await server.memory.bad_rows(size) if owner is None else ()

    def mine(receipt: SettlementReceipt) -> bool:
        return owner in (None, receipt.payer.pubkey)

    receipts = await server.receipts.recent(size, keep=mine)
    grants = tuple(Granted(one.signed, one.granted_at_ms) for one in server.capabilities.recent(size, me))
    events = (await server.audit.scan(_is_our_own, size, issuer_pubkey=owner)).events
    paying = await _paying(server, records)
    named = {r.memory_record_id for r in receipts if r.memory_record_id is not None}
    named |= {str(e.kind.get("intent_id", e.kind.get("memory_id"))) for e in events}
    parents = await _parents(server, records)
    existing = await server.memory.existing(
        sorted(named | {p for p in parents.values() if p is not None} | set(parents))
    )
    moments = [r.created_at for r in records] + [r.settled_at for r in receipts]
    moments += [e.timestamp_ms for e in events] + [g.granted_at_ms for g in grants if g.granted_at_ms]
    since = max(min(moments, default=0) - _BEFORE_MS, 0)
    ids = frozenset(named | {record.id for record in records} | {grant.signed.signature for grant in grants})
    telling = (lambda event: event.kind.get("type") in _TELLING) if owner is None else _telling_of(server, me, ids)
    history = await _history(server, telling, since)
    return Window(
        records=records,
        bad=bad,
        receipts=receipts,
        grants=grants,
        events=events,
        existing=frozenset(existing),
        parents=parents,
        paying=paying,
        history=history,
    )


async def _history(server: Server, telling: Callable[[parts.AuditEvent], bool], since_ms: int) -> History:
    """Return what the rows since a moment tell. None of them is held: a log of a year has tens of thousands."""
    history = History(server.identity.agent.pubkey)

    def is_one_too_many(event: parts.AuditEvent) -> bool:
        if telling(event):
            history.learn(event)
        return history.learnt == MAX_LOG

    scan = await server.audit.scan(is_one_too_many, 1, since_ms=since_ms)
    history.since(scan.events[0].timestamp_ms + 1 if scan.events else since_ms)
    return history


def _is_our_own(event: parts.AuditEvent) -> bool:
    """Not a copy of the supervisor's, of which each run brings ten: they tell of no store here."""
    return event.kind.get("type") != "supervisor_row"


def _telling_of(server: Server, me: str, ids: frozenset[str]) -> Callable[[parts.AuditEvent], bool]:
    """Rows that tell of the caller's own things: how many there are of others neither shows nor crowds those out."""
    own = (me, server.identity.agent.pubkey)

    def telling(event: parts.AuditEvent) -> bool:
        row = event.kind
        if row.get("type") not in _TELLING:
            return False
        if event.issuer.pubkey == me or row["type"] == "audit_purged":
            return True
        if row["type"] == "memory_purged":
            return event.issuer.pubkey in own
        gone = row.get("deleted")
        about = {row.get(name) for name in ("intent_id", "memory_id", "signature_b58")}
        return not ids.isdisjoint(about.union(gone if isinstance(gone, list | tuple) else ()))

    return telling


async def _paying(server: Server, records: Iterable[MemoryRecord]) -> Sequence[SettlementReceipt]:
    ids = {record.id for record in records}
    named = {drift.receipt_of(record) for record in records}
    found: Sequence[SettlementReceipt] = await server.receipts.recent(
        2**32, keep=lambda receipt: receipt.memory_record_id in ids or receipt.id in named
    )
    return found


async def _parents(server: Server, records: Iterable[MemoryRecord]) -> Mapping[str, str | None]:
    """Whose parent is who, each chain followed for a while beyond the window."""
    parents = {record.id: record.parent for record in records}
    ahead = {parent for parent in parents.values() if parent is not None and parent not in parents}
    for _ in range(_MAX_HOPS):
        if not ahead:
            break
        following = [record for one in sorted(ahead) if (record := await server.memory.get(one)) is not None]
        parents.update({record.id: record.parent for record in following})
        ahead = {r.parent for r in following if r.parent is not None and r.parent not in parents}
    return parents


HANDLERS: Final[Mapping[str, Handler]] = {"verify": verify}
