"""Parts of requests and responses: repair orders, outcomes, reports. Names as in version 1.

For fields that version 1's page does not name, ours follow its style, and a comment says so.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pydantic

from covenant.wire.types import U64, A2ATaskResult, AgentId, Base58, PeerSummary, Wire, omitted

Mode = Literal["dry_run", "apply"]
# How much one answer may hold; a handler cuts further where rows are large.
Limit = Annotated[int, pydantic.Field(ge=0, lt=2**32)]
DuplicateRisk = Literal["idempotent", "operator-accepted", "operator_accepted"]
# Roots and hashes are 64 lower-case hexadecimal digits.
Hex = str


# Memory -------------------------------------------------------------------------------------------------------


class DetachParent(Wire):
    """Remove the parent of a record. ``expected_parent`` names the parent that it must have."""

    action: Literal["detach_parent"] = "detach_parent"
    id: str
    expected_parent: str | None = None


class DeleteRecord(Wire):
    """Take one record out."""

    action: Literal["delete_record"] = "delete_record"
    id: str


class BackfillProvenance(Wire):
    """Write where a record came from into its metadata."""

    action: Literal["backfill_provenance"] = "backfill_provenance"
    id: str
    provenance: Any


MemoryCommand = Annotated[DetachParent | DeleteRecord | BackfillProvenance, pydantic.Field(discriminator="action")]


class MemoryRepairOrder(Wire):
    """One repair, tried or done, and why."""

    mode: Mode
    command: MemoryCommand
    reason: str


class MemoryRepairOutcome(Wire):
    """The effect of a repair, done or planned; ``before`` and ``after`` are records."""

    id: str
    action: str
    mode: Mode
    would_change: bool
    changed: bool
    before: Any = omitted()
    after: Any = omitted()


class CompactionPolicy(Wire):
    """The records that a compaction removes and marks; a policy without any criterion is refused."""

    delete_working_before_ms: U64 | None = None
    delete_episodic_before_ms: U64 | None = None
    mark_longterm_stale_before_ms: U64 | None = None
    detach_stale_parents: bool = False
    marked_at_ms: U64 | None = None


class MemoryCompactionOrder(Wire):
    """One compaction, tried or done, and why."""

    mode: Mode
    policy: CompactionPolicy
    reason: str


class MemoryCompactionOutcome(Wire):
    """The ids that a compaction touched or would touch; ``not_shown``, which is ours, counts those that the answer had
    no room for."""

    mode: Mode
    would_change: bool
    changed: bool
    deleted: tuple[str, ...] = ()
    stale_marked: tuple[str, ...] = ()
    parents_detached: tuple[str, ...] = ()
    not_shown: U64 | None = omitted()


class Check(Wire):
    """One check of ``verify``."""

    name: str
    passed: bool
    message: str


class Drift(Wire):
    """Where two stores disagree, and how that is mended."""

    kind: str
    id: str | None = omitted()
    message: str
    repair: str


# Settlement ---------------------------------------------------------------------------------------------------


class ChainConfiguration(Wire):
    """The configuration of a chain, and what it still lacks."""

    chain: str | None = None
    # Version 1's clients decode a text; there is none without a chain.
    cluster: str = "none"
    rpc_url: str | None = None
    ws_url: str | None = None
    program_id: str | None = None
    covnt_mint: str | None = None
    ready: bool
    missing: tuple[str, ...] = ()


class ReceiptBatch(Wire):
    """Receipts under one Merkle root; ``tx_sig`` and ``slot`` where that went to a chain."""

    batch_id: str
    merkle_root: Hex
    receipt_count: U64
    tx_sig: str | None = None
    slot: U64 | None = None


# Capabilities, peers ------------------------------------------------------------------------------------------


class UseBudget(Wire):
    """How often a metered grant was used."""

    max_uses: U64
    used: U64
    remaining: U64


class CapabilityUse(Wire):
    """A grant, whether it holds now, and what is left of it."""

    signature_b58: Base58
    action: str
    expires_at: U64 | None = None
    revoked: bool
    effective: Literal["live", "revoked", "expired", "exhausted"]
    budget: UseBudget | None = omitted()


class PeerRevokeOutcome(Wire):
    """The outcome of ``revoke_peer``: with the peer's fields where it is about one."""

    type: Literal["revoked", "already_revoked", "not_found", "ambiguous", "self_revoke_forbidden"]
    agent_id: AgentId | None = omitted()
    token_prefix: str | None = omitted()
    registered_at: U64 | None = omitted()
    revoked_at: U64 | None = omitted()
    matches: tuple[PeerSummary, ...] = ()
    truncated: bool = False


class GrantedAction(Wire):
    """A grant made on the way (``enroll_peer``)."""

    action: str
    signature_b58: Base58


# Audit --------------------------------------------------------------------------------------------------------


class AuditEvent(Wire):
    """One row: ``kind`` is an object whose ``type`` names the kind and which holds its fields."""

    id: str
    timestamp_ms: U64
    issuer: AgentId
    kind: dict[str, Any]


class AuditReport(Wire):
    """The result of ``verify_audit_integrity``."""

    events: U64
    anchors: U64
    valid: bool
    root_hash_hex: Hex
    failures: tuple[Any, ...] = ()


class ChainProof(Wire):
    """That a row is in the log, as version 1 proves it: with the hashes of all rows after it, ``root_hash_hex`` follows
    from ``previous_hash_hex`` and ``event_hash_hex``."""

    event_id: str
    leaf_index: U64
    event_hash_hex: Hex
    previous_hash_hex: Hex
    suffix_event_hashes_hex: tuple[Hex, ...] = ()
    root_hash_hex: Hex


class InclusionProof(Wire):
    """That a row is in the log (RFC 6962, section 2.1.1), where ``extended`` asks for it; these fields are ours."""

    event_id: str
    leaf_index: U64
    tree_size: U64
    leaf_hash_hex: Hex
    path_hex: tuple[Hex, ...] = ()
    root_hash_hex: Hex
    # The signed note (C2SP) of a checkpoint of that size, where there is one.
    checkpoint: str | None = None


class ProvenanceAction(Wire):
    """One row, as who did what by whose leave."""

    event_id: str
    timestamp_ms: U64
    kind: str
    actor: str
    action: str
    approver: str | None = omitted()
    rule: str | None = omitted()
    outcome: str


# Mailbox ------------------------------------------------------------------------------------------------------


class Requeue(Wire):
    """Put a leased task back."""

    action: Literal["requeue"] = "requeue"
    lease_id: str | None = None
    duplicate_risk: DuplicateRisk


class ForceError(Wire):
    """End a task with an error."""

    action: Literal["force_error"] = "force_error"
    lease_id: str | None = None
    message: str


A2ACommand = Annotated[Requeue | ForceError, pydantic.Field(discriminator="action")]


class A2ARepairOrder(Wire):
    """One repair of the mailbox, and why; shaped as version 1's repair of memory is."""

    task_id: str
    command: A2ACommand
    reason: str


class A2ARepairOutcome(Wire):
    """The effect of a repair of the mailbox; the lease and the risk are ours."""

    task_id: str
    action: Literal["requeued", "forced_error"]
    state: Literal["queued", "in_flight", "result_pending", "resolved"]
    result: A2ATaskResult | None = omitted()
    lease_id: str | None = None
    duplicate_risk: str | None = None
    attempt: U64 = 0


class RetryPolicy(Wire):
    """Which stale leases may be put back; version 1's defaults."""

    enabled: bool = False
    min_lease_age_ms: U64 = 300_000
    max_attempts: U64 = 3
    max_requeues: U64 = 1
    scan_limit: U64 = 100


class RetryRequeued(Wire):
    """A task that was put back, with the lease that this ended."""

    task_id: str
    lease_id: str
    attempt: U64
    idempotency_key: str


class RetrySkip(Wire):
    """A lease that was not put back, and why. ``detail`` is ours: the reason where version 1 has no word for it."""

    task_id: str
    reason: Literal[
        "disabled",
        "not_in_flight",
        "missing_lease",
        "lease_too_young",
        "missing_idempotency",
        "unsafe_duplicate_safety",
        "max_attempts_reached",
        "limit_reached",
        "capability_scope_mismatch",
    ]
    detail: str | None = omitted()
    attempt: U64 = 0


class RetryReport(Wire):
    """The effect of a search for stale leases. ``skipped_by_reason`` and ``error`` are ours."""

    policy: RetryPolicy
    considered: U64
    requeued: tuple[RetryRequeued, ...] = ()
    skipped: tuple[RetrySkip, ...] = ()
    skipped_by_reason: dict[str, U64] = pydantic.Field(default_factory=dict)
    error: str | None = None

    def row(self) -> dict[str, Any]:
        """Return the fields of its audit row."""
        return {
            **self.policy.model_dump(),
            "considered": self.considered,
            "requeued": len(self.requeued),
            "skipped": sum(self.skipped_by_reason.values()),
            "skipped_by_reason": self.skipped_by_reason,
            "error": self.error,
        }


# Ours ---------------------------------------------------------------------------------------------------------


class AgentListing(Wire):
    """A package below ``agents/``: routable, or with the error that keeps it from being so."""

    directory: str
    id: str | None = None
    # Its key where tasks are sent to it as `<id>@agent` (ADR 0047); ours.
    pubkey: str | None = omitted()
    name: str | None = None
    # Ours: what its manifest says that it does.
    description: str | None = omitted()
    version: str | None = None
    runtime: str | None = None
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    budget_credits_per_hour: U64 = 0
    tools_allowed: tuple[str, ...] = ()
    routable: bool
    error: str | None = None
    # Ours: the fix of the error.
    fix: str | None = omitted()
    # Where the request asked for it: `ok`, `unknown` where no supervisor verified it, or the code of the error, and
    # the error; and the signature's end.
    signature: str | None = omitted()
    signature_error: str | None = omitted()
    expires_at: U64 | None = omitted()


class Expires(Wire):
    """Something that ends: an envelope, a grant or a token."""

    what: Literal["envelope", "grant", "token"]
    name: str
    expires_at: U64


class Approval(Wire):
    """Something that a run at a Hermes API waits for; what it shows of itself is cut to 300 characters."""

    id: str
    intent_id: str
    run_id: str
    agent_id: str
    description: str
    command: str
    choices: tuple[str, ...]
    requested_at: U64


class Denial(Wire):
    """Something that the kernel or a gate denied an agent, from the supervisor's rows."""

    event_id: str
    timestamp_ms: U64
    run_id: str | None = None
    agent_id: str | None = None
    layer: str
    target: str
    code: str
    count: U64 = 1
