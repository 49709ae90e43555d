"""The mailbox's state, built from the events of its file. No file, no clock, no randomness.

``emit`` applies an event and keeps its undo step, until ``settle`` (it is durable) or ``withdraw``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import assert_never

from covenant.stores.mailbox import events
from covenant.stores.mailbox.answers import Answers, Cached
from covenant.stores.mailbox.interface import Lease, Limits, State, TaskEntry
from covenant.stores.mailbox.queue import Key, Shelf
from covenant.wire.types import A2ATask, A2ATaskResult


class TaskBook(Shelf):
    """Every stored task, with its state and result."""

    def __init__(self, limits: Limits) -> None:
        super().__init__()
        self.limits = limits
        self.cache = Answers()
        # The number of events in a file that match no task.
        self.strays = 0
        self._turn = 0
        self._fresh: list[events.Event] = []
        self._touched: dict[str, None] = {}
        self._undo: list[Callable[[], None]] = []

    # --- units of work ----------------------------------------------------------------------------------

    def emit(self, event: events.Event) -> TaskEntry | None:
        """Apply an event that is to be written. Returns the changed entry."""
        self._fresh.append(event)
        return self.apply(event)

    def fresh(self) -> list[events.Event]:
        """Return the events to write, in order, once."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def settle(self) -> list[TaskEntry]:
        """Drop the undo steps: all events are durable. Returns the entries that changed."""
        self._undo.clear()
        touched, self._touched = self._touched, {}
        return [self.entries[name] for name in touched if name in self.entries]

    def withdraw(self) -> None:
        """Undo all events since the last ``settle``: none could be written."""
        while self._undo:
            self._undo.pop()()
        self._fresh.clear()
        self._touched.clear()

    # --- events -----------------------------------------------------------------------------------------

    def apply(self, event: events.Event) -> TaskEntry | None:
        """Apply an event. Returns the changed entry; None if no task matches, or the task's state does not fit."""
        match event:
            case events.TaskSent(task=task):
                return self._sent(event) if task.id not in self.entries else self._stray()
            case events.ResultCached():
                self._cached(event)
                return None
            case events.TaskReceived(task_id=name):
                return self._leased(name, f"v1-{name}", event.at_ms, None)
            case events.TaskLeased(task_id=name):
                return self._leased(name, event.lease_id, event.at_ms, event.lease_expires_at_ms)
            case events.TaskRequeued(task_id=name):
                return self._again(name, requeues=1 if event.by == "auto_retry" else 0)
            case events.TaskLeaseExpired(task_id=name):
                return self._again(name, requeues=0)
            case (
                events.TaskForceErrored(task_id=name, message=message)
                | events.TaskExpired(task_id=name, reason=message)
            ):
                return self._ended(failure(name, message), event.at_ms)
            case events.TaskCancelled(task_id=name):
                return self._ended(failure(name, "cancelled"), event.at_ms, State.RESOLVED)
            case events.ResultPosted(result=result) | events.ResultReplayed(result=result):
                return self._ended(result, event.at_ms)
            case events.ResultReceived(task_id=name):
                return self._fetched(name)
            case _ as never:
                assert_never(never)

    def _sent(self, event: events.TaskSent) -> TaskEntry:
        entry = TaskEntry(
            task=event.task,
            state=State.QUEUED,
            sent_at_ms=event.at_ms,
            turn=self._next(),
            attempt=event.attempt,
            requeues=event.requeues,
            size=size_of(event.task),
            sent_id=event.sent_id,
            given_id=event.given_id,
        )
        return self._change(event.task.id, entry)

    def _leased(self, name: str, lease_id: str, at_ms: int, expires_at_ms: int | None) -> TaskEntry | None:
        entry = self.entries.get(name)
        if entry is None or entry.state is not State.QUEUED:
            return self._stray()
        # Version 1's leases have no end; a lease without one would hold its task forever.
        end = at_ms + self.limits.lease_ms if expires_at_ms is None else expires_at_ms
        lease = Lease(lease_id, entry.task.recipient, at_ms, end)
        return self._change(name, replace(entry, state=State.IN_FLIGHT, lease=lease, attempt=entry.attempt + 1))

    def _again(self, name: str, *, requeues: int) -> TaskEntry | None:
        entry = self.entries.get(name)
        if entry is None or entry.state is not State.IN_FLIGHT:
            return self._stray()
        # The task queues behind the others: a task that always fails must not delay them.
        queued = replace(entry, state=State.QUEUED, lease=None, turn=self._next(), requeues=entry.requeues + requeues)
        return self._change(name, queued)

    def _ended(self, result: A2ATaskResult, at_ms: int, state: State = State.RESULT_PENDING) -> TaskEntry | None:
        entry = self.entries.get(result.task_id)
        if entry is None or not entry.open:
            return self._stray()
        size = entry.size + size_of(result)
        ended = replace(entry, state=state, lease=None, result=result, ended_at_ms=at_ms, turn=self._next(), size=size)
        return self._change(result.task_id, ended)

    def _fetched(self, name: str) -> TaskEntry | None:
        entry = self.entries.get(name)
        if entry is None or entry.state is not State.RESULT_PENDING:
            return self._stray()
        return self._change(name, replace(entry, state=State.RESOLVED))

    def _cached(self, event: events.ResultCached) -> None:
        key = Key(event.sender, event.recipient, event.what, event.key)
        self._cache(key, Cached(event.result, event.at_ms, size_of(event.result), self._next()))
        limits = self.limits
        while (many := len(self.cache) > limits.cached) or self.cache.size > limits.cached_size:
            self._cache(self.cache.first_to_go(by_count=many), None)

    def retime(self, name: str, now_ms: int) -> None:
        """Take the times of a task that are ahead of ``now_ms`` back to it."""
        entry = self.entries[name]
        lease, ended = entry.lease, entry.ended_at_ms
        if lease is not None and lease.at_ms > now_ms:
            lease = lease._replace(at_ms=now_ms, expires_at_ms=now_ms + max(0, lease.expires_at_ms - lease.at_ms))
        sent = min(entry.sent_at_ms, now_ms)
        self._change(
            name,
            replace(entry, sent_at_ms=sent, ended_at_ms=None if ended is None else min(ended, now_ms), lease=lease),
        )

    def forget(self, name: str) -> None:
        """Remove a task that is resolved."""
        self._change(name, None)

    def forget_cached(self, key: Key) -> None:
        """Remove an earlier answer."""
        self._cache(key, None)

    # --- what can be taken back -------------------------------------------------------------------------

    def _change(self, name: str, new: TaskEntry | None) -> TaskEntry:
        old = self.entries.get(name)
        self._undo.append(lambda: self.put(name, old))
        self._touched[name] = None
        self.put(name, new)
        return new  # type: ignore[return-value]  # None only from forget(), which does not look

    def _cache(self, key: Key, new: Cached | None) -> None:
        old = self.cache.get(key)
        self._undo.append(lambda: self.cache.put(key, old))
        self.cache.put(key, new)

    def _next(self) -> int:
        self._turn += 1
        return self._turn

    def _stray(self) -> TaskEntry | None:
        self.strays += 1
        return None


def size_of(document: A2ATask | A2ATaskResult) -> int:
    """Return the size in bytes of a task or a result as JSON."""
    return len(document.model_dump_json().encode())


def failure(task_id: str, message: str) -> A2ATaskResult:
    """Return the result of a task that the mailbox or a repair ended."""
    return A2ATaskResult(task_id=task_id, status="error", content=(), error_message=message)
