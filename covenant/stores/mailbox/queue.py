"""The stored tasks, with indices that find one without a scan. No event, no file, no clock.

The indices make the cost of every act independent of the size of the mailbox.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

from covenant.stores.mailbox.interface import State, TaskEntry
from covenant.wire.types import A2ATask

K = TypeVar("K")


class Key(NamedTuple):
    """Identifies equal tasks: same sender, recipient and request, under the key that the sender gave."""

    sender: str
    recipient: str
    what: str
    key: str

    @classmethod
    def of(cls, task: A2ATask) -> Key | None:
        """Return the key of a task that declared itself idempotent, else None."""
        declared = task.idempotency
        if declared is None or declared.duplicate_safety != "idempotent" or not declared.key:
            return None
        return cls(task.sender.pubkey, task.recipient.pubkey, task.task_kind or task.intent_text, declared.key)


class Shelf:
    """Every stored task. Only ``put`` changes them."""

    def __init__(self) -> None:
        self.entries: dict[str, TaskEntry] = {}
        # Bytes of all tasks and results.
        self.size = 0
        self._waiting: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
        self._unfetched: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
        self._open: dict[str, int] = {}
        self._open_pairs: dict[tuple[str, str], int] = {}
        # By sender: number of tasks, and their bytes with results.
        self._tasks_of: dict[str, int] = {}
        self._size_of: dict[str, int] = {}
        self._busy: dict[Key, int] = {}
        self._peers: defaultdict[str, dict[str, None]] = defaultdict(dict)
        # Names of tasks by the ids that senders and recipients use.
        self._by_sender: dict[tuple[str, str], str] = {}
        self._by_recipient: dict[tuple[str, str], str] = {}
        self._same: defaultdict[Key, dict[str, None]] = defaultdict(dict)
        self._due: list[tuple[int, str]] = []

    def first_waiting(self, recipient: str, of: Callable[[str], bool]) -> TaskEntry | None:
        """Return the recipient's task that has waited longest, of the senders whose public key ``of`` accepts."""
        first = self._first(self._waiting, recipient, State.QUEUED)
        if first is None or of(first.task.sender.pubkey):
            return first
        waiting = ((turn, self._waits(turn, name)) for turn, name in sorted(self._waiting[recipient]))
        return next((one for _, one in waiting if one is not None and of(one.task.sender.pubkey)), None)

    def first_unfetched(self, sender: str) -> TaskEntry | None:
        """Return the oldest answer that the sender has not fetched."""
        return self._first(self._unfetched, sender, State.RESULT_PENDING)

    def open_of(self, recipient: str) -> int:
        """Return the number of open tasks of a recipient."""
        return self._open.get(recipient, 0)

    def open_between(self, sender: str, recipient: str) -> int:
        """Return the number of open tasks that a recipient has from one sender."""
        return self._open_pairs.get((sender, recipient), 0)

    def held_by(self, sender: str) -> tuple[int, int]:
        """Return the number of a sender's stored tasks, and their bytes with results."""
        return self._tasks_of.get(sender, 0), self._size_of.get(sender, 0)

    def most_held(self) -> tuple[int, int]:
        """Return the most tasks that any one sender has, and the most bytes."""
        return max(self._tasks_of.values(), default=0), max(self._size_of.values(), default=0)

    def same(self, key: Key) -> list[TaskEntry]:
        """Return the open tasks with this key."""
        return [self.entries[name] for name in self._same.get(key, ())]

    def sent(self, pubkey: str, task_id: str) -> TaskEntry | None:
        """Return the entry that the key sent under this id."""
        name = self._by_sender.get((pubkey, task_id))
        return None if name is None else self.entries[name]

    def given(self, pubkey: str, task_id: str) -> TaskEntry | None:
        """Return the entry that the key receives under this id."""
        name = self._by_recipient.get((pubkey, task_id))
        return None if name is None else self.entries[name]

    def newest_of(self, pubkey: str) -> Iterator[TaskEntry]:
        """Yield the entries that the key sent or is to receive, newest first."""
        for name in reversed(self._peers.get(pubkey, {})):
            yield self.entries[name]

    def due(self, now_ms: int) -> Iterator[TaskEntry]:
        """Yield the open tasks whose deadline or lease is over. The caller must end each before it takes the next, or
        it returns at the next call only."""
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
        """Return the time of the first deadline or end of a lease, or slightly earlier."""
        while self._due:
            moment, name = self._due[0]
            entry = self.entries.get(name)
            if entry is not None and self._moment(entry) == moment:
                return moment
            heapq.heappop(self._due)
        return None

    # --- the indices ------------------------------------------------------------------------------------

    def put(self, name: str, new: TaskEntry | None) -> None:
        """Set the entry of that name; None removes it."""
        old = self.entries.get(name)
        grown = (new.size if new else 0) - (old.size if old else 0)
        self.size += grown
        if (one := new or old) is not None:
            _add(self._tasks_of, one.task.sender.pubkey, (new is not None) - (old is not None))
            _add(self._size_of, one.task.sender.pubkey, grown)
        if new is None:
            if old is not None:
                self._take_out(old)
            return
        self.entries[name] = new
        task = new.task
        if old is None:
            self._peers[task.sender.pubkey][name] = None
            self._peers[task.recipient.pubkey][name] = None
            self._by_sender[task.sender.pubkey, new.id_of_sender] = name
            self._by_recipient[task.recipient.pubkey, new.id_of_recipient] = name
        self._count(task, old, new)
        if (moment := self._moment(new)) is not None:
            heapq.heappush(self._due, (moment, name))
        if new.state is State.RESULT_PENDING:
            heapq.heappush(self._unfetched[task.sender.pubkey], (new.turn, name))
        elif new.state is State.QUEUED:
            self._offer(new)

    def _take_out(self, old: TaskEntry) -> None:
        task = old.task
        del self.entries[task.id]
        del self._by_sender[task.sender.pubkey, old.id_of_sender]
        del self._by_recipient[task.recipient.pubkey, old.id_of_recipient]
        self._count(task, old, None)
        for pubkey in (task.sender.pubkey, task.recipient.pubkey):
            self._peers[pubkey].pop(task.id, None)
            if not self._peers[pubkey]:
                del self._peers[pubkey]

    def _count(self, task: A2ATask, old: TaskEntry | None, new: TaskEntry | None) -> None:
        """Update the counts of open and in-flight tasks, and offer the next of equal tasks."""
        was, now = old is not None and old.open, new is not None and new.open
        _add(self._open, task.recipient.pubkey, now - was)
        _add(self._open_pairs, (task.sender.pubkey, task.recipient.pubkey), now - was)
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

    def _first_of(self, key: Key) -> TaskEntry | None:
        """Return the first open task with this key."""
        name = next(iter(self._same.get(key, ())), None)
        return None if name is None else self.entries.get(name)

    def _offer(self, entry: TaskEntry) -> None:
        """Make a waiting task available for a lease, if it may be leased."""
        if entry.state is State.QUEUED and self._may_go(entry):
            heapq.heappush(self._waiting[entry.task.recipient.pubkey], (entry.turn, entry.task.id))

    def _may_go(self, entry: TaskEntry) -> bool:
        """Whether a task may be leased: it is the first of its equals, and none of them is in flight."""
        key = Key.of(entry.task)
        return key is None or (key not in self._busy and self._first_of(key) is entry)

    def _moment(self, entry: TaskEntry) -> int | None:
        """Return the time at which an entry's deadline has passed or its lease may end; None if neither applies."""
        if not entry.open:
            return None
        # A task may still be done at its deadline, so that ends 1 ms later; a lease ends at its own time.
        moments = [] if entry.task.deadline_ms is None else [entry.task.deadline_ms + 1]
        if entry.lease is not None and may_repeat(entry):
            moments.append(entry.lease.expires_at_ms)
        return min(moments, default=None)

    def _waits(self, turn: int, name: str) -> TaskEntry | None:
        entry = self.entries.get(name)
        is_it = entry is not None and entry.state is State.QUEUED and entry.turn == turn
        return entry if entry is not None and is_it and self._may_go(entry) else None

    def _first(self, heaps: dict[str, list[tuple[int, str]]], pubkey: str, state: State) -> TaskEntry | None:
        heap = heaps.get(pubkey)
        while heap:
            turn, name = heap[0]
            entry = self.entries.get(name)
            is_it = entry is not None and entry.state is state and entry.turn == turn
            # A task that may not be leased now is offered again when the task before it changes.
            if entry is not None and is_it and (state is State.RESULT_PENDING or self._may_go(entry)):
                return entry
            heapq.heappop(heap)
        heaps.pop(pubkey, None)
        return None


def _add(numbers: dict[K, int], key: K, by: int) -> None:
    """Change a number; an entry that becomes 0 is removed."""
    number = numbers.get(key, 0) + by
    if number:
        numbers[key] = number
    else:
        numbers.pop(key, None)


def _in_flight(entry: TaskEntry | None) -> int:
    return int(entry is not None and entry.state is State.IN_FLIGHT)


def may_repeat(entry: TaskEntry) -> bool:
    """Whether a task may be repeated without asking: not if its sender declared that unsafe."""
    declared = entry.task.idempotency
    return declared is None or declared.duplicate_safety != "unsafe"
