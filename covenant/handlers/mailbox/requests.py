"""The mailbox requests: authorization to send, receive, answer and repair, and a log row for each act (ADR 0047).

A caller sees the tasks that it sent or is to receive. The agents of this host belong to the operator: the operator sees
and repairs the tasks for them (``covenant.handlers.mailbox.repair``). Their ``a2a.recv.<sender>`` is the operator's
grant. The agents do their tasks themselves: ``covenant.handlers.mailbox.delivery``.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from covenant.handlers import billing, paging
from covenant.handlers.access import authorization
from covenant.handlers.caller import Caller
from covenant.handlers.mailbox import cross_host
from covenant.handlers.server import Handler, Server
from covenant.stores.audit.interface import AuditEntry as Row
from covenant.stores.mailbox.interface import TaskEntry
from covenant.wire import requests, responses
from covenant.wire.types import A2ATask, A2ATaskResult, AgentId
from policy import errors

_AGENT: Final = "@agent"
AUTHORITY: Final = cross_host.AUTHORITY
# A queue response has two lists, and the first item of each is always shown.
_HALF_OF_AN_ANSWER: Final = paging.ROOM // 2
_SHOWN_ID: Final = 256
MOST_REASON: Final = 4096


def local_agent(recipient: AgentId) -> str | None:
    """Return the id of the agent of this host that is addressed; None for another recipient."""
    name = recipient.display.removesuffix(_AGENT)
    return name if name != recipient.display and billing.budget_of(name) == recipient else None


# Sending ----------------------------------------------------------------------------------------------------------


async def send_a2_a_task(server: Server, caller: Caller, asked: requests.SendA2ATask) -> responses.A2ATaskQueued:
    """Put a task into the mailbox: (1) its sender is the caller, (2) the sender may send to the recipient, (3) the
    recipient is known and accepts it, (4) store it, (5) write the row."""
    task = asked.task
    # (1)
    if task.sender != caller.agent:
        claimed = {"peer_display": caller.agent.display, "claimed_sender_display": task.sender.display}
        error = errors.SenderMismatchError(
            f"`{task.sender.display}` is not who sends this", hint=f"the sender is `{caller.agent.display}`"
        )
        await _refused(server, caller, "a2_a_sender_mismatch", claimed, error)
        raise error
    # (2) A task for another host is not this mailbox's.
    host = cross_host.destination(server, task)
    if host is not None:
        await cross_host.deliver(server, caller, task, host)
        return responses.A2ATaskQueued(task_id=task.id)
    await require_send(server, caller, task)
    # (3)
    await _check_recipient(server, caller, task)
    # (4)
    sent = await server.mailbox.send(task)
    # (5)
    row: dict[str, str | None] = {
        "task_id": task.id,
        "sender_display": task.sender.display,
        "recipient_display": task.recipient.display,
        "task_kind": task.task_kind,
        "intent_hash_hex": _hash(task.intent_text),
        "outcome": sent.outcome,
    }
    await server.audit.append("a2_a_task_sent", row, caller.agent)
    return responses.A2ATaskQueued(task_id=task.id)


async def cancel_a2_a_task(server: Server, caller: Caller, asked: requests.CancelA2ATask) -> responses.A2ACancelled:
    """Cancel a task that the caller sent; an answered task stays unchanged."""
    if len(asked.reason) > MOST_REASON:
        raise errors.TaskInvalidError(f"a reason has at most {MOST_REASON} characters", where="reason")
    entry = seen(server, caller, asked.task_id)
    if entry.task.sender.pubkey != caller.agent.pubkey:
        raise errors.NotSenderError(f"only `{entry.task.sender.display}` may take task `{asked.task_id}` back")
    try:
        await server.mailbox.cancel(entry.task.id, reason=asked.reason)
    except errors.TaskStateError:
        return responses.A2ACancelled(task_id=asked.task_id, cancelled=False)
    row = {"task_id": asked.task_id, "reason": asked.reason}
    await server.audit.append("a2_a_task_cancelled", row, caller.agent)
    return responses.A2ACancelled(task_id=asked.task_id, cancelled=True)


async def try_recv_a2_a_result(
    server: Server, caller: Caller, asked: requests.TryRecvA2AResult
) -> responses.A2AResultOpt:
    """Return the oldest answer to a task of the caller; it is returned only once."""
    result = await server.mailbox.take_result(caller.agent.pubkey)
    if result is not None:
        row = {"task_id": result.task_id, "status": result.status}
        await server.audit.append("a2_a_result_taken", row, caller.agent)
    return responses.A2AResultOpt(result=result)


# Receiving --------------------------------------------------------------------------------------------------------


async def try_recv_a2_a_task(server: Server, caller: Caller, asked: requests.TryRecvA2ATask) -> responses.A2ATaskOpt:
    """Lease the next task for the caller."""
    entry = await server.mailbox.lease(caller.agent.pubkey)
    if entry is None:
        return responses.A2ATaskOpt(task=None)
    given = entry.as_given()
    await write_lease(server, entry, caller.agent, task_id=given.id)
    lease = entry.lease
    assert lease is not None
    return responses.A2ATaskOpt(task=given, lease_id=lease.id, lease_expires_at_ms=lease.expires_at_ms)


async def post_a2_a_result(server: Server, caller: Caller, asked: requests.PostA2AResult) -> responses.A2AResultPosted:
    """Answer a task: (1) the caller has such a task without an answer, (2) the caller may answer its sender, (3) store
    the answer, (4) write the row."""
    result = asked.result
    # (1) before the check of capabilities, which needs the sender
    entry = server.mailbox.given(caller.agent.pubkey, result.task_id)
    if entry is None:
        # The same words for both cases, also in the caller's own feed: they must not reveal if others have such a task.
        await _reject(server, caller, result, "unknown task")
        raise _no_task(result.task_id)
    if not entry.open:
        await _reject(server, caller, result, "answered already")
        raise errors.TaskStateError(f"task `{result.task_id}` has its result already")
    # (2)
    sender = entry.task.sender
    facts = authorization.RequestFacts(peer_pubkey_b58=sender.pubkey, task_id=result.task_id)
    await _require_peer(server, caller, "respond", sender, facts)
    # (3)
    try:
        await server.mailbox.post(result.model_copy(update={"task_id": entry.task.id}))
    except errors.CovenantError as e:
        await _reject(server, caller, result, e.message)
        raise
    # (4)
    await write_result(server, result, caller.agent)
    return responses.A2AResultPosted(task_id=result.task_id)


# Looking ----------------------------------------------------------------------------------------------------------


async def recent_a2_a_tasks(server: Server, caller: Caller, asked: requests.RecentA2ATasks) -> responses.A2ATasks:
    """Return the newest tasks that the caller sent or is to receive, newest first."""
    pubkey = caller.agent.pubkey
    entries = server.mailbox.recent(pubkey, asked.limit)
    return responses.A2ATasks(tasks=paging.that_fit(entry.task_of(pubkey) for entry in entries))


async def recent_a2_a_results(server: Server, caller: Caller, asked: requests.RecentA2AResults) -> responses.A2AResults:
    """Return the newest answers to the caller's tasks, newest first, or the answer to one."""
    pubkey = caller.agent.pubkey
    if asked.task_id is None:
        entries = server.mailbox.answered(pubkey, asked.limit)
    else:
        found = server.mailbox.sent(pubkey, asked.task_id) or server.mailbox.given(pubkey, asked.task_id)
        entries = [] if found is None else [found]
    return responses.A2AResults(results=paging.that_fit(_results(entries, pubkey)))


async def a2_a_queue(server: Server, caller: Caller, asked: requests.A2AQueue) -> responses.A2AQueueListing:
    """Return the open tasks, oldest first, and the answers that wait for the caller."""
    pubkey = None if caller.operator else caller.agent.pubkey
    now_ms = server.now_ms()
    entries = (one for one in server.mailbox.open_entries(pubkey) if _concerns(caller, one))
    found = [one.to_wire(caller.agent.pubkey) for one in entries if _matches(one, asked, now_ms)]
    waiting = server.mailbox.unfetched(caller.agent.pubkey)
    return responses.A2AQueueListing(
        tasks=paging.that_fit(found[: asked.limit], _HALF_OF_AN_ANSWER),
        results=paging.that_fit(_results(waiting[: asked.limit], caller.agent.pubkey), _HALF_OF_AN_ANSWER),
    )


# Rows that the agents' own work writes as well --------------------------------------------------------------------


async def write_lease(server: Server, entry: TaskEntry, issuer: AgentId | None, *, task_id: str | None = None) -> None:
    """Write the row of a lease, under the id that its issuer uses for the task; default: the mailbox's name."""
    assert entry.lease is not None
    row = {
        "task_id": entry.task.id if task_id is None else task_id,
        "lease_id": entry.lease.id,
        "attempt": entry.attempt,
        "lease_expires_at_ms": entry.lease.expires_at_ms,
    }
    await server.audit.append("a2_a_task_leased", row, issuer)


async def write_result(server: Server, result: A2ATaskResult, issuer: AgentId | None) -> None:
    """Write the row of an answer, with a hash of its content."""
    row = {
        "task_id": result.task_id,
        "status": result.status,
        "content_hash_hex": _hash(result.model_dump_json(include={"content", "error_message"})),
    }
    await server.audit.append("a2_a_result_posted", row, issuer)


# The rules --------------------------------------------------------------------------------------------------------


def _forms(verb: str, peer: AgentId) -> tuple[str, str]:
    """Return both actions for a peer: by its key, which is unique, and version 1's by its display name."""
    return f"a2a.{verb}.{peer.pubkey}", f"a2a.{verb}.{peer.display}"


async def require_send(server: Server, caller: Caller, task: A2ATask) -> None:
    """Require that the caller may now send the task to its recipient; writes a row in either case.

    Raises:
        errors.CapabilityMissingError, errors.CapabilityScopeError: it may not.
    """
    agent, manifest = local_agent(task.recipient), None
    if agent is not None:
        with contextlib.suppress(errors.CovenantError):
            # A missing agent has no manifest; only a caller that may send to it learns that it is missing.
            manifest = server.agents.find(agent).digest
    await _require_peer(server, caller, "send", task.recipient, _facts_of_send(task, manifest))


async def require_still(server: Server, caller: Caller, task: A2ATask, manifest_sha256: str | None) -> None:
    """Repeat the check of ``require_send`` for the agent that will do the task. A success writes no row and does not
    wait.

    Raises:
        errors.CapabilityMissingError, errors.CapabilityScopeError: the sender no longer may.
    """
    facts = _facts_of_send(task, manifest_sha256)
    if _first_held(server, caller.agent.pubkey, _forms("send", task.recipient), facts) is None:
        await _require_peer(server, caller, "send", task.recipient, facts)


def lacks_send(server: Server, caller: Caller, task: A2ATask, manifest_sha256: str) -> str | None:
    """Return the action that the task needs and its sender no longer holds; None if it holds it."""
    forms, facts = _forms("send", task.recipient), _facts_of_send(task, manifest_sha256)
    return None if _first_held(server, caller.agent.pubkey, forms, facts) is not None else forms[1]


def _facts_of_send(task: A2ATask, manifest_sha256: str | None) -> authorization.RequestFacts:
    return authorization.RequestFacts(
        peer_pubkey_b58=task.recipient.pubkey, task_id=task.id, manifest_sha256=manifest_sha256
    )


async def _require_peer(
    server: Server, caller: Caller, verb: str, peer: AgentId, facts: authorization.RequestFacts
) -> None:
    action = _first_held(server, caller.agent.pubkey, _forms(verb, peer), facts) or _forms(verb, peer)[1]
    await authorization.require(server, caller, action, agent_id=AUTHORITY, facts=facts)


def _first_held(server: Server, pubkey: str, forms: Iterable[str], facts: authorization.RequestFacts) -> str | None:
    now_ms = server.now_ms()
    decided = (authorization.decide(server.capabilities, pubkey, action, facts, now_ms) for action in forms)
    return next((one.action for one in decided if one.grant is not None), None)


async def _check_recipient(server: Server, caller: Caller, task: A2ATask) -> None:
    """Require that the recipient is an agent of this host, or a peer that accepts tasks of the sender.

    Raises:
        errors.NoAgentError: it is an agent that is not there.
        errors.RecipientRejectedError: it has no grant of ``a2a.recv.<sender>``.
    """
    sender, recipient = task.sender, task.recipient
    agent = local_agent(recipient)
    if agent is not None:
        server.agents.find(agent)
    # With a peer's own key and another peer's name, the log would show the task as sent to that other peer.
    if sender == recipient or (agent is not None and caller.operator):
        return
    answers = server.identity.agent.pubkey if agent is not None else recipient.pubkey
    facts = authorization.RequestFacts(peer_pubkey_b58=sender.pubkey, task_id=task.id)
    now_ms = server.now_ms()
    for action in _forms("recv", sender):
        grant = authorization.decide(server.capabilities, answers, action, facts, now_ms).grant
        # A name that differs from the grant's is a mistake, or is meant to resemble another peer.
        if grant is not None and (agent is not None or grant.subject_display == recipient.display):
            return
    row = {
        "sender_display": sender.display,
        "recipient_display": recipient.display,
        "action": _forms("recv", sender)[1],
    }
    error = errors.RecipientRejectedError(
        f"`{recipient.display}` takes no tasks of `{sender.display}`",
        hint=f"it grants itself `{_forms('recv', sender)[1]}`",
    )
    await _refused(server, caller, "a2_a_recipient_rejected", row, error)
    raise error


async def _refused(
    server: Server, caller: Caller, kind: str, row: Mapping[str, object], error: errors.CovenantError
) -> None:
    await server.refusals.write(
        server.audit, caller, server.now_ms, [Row(kind, row, caller.agent)], (error.code, error.message)
    )


def _parties(entry: TaskEntry) -> tuple[str, str]:
    return entry.task.sender.pubkey, entry.task.recipient.pubkey


def _concerns(caller: Caller, entry: TaskEntry) -> bool:
    return caller.agent.pubkey in _parties(entry) or (caller.operator and local_agent(entry.task.recipient) is not None)


def seen(server: Server, caller: Caller, task_id: str) -> TaskEntry:
    """Return a task that the caller sent or is to receive under this id; for the operator also an agent's task, by the
    mailbox's name.

    Raises:
        errors.NoTaskError: there is none, or it is between others.
    """
    box, pubkey = server.mailbox, caller.agent.pubkey
    entry: TaskEntry | None = box.sent(pubkey, task_id) or box.given(pubkey, task_id)
    if entry is None and caller.operator:
        entry = box.get(task_id)
    if entry is None or not _concerns(caller, entry):
        # One error for both: the caller must not learn if others have such a task.
        raise _no_task(task_id)
    return entry


def _no_task(task_id: str) -> errors.NoTaskError:
    return errors.NoTaskError(f"there is no task `{task_id}` of yours", hint="covenant a2a status")


async def _reject(server: Server, caller: Caller, result: A2ATaskResult, reason: str) -> None:
    # Any peer may name a task that does not exist, in a text as long as a frame.
    row = {"task_id": result.task_id[:_SHOWN_ID], "reason": reason[:MOST_REASON]}
    rejected = Row("a2_a_result_rejected", row, caller.agent)
    await server.refusals.write(
        server.audit, caller, server.now_ms, [rejected], ("a2_a_result_rejected", row["reason"])
    )


def _matches(entry: TaskEntry, asked: requests.A2AQueue, now_ms: int) -> bool:
    if asked.state_filter is not None and entry.state != asked.state_filter:
        return False
    if asked.min_lease_age_ms is not None and (
        entry.lease is None or now_ms - entry.lease.at_ms < asked.min_lease_age_ms
    ):
        return False
    deadline = entry.task.deadline_ms
    return asked.deadline_within_ms is None or (deadline is not None and deadline - now_ms <= asked.deadline_within_ms)


def _results(entries: Iterable[TaskEntry], pubkey: str) -> Iterator[A2ATaskResult]:
    return (result for entry in entries if (result := entry.result_of(pubkey)) is not None)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


HANDLERS: Final[Mapping[str, Handler]] = {
    "send_a2_a_task": send_a2_a_task,
    "try_recv_a2_a_task": try_recv_a2_a_task,
    "post_a2_a_result": post_a2_a_result,
    "try_recv_a2_a_result": try_recv_a2_a_result,
    "recent_a2_a_tasks": recent_a2_a_tasks,
    "recent_a2_a_results": recent_a2_a_results,
    "a2_a_queue": a2_a_queue,
    "cancel_a2_a_task": cancel_a2_a_task,
}
