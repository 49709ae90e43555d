"""What every mailbox does; ``tests/unit/covenant/stores/test_mailbox.py`` holds both implementations to it.

A task is queued, leased to its recipient (``in_flight``), answered (``result_pending``) and, once its sender has the
answer, resolved. Every task that was taken is answered exactly once: by its recipient, by whoever repairs it, or by
the mailbox itself when its deadline passes. Who may do what is not decided here but in
``covenant.handlers.mailbox.requests``.
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
# There is an answer to the same, and no room to give it once more.
NO_ROOM = "no_room"


class State(enum.StrEnum):
    """The states of a task, as version 1 names them."""

    QUEUED = "queued"
    IN_FLIGHT = "in_flight"
    RESULT_PENDING = "result_pending"
    RESOLVED = "resolved"


class Skip(enum.StrEnum):
    """Why a retry leaves a task as it is, in the order in which it is asked."""

    NOT_IN_FLIGHT = "not_in_flight"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    RUNNING = "running_here"
    LEASE_TOO_YOUNG = "lease_too_young"
    NOT_DECLARED = "idempotency_missing"
    UNSAFE = "duplicate_unsafe"
    NO_KEY = "idempotency_key_empty"
    ATTEMPTS = "max_attempts_reached"
    REQUEUES = "max_requeues_reached"


class Lease(NamedTuple):
    """Who has a task from when until when."""

    id: str
    to: AgentId
    at_ms: int
    expires_at_ms: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A task and what became of it. ``attempt`` counts its leases, ``requeues`` those that a retry took back, and
    ``size`` the bytes of the task and its result.

    ``task.id`` and ``result.task_id`` are the mailbox's name of the task, which no other has. Senders choose ids, and
    what one chose says nothing to another: where an id was taken by somebody else's task, the sender's own stays the
    sender's (``sent_id``), and the recipient is given it or, where it has that one too, the name (``given_id``).
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
        """What its sender calls it."""
        return self.task.id if self.sent_id is None else self.sent_id

    @property
    def id_of_recipient(self) -> str:
        """What its recipient calls it."""
        return self.task.id if self.given_id is None else self.given_id

    def id_of(self, pubkey: str) -> str:
        """What somebody calls it; whoever is neither, such as the operator, calls it by the mailbox's name."""
        if pubkey == self.task.sender.pubkey:
            return self.id_of_sender
        return self.id_of_recipient if pubkey == self.task.recipient.pubkey else self.task.id

    def task_of(self, pubkey: str) -> A2ATask:
        """The task under the id by which somebody knows it."""
        return _named(self.task, "id", self.id_of(pubkey))

    def result_of(self, pubkey: str) -> A2ATaskResult | None:
        """The result under that id."""
        return None if self.result is None else _named(self.result, "task_id", self.id_of(pubkey))

    def as_given(self) -> A2ATask:
        """The task as its recipient is given it, also where that is its sender."""
        return _named(self.task, "id", self.id_of_recipient)

    @property
    def open(self) -> bool:
        """Whether it has no result yet."""
        return self.state in (State.QUEUED, State.IN_FLIGHT)

    def to_wire(self, pubkey: str) -> QueueEntry:
        """The entry as ``a2_a_queue`` shows it to somebody; only while it is open."""
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
    """How long a lease is and how much the mailbox holds.

    What one sender has of it, tasks and their answers, is bounded as well, or one would have the room of all others:
    ``of_sender`` tasks, ``size_of_sender`` bytes, and ``open_per_pair`` open ones for one recipient; of each no more
    than is free, or a few together would have all.

    A task whose lease ended ``max_attempts`` times without an answer is ended with an error. ``cached`` and
    ``cached_size`` bound the idempotency cache, out first the oldest of who has most of it: nobody can have an answer
    of somebody else forgotten, who would have it done again. A compaction forgets an answer that nobody fetched after
    ``unfetched_ms``, and ends a task without a deadline that nobody took in ``undelivered_ms``.
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
    """A task that is in the mailbox. ``outcome`` is ``known`` where it was there before, ``replayed`` where an earlier
    answer is already its own."""

    entry: Entry
    outcome: Literal["queued", "replayed", "known"]


class Ended(NamedTuple):
    """What the mailbox did by itself: a lease taken back (``result`` None), or a task ended with an error."""

    entry: Entry
    lease_id: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class Retried:
    """What a retry did: the tasks that wait again, and how many were left for which reason."""

    considered: int = 0
    requeued: Sequence[Entry] = ()
    skipped: Mapping[Skip, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RetryRules:
    """Which stale leases a retry takes back (covenant-v1.md, section 14)."""

    min_lease_age_ms: int = 300_000
    max_attempts: int = 3
    max_requeues: int = 1
    scan_limit: int = 100


class Mailbox(Protocol):
    """A store of tasks. What a call returned for is durable; what it raised for is not there."""

    limits: Limits
    # The tasks that this very process works on. Not kept: after a start there are none.
    running: set[str]

    async def send(self, task: A2ATask) -> Sent:
        """Take a task. The same task again is answered as before. Senders have their ids each for themselves.

        Raises:
            errors.TaskExistsError: another task of its sender has its id.
            errors.TaskInvalidError: it is too large, or has no id or no text.
            errors.MailboxFullError: too much waits already.
        """
        ...

    async def lease(
        self, recipient: str, *, lease_ms: int | None = None, of: Callable[[str], bool] = ...
    ) -> Entry | None:
        """Lease the longest waiting task of the recipient's public key to it, of those whose sender's key ``of`` takes
        (all of them); None where none waits."""
        ...

    async def post(self, result: A2ATaskResult, *, lease_id: str | None = None) -> Entry:
        """Answer an open task. A late answer to a task that waits again is taken as well, unless ``lease_id`` says
        under which lease it was done.

        Raises:
            errors.NoTaskError, errors.TaskStateError, errors.LeaseMismatchError, errors.TaskInvalidError
            errors.MailboxFullError: there is no room for it; it can be posted again.
        """
        ...

    async def take_result(self, sender: str) -> A2ATaskResult | None:
        """The oldest answer that the sender's public key has not had, under the sender's id; it is not given again."""
        ...

    async def requeue(
        self, task_id: str, *, lease_id: str | None = None, duplicate_risk: str | None, reason: str, by: str = "repair"
    ) -> Entry:
        """Put a leased task back. ``duplicate_risk`` idempotent holds only for a task that says so of itself.

        Raises:
            errors.NoTaskError, errors.TaskStateError, errors.LeaseMismatchError, errors.TaskInvalidError
        """
        ...

    async def force_error(self, task_id: str, *, lease_id: str | None = None, message: str, reason: str) -> Entry:
        """End an open task with an error.

        Raises:
            errors.NoTaskError, errors.TaskStateError, errors.LeaseMismatchError
        """
        ...

    async def cancel(self, task_id: str, *, reason: str) -> Entry:
        """Take an open task back: it is resolved, and whoever has it leased answers in vain.

        Raises:
            errors.NoTaskError, errors.TaskStateError
        """
        ...

    async def retry_stale(self, rules: RetryRules, *, apply: bool, running: Container[str] = ()) -> Retried:
        """Put stale leases of idempotent tasks back, but for those of ``running``; without ``apply`` only say which."""
        ...

    async def expire(self) -> Sequence[Ended]:
        """Do what is due: deadlines, and leases that have ended. Every other act does so too; what came of it since the
        last call is returned here."""
        ...

    async def compact(self) -> int:
        """Forget what is done with, and bound the cache; how many tasks were forgotten."""
        ...

    def get(self, task_id: str) -> Entry | None:
        """The entry of a task, by the mailbox's name of it, as in all that is done to one."""
        ...

    def sent(self, pubkey: str, task_id: str) -> Entry | None:
        """The entry that the public key sent under this id."""
        ...

    def given(self, pubkey: str, task_id: str) -> Entry | None:
        """The entry that the public key receives under this id."""
        ...

    def recent(self, pubkey: str, limit: int) -> list[Entry]:
        """The newest entries that the public key sent or is to receive, newest first."""
        ...

    def answered(self, pubkey: str, limit: int) -> list[Entry]:
        """The newest answers to tasks that the public key sent or received, newest first."""
        ...

    def open_entries(self, pubkey: str | None = None) -> list[Entry]:
        """What waits or is leased, oldest first; with a key, what it sent or is to receive."""
        ...

    def unfetched(self, pubkey: str) -> list[Entry]:
        """The answers that wait for the sender, oldest first."""
        ...

    def fullness(self) -> float:
        """How much it holds of what it may, or one sender of its part, in tasks or bytes, whichever is most: 0 to 1."""
        ...

    def next_due_ms(self) -> int | None:
        """When ``expire`` next has something to do."""
        ...

    def watch(self, called: Callable[[Entry], None]) -> Callable[[], None]:
        """Call ``called`` with each entry that changed, once that is durable; what is returned ends it."""
        ...

    async def close(self) -> None:
        """Write what waits, and let go."""
        ...
