"""Receipts and their batches: list them, and settle receipts.

A flush is off-chain unless the daemon has a chain that is ready: the batch then has its root and id, and ``tx_sig`` and
``slot`` are null. The row of the flush puts the root into the audit log, whose checkpoints others witness. A batch that
a chain refused stays unchanged, and the next flush anchors it before it makes another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import anyio.to_thread

from covenant.handlers import paging
from covenant.handlers.access import authorization
from covenant.handlers.caller import Caller
from covenant.handlers.receipt_backfill import backfill_settlement_receipts
from covenant.handlers.server import Handler, Server
from covenant.stores.settlement import interface
from covenant.wire import parts, requests, responses
from covenant.wire.types import SettlementReceipt
from policy import errors

_MOST_ROWS: Final = 10_000
# A larger flush would delay other writers of the file.
_MOST_FLUSHED: Final = 100_000


@dataclass(frozen=True, slots=True)
class ReceiptBounds:
    """The limits that a grant's scope sets on visible receipts; None sets no limit."""

    payer: str | None = None
    resource: str | None = None
    batch_id: str | None = None
    cluster: str | None = None

    @classmethod
    def of(cls, scope: Any) -> ReceiptBounds:
        """Return the bounds of a well-formed scope of ``chain.``."""
        known = scope if isinstance(scope, Mapping) else {}
        names = ("payer_pubkey_b58", "resource", "batch_id", "cluster")
        return cls(*(found if isinstance(found := known.get(name), str) else None for name in names))

    def admits(self, receipt: SettlementReceipt) -> bool:
        """Whether the receipt is within the bounds."""
        pairs = (
            (self.payer, receipt.payer.pubkey),
            (self.resource, receipt.resource),
            (self.batch_id, receipt.batch_id),
            (self.cluster, receipt.cluster),
        )
        return all(bound is None or bound == found for bound, found in pairs)


async def recent_receipts(server: Server, caller: Caller, asked: requests.RecentReceipts) -> responses.ReceiptListing:
    """Return the newest receipts within the grant's scope."""
    bounds = await _require(server, caller, "chain.receipts", asked.limit)
    found = await server.receipts.recent(min(asked.limit, _MOST_ROWS), asked.since_ms, keep=bounds.admits)
    return responses.ReceiptListing(receipts=paging.that_fit(found))


async def receipt_batches(
    server: Server, caller: Caller, asked: requests.ReceiptBatches
) -> responses.ReceiptBatchListing:
    """Return the newest batches within the grant's scope; a scope with a payer or resource admits no batch."""
    bounds = await _require(server, caller, "chain.batches", asked.limit)
    bounded = bounds.batch_id is not None or bounds.cluster is not None
    wanted = min(asked.limit, _MOST_ROWS)
    found = await server.receipts.batches(_MOST_FLUSHED if bounded else wanted)
    shown = [one for one in found if bounds.batch_id in {None, one.batch_id} and bounds.cluster in {None, one.cluster}]
    return responses.ReceiptBatchListing(batches=paging.that_fit(map(_to_wire, shown[:wanted])))


async def chain_status(server: Server, caller: Caller, asked: requests.ChainStatus) -> responses.ChainStatusReport:
    """Return the configuration of the chain; every admitted caller may read it, as in version 1."""
    return responses.ChainStatusReport(status=server.chain.status())


async def flush_receipts(
    server: Server, caller: Caller, asked: requests.FlushReceipts
) -> responses.ReceiptBatchFlushed:
    """Put the oldest open receipts, at most ``limit``, into one batch, and anchor it if a chain is ready."""
    bounds = await _require(server, caller, "chain.flush", asked.limit)
    if not asked.limit:
        raise errors.MalformedRequestError("`limit` is 0: a batch holds at least one receipt")
    async with server.receipts.flushing:
        ready = server.chain.status().ready
        left: Sequence[interface.Batch] = await server.receipts.unconfirmed(1) if ready else ()
        if left:
            return responses.ReceiptBatchFlushed(
                batch=_to_wire(await _anchor(server, caller, left[0])), receipts_updated=left[0].receipt_count
            )
        batch = await _settle(server, caller, min(asked.limit, _MOST_FLUSHED), bounds)
        if ready:
            batch = await _anchor(server, caller, batch)
    return responses.ReceiptBatchFlushed(batch=_to_wire(batch), receipts_updated=batch.receipt_count)


async def _settle(server: Server, caller: Caller, limit: int, bounds: ReceiptBounds) -> interface.Batch:
    # Open receipts have no cluster yet; the cluster that they will go to was checked.
    bounds = dataclasses.replace(bounds, cluster=None)
    receipts = await server.receipts.unsettled(limit, keep=bounds.admits)
    if not receipts:
        raise errors.NothingToSettleError("no receipt is open")
    batch = await anyio.to_thread.run_sync(interface.batch_of, receipts)
    # Write the root to the log before any receipt is marked as settled.
    await _write_row(server, caller, batch, sum(one.credits_consumed for one in receipts))
    made: interface.Batch = await server.receipts.mark_batch([one.id for one in receipts])
    return made


async def _anchor(server: Server, caller: Caller, batch: interface.Batch) -> interface.Batch:
    """Anchor the root of an existing batch on the chain."""
    try:
        anchor = await server.chain.anchor(batch, now_ms=server.now_ms())
    except errors.ChainError as e:
        hint = "the batch is made off-chain; the next flush anchors it"
        raise errors.ChainError(e.message, hint=f"{hint} ({e.hint})" if e.hint else hint) from e
    anchored = dataclasses.replace(batch, **dataclasses.asdict(anchor))
    await _write_row(server, caller, anchored, 0)
    await server.receipts.mark_batch_confirmed(batch.batch_id, anchor)
    return anchored


async def _write_row(server: Server, caller: Caller, batch: interface.Batch, credits_settled: int) -> None:
    row = {
        "batch_id": batch.batch_id,
        "merkle_root_hex": batch.merkle_root,
        "receipt_count": batch.receipt_count,
        "credits": credits_settled,
        "tx_sig": batch.tx_sig,
        "slot": batch.slot,
    }
    await server.audit.append("receipts_flushed", row, issuer=caller.agent)


async def _require(server: Server, caller: Caller, action: str, limit: int) -> ReceiptBounds:
    """Return the bounds of the first grant that allows any of the action, the widest first.

    A request names no payer and no resource. It concerns those in the grant's scope, because only these are shown or
    settled.

    Raises:
        errors.CapabilityMissingError, errors.CapabilityScopeError: the caller may not.
    """
    candidates = server.capabilities.candidates(caller.agent.pubkey, action, server.now_ms())
    found = sorted(
        (ReceiptBounds.of(grant.token.scope) for grant in candidates), key=lambda one: one != ReceiptBounds()
    )
    status = server.chain.status()
    for bounds in found:
        facts = _facts(action, bounds, limit, status)
        decided = authorization.decide(server.capabilities, caller.agent.pubkey, action, facts, server.now_ms())
        if decided.grant is not None:
            break
    else:
        bounds = ReceiptBounds()
    facts = _facts(action, bounds, limit, status)
    await authorization.require(server, caller, action, agent_id=action.replace(".", ":"), facts=facts)
    return bounds


def _facts(
    action: str, bounds: ReceiptBounds, limit: int, status: parts.ChainConfiguration
) -> authorization.RequestFacts:
    # A batch holds receipts of several payers and resources, so no list of batches concerns only one of them.
    of_receipts = action != "chain.batches"
    return authorization.RequestFacts(
        limit=limit,
        payer_pubkey_b58=bounds.payer if of_receipts else None,
        resource=bounds.resource if of_receipts else None,
        # Open receipts are in no batch, and go to the configured cluster.
        batch_id=None if action == "chain.flush" else bounds.batch_id,
        cluster=status.cluster if action == "chain.flush" else bounds.cluster,
        mint=status.covnt_mint,
    )


def _to_wire(batch: interface.Batch) -> parts.ReceiptBatch:
    return parts.ReceiptBatch(
        batch_id=batch.batch_id,
        merkle_root=batch.merkle_root,
        receipt_count=batch.receipt_count,
        tx_sig=batch.tx_sig,
        slot=batch.slot,
    )


HANDLERS: Final[Mapping[str, Handler]] = {
    "recent_receipts": recent_receipts,
    "receipt_batches": receipt_batches,
    "chain_status": chain_status,
    "flush_receipts": flush_receipts,
    "backfill_settlement_receipts": backfill_settlement_receipts,
}
