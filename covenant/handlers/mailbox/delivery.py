"""Deliver tasks to the agents of this host.

    mailbox ── lease ──> dispatch, as the task's sender ──> answer into the mailbox

A task is an intent of its sender: the sender's grants and the agent's budget decide, as when the sender submits it. For
a sender that is no longer admitted, queued tasks are cancelled at their turn and runs are ended. The lease belongs to
this process: when it is withdrawn, or the task is answered otherwise, the run is ended. The next start takes back tasks
that were leased when a daemon died. If the sender declared a task unsafe to repeat, the sender is told instead that it
may have been done.

The number of concurrent tasks of one sender is limited, so that the others get a share however much is queued.

This module also executes and logs the timed acts of the mailbox (deadlines, leases).
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import anyio
import anyio.abc

from covenant.handlers.caller import Caller
from covenant.handlers.intents import submit
from covenant.handlers.mailbox import repair
from covenant.handlers.mailbox import requests as mailbox_requests
from covenant.handlers.server import Server
from covenant.runtime.packages import Card
from covenant.stores.mailbox.interface import ATTEMPTS_EXHAUSTED, TaskEntry
from covenant.wire import parts, requests, responses
from covenant.wire.types import A2ATask, A2ATaskResult, AgentId
from policy import errors

_LOG: Final = logging.getLogger(__name__)

MOST: Final = 4
INTERRUPTED: Final = "interrupted"
SHOWN_OUT: Final = "its sender is let in no more"
# Events after which a peer may no longer be admitted.
_SHOWS_OUT: Final = frozenset({"peer_revoked", "peer_expired", "peers_purged"})
# The longest wait between checks; due work is done sooner.
LONGEST_WAIT: Final = 30.0
AFTER_A_FAILURE: Final = 1.0
_HALF: Final = 0.5
_COMPACT_EVERY_MS: Final = 3600 * 1000
# The time of a run outside its own clock: starting the sandbox and writing the answer.
_AROUND_MS: Final = 10 * 60 * 1000


class Delivery:
    """The running tasks and their limits. One per daemon; ``run`` is a task of its group.

    Args:
        most: the most concurrent tasks; half of them for one sender and three in four for all but the operator.
    """

    def __init__(self, server: Server, *, most: int = MOST) -> None:
        self._server = server
        self._most = most
        self._waiting: dict[str, str] = {}
        # Agents with waiting tasks whose senders have reached their limit.
        self._held_back: dict[str, str] = {}
        self._runs: dict[str, tuple[str, anyio.CancelScope]] = {}
        # The number of a sender's running tasks, by public key.
        self._of: Counter[str] = Counter()
        self._changed = anyio.Event()
        self._compacted_at_ms = 0
        self._shown_out = True

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Deliver tasks until cancelled; the runs end with it."""
        end = self._server.mailbox.watch(self._heard)
        self._server.audit.listen(self._read)
        try:
            await self._recover()
            async with anyio.create_task_group() as group:
                task_status.started()
                while True:
                    self._changed = anyio.Event()
                    try:
                        await self._tend()
                        await self._give_out(group)
                    except errors.CovenantError as e:
                        # A full disk, for example: due work stays due.
                        _LOG.error("the mailbox could not be tended: %s", e)
                        await anyio.sleep(AFTER_A_FAILURE)
                        self._changed.set()
                    with anyio.move_on_after(self._until_due()):
                        await self._changed.wait()
        finally:
            end()

    # --- what is due ------------------------------------------------------------------------------------------

    async def _tend(self) -> None:
        for ended in await self._server.mailbox.expire():
            row = {"task_id": ended.entry.task.id, "lease_id": ended.lease_id, "reason": ended.reason}
            await self._server.audit.append("a2_a_task_expired", row)
        await self._take_back()
        await self._make_room()

    async def _take_back(self) -> None:
        """Cancel tasks of senders that are no longer admitted: all after a peer was removed, otherwise only running
        ones."""
        box, every = self._server.mailbox, self._shown_out
        self._shown_out = False
        if every:
            found = [one for one in box.open_entries() if mailbox_requests.local_agent(one.task.recipient) is not None]
        else:
            found = [one for task_id in self._runs if (one := box.get(task_id)) is not None]
        try:
            for entry in found:
                if entry.open and not self._let_in(entry.task.sender):
                    await self._cancel(entry)
        except errors.CovenantError:
            self._shown_out = self._shown_out or every
            raise

    def _let_in(self, sender: AgentId) -> bool:
        return sender.pubkey == self._server.identity.agent.pubkey or bool(self._server.peers.of(sender.pubkey))

    async def _cancel(self, entry: TaskEntry) -> None:
        try:
            await self._server.mailbox.cancel(entry.task.id, reason=SHOWN_OUT)
        except errors.TaskStateError:
            return  # it was answered meanwhile
        row = {"task_id": entry.task.id, "reason": SHOWN_OUT}
        await self._server.audit.append("a2_a_task_cancelled", row)

    async def _make_room(self) -> None:
        """Compact automatically when the mailbox or a sender's part is half full. If that made no room, wait an
        hour."""
        server, box = self._server, self._server.mailbox
        now_ms = server.now_ms()
        if box.fullness() < _HALF or now_ms - self._compacted_at_ms < _COMPACT_EVERY_MS:
            return
        dropped = await box.compact()
        if box.fullness() >= _HALF:
            self._compacted_at_ms = now_ms
        await server.audit.append("a2_a_compacted", {"dropped": dropped})

    def _until_due(self) -> float:
        due_ms = self._server.mailbox.next_due_ms()
        return LONGEST_WAIT if due_ms is None else min(LONGEST_WAIT, max(0, due_ms - self._server.now_ms()) / 1000)

    async def _recover(self) -> None:
        """Take back the tasks that agents of this host had leased: no process works on them any more."""
        server = self._server
        for entry in server.mailbox.open_entries():
            agent = mailbox_requests.local_agent(entry.task.recipient)
            if agent is None:
                continue
            self._waiting[agent] = entry.task.recipient.pubkey
            if entry.lease is None:
                continue
            declared, held = entry.task.idempotency, entry.lease.id
            unsafe = declared is not None and declared.duplicate_safety == "unsafe"
            reason = "the daemon started again"
            if unsafe or entry.attempt >= server.mailbox.limits.max_attempts:
                message = INTERRUPTED if unsafe else ATTEMPTS_EXHAUSTED
                after = await server.mailbox.force_error(entry.task.id, message=message, reason=reason)
                await repair.write_repair(server, after, "force_error", reason, None, lease_id=held)
            else:
                after = await server.mailbox.requeue(entry.task.id, duplicate_risk=None, reason=reason, by="restart")
                await repair.write_repair(server, after, "requeue", reason, None, lease_id=held)

    def _heard(self, entry: TaskEntry) -> None:
        """Called with each changed entry: a task may be ready to lease, or a run to end."""
        agent = mailbox_requests.local_agent(entry.task.recipient)
        if agent is not None:
            self._waiting[agent] = entry.task.recipient.pubkey
        running = self._runs.get(entry.task.id)
        if running is not None and (entry.lease is None or entry.lease.id != running[0]):
            running[1].cancel()
        self._changed.set()

    def _read(self, event: parts.AuditEvent) -> None:
        if event.kind["type"] in _SHOWS_OUT:
            self._shown_out = True
            self._changed.set()

    # --- giving out -------------------------------------------------------------------------------------------

    async def _give_out(self, group: anyio.abc.TaskGroup) -> None:
        """Lease a task for each agent in turn, while there is room."""
        while self._waiting and len(self._runs) < self._most:
            agent, pubkey = next(iter(self._waiting.items()))
            del self._waiting[agent]
            try:
                entry = await self._server.mailbox.lease(pubkey, lease_ms=self._lease_ms(agent), of=self._may_have)
            except errors.CovenantError:
                # No task was leased and no other event will repeat this wake-up, so requeue the agent.
                self._waiting[agent] = pubkey
                raise
            if entry is None:
                self._held_back[agent] = pubkey
                continue
            # The agent queues behind the others: it may have more tasks.
            self._waiting[agent] = pubkey
            if not self._let_in(entry.task.sender):
                await self._cancel(entry)
                continue
            scope = anyio.CancelScope()
            assert entry.lease is not None
            self._runs[entry.task.id] = (entry.lease.id, scope)
            self._of[entry.task.sender.pubkey] += 1
            self._server.mailbox.running.add(entry.task.id)
            group.start_soon(self._deliver, entry, agent, scope)

    def _may_have(self, sender: str) -> bool:
        """Whether one more task of this sender may run."""
        operator = self._server.identity.agent.pubkey
        if sender == operator:
            return True
        others = self._of.total() - self._of[operator]
        return self._of[sender] < max(1, self._most // 2) and others < max(1, self._most * 3 // 4)

    def _lease_ms(self, agent: str) -> int:
        shortest = self._server.mailbox.limits.lease_ms
        try:
            card = self._server.agents.find(agent)
        except errors.CovenantError:
            return int(shortest)
        return int(max(shortest, card.manifest.resources.cpu_ms_per_task + _AROUND_MS))

    async def _deliver(self, entry: TaskEntry, agent: str, scope: anyio.CancelScope) -> None:
        task, server = entry.task, self._server
        assert entry.lease is not None
        with self._running(task), scope:
            try:
                await mailbox_requests.write_lease(server, entry, None)
                result = await _done(server, entry, agent)
                # From here on the change of the task is our own answer, which must not cancel this run.
                self._runs.pop(task.id, None)
                with anyio.CancelScope(shield=True):
                    await self._answer(result, entry.lease.id)
            except errors.CovenantError as e:
                # The task stays leased, and is taken back when the lease ends.
                _LOG.error("task %s of agent %s could not be answered: %s", task.id, agent, e)

    async def _answer(self, result: A2ATaskResult, lease_id: str) -> None:
        try:
            await self._server.mailbox.post(result, lease_id=lease_id)
        except (errors.TaskStateError, errors.LeaseMismatchError, errors.NoTaskError) as e:
            row = {"task_id": result.task_id, "reason": e.message}
            await self._server.audit.append("a2_a_result_rejected", row)
            return
        await mailbox_requests.write_result(self._server, result, None)

    @contextmanager
    def _running(self, task: A2ATask) -> Iterator[None]:
        try:
            yield
        finally:
            self._runs.pop(task.id, None)
            self._of -= Counter([task.sender.pubkey])
            self._waiting.update(self._held_back)
            self._held_back.clear()
            self._server.mailbox.running.discard(task.id)
            self._changed.set()


async def retry_on_schedule(server: Server, policy: parts.RetryPolicy, *, interval_ms: int) -> None:
    """Search for stale leases every ``interval_ms`` until cancelled. Each search writes a row."""
    while True:
        await anyio.sleep(interval_ms / 1000)
        try:
            report = await repair.retry(server, policy, None)
        except errors.CovenantError as e:
            report = parts.RetryReport(policy=policy, considered=0, error=e.message)
        try:
            await server.audit.append("a2_a_auto_retry_scheduler_scan", report.row())
        except errors.CovenantError as e:
            _LOG.error("a look for stale tasks is not in the log: %s", e)


async def _done(server: Server, entry: TaskEntry, agent: str) -> A2ATaskResult:
    """Execute a task as an intent of its sender, and return the result. The intent's key is derived from the task's id,
    so a daemon that dies between the run and the answer does not run it again."""
    task, name = entry.task_of(entry.task.sender.pubkey), entry.task.id
    sender = Caller(
        agent=task.sender,
        operator=task.sender.pubkey == server.identity.agent.pubkey,
        token_prefix="",
        transport="ipc",
    )
    asked = requests.SubmitIntent(text=task.intent_text, agent=agent, idempotency_key=_key(task.id))

    async def precondition(card: Card | None) -> None:
        # The intent may be routed to another agent than a moment ago.
        await mailbox_requests.require_still(server, sender, task, None if card is None else card.digest)

    def missing_grant(card: Card) -> str | None:
        return mailbox_requests.lacks_send(server, sender, task, card.digest)

    try:
        # The task may have waited long: check that its grant still holds, and for the agent that is installed now.
        await mailbox_requests.require_send(server, sender, task)
        answer = await submit.submit_intent(
            server, sender, asked, precondition=precondition, missing_grant=missing_grant
        )
    except errors.CovenantError as e:
        return A2ATaskResult(task_id=name, status="error", error_message=f"{e.code}: {e.message}")
    except Exception:
        _LOG.exception("task %s failed", name)
        return A2ATaskResult(task_id=name, status="error", error_message="internal: the daemon failed at this")
    if answer.status == "ignored":
        return A2ATaskResult(task_id=name, status="error", error_message="ignored: the text is on the ignore list")
    return A2ATaskResult(task_id=name, status="ok", content=_content(answer))


def _content(answer: responses.IntentResult) -> tuple[dict[str, object], ...]:
    """Return the answer as one block of text, and the other fields of the result in ``_meta``."""
    more = {
        "covenant/intent_id": answer.intent_id,
        "covenant/run_id": answer.run_id,
        "covenant/sources": list(answer.sources),
    }
    return ({"type": "text", "text": answer.text, "_meta": more},)


def _key(task_id: str) -> str:
    # A hash, because a task's id may be as long as a key may be.
    return f"a2a/{hashlib.sha256(task_id.encode()).hexdigest()}"
