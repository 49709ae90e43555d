"""The interface of a mailbox; ``tests/unit/covenant/stores/test_mailbox.py`` tests both implementations against it.

A task is queued, leased to its recipient (``in_flight``), answered (``result_pending``) and, once its sender has the
answer, resolved. Every accepted task is answered exactly once: by its recipient, by a repair, or by the mailbox itself
when its deadline passes. ``covenant.handlers.mailbox.requests`` decides who may do what.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, TypeVar

from covenant.wire.types import A2ATask, A2ATaskResult, AgentId, QueueEntry

D = TypeVar("D", A2ATask, A2ATaskResult)

MAX_RESULT_BYTES = 4 * 1024 * 1024
MAX_TASK_BYTES = 1024 * 1024

# The error messages of results that the mailbox writes itself.
DEADLINE_EXCEEDED = "deadline_exceeded"
ATTEMPTS_EXHAUSTED = "attempts_exhausted"
UNDELIVERED = "undelivered"
# The cache has an answer to an equal task, but there is no room for another copy.
NO_ROOM = "no_room"


class State(enum.StrEnum):
    """The states of a task, as version 1 names them."""

    QUEUED = "queued"
    IN_FLIGHT = "in_flight"
    RESULT_PENDING = "result_pending"
    RESOLVED = "resolved"


class Skip(enum.StrEnum):
    """Reasons for which a retry skips a task, in the order in which they are checked, under version 1's names where it
    has one. ``handlers.mailbox.repair`` gives its clients another name for the rest."""

    NOT_IN_FLIGHT = "not_in_flight"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    RUNNING = "running_here"
    LEASE_TOO_YOUNG = "lease_too_young"
    NOT_DECLARED = "missing_idempotency"
    UNSAFE = "unsafe_duplicate_safety"
    NO_KEY = "idempotency_key_empty"
    ATTEMPTS = "max_attempts_reached"
    REQUEUES = "limit_reached"


class Lease(NamedTuple):
    """The holder of a task, with the start and end of its lease."""

    id: str
    to: AgentId
    at_ms: int
    expires_at_ms: int


@dataclass(frozen=True, slots=True)
class TaskEntry:
    """A task and its state. ``attempt`` counts its leases, ``requeues`` the leases that a retry ended, and ``size`` the
    bytes of the task and its result.

    ``task.id`` and ``result.task_id`` are the mailbox's unique name of the task. Senders choose ids, and must not learn
    of each other's. If another sender's task has the chosen id already, the sender still uses it (``sent_id``). The
    recipient gets that id too or, if it already has a task with it, the name (``given_id``).
    """

    task: A2ATask
    state: State
    sent_at_ms: int
    turn: int
    attempt: int = 0
    requeues: int = 0
    lease: Lease | None = None
    result: A2ATaskResult | None = None
    ended_at_ms: int | None = None
    size: int = 0
    sent_id: str | None = None
    given_id: str | None = None

    @property
    def id_of_sender(self) -> str:
        """The id that its sender uses."""
        return self.task.id if self.sent_id is None else self.sent_id

    @property
    def id_of_recipient(self) -> str:
        """The id that its recipient uses."""
        return self.task.id if self.given_id is None else self.given_id

    def id_of(self, pubkey: str) -> str:
        """Return the id that this key uses. A key that is neither sender nor recipient, as the operator's, uses the
        mailbox's name."""
        if pubkey == self.task.sender.pubkey:
            return self.id_of_sender
        return self.id_of_recipient if pubkey == self.task.recipient.pubkey else self.task.id

    def task_of(self, pubkey: str) -> A2ATask:
        """Return the task with the id that this key uses."""
        return _named(self.task, "id", self.id_of(pubkey))

    def result_of(self, pubkey: str) -> A2ATaskResult | None:
        """Return the result with the id that this key uses."""
        return None if self.result is None else _named(self.result, "task_id", self.id_of(pubkey))

    def as_given(self) -> A2ATask:
        """Return the task with the recipient's id, even if the recipient is also its sender."""
        return _named(self.task, "id", self.id_of_recipient)

    @property
    def open(self) -> bool:
        """Whether it has no result yet."""
        return self.state in (State.QUEUED, State.IN_FLIGHT)

    def to_wire(self, pubkey: str) -> QueueEntry:
        """Return the entry as ``a2_a_queue`` shows it to this key. Only for open entries."""
        lease = self.lease
        return QueueEntry(
            state="in_flight" if self.state is State.IN_FLIGHT else "queued",
            task=self.task_of(pubkey),
            lease_id=lease.id if lease else None,
            leased_to=lease.to if lease else None,
            leased_at_ms=lease.at_ms if lease else None,
            lease_expires_at_ms=lease.expires_at_ms if lease else None,
            attempt=self.attempt,
        )


def _named(document: D, field_: str, name: str) -> D:
    return document if getattr(document, field_) == name else document.model_copy(update={field_: name})


@dataclass(frozen=True, slots=True)
class Limits:
    """The length of a lease and the capacity of the mailbox.

    Each sender's tasks and answers are limited too, so that no sender can take the room of all others:
    ``of_sender`` tasks, ``size_of_sender`` bytes, and ``open_per_pair`` open tasks for one recipient. In addition, a
    sender may hold at most as much as is still free, so that a few together cannot take everything.

    After ``max_attempts`` leases without an answer a task ends with an error. ``cached`` and ``cached_size`` bound the
    idempotency cache. It evicts the oldest answer of the sender with the most: no sender can evict another's answer,
    which would repeat that task. A compaction drops an unfetched answer after ``unfetched_ms``, and ends an unanswered
    task without a deadline after ``undelivered_ms``.
    """

    lease_ms: int = 10 * 60 * 1000
    max_attempts: int = 5
    open_per_recipient: int = 10_000
    open_per_pair: int = 5_000
    entries: int = 100_000
    of_sender: int = 25_000
    size: int = 256 * 1024 * 1024
    size_of_sender: int = 64 * 1024 * 1024
    cached: int = 10_000
    cached_size: int = 64 * 1024 * 1024
    cached_ms: int = 30 * 24 * 3600 * 1000
    unfetched_ms: int = 7 * 24 * 3600 * 1000
    undelivered_ms: int = 30 * 24 * 3600 * 1000


class Sent(NamedTuple):
    """An accepted task. ``outcome`` is ``known`` if the mailbox had it before, ``replayed`` if an earlier answer was
    copied."""

    entry: TaskEntry
    outcome: Literal["queued", "replayed", "known"]


class Ended(NamedTuple):
    """An act of the mailbox itself: a lease that expired (``result`` None), or a task that ended with an error."""

    entry: TaskEntry
    lease_id: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class Retried:
    """The result of a retry: the tasks that wait again, and the number of skipped ones for each reason."""

    considered: int = 0
    requeued: Sequence[TaskEntry] = ()
    # The leases that were ended, in the same order.
    leases: Sequence[str] = ()
    skipped: Mapping[Skip, int] = field(default_factory=dict)
    # The skipped ones, each with its reason.
    passed: Sequence[tuple[TaskEntry, Skip]] = ()


@dataclass(frozen=True, slots=True)
class RetryRules:
    """The rules by which a retry ends stale leases (covenant-v1.md, section 14)."""

    min_lease_age_ms: int = 300_000
    max_attempts: int = 3
    max_requeues: int = 1
    scan_limit: int = 100


class Mailbox(Protocol):
    """A store of tasks. A change is durable when its call returns; a call that raised changed nothing."""

    limits: Limits
    # The tasks that this process works on. Not stored: after a start there are none.
    running: set[str]

    async def send(self, task: A2ATask) -> Sent:
        """Accept a task. An equal task gets the same outcome as before. Each sender has its own namespace of ids.

        Raises:
            errors.TaskExistsError: another task of its sender has its id.
            errors.TaskInvalidError: it is too large, or has no id or no text.
            errors.MailboxFullError: too many tasks or bytes are queued.
        """
        ...

    async def lease(
        self, recipient: str, *, lease_ms: int | None = None, of: Callable[[str], bool] = ...
    ) -> TaskEntry | None:
        """Lease to the recipient the task that has waited longest, of the senders whose key ``of`` accepts (default:
        all). Returns None if no task waits."""
        ...

    async def post(self, result: A2ATaskResult, *, lease_id: str | None = None) -> TaskEntry:
        """Answer an open task. A late answer to a task that waits again is accepted too, unless ``lease_id`` names an
        ended lease.

        Raises:
            errors.NoTaskError, errors.TaskStateError, errors.LeaseMismatchError, errors.TaskInvalidError
            errors.MailboxFullError: there is no room for it; it can be posted again.
        """
        ...

    async def take_result(self, sender: str) -> A2ATaskResult | None:
        """Return the oldest answer that the sender has not fetched, under the sender's id. It is returned only once."""
        ...

    async def requeue(
        self, task_id: str, *, lease_id: str | None = None, duplicate_risk: str | None, reason: str, by: str = "repair"
    ) -> TaskEntry:
        """Put a leased task back. The risk is the word of the caller who repairs, as in version 1: also ``idempotent``.

        Raises:
            errors.NoTaskError, errors.TaskStateError, errors.LeaseMismatchError
        """
        ...

    async def force_error(self, task_id: str, *, lease_id: str | None = None, message: str, reason: str) -> TaskEntry:
        """End an open task with an error.

        Raises:
            errors.NoTaskError, errors.TaskStateError, errors.LeaseMismatchError
        """
        ...

    async def cancel(self, task_id: str, *, reason: str) -> TaskEntry:
        """Cancel an open task: it is resolved, and an answer of the lease holder is refused.

        Raises:
            errors.NoTaskError, errors.TaskStateError
        """
        ...

    async def retry_stale(self, rules: RetryRules, *, apply: bool, running: Container[str] = ()) -> Retried:
        """Put back idempotent tasks with stale leases, except those in ``running``; without ``apply`` only report
        them."""
        ...

    async def expire(self) -> Sequence[Ended]:
        """End tasks and leases whose time is over. Every other act does so too. Returns all that ended since the last
        call."""
        ...

    async def compact(self) -> int:
        """Remove finished tasks, and old answers from the cache. Returns the number of removed tasks."""
        ...

    async def set_clock(self, now_ms: int) -> None:
        """Take times that are ahead of ``now_ms`` back to it; a lease of then lasts its length from now."""
        ...

    def get(self, task_id: str) -> TaskEntry | None:
        """Return the entry of a task by the mailbox's name. All calls that act on one task use this name."""
        ...

    def sent(self, pubkey: str, task_id: str) -> TaskEntry | None:
        """Return the entry that the public key sent under this id."""
        ...

    def given(self, pubkey: str, task_id: str) -> TaskEntry | None:
        """Return the entry that the public key receives under this id."""
        ...

    def recent(self, pubkey: str, limit: int) -> list[TaskEntry]:
        """Return the newest entries that the public key sent or is to receive, newest first."""
        ...

    def answered(self, pubkey: str, limit: int) -> list[TaskEntry]:
        """Return the newest answers to tasks that the public key sent or received, newest first."""
        ...

    def open_entries(self, pubkey: str | None = None) -> list[TaskEntry]:
        """Return the open entries, oldest first; with a key, only those that it sent or is to receive."""
        ...

    def unfetched(self, pubkey: str) -> list[TaskEntry]:
        """Return the answers that wait for the sender, oldest first."""
        ...

    def fullness(self) -> float:
        """Return the used share of the mailbox, or of one sender's part, in tasks or bytes, whichever is most: 0
        to 1."""
        ...

    def next_due_ms(self) -> int | None:
        """Return the time at which ``expire`` next has work."""
        ...

    def watch(self, called: Callable[[TaskEntry], None]) -> Callable[[], None]:
        """Call ``called`` with each changed entry once the change is durable. Call the returned function to stop."""
        ...

    async def close(self) -> None:
        """Write the queued acts, and close the file."""
        ...
