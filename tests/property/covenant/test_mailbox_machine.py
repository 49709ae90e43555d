"""Run random sequences of operations on the mailbox and compare it with a small model of each task.

A task is leased to one recipient at a time, it is answered once, and its answer is delivered once. A restart or a
compaction changes none of this.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import anyio.from_thread
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from covenant.stores.mailbox.durable import DurableMailbox
from covenant.stores.mailbox.interface import Limits, RetryRules, State, TaskEntry
from covenant.wire.types import A2ATask, A2ATaskResult, AgentId, Idempotency
from policy import errors

PEERS = [AgentId(display=f"{name}@local", pubkey=name.upper() * 43) for name in ("a", "b", "c")]
NOW = 1_790_000_000_000
LEASE_MS = 1000
T = TypeVar("T")


@dataclass
class Known:
    """The model's record of one task: ``sent`` as the sender knows it, ``given`` the id that the recipient has."""

    task: A2ATask
    sent: A2ATask
    given: str
    leases: int = 0
    lease_id: str | None = None
    ends_at: int = 0
    answer: A2ATaskResult | None = None
    fetched: bool = False


class Full:
    """A journal whose disk refuses every write."""

    def __init__(self, kept: Any) -> None:
        self.kept = kept

    async def append_all(self, lines: Any) -> None:
        if lines:
            raise errors.StoreFullError("no room")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kept, name)


class Mailbox(RuleBasedStateMachine):
    """One home, three peers, and a clock."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.portal_context = anyio.from_thread.start_blocking_portal()
        self.portal = self.portal_context.__enter__()
        self.now = NOW
        self.known: dict[str, Known] = {}
        self.given: set[str] = set()
        self.limits = Limits(lease_ms=LEASE_MS, max_attempts=3, cached=2, unfetched_ms=10**9, undelivered_ms=10**9)
        self.box = self.do(self.opened())

    async def opened(self) -> DurableMailbox:
        return await DurableMailbox.open(Path(self.folder.name), now_ms=lambda: self.now, limits=self.limits)

    def do(self, act: Coroutine[Any, Any, T]) -> T:
        async def done() -> T:
            return await act

        return self.portal.call(done)

    def teardown(self) -> None:
        self.do(self.box.close())
        self.portal_context.__exit__(None, None, None)
        self.folder.cleanup()

    def look(self) -> None:
        """Update the model with changes that the mailbox makes by itself, and check that its rules allow each one."""
        self.do(self.box.expire())
        for name, known in self.known.items():
            entry = self.box.get(name)
            if entry is None:
                continue
            if entry.result is not None and known.answer is None:
                late = known.task.deadline_ms is not None and self.now > known.task.deadline_ms
                reason = entry.result.error_message
                if reason == "deadline_exceeded":
                    assert late
                elif reason == "attempts_exhausted":
                    assert known.leases >= self.limits.max_attempts
                    assert self.now >= known.ends_at
                else:
                    # an earlier answer to the same
                    assert known.task.idempotency is not None
                    assert entry.result.status == "ok"
                known.answer = entry.result
            if entry.state is State.QUEUED and known.lease_id is not None:
                assert self.now >= known.ends_at
                known.lease_id = None

    @rule(
        n=st.integers(0, 30),
        sender=st.sampled_from(PEERS),
        recipient=st.sampled_from(PEERS),
        deadline=st.none() | st.integers(-1, 3000),
        declared=st.sampled_from([None, ("unsafe", "k"), ("idempotent", "k"), ("idempotent", "l"), ("idempotent", "")]),
    )
    def send(
        self, n: int, sender: AgentId, recipient: AgentId, deadline: int | None, declared: tuple[Any, str] | None
    ) -> None:
        name = f"t{n}"
        task = A2ATask(
            id=name,
            sender=sender,
            recipient=recipient,
            intent_text="x",
            deadline_ms=None if deadline is None else self.now + deadline,
            idempotency=Idempotency(duplicate_safety=declared[0], key=declared[1]) if declared else None,
        )
        mine = [known for known in self.known.values() if known.sent.id == name and known.sent.sender == sender]
        known = next(iter(mine), None)
        if known is not None and known.sent != task:
            try:
                self.do(self.box.send(task))
            except errors.TaskExistsError:
                return
            raise AssertionError("two tasks of one sender have one id")
        # Tasks of other senders make no difference to this sender.
        entry, outcome = self.do(self.box.send(task))
        assert (outcome == "known") == (known is not None)
        assert entry.task_of(sender.pubkey) == task
        if known is not None:
            return
        assert entry.task.id not in self.known
        has = {known.given for known in self.known.values() if known.task.recipient == recipient}
        assert (entry.id_of_recipient == name) == (name not in has)
        assert entry.id_of_recipient not in has
        self.known[entry.task.id] = Known(entry.task, task, entry.id_of_recipient)
        self.look()

    @rule(recipient=st.sampled_from(PEERS), length=st.sampled_from([LEASE_MS, 10, 5000]))
    def lease(self, recipient: AgentId, length: int) -> None:
        self.look()
        entry = self.do(self.box.lease(recipient.pubkey, lease_ms=length))
        if entry is None:
            waiting = [known for known in self.known.values() if self.leasable(known, recipient)]
            assert waiting == []
            return
        known = self.known[entry.task.id]
        assert self.leasable(known, recipient)
        assert entry.lease is not None
        assert entry.lease.id not in self.given
        self.given.add(entry.lease.id)
        known.leases += 1
        assert entry.attempt == known.leases
        known.lease_id, known.ends_at = entry.lease.id, self.now + length

    def leasable(self, known: Known, recipient: AgentId) -> bool:
        if known.task.recipient != recipient or known.answer is not None or known.lease_id is not None:
            return False
        declared = known.task.idempotency
        if declared is None or declared.duplicate_safety != "idempotent" or not declared.key:
            return True
        return not any(
            other.lease_id is not None
            and other.answer is None
            and (other.task.sender, other.task.recipient, other.task.idempotency)
            == (known.task.sender, known.task.recipient, declared)
            for other in self.known.values()
        )

    @precondition(lambda self: self.known)
    @rule(data=st.data(), status=st.sampled_from(["ok", "ok", "error", "partial"]), named=st.booleans(), text=st.text())
    def post(self, data: st.DataObject, status: Any, named: bool, text: str) -> None:
        self.look()
        name = data.draw(st.sampled_from(sorted(self.known)))
        known = self.known[name]
        result = A2ATaskResult(task_id=name, status=status, content=({"type": "text", "text": text},))
        lease_id = (known.lease_id or "none") if named else None
        may = known.answer is None and known.leases > 0 and (lease_id is None or known.lease_id is not None)
        self.attempt(name, may, self.box.post(result, lease_id=lease_id), result)
        self.look()

    def attempt(self, name: str, may: bool, act: Coroutine[Any, Any, TaskEntry], answer: A2ATaskResult | None) -> None:
        known = self.known[name]
        try:
            entry = self.do(act)
        except (errors.TaskStateError, errors.LeaseMismatchError, errors.NoTaskError, errors.TaskInvalidError):
            assert not may
            return
        assert may
        known.lease_id = None
        if entry.result is not None:
            known.answer = entry.result
            assert answer is None or entry.result == answer

    @precondition(lambda self: self.known)
    @rule(data=st.data(), act=st.sampled_from(["requeue", "force_error", "cancel"]))
    def repair(self, data: st.DataObject, act: str) -> None:
        self.look()
        name = data.draw(st.sampled_from(sorted(self.known)))
        known = self.known[name]
        if act == "requeue":
            may = known.answer is None and known.lease_id is not None
            self.attempt(name, may, self.box.requeue(name, duplicate_risk="operator-accepted", reason="r"), None)
        elif act == "force_error":
            self.attempt(name, known.answer is None, self.box.force_error(name, message="m", reason="r"), None)
        else:
            self.attempt(name, known.answer is None, self.box.cancel(name, reason="r"), None)
            known.fetched = known.fetched or (known.answer is not None and known.answer.error_message == "cancelled")

    @rule(sender=st.sampled_from(PEERS))
    def take(self, sender: AgentId) -> None:
        self.look()
        answer = self.do(self.box.take_result(sender.pubkey))
        waiting = [
            known for known in self.known.values() if known.task.sender == sender and known.answer and not known.fetched
        ]
        if answer is None:
            assert waiting == []
            return
        known = next(known for known in waiting if known.sent.id == answer.task_id)
        assert known.answer is not None
        assert known.answer.model_copy(update={"task_id": answer.task_id}) == answer
        known.fetched = True

    @rule(ms=st.sampled_from([1, 10, 500, 1000, 5000]))
    def wait(self, ms: int) -> None:
        self.now += ms

    @rule(age=st.sampled_from([0, 500]))
    def retry(self, age: int) -> None:
        self.look()
        done = self.do(self.box.retry_stale(RetryRules(min_lease_age_ms=age), apply=True))
        for entry in done.requeued:
            known = self.known[entry.task.id]
            assert known.lease_id is not None
            assert known.task.idempotency is not None
            assert known.task.idempotency.duplicate_safety == "idempotent"
            known.lease_id = None

    @rule(compact=st.booleans())
    def restart(self, compact: bool) -> None:
        if compact:
            self.do(self.box.compact())
            self.look()
            gone = {name for name in self.known if self.box.get(name) is None}
            assert all(self.known[name].fetched for name in gone)
            for name in gone:
                del self.known[name]
        self.do(self.box.close())
        self.box = self.do(self.opened())
        assert self.box.recovered == []

    @precondition(lambda self: self.known)
    @rule(data=st.data(), peer=st.sampled_from(PEERS), act=st.sampled_from(["lease", "take", "post", "cancel", "send"]))
    def full_disk(self, data: st.DataObject, peer: AgentId, act: str) -> None:
        """An operation that cannot be written to disk has no effect."""
        self.look()
        before = {name: self.box.get(name) for name in self.known}, self.box.open_entries(), self.box.fullness()
        name = data.draw(st.sampled_from(sorted(self.known)))
        same = Idempotency(duplicate_safety="idempotent", key="k")
        acts: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
            "lease": lambda: self.box.lease(peer.pubkey),
            "take": lambda: self.box.take_result(peer.pubkey),
            "post": lambda: self.box.post(A2ATaskResult(task_id=name, status="ok")),
            "cancel": lambda: self.box.cancel(name, reason="r"),
            "send": lambda: self.box.send(
                A2ATask(id="new", sender=peer, recipient=peer, intent_text="x", idempotency=same)
            ),
        }
        kept = self.box._journal
        self.box._journal = Full(kept)  # type: ignore[assignment]
        try:
            answer = self.do(acts[act]())
        except errors.CovenantError:
            pass
        else:
            assert answer is None
        finally:
            self.box._journal = kept
        after = {name: self.box.get(name) for name in self.known}, self.box.open_entries(), self.box.fullness()
        assert after == before
        assert self.box.get("new") is None

    @invariant()
    def nothing_is_lost_and_nothing_is_answered_twice(self) -> None:
        for name, known in self.known.items():
            entry = self.box.get(name)
            assert entry is not None
            assert self.box.sent(known.sent.sender.pubkey, known.sent.id) == entry
            assert self.box.given(known.sent.recipient.pubkey, known.given) == entry
            if known.answer is not None:
                assert entry.result == known.answer
                assert (entry.state is State.RESOLVED) == known.fetched


Mailbox.TestCase.settings = settings(
    max_examples=25, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestMailbox = Mailbox.TestCase
