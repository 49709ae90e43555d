"""The mailbox without a disk: the rules applied to a book."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import TypeVar

from covenant.stores.mailbox import transitions
from covenant.stores.mailbox.book import TaskBook
from covenant.stores.mailbox.interface import Ended, Limits, Retried, RetryRules, Sent, State, TaskEntry
from covenant.wire.types import A2ATask, A2ATaskResult

T = TypeVar("T")


class InMemoryMailbox:
    """A mailbox that ends with its process. ``DurableMailbox`` adds a file to it."""

    def __init__(self, *, now_ms: Callable[[], int], limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.running: set[str] = set()
        self._now = now_ms
        self._book = TaskBook(self.limits)
        self._ended: list[Ended] = []
        self._watchers: list[Callable[[TaskEntry], None]] = []

    async def _do(self, act: Callable[[], T]) -> T:
        """Expire due tasks and leases, then run one act."""
        try:
            return self._act(act)
        finally:
            self._book.fresh()
            self._done()

    def _act(self, act: Callable[[], T]) -> T:
        self._ended += transitions.expire(self._book, self._now())
        return act()

    def _done(self) -> None:
        """Settle the emitted events, and notify the watchers."""
        self._tell(self._book.settle())

    def _tell(self, entries: Sequence[TaskEntry]) -> None:
        for entry in entries:
            for called in list(self._watchers):
                called(entry)

    async def send(self, task: A2ATask) -> Sent:
        """See the interface, here and below."""
        name = str(uuid.uuid4())
        return await self._do(lambda: transitions.send(self._book, task, self._now(), other_id=name))

    async def lease(
        self, recipient: str, *, lease_ms: int | None = None, of: Callable[[str], bool] = transitions.anybody
    ) -> TaskEntry | None:
        """Lease the longest waiting task."""
        length = self.limits.lease_ms if lease_ms is None else lease_ms
        name = str(uuid.uuid4())
        return await self._do(
            lambda: transitions.lease(self._book, recipient, self._now(), lease_id=name, lease_ms=length, of=of)
        )

    async def post(self, result: A2ATaskResult, *, lease_id: str | None = None) -> TaskEntry:
        """Answer an open task."""
        return await self._do(lambda: transitions.post(self._book, result, self._now(), lease_id=lease_id))

    async def take_result(self, sender: str) -> A2ATaskResult | None:
        """Return the oldest answer that the sender has not fetched."""
        return await self._do(lambda: transitions.take_result(self._book, sender, self._now()))

    async def requeue(
        self, task_id: str, *, lease_id: str | None = None, duplicate_risk: str | None, reason: str, by: str = "repair"
    ) -> TaskEntry:
        """Put a leased task back."""
        act = partial(transitions.requeue, lease_id=lease_id, duplicate_risk=duplicate_risk, reason=reason, by=by)
        return await self._do(lambda: act(self._book, task_id, self._now()))

    async def force_error(self, task_id: str, *, lease_id: str | None = None, message: str, reason: str) -> TaskEntry:
        """End an open task with an error."""
        act = partial(transitions.force_error, lease_id=lease_id, message=message, reason=reason)
        return await self._do(lambda: act(self._book, task_id, self._now()))

    async def cancel(self, task_id: str, *, reason: str) -> TaskEntry:
        """Cancel an open task."""
        return await self._do(lambda: transitions.cancel(self._book, task_id, self._now(), reason=reason))

    async def retry_stale(self, rules: RetryRules, *, apply: bool, running: Container[str] = ()) -> Retried:
        """Put stale leases of idempotent tasks back."""
        act = partial(transitions.retry_stale, apply=apply, running=running)
        return await self._do(lambda: act(self._book, rules, self._now()))

    async def expire(self) -> Sequence[Ended]:
        """Expire due tasks and leases."""
        await self._do(lambda: None)
        ended, self._ended = self._ended, []
        return ended

    async def compact(self) -> int:
        """Remove finished tasks."""
        return len(await self._do(lambda: transitions.compact(self._book, self._now())))

    async def set_clock(self, now_ms: int) -> None:
        """Take times that are ahead of ``now_ms`` back to it."""
        await self._do(lambda: transitions.set_clock(self._book, now_ms))

    def get(self, task_id: str) -> TaskEntry | None:
        """Return the entry of a task."""
        return self._book.entries.get(task_id)

    def sent(self, pubkey: str, task_id: str) -> TaskEntry | None:
        """Return the entry that the key sent under this id."""
        return self._book.sent(pubkey, task_id)

    def given(self, pubkey: str, task_id: str) -> TaskEntry | None:
        """Return the entry that the key receives under this id."""
        return self._book.given(pubkey, task_id)

    def recent(self, pubkey: str, limit: int) -> list[TaskEntry]:
        """Return the newest entries of a key, newest first."""
        return [entry for entry, _ in zip(self._book.newest_of(pubkey), range(limit), strict=False)]

    def answered(self, pubkey: str, limit: int) -> list[TaskEntry]:
        """Return the newest answers of a key, newest first."""
        ended = [entry for entry in self._book.newest_of(pubkey) if entry.result is not None]
        return sorted(ended, key=lambda entry: -entry.turn)[:limit]

    def open_entries(self, pubkey: str | None = None) -> list[TaskEntry]:
        """Return the open entries, oldest first."""
        entries = self._book.entries.values() if pubkey is None else self._book.newest_of(pubkey)
        return sorted((entry for entry in entries if entry.open), key=lambda entry: entry.turn)

    def unfetched(self, pubkey: str) -> list[TaskEntry]:
        """Return the answers that wait for the sender, oldest first."""
        mine = (entry for entry in self._book.newest_of(pubkey) if entry.task.sender.pubkey == pubkey)
        return sorted((one for one in mine if one.state is State.RESULT_PENDING), key=lambda entry: entry.turn)

    def fullness(self) -> float:
        """Return the used share of the mailbox, or of the most active sender's part, whichever is more."""
        tasks, size = self._book.most_held()
        limits = self.limits
        of_all = max(len(self._book.entries) / limits.entries, self._book.size / limits.size)
        return max(of_all, tasks / limits.of_sender, size / limits.size_of_sender)

    def next_due_ms(self) -> int | None:
        """Return the time at which ``expire`` next has work."""
        return self._book.next_due_ms()

    def watch(self, called: Callable[[TaskEntry], None]) -> Callable[[], None]:
        """Call ``called`` with each changed entry, until the returned function is called."""
        self._watchers.append(called)
        return lambda: self._watchers.remove(called)

    async def close(self) -> None:
        """Do nothing: no writes are queued."""
