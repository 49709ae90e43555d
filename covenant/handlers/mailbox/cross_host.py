"""Tasks from and to other hosts, by signed envelopes (covenant-v1.md, section 14). Each decision has a row.

    a task in:   open ─> known host ─> for this daemon ─> fresh ─> granted by key ─> claimed once ─> row ─> mailbox
    a task out:  sender is this daemon ─> the recipient's key is the known one ─> signed ─> posted ─> row

A sender of another host learns only that a task was accepted or rejected. Its answer is not sent back: version 1 has no
message for it. Only grants that name the key count, since a display name is what its sender says.
"""

from __future__ import annotations

from typing import Final

from covenant.handlers.access import authorization
from covenant.handlers.caller import Caller
from covenant.handlers.server import Server
from covenant.handlers.state.other_hosts import OtherHosts
from covenant.keys import identity
from covenant.providers.known_hosts import KnownHost
from covenant.runtime import peer_host
from covenant.stores.mailbox.seen_envelopes import MAX_AGE_MS, MAX_SKEW_MS, Claim
from covenant.wire import cross_host
from covenant.wire.cross_host import SignedTask
from covenant.wire.types import A2ATask
from policy import errors

AUTHORITY: Final = "a2a"
_SHOWN: Final = 256


async def admit(server: Server, hosts: OtherHosts, envelope: SignedTask) -> bool:
    """Put the task of an envelope into the mailbox, once. True also for one that was put there before.

    Raises:
        errors.CovenantError: a row of the log cannot be written; the task is not taken then.
    """
    task = cross_host.task_of(envelope)
    if isinstance(task, str):
        return await _rejected(server, None, task)
    if not identity.sealed(task.sender.pubkey, envelope.message(), envelope.signature):
        return await _rejected(server, None, "signature_invalid")
    if (reason := _reason(server, hosts, envelope, task)) is not None:
        return await _rejected(server, task, reason)
    claim = Claim(task.sender.pubkey, task.id, envelope.issued_at_ms)
    try:
        fresh = await hosts.seen.claim(claim, server.now_ms())
    except errors.StoreError:
        return await _rejected(server, task, "dedup_write_failed")
    if not fresh:
        await _admission(server, task, "duplicate", "duplicate")
        return True
    # Before the task is in the mailbox, so that none is there without its row.
    await _admission(server, task, "admitted", "")
    try:
        # The recipient is this daemon by its key; its name is the one that this host uses.
        await server.mailbox.send(task.model_copy(update={"recipient": server.identity.agent}))
    except errors.CovenantError:
        return await _rejected(server, task, "enqueue_failed")
    return True


def _reason(server: Server, hosts: OtherHosts, envelope: SignedTask, task: A2ATask) -> str | None:
    """Return why an authentic envelope is not taken; None if it is. Nothing is changed."""
    known, now_ms = hosts.known.of(task.sender.display), server.now_ms()
    if known is None or known.pubkey != task.sender.pubkey:
        return "unknown_principal"
    if task.recipient.pubkey != server.identity.agent.pubkey:
        return "recipient_mismatch"
    if now_ms - envelope.issued_at_ms > MAX_AGE_MS:
        return "stale"
    if envelope.issued_at_ms - now_ms > MAX_SKEW_MS:
        return "future_skew"
    facts = authorization.RequestFacts(peer_pubkey_b58=task.sender.pubkey, task_id=task.id)
    action = f"a2a.recv.{task.sender.pubkey}"
    granted = authorization.decide(server.capabilities, server.identity.agent.pubkey, action, facts, now_ms).grant
    return None if granted is not None else "recv_not_granted"


async def _rejected(server: Server, task: A2ATask | None, reason: str) -> bool:
    await _admission(server, task, "rejected", reason)
    return False


async def _admission(server: Server, task: A2ATask | None, outcome: str, reason: str) -> None:
    """Write the row of a decision; before the signature holds, it names no sender."""
    row = {
        "sender_pubkey_b58": "" if task is None else task.sender.pubkey,
        "recipient_display": "" if task is None else task.recipient.display[:_SHOWN],
        "outcome": outcome,
        "reason": reason,
    }
    await server.audit.append("cross_host_a2_a_admission", row)


def destination(server: Server, task: A2ATask) -> KnownHost | None:
    """Return the host that a task is for; None for one of this host."""
    hosts: OtherHosts | None = server.other_hosts
    if hosts is None or task.recipient.pubkey == server.identity.agent.pubkey:
        return None
    return hosts.known.of(task.recipient.display)


async def deliver(server: Server, caller: Caller, task: A2ATask, host: KnownHost) -> None:
    """Send a task to another host. The caller needs ``a2a.send.<key>``: the name is what the sender says.

    Raises:
        errors.CapabilityMissingError, errors.CapabilityScopeError: the caller may not send to this key.
        errors.RecipientRejectedError: it was not sent, or the other host did not take it.
    """
    facts = authorization.RequestFacts(peer_pubkey_b58=task.recipient.pubkey, task_id=task.id)
    await authorization.require(server, caller, f"a2a.send.{task.recipient.pubkey}", agent_id=AUTHORITY, facts=facts)
    outcome, reason = await _sent(server, task, host)
    row = {
        "recipient_pubkey_b58": task.recipient.pubkey,
        "recipient_display": task.recipient.display,
        "outcome": outcome,
        "reason": reason,
    }
    await server.audit.append("cross_host_a2_a_delivery", row)
    if outcome != "delivered":
        raise errors.RecipientRejectedError(
            f"the task for `{task.recipient.display}` was not delivered: {reason}", hint=_HINTS.get(reason, "")
        )


async def _sent(server: Server, task: A2ATask, host: KnownHost) -> tuple[str, str]:
    """Return the outcome of a delivery, and why."""
    hosts: OtherHosts | None = server.other_hosts
    assert hosts is not None
    if task.sender.pubkey != server.identity.agent.pubkey:
        return "refused", "sender_not_self"
    if host.pubkey != task.recipient.pubkey:
        return "refused", "identity_mismatch"
    if hosts.known.name is None or host.url is None:
        return "refused", "no_route"
    name = task.sender.display.partition("@")[0]
    sender = task.sender.model_copy(update={"display": f"{name}@{hosts.known.name}"})
    task_json = task.model_copy(update={"sender": sender}).model_dump_json().encode()
    issued_at_ms = server.now_ms()
    signature = server.identity.seal(issued_at_ms, task_json)
    body = SignedTask(task_json, issued_at_ms, signature).to_bytes()
    if len(body) > cross_host.BODY_BYTES:
        return "refused", "too_large"
    return await peer_host.post(f"{host.url}/a2a/peer-tasks", body, seconds=server.settings.deliver_timeout_ms / 1000)


_HINTS: Final = {
    "sender_not_self": "only the operator sends to other hosts",
    "identity_mismatch": "the key of this host in known-hosts.toml is another",
    "no_route": "known-hosts.toml needs `name`, and the host's `url`",
    "remote_refused": "the other host's log has the reason",
    "too_large": "an envelope has 64 KiB, which a task of some 13 KiB fills",
}
