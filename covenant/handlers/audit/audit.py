"""Requests about the audit log: own rows for each caller; verification and purge for callers with the grant.

Each answer is about durable rows. A purge leaves a signed record of the rows that it cut, and a row with its caller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from covenant.handlers import paging
from covenant.handlers.access import authorization
from covenant.handlers.access.authorization import RequestFacts
from covenant.handlers.audit import integrity
from covenant.wire import parts, requests, responses
from policy import errors
from policy.audit_log import note, verify

if TYPE_CHECKING:
    from covenant.handlers.caller import Caller
    from covenant.handlers.server import Handler, Server
    from covenant.stores.audit.interface import ChainSuffix, Proof

MOST_ROWS: Final = 10_000
# Of a log that does not hold, beside other things.
MOST_FAILURE_BYTES: Final = 1024 * 1024
# A row may be as long as an intent. So a few are read before many: who has thousands of long ones and asks for all
# of them has the daemon hold what fits, and not all.
AT_FIRST: Final = 64


async def recent_audit(server: Server, caller: Caller, asked: requests.RecentAudit) -> responses.AuditEvents:
    """The caller's own rows, newest first; as many as one answer takes."""
    limit = min(asked.limit, MOST_ROWS)
    count = min(limit, AT_FIRST)
    while True:
        rows = await _newest(server, caller, asked, count)
        shown, full = paging.cut(rows)
        if full or len(rows) < count or count >= limit:
            return responses.AuditEvents(events=shown)
        count = min(limit, 4 * count)


async def _newest(
    server: Server, caller: Caller, asked: requests.RecentAudit, count: int
) -> Sequence[parts.AuditEvent]:
    issuer = caller.agent.pubkey
    if asked.whole:
        return await server.audit.recent(count, since_ms=asked.since_ms, issuer_pubkey=issuer)

    def wanted(row: parts.AuditEvent) -> bool:
        return asked.shows(row.kind)

    return (await server.audit.scan(wanted, count, since_ms=asked.since_ms, issuer_pubkey=issuer)).events


async def verify_audit_integrity(
    server: Server, caller: Caller, asked: requests.VerifyAuditIntegrity
) -> responses.AuditIntegrity:
    """Hold the rows against their chain and the signed head: for the operator."""
    await authorization.require_operator(server, caller, None, "verify the audit log")
    return responses.AuditIntegrity(report=report(await integrity.verified(server)))


async def purge_audit(server: Server, caller: Caller, asked: requests.PurgeAudit) -> responses.AuditPurged:
    """Cut what is older, under a grant of ``audit.purge`` whose scope reaches as far."""
    facts = RequestFacts(before_ms=asked.before_ms)
    await authorization.require(server, caller, "audit.purge", agent_id="audit:purge", facts=facts)
    done = await server.audit.purge(asked.before_ms)
    row = {
        "before_ms": asked.before_ms,
        "purged": done.purged,
        "root_before_hex": done.root_before_hex,
        "root_after_hex": done.root_after_hex,
        "rebase_id": done.rebase_id,
    }
    await server.audit.append("audit_purged", row, caller.agent)
    return responses.AuditPurged(purged=done.purged)


async def prove_audit_inclusion(
    server: Server, caller: Caller, asked: requests.ProveAuditInclusion
) -> responses.AuditInclusion:
    """That a row is in the log: any for the operator, their own for everybody else.

    Another's row is answered as one that is not there.
    """
    if not caller.operator:
        own = await server.audit.scan(lambda row: row.id == asked.event_id, 1, issuer_pubkey=caller.agent.pubkey)
        if not own.events:
            return responses.AuditInclusion(proof=None)
    if not asked.extended:
        found = await server.audit.prove_by_chain(asked.event_id)
        return responses.AuditInclusion(proof=None if found is None else _by_chain(asked.event_id, found))
    proof = await server.audit.prove(asked.event_id)
    return responses.AuditInclusion(proof=_on_the_wire(proof) if proof else None)


async def cosign_audit_checkpoint(
    server: Server, caller: Caller, asked: requests.CosignAuditCheckpoint
) -> responses.AuditCheckpoint:
    """Keep cosignatures of witnesses whom the operator names; who that was is a row for each."""
    await authorization.require_operator(server, caller, None, "keep cosignatures of the audit log")
    if len(asked.witnesses) > note.MAX_SIGNATURES:
        raise errors.UsageError(f"{len(asked.witnesses)} witnesses are named, at most {note.MAX_SIGNATURES} are taken")
    witnesses = [note.Verifier.parse(one) for one in asked.witnesses]
    try:
        cosigned = note.Note.parse(asked.checkpoint.encode())
    except UnicodeEncodeError as e:
        raise errors.NoteError("the note is not valid Unicode") from e
    kept = await server.audit.cosigned(cosigned, witnesses)
    return responses.AuditCheckpoint(checkpoint=kept.raw.decode())


def report(found: verify.Report) -> parts.AuditReport:
    """The report as version 1 sends it: its failures are texts."""
    return parts.AuditReport(
        events=found.events,
        anchors=found.anchors,
        valid=found.valid,
        root_hash_hex=found.root_hash_hex,
        failures=paging.that_fit((one.text() for one in found.failures), MOST_FAILURE_BYTES),
    )


def _by_chain(event_id: str, found: ChainSuffix) -> parts.ChainProof:
    return parts.ChainProof(
        event_id=event_id,
        leaf_index=found.index,
        event_hash_hex=found.event_hash_hex,
        previous_hash_hex=found.previous_hash_hex,
        suffix_event_hashes_hex=found.suffix,
        root_hash_hex=found.root_hash_hex,
    )


def _on_the_wire(proof: Proof) -> parts.InclusionProof:
    return parts.InclusionProof(
        event_id=proof.event_id,
        leaf_index=proof.inclusion.index,
        tree_size=proof.inclusion.size,
        leaf_hash_hex=proof.inclusion.leaf.hex(),
        path_hex=tuple(value.hex() for value in proof.inclusion.path),
        root_hash_hex=proof.root.hex(),
        checkpoint=proof.checkpoint.raw.decode(),
    )


HANDLERS: Final[Mapping[str, Handler]] = {
    "recent_audit": recent_audit,
    "verify_audit_integrity": verify_audit_integrity,
    "purge_audit": purge_audit,
    "prove_audit_inclusion": prove_audit_inclusion,
    "cosign_audit_checkpoint": cosign_audit_checkpoint,
}
