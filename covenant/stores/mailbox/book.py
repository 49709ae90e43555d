"""What the mailbox holds, as the events of its file make it. No file, no clock, no randomness.

``emit`` applies an event and remembers how to take it back, until ``settle`` (it is durable) or ``withdraw``.
The indices make every act independent of how much the mailbox holds.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple, TypeVar, assert_never

from covenant.stores.mailbox import events
from covenant.stores.mailbox.interface import Entry, Lease, Limits, State
from covenant.wire.types import A2ATask, A2ATaskResult

K = TypeVar("K")


class Key(NamedTuple):
    """Which tasks are the same: who asks whom for what, under the key that the sender gave."""

    sender: str
    recipient: str
    what: str
    key: str

    @classmethod
    def of(cls, task: A2ATask) -> Key | None:
        """The key of a task that declared itself idempotent."""
        declared = task.idempotency
        if declared is None or declared.duplicate_safety != "idempotent" or not declared.key:
            return None
        return cls(task.sender.pubkey, task.recipient.pubkey, task.task_kind or task.intent_text, declared.key)


class Cached(NamedTuple):
    """An earlier answer, and since when."""

    result: A2ATaskResult
    at_ms: int


class Book:
    """Every task that is kept, with what became of it."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.entries: dict[str, Entry] = {}
        self.cache: dict[Key, Cached] = {}
        # Events of a file that name no task that they could be about.
        self.strays = 0
        # The bytes of all tasks and results.
        self.size = 0
        self._turn = 0
        self._waiting: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
        self._unfetched: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
        self._open: dict[str, int] = {}
        self._busy: dict[Key, int] = {}
        self._peers: defaultdict[str, dict[str, None]] = defaultdict(dict)
        self._same: defaultdict[Key, dict[str, None]] = defaultdict(dict)
        self._due: list[tuple[int, str]] = []
        self._fresh: list[events.Event] = []
        self._touched: dict[str, None] = {}
        self._undo: list[Callable[[], None]] = []

    # --- units of work ----------------------------------------------------------------------------------

    def emit(self, event: events.Event) -> Entry | None:
        """Apply an event that is to be written; the entry as it is now."""
        self._fresh.append(event)
        return self.apply(event)

    def fresh(self) -> list[events.Event]:
        """What is to be written, in its order; asked for once."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def settle(self) -> list[Entry]:
        """All of it is durable; the entries that changed."""
        self._undo.clear()
        touched, self._touched = self._touched, {}
        return [self.entries[name] for name in touched if name in self.entries]

    def withdraw(self) -> None:
        """None of it could be written: be as before."""
        while self._undo:
            self._undo.pop()()
        self._fresh.clear()
        self._touched.clear()

    # --- events -----------------------------------------------------------------------------------------

    def apply(self, event: events.Event) -> Entry | None:
        """The change that an event is; None where it is about no task, or about one that is not as it needs."""
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

    def _sent(self, event: events.TaskSent) -> Entry:
        entry = Entry(
            task=event.task,
            state=State.QUEUED,
            sent_at_ms=event.at_ms,
            turn=self._next(),
            attempt=event.attempt,
            requeues=event.requeues,
            size=size_of(event.task),
        )
        return self._put(event.task.id, entry)

    def _leased(self, name: str, lease_id: str, at_ms: int, expires_at_ms: int | None) -> Entry | None:
        entry = self.entries.get(name)
        if entry is None or entry.state is not State.QUEUED:
            return self._stray()
        # Version 1's leases have no end; a lease that has none would hold its task for good.
        end = at_ms + self.limits.lease_ms if expires_at_ms is None else expires_at_ms
        lease = Lease(lease_id, entry.task.recipient, at_ms, end)
        return self._put(name, replace(entry, state=State.IN_FLIGHT, lease=lease, attempt=entry.attempt + 1))

    def _again(self, name: str, *, requeues: int) -> Entry | None:
        entry = self.entries.get(name)
        if entry is None or entry.state is not State.IN_FLIGHT:
            return self._stray()
        # Behind the others: one that is never done must not keep them from their turn.
        queued = replace(entry, state=State.QUEUED, lease=None, turn=self._next(), requeues=entry.requeues + requeues)
        return self._put(name, queued)

    def _ended(self, result: A2ATaskResult, at_ms: int, state: State = State.RESULT_PENDING) -> Entry | None:
        entry = self.entries.get(result.task_id)
        if entry is None or not entry.open:
            return self._stray()
        size = entry.size + size_of(result)
        ended = replace(entry, state=state, lease=None, result=result, ended_at_ms=at_ms, turn=self._next(), size=size)
        return self._put(result.task_id, ended)

    def _fetched(self, name: str) -> Entry | None:
        entry = self.entries.get(name)
        if entry is None or entry.state is not State.RESULT_PENDING:
            return self._stray()
        return self._put(name, replace(entry, state=State.RESOLVED))

    def _cached(self, event: events.ResultCached) -> None:
        key = Key(event.sender, event.recipient, event.what, event.key)
        self._cache(key, Cached(event.result, event.at_ms))
        while len(self.cache) > self.limits.cached:
            self._cache(next(iter(self.cache)), None)

    def forget(self, name: str) -> None:
        """Take a task out that is done with."""
        self._put(name, None)

    def forget_cached(self, key: Key) -> None:
        """Take an earlier answer out."""
        self._cache(key, None)

    # --- questions --------------------------------------------------------------------------------------

    def first_waiting(self, recipient: str) -> Entry | None:
        """The task of the recipient that waits longest."""
        return self._first(self._waiting, recipient, State.QUEUED)

    def first_unfetched(self, sender: str) -> Entry | None:
        """The oldest answer that the sender has not had."""
        return self._first(self._unfetched, sender, State.RESULT_PENDING)

    def open_of(self, recipient: str) -> int:
        """How many open tasks a recipient has."""
        return self._open.get(recipient, 0)

    def same(self, key: Key) -> list[Entry]:
        """The open tasks that are the same."""
        return [self.entries[name] for name in self._same.get(key, ())]

    def newest_of(self, pubkey: str) -> Iterator[Entry]:
        """What the key sent or is to receive, newest first."""
        for name in reversed(self._peers.get(pubkey, {})):
            yield self.entries[name]

    def due(self, now_ms: int) -> Iterator[Entry]:
        """The open tasks with a deadline or a lease that is over. Each is to be dealt with before the next is asked
        for, or comes again at the next call only."""
        left = []
        while self._due and self._due[0][0] <= now_ms:
            _, name = heapq.heappop(self._due)
            entry = self.entries.get(name)
            if entry is not None and (moment := self._moment(entry)) is not None:
                if moment > now_ms:
                    left.append((moment, name))
                else:
                    yield entry
        for item in left:
            heapq.heappush(self._due, item)

    def next_due_ms(self) -> int | None:
        """When the first of them is over, or a little before."""
        while self._due:
            moment, name = self._due[0]
            entry = self.entries.get(name)
            if entry is not None and self._moment(entry) == moment:
                return moment
            heapq.heappop(self._due)
        return None

    # --- the indices ------------------------------------------------------------------------------------

    def _put(self, name: str, new: Entry | None) -> Entry:
        old = self.entries.get(name)
        self._undo.append(lambda: self._set(name, old))
        self._touched[name] = None
        self._set(name, new)
        return new  # type: ignore[return-value]  # None only from forget(), which does not look

    def _set(self, name: str, new: Entry | None) -> None:
        old = self.entries.get(name)
        self.size += (new.size if new else 0) - (old.size if old else 0)
        if new is None:
            if old is not None:
                self._take_out(old)
            return
        self.entries[name] = new
        task = new.task
        if old is None:
            self._peers[task.sender.pubkey][name] = None
            self._peers[task.recipient.pubkey][name] = None
        self._count(task, old, new)
        if (moment := self._moment(new)) is not None:
            heapq.heappush(self._due, (moment, name))
        if new.state is State.RESULT_PENDING:
            heapq.heappush(self._unfetched[task.sender.pubkey], (new.turn, name))
        elif new.state is State.QUEUED:
            self._offer(new)

    def _take_out(self, old: Entry) -> None:
        task = old.task
        del self.entries[task.id]
        self._count(task, old, None)
        for pubkey in (task.sender.pubkey, task.recipient.pubkey):
            self._peers[pubkey].pop(task.id, None)
            if not self._peers[pubkey]:
                del self._peers[pubkey]

    def _count(self, task: A2ATask, old: Entry | None, new: Entry | None) -> None:
        """Keep the numbers of what is open and in flight, and let whoever waited for the same go next."""
        was, now = old is not None and old.open, new is not None and new.open
        _add(self._open, task.recipient.pubkey, now - was)
        key = Key.of(task)
        if key is None:
            return
        _add(self._busy, key, _in_flight(new) - _in_flight(old))
        if now:
            self._same[key][task.id] = None
        elif was:
            self._same[key].pop(task.id, None)
            if not self._same[key]:
                del self._same[key]
        first = self._first_of(key)
        if first is not None:
            self._offer(first)

    def _first_of(self, key: Key) -> Entry | None:
        """The first open task of those that are the same."""
        name = next(iter(self._same.get(key, ())), None)
        return None if name is None else self.entries.get(name)

    def _offer(self, entry: Entry) -> None:
        """Let a task that waits be given out, if it may."""
        if entry.state is State.QUEUED and self._may_go(entry):
            heapq.heappush(self._waiting[entry.task.recipient.pubkey], (entry.turn, entry.task.id))

    def _may_go(self, entry: Entry) -> bool:
        """Of those that are the same the first goes, and only while none of them is in flight."""
        key = Key.of(entry.task)
        return key is None or (key not in self._busy and self._first_of(key) is entry)

    def _moment(self, entry: Entry) -> int | None:
        """When something is to be done about an entry: its deadline has passed, or its lease may be taken back."""
        if not entry.open:
            return None
        # A deadline is the last moment at which the task may be done, a lease ends at its own.
        moments = [] if entry.task.deadline_ms is None else [entry.task.deadline_ms + 1]
        if entry.lease is not None and may_repeat(entry):
            moments.append(entry.lease.expires_at_ms)
        return min(moments, default=None)

    def _first(self, heaps: dict[str, list[tuple[int, str]]], pubkey: str, state: State) -> Entry | None:
        heap = heaps.get(pubkey)
        while heap:
            turn, name = heap[0]
            entry = self.entries.get(name)
            is_it = entry is not None and entry.state is state and entry.turn == turn
            # One that may not go now is offered again when what it waits for has changed.
            if entry is not None and is_it and (state is State.RESULT_PENDING or self._may_go(entry)):
                return entry
            heapq.heappop(heap)
        heaps.pop(pubkey, None)
        return None

    def _cache(self, key: Key, new: Cached | None) -> None:
        old = self.cache.pop(key, None)
        self._undo.append(lambda: self._restore(key, old))
        if new is not None:
            self.cache[key] = new

    def _restore(self, key: Key, old: Cached | None) -> None:
        self.cache.pop(key, None)
        if old is not None:
            self.cache[key] = old

    def _next(self) -> int:
        self._turn += 1
        return self._turn

    def _stray(self) -> Entry | None:
        self.strays += 1
        return None


def _add(numbers: dict[K, int], key: K, by: int) -> None:
    """Change a number; what is 0 is not there."""
    number = numbers.get(key, 0) + by
    if number:
        numbers[key] = number
    else:
        numbers.pop(key, None)


def _in_flight(entry: Entry | None) -> int:
    return int(entry is not None and entry.state is State.IN_FLIGHT)


def may_repeat(entry: Entry) -> bool:
    """Whether a task may be done again without asking: not where its sender said that this is unsafe."""
    declared = entry.task.idempotency
    return declared is None or declared.duplicate_safety != "unsafe"


def size_of(document: A2ATask | A2ATaskResult) -> int:
    """The bytes of a task or a result as JSON."""
    return len(document.model_dump_json().encode())


def failure(task_id: str, message: str) -> A2ATaskResult:
    """The result of a task that the mailbox, or whoever repairs it, ended."""
    return A2ATaskResult(task_id=task_id, status="error", content=(), error_message=message)
