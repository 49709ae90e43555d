"""Mailbox repairs: sender and recipient put tasks back or end them; the operator retries stale leases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from covenant.handlers import paging
from covenant.handlers.access import authorization
from covenant.handlers.caller import Caller
from covenant.handlers.mailbox import requests as mailbox_requests
from covenant.handlers.server import Handler, Server
from covenant.stores.mailbox.interface import RetryRules, Skip, TaskEntry
from covenant.wire import parts, requests, responses
from covenant.wire.types import AgentId
from policy import errors

# Version 1's clients decode nine reasons only: the nearest of these.
_V1_REASONS: Final[Mapping[str, str]] = {
    Skip.DEADLINE_EXCEEDED: "max_attempts_reached",
    Skip.RUNNING: "lease_too_young",
    Skip.NO_KEY: "missing_idempotency",
}


async def repair_a2_a_task(server: Server, caller: Caller, asked: requests.RepairA2ATask) -> responses.A2ARepaired:
    """Put a leased task back, or end a task, at the request of its sender or recipient, with a reason."""
    order, command = asked.request, asked.request.command
    if not order.reason.strip() or len(order.reason) > mailbox_requests.MOST_REASON:
        raise errors.TaskInvalidError(
            f"a repair has a reason, of at most {mailbox_requests.MOST_REASON} characters", where="request.reason"
        )
    entry = mailbox_requests.seen(server, caller, order.task_id)
    other = entry.task.recipient if entry.task.sender.pubkey == caller.agent.pubkey else entry.task.sender
    risk = command.duplicate_risk.replace("_", "-") if isinstance(command, parts.Requeue) else None
    facts = authorization.RequestFacts(
        peer_pubkey_b58=other.pubkey, task_id=order.task_id, lease_id=command.lease_id, duplicate_risk=risk
    )
    await authorization.require(
        server, caller, f"a2a.repair.{command.action}", agent_id=mailbox_requests.AUTHORITY, facts=facts
    )
    held = command.lease_id or (entry.lease.id if entry.lease else None)
    if isinstance(command, parts.Requeue):
        after = await server.mailbox.requeue(
            entry.task.id, lease_id=command.lease_id, duplicate_risk=risk, reason=order.reason
        )
    else:
        after = await server.mailbox.force_error(
            entry.task.id, lease_id=command.lease_id, message=command.message, reason=order.reason
        )
    issuer, name = caller.agent, order.task_id
    await write_repair(server, after, command.action, order.reason, issuer, task_id=name, lease_id=held, risk=risk)
    done: Literal["requeued", "forced_error"] = "requeued" if isinstance(command, parts.Requeue) else "forced_error"
    return responses.A2ARepaired(outcome=_outcome(after, done, name, lease_id=held, risk=risk))


def _outcome(
    after: TaskEntry,
    action: Literal["requeued", "forced_error"],
    task_id: str,
    *,
    lease_id: str | None = None,
    risk: str | None = None,
) -> parts.A2ARepairOutcome:
    """Return the task after a repair, under the id that the caller uses for it."""
    result = None if after.result is None else after.result.model_copy(update={"task_id": task_id})
    return parts.A2ARepairOutcome(
        task_id=task_id,
        action=action,
        state=after.state.value,
        result=result,
        lease_id=lease_id,
        duplicate_risk=risk,
        attempt=after.attempt,
    )


async def retry_a2_a_stale(server: Server, caller: Caller, asked: requests.RetryA2AStale) -> responses.A2AAutoRetried:
    """Put stale leases back, for the operator; unless the policy is enabled, only report them."""
    await authorization.require_operator(server, caller, None, "retry stale tasks")
    if asked.policy.enabled:
        facts = authorization.RequestFacts(duplicate_risk="idempotent")
        await authorization.require(
            server, caller, "a2a.repair.requeue", agent_id=mailbox_requests.AUTHORITY, facts=facts
        )
    return responses.A2AAutoRetried(report=await retry(server, asked.policy, caller.agent))


async def retry(server: Server, policy: parts.RetryPolicy, issuer: AgentId | None) -> parts.RetryReport:
    """Search once for stale leases. A disabled policy changes nothing and counts them as ``disabled``."""
    rules = RetryRules(policy.min_lease_age_ms, policy.max_attempts, policy.max_requeues, policy.scan_limit)
    done = await server.mailbox.retry_stale(rules, apply=policy.enabled, running=server.mailbox.running)
    reasons = {str(reason): count for reason, count in sorted(done.skipped.items())}
    if policy.enabled:
        for entry in done.requeued:
            await write_repair(server, entry, "auto_requeue", "stale lease", issuer, risk="idempotent")
    elif done.requeued:
        reasons["disabled"] = len(done.requeued)
    requeued = [_requeued(entry, lease) for entry, lease in zip(done.requeued, done.leases, strict=True)]
    skipped = [_skipped(entry, why) for entry, why in done.passed]
    if not policy.enabled:
        skipped += [_skipped(entry, "disabled") for entry in done.requeued]
    return parts.RetryReport(
        policy=policy,
        considered=done.considered,
        requeued=paging.that_fit(requeued, paging.ROOM // 2) if policy.enabled else (),
        skipped=paging.that_fit(skipped, paging.ROOM // 2),
        skipped_by_reason=reasons,
    )


def _requeued(entry: TaskEntry, lease_id: str) -> parts.RetryRequeued:
    declared = entry.task.idempotency
    # A task that did not declare a key is skipped.
    assert declared is not None
    return parts.RetryRequeued(
        task_id=entry.task.id, lease_id=lease_id, attempt=entry.attempt, idempotency_key=declared.key
    )


def _skipped(entry: TaskEntry, why: str) -> parts.RetrySkip:
    known = _V1_REASONS.get(why)
    about = {"reason": why} if known is None else {"reason": known, "detail": why}
    return parts.RetrySkip(task_id=entry.task.id, attempt=entry.attempt, **about)  # type: ignore[arg-type]


async def compact_a2_a(server: Server, caller: Caller, asked: requests.CompactA2A) -> responses.A2ACompacted:
    """Remove finished tasks."""
    await authorization.require(server, caller, "a2a.compact", agent_id=mailbox_requests.AUTHORITY)
    dropped = await server.mailbox.compact()
    await server.audit.append("a2_a_compacted", {"dropped": dropped}, caller.agent)
    return responses.A2ACompacted(dropped=dropped)


async def write_repair(
    server: Server,
    entry: TaskEntry,
    action: str,
    reason: str,
    issuer: AgentId | None,
    *,
    task_id: str | None = None,
    lease_id: str | None = None,
    risk: str | None = None,
) -> None:
    """Write the row of a repair, under the id that its issuer uses for the task."""
    row = {
        "task_id": entry.task.id if task_id is None else task_id,
        "action": action,
        "reason": reason,
        "lease_id": lease_id,
        "duplicate_risk": risk,
        "attempt": entry.attempt,
    }
    await server.audit.append("a2_a_repair_applied", row, issuer)


HANDLERS: Final[Mapping[str, Handler]] = {
    "repair_a2_a_task": repair_a2_a_task,
    "retry_a2_a_stale": retry_a2_a_stale,
    "compact_a2_a": compact_a2_a,
}
