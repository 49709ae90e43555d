"""Capabilities, peers, identity, secrets, and the mailbox."""

from __future__ import annotations

from typing import Literal

from covenant.wire import parts
from covenant.wire.responses.base import Response
from covenant.wire.types import (
    U64,
    A2ATask,
    A2ATaskResult,
    AgentId,
    Display,
    PeerSummary,
    QueueEntry,
    SignedCapability,
    omitted,
)


# Capabilities, peers, identity, secrets -------------------------------------------------------------------------
class CapabilityListing(Response):
    """To ``recent_capabilities``."""

    kind: Literal["capabilities"] = "capabilities"
    capabilities: tuple[SignedCapability, ...]


class CapabilityGranted(Response):
    """To ``grant_capability``."""

    kind: Literal["capability_granted"] = "capability_granted"
    signature_b58: str
    subject_display: Display
    action: str


class CapabilityRevoked(Response):
    """To ``revoke_capability``."""

    kind: Literal["capability_revoked"] = "capability_revoked"
    signature_b58: str
    removed: bool


class CapabilitiesPurged(Response):
    """To ``purge_capabilities``."""

    kind: Literal["capabilities_purged"] = "capabilities_purged"
    purged: U64


class CapabilityUsageListing(Response):
    """To ``capability_usage``."""

    kind: Literal["capability_usage"] = "capability_usage"
    grants: tuple[parts.CapabilityUse, ...]


class PeersPurged(Response):
    """To ``purge_peers``."""

    kind: Literal["peers_purged"] = "peers_purged"
    purged: U64


class OperatorTokenRotated(Response):
    """To ``rotate_operator_token``: the one time that the token is said."""

    kind: Literal["operator_token_rotated"] = "operator_token_rotated"
    token_b58: str


class PeerList(Response):
    """To ``list_peers``."""

    kind: Literal["peer_list"] = "peer_list"
    peers: tuple[PeerSummary, ...]
    operator_pubkey_b58: str
    truncated: bool


class PeerRevoked(Response):
    """To ``revoke_peer``."""

    kind: Literal["peer_revoked"] = "peer_revoked"
    outcome: parts.PeerRevokeOutcome


class PeerEnrolled(Response):
    """To ``enroll_peer``. The one time that the token is said. ``agent_id``, ``grants`` and ``expires_at`` are ours."""

    kind: Literal["peer_enrolled"] = "peer_enrolled"
    token_b58: str
    pubkey_b58: str
    display: Display
    granted: tuple[str, ...] = ()
    agent_id: AgentId
    grants: tuple[parts.GrantedAction, ...] = ()
    expires_at: U64 | None = omitted()


class IdentityAttestation(Response):
    """To ``sign_attestation``."""

    kind: Literal["identity_attestation"] = "identity_attestation"
    signature_b58: str
    pubkey_b58: str
    ts: U64


class ClockSet(Response):
    """Ours, to ``set_clock``."""

    kind: Literal["clock_set"] = "clock_set"
    changed: bool
    from_ms: U64
    to_ms: U64


class ConsoleOpened(Response):
    """Ours, to ``open_console``. The code is in the fragment of ``url``, which no browser sends to a server."""

    kind: Literal["console_opened"] = "console_opened"
    url: str
    expires_at: U64


class Secret(Response):
    """To ``get_secret``."""

    kind: Literal["secret"] = "secret"
    name: str
    value: str


# Mailbox --------------------------------------------------------------------------------------------------------


class A2ATaskQueued(Response):
    """To ``send_a2_a_task``."""

    kind: Literal["a2_a_task_queued"] = "a2_a_task_queued"
    task_id: str


class A2ATaskOpt(Response):
    """To ``try_recv_a2_a_task``. Ours: the lease, and when it ends."""

    kind: Literal["a2_a_task_opt"] = "a2_a_task_opt"
    task: A2ATask | None
    lease_id: str | None = omitted()
    lease_expires_at_ms: U64 | None = omitted()


class A2AResultPosted(Response):
    """To ``post_a2_a_result``."""

    kind: Literal["a2_a_result_posted"] = "a2_a_result_posted"
    task_id: str


class A2AResultOpt(Response):
    """To ``try_recv_a2_a_result``."""

    kind: Literal["a2_a_result_opt"] = "a2_a_result_opt"
    result: A2ATaskResult | None


class A2ATasks(Response):
    """To ``recent_a2_a_tasks``."""

    kind: Literal["a2_a_tasks"] = "a2_a_tasks"
    tasks: tuple[A2ATask, ...]


class A2AResults(Response):
    """To ``recent_a2_a_results``."""

    kind: Literal["a2_a_results"] = "a2_a_results"
    results: tuple[A2ATaskResult, ...]


class A2AQueueListing(Response):
    """To ``a2_a_queue``."""

    kind: Literal["a2_a_queue"] = "a2_a_queue"
    tasks: tuple[QueueEntry, ...]
    results: tuple[A2ATaskResult, ...]


class A2ARepaired(Response):
    """To ``repair_a2_a_task``."""

    kind: Literal["a2_a_repaired"] = "a2_a_repaired"
    outcome: parts.A2ARepairOutcome


class A2AAutoRetried(Response):
    """To ``retry_a2_a_stale``."""

    kind: Literal["a2_a_auto_retried"] = "a2_a_auto_retried"
    report: parts.RetryReport


class A2ACompacted(Response):
    """To ``compact_a2_a``."""

    kind: Literal["a2_a_compacted"] = "a2_a_compacted"
    dropped: U64


class A2ACancelled(Response):
    """Ours, to ``cancel_a2_a_task``."""

    kind: Literal["a2_a_cancelled"] = "a2_a_cancelled"
    task_id: str
    cancelled: bool
