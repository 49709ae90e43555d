"""Capabilities, peers, identity, secrets, and the mailbox."""

from __future__ import annotations

from typing import Any, Literal

from covenant.wire import parts
from covenant.wire.parts import Limit
from covenant.wire.requests.base import Request
from covenant.wire.types import U64, A2ATask, A2ATaskResult, Base58, Display

# Capabilities, peers, identity, secrets -------------------------------------------------------------------------


class RecentCapabilities(Request):
    """The newest grants of or by the caller."""

    kind: Literal["recent_capabilities"] = "recent_capabilities"
    limit: Limit = 10


class GrantCapability(Request):
    """Grant the caller an action. Ours: ``subject`` and ``parent_b58``, by which a holder grants less to another, and
    ``signature_b58`` where it signed that itself."""

    kind: Literal["grant_capability"] = "grant_capability"
    action: str
    scope: Any = None
    expires_at: U64 | None = None
    subject: str | None = None
    parent_b58: Base58 | None = None
    signature_b58: Base58 | None = None


class RevokeCapability(Request):
    """Take a grant back."""

    kind: Literal["revoke_capability"] = "revoke_capability"
    signature_b58: str


class PurgeCapabilities(Request):
    """Forget what was revoked before a time, or longer ago than ``older_than_ms``; one of the two is needed."""

    kind: Literal["purge_capabilities"] = "purge_capabilities"
    before_ms: U64 | None = None
    older_than_ms: U64 | None = None


class CapabilityUsage(Request):
    """The caller's grants and what is left of them; ``limit`` is ours."""

    kind: Literal["capability_usage"] = "capability_usage"
    limit: Limit = 100


class PurgePeers(Request):
    """Forget the peers that were revoked before."""

    kind: Literal["purge_peers"] = "purge_peers"
    before_ms: U64


class RotateOperatorToken(Request):
    """A new token for the operator."""

    kind: Literal["rotate_operator_token"] = "rotate_operator_token"


class ListPeers(Request):
    """List the peers."""

    kind: Literal["list_peers"] = "list_peers"
    limit: Limit = 20
    pubkey_prefix: str | None = None
    status_filter: Literal["live", "revoked"] | None = None


class RevokePeer(Request):
    """Let a peer in no more."""

    kind: Literal["revoke_peer"] = "revoke_peer"
    token_prefix: str
    force: bool = False
    match_limit: Limit | None = None


class EnrollPeer(Request):
    """Admit a peer with these actions. ``expires_at`` and ``pubkey`` are ours."""

    kind: Literal["enroll_peer"] = "enroll_peer"
    display: Display
    actions: tuple[str, ...] = ()
    expires_at: U64 | None = None
    pubkey: Base58 | None = None


class SignAttestation(Request):
    """Sign a message with the daemon's identity, under a domain of its own."""

    kind: Literal["sign_attestation"] = "sign_attestation"
    message_b58: str
    ts: U64


class SetClock(Request):
    """Ours: take the daemon's clock back to the machine's, after that was ahead."""

    kind: Literal["set_clock"] = "set_clock"


class OpenConsole(Request):
    """Ours: a link that logs one browser in to the web console, once and soon; for the operator."""

    kind: Literal["open_console"] = "open_console"


class GetSecret(Request):
    """A secret by its name."""

    kind: Literal["get_secret"] = "get_secret"
    name: str


# Mailbox --------------------------------------------------------------------------------------------------------


class SendA2ATask(Request):
    """Put a task into the mailbox."""

    kind: Literal["send_a2_a_task"] = "send_a2_a_task"
    task: A2ATask


class TryRecvA2ATask(Request):
    """The next task for the caller, leased to it."""

    kind: Literal["try_recv_a2_a_task"] = "try_recv_a2_a_task"


class PostA2AResult(Request):
    """Post the result of a task."""

    kind: Literal["post_a2_a_result"] = "post_a2_a_result"
    result: A2ATaskResult


class TryRecvA2AResult(Request):
    """The next result for the caller."""

    kind: Literal["try_recv_a2_a_result"] = "try_recv_a2_a_result"


class RecentA2ATasks(Request):
    """The newest tasks that the caller may see."""

    kind: Literal["recent_a2_a_tasks"] = "recent_a2_a_tasks"
    limit: Limit = 10


class RecentA2AResults(Request):
    """The newest results that the caller may see. ``task_id`` is ours: the result of that task alone, however many
    others came after it."""

    kind: Literal["recent_a2_a_results"] = "recent_a2_a_results"
    limit: Limit = 10
    task_id: str | None = None


class A2AQueue(Request):
    """List the open tasks in the mailbox."""

    kind: Literal["a2_a_queue"] = "a2_a_queue"
    limit: Limit = 20
    min_lease_age_ms: U64 | None = None
    deadline_within_ms: U64 | None = None
    state_filter: Literal["queued", "in_flight"] | None = None


class RepairA2ATask(Request):
    """Put a leased task back, or end it."""

    kind: Literal["repair_a2_a_task"] = "repair_a2_a_task"
    request: parts.A2ARepairOrder


class RetryA2AStale(Request):
    """Put stale leases back."""

    kind: Literal["retry_a2_a_stale"] = "retry_a2_a_stale"
    policy: parts.RetryPolicy = parts.RetryPolicy()


class CompactA2A(Request):
    """Forget what is done."""

    kind: Literal["compact_a2_a"] = "compact_a2_a"


class CancelA2ATask(Request):
    """Ours: cancel a task that has no answer yet."""

    kind: Literal["cancel_a2_a_task"] = "cancel_a2_a_task"
    task_id: str
    reason: str = ""
