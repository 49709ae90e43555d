"""The effect of each act on the book of the mailbox: the rules, without file, clock or randomness.

Each function decides, then emits the events of its decision; it raises before it emits. The caller must call ``expire``
first, so that no function treats an ended lease or a passed deadline as current.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container
from functools import partial

from covenant.stores.mailbox import events
from covenant.stores.mailbox.book import TaskBook, failure, size_of
from covenant.stores.mailbox.interface import (
    ATTEMPTS_EXHAUSTED,
    DEADLINE_EXCEEDED,
    MAX_RESULT_BYTES,
    MAX_TASK_BYTES,
    NO_ROOM,
    UNDELIVERED,
    Ended,
    Retried,
    RetryRules,
    Sent,
    Skip,
    State,
    TaskEntry,
)
from covenant.stores.mailbox.queue import Key, may_repeat
from covenant.wire.types import A2ATask, A2ATaskResult
from policy import errors

_MAX_ID = 256
# The longest message that ends a task in a full mailbox, in characters: ending a task makes room later.
_SHORT = 1024


def send(book: TaskBook, task: A2ATask, now_ms: int, *, other_id: str) -> Sent:
    """Accept a task: it is known, answered from the cache, or queued.

    ``other_id`` is its name if another sender's task has its id. It is unpredictable, and the sender does not learn it:
    a sender that can detect a used id would learn of others' tasks.

    Raises:
        errors.TaskExistsError: another task of its sender has its id.
        errors.TaskInvalidError: it is too large, or has no id or no text.
        errors.MailboxFullError: too many tasks or bytes are queued.
    """
    known = book.sent(task.sender.pubkey, task.id)
    if known is not None:
        if known.task_of(task.sender.pubkey) != task:
            raise errors.TaskExistsError(
                f"another task of yours has the id `{task.id}`", hint="give each task an id of its own"
            )
        return Sent(known, "known")
    _check_task(task)
    _check_room(book, task)
    recipient = task.recipient.pubkey
    name = other_id if task.id in book.entries else task.id
    given = other_id if book.given(recipient, task.id) is not None else task.id
    entry = book.emit(
        events.TaskSent(
            task=task.model_copy(update={"id": name}),
            sent_id=None if name == task.id else task.id,
            given_id=None if name == given else given,
            at_ms=now_ms,
        )
    )
    assert entry is not None
    replayed = _replay(book, entry, now_ms)
    return Sent(replayed or entry, "replayed" if replayed else "queued")


def anybody(sender: str) -> bool:
    """Accept every sender."""
    return True


def lease(
    book: TaskBook, recipient: str, now_ms: int, *, lease_id: str, lease_ms: int, of: Callable[[str], bool] = anybody
) -> TaskEntry | None:
    """Lease the recipient its next task, of a sender that ``of`` accepts. Only one of several equal tasks is leased at
    a time."""
    while (entry := book.first_waiting(recipient, of)) is not None:
        if _replay(book, entry, now_ms):
            continue
        return book.emit(
            events.TaskLeased(
                task_id=entry.task.id,
                lease_id=lease_id,
                leased_to=entry.task.recipient,
                lease_expires_at_ms=now_ms + lease_ms,
                at_ms=now_ms,
            )
        )
    return None


def post(book: TaskBook, result: A2ATaskResult, now_ms: int, *, lease_id: str | None) -> TaskEntry:
    """Answer a task; an ok answer to an idempotent task also answers equal tasks, now and later.

    Raises:
        errors.NoTaskError, errors.LeaseMismatchError: as the interface says.
        errors.TaskStateError: it has its result, or was never leased.
        errors.TaskInvalidError: the result is too large.
        errors.MailboxFullError: there is no room for it.
    """
    entry = _open(book, result.task_id)
    _check_lease(entry, lease_id)
    if entry.attempt == 0:
        raise errors.TaskStateError("the task was given to nobody yet", hint="receive it first")
    size = size_of(result)
    if size > MAX_RESULT_BYTES:
        raise errors.TaskInvalidError(f"a result may have {MAX_RESULT_BYTES} bytes", where="result")
    if not _has_room(book, entry.task.sender.pubkey, size):
        raise errors.MailboxFullError("the mailbox has no room for this result", hint="run `covenant a2a compact`")
    answered = book.emit(events.ResultPosted(result=result, at_ms=now_ms))
    assert answered is not None
    key = Key.of(entry.task)
    if key is not None and result.status == "ok":
        book.emit(
            events.ResultCached(
                sender=key.sender,
                recipient=key.recipient,
                what=key.what,
                key=key.key,
                result=result,
                at_ms=now_ms,
            )
        )
        for same in book.same(key):
            if same.state is State.QUEUED:
                _replay(book, same, now_ms)
    return answered


def take_result(book: TaskBook, sender: str, now_ms: int) -> A2ATaskResult | None:
    """Return the sender's oldest unfetched answer, and mark it as fetched."""
    entry = book.first_unfetched(sender)
    if entry is None:
        return None
    book.emit(events.ResultReceived(task_id=entry.task.id, at_ms=now_ms))
    return entry.result_of(sender)


def requeue(
    book: TaskBook, task_id: str, now_ms: int, *, lease_id: str | None, duplicate_risk: str | None, reason: str, by: str
) -> TaskEntry:
    """Put a leased task back.

    Raises:
        errors.NoTaskError, errors.LeaseMismatchError: as the interface says.
        errors.TaskStateError: it has its result, or is not leased.
    """
    # As in version 1, who repairs may know of a task that it can be repeated although its sender did not declare it.
    entry = _open(book, task_id)
    _check_lease(entry, lease_id)
    if entry.lease is None:
        raise errors.TaskStateError("the task is not leased", hint="it waits already")
    event = events.TaskRequeued(
        task_id=task_id, lease_id=entry.lease.id, duplicate_risk=duplicate_risk, reason=reason, by=by, at_ms=now_ms
    )
    queued = book.emit(event)
    assert queued is not None
    return queued


def force_error(
    book: TaskBook, task_id: str, now_ms: int, *, lease_id: str | None, message: str, reason: str
) -> TaskEntry:
    """End an open task with an error.

    Raises:
        errors.NoTaskError, errors.LeaseMismatchError, errors.TaskStateError: as the interface says.
        errors.TaskInvalidError: the message is larger than a result may be.
        errors.MailboxFullError: it is long, and there is no room for it.
    """
    entry = _open(book, task_id)
    _check_lease(entry, lease_id)
    size = size_of(failure(task_id, message))
    if size > MAX_RESULT_BYTES:
        raise errors.TaskInvalidError(f"a result may have {MAX_RESULT_BYTES} bytes", where="message")
    if len(message) > _SHORT and not _has_room(book, entry.task.sender.pubkey, size):
        raise errors.MailboxFullError("the mailbox has no room for this message", hint="say it in fewer words")
    event = events.TaskForceErrored(
        task_id=task_id,
        lease_id=entry.lease.id if entry.lease else None,
        message=message,
        reason=reason,
        at_ms=now_ms,
    )
    ended = book.emit(event)
    assert ended is not None
    return ended


def cancel(book: TaskBook, task_id: str, now_ms: int, *, reason: str) -> TaskEntry:
    """Cancel an open task."""
    _open(book, task_id)
    ended = book.emit(events.TaskCancelled(task_id=task_id, reason=reason, at_ms=now_ms))
    assert ended is not None
    return ended


def expire(book: TaskBook, now_ms: int) -> list[Ended]:
    """End tasks whose deadline has passed, and put tasks with an ended lease back, up to the maximum of attempts.

    A task that its sender declared unsafe to repeat is not put back: it may have been done. It stays leased until a
    repair, its deadline or a compaction ends it.
    """
    done = []
    for entry in book.due(now_ms):
        name, held = entry.task.id, entry.lease.id if entry.lease else None
        late = entry.task.deadline_ms is not None and now_ms > entry.task.deadline_ms
        if late or entry.attempt >= book.limits.max_attempts:
            reason = DEADLINE_EXCEEDED if late else ATTEMPTS_EXHAUSTED
            after = book.emit(events.TaskExpired(task_id=name, reason=reason, at_ms=now_ms))
        else:
            assert held is not None
            reason = "lease_expired"
            after = book.emit(events.TaskLeaseExpired(task_id=name, lease_id=held, at_ms=now_ms))
        assert after is not None
        done.append(Ended(after, held, reason))
    return done


def retry_stale(book: TaskBook, rules: RetryRules, now_ms: int, *, apply: bool, running: Container[str]) -> Retried:
    """End stale leases of tasks that declared themselves safe to repeat."""
    considered = sorted((entry for entry in book.entries.values() if entry.open), key=_age)[: rules.scan_limit]
    skipped: Counter[Skip] = Counter()
    requeued, leases, passed = [], [], []
    for entry in considered:
        why = _skip(entry, rules, now_ms, running)
        if why is not None:
            skipped[why] += 1
            passed.append((entry, why))
            continue
        again = partial(requeue, lease_id=None, duplicate_risk="idempotent", reason="stale lease", by="auto_retry")
        # An entry without a lease is skipped as not in flight.
        assert entry.lease is not None
        leases.append(entry.lease.id)
        requeued.append(again(book, entry.task.id, now_ms) if apply else entry)
    return Retried(len(considered), requeued, leases, dict(skipped), passed)


def compact(book: TaskBook, now_ms: int) -> list[str]:
    """Return the names of the removed tasks: resolved ones, and answers not fetched in time.

    Tasks without a deadline that were not answered in time are ended here; a later compaction removes them.
    """
    limits = book.limits
    gone = []
    for name, entry in list(book.entries.items()):
        if entry.open:
            if entry.task.deadline_ms is None and now_ms - entry.sent_at_ms > limits.undelivered_ms:
                book.emit(events.TaskExpired(task_id=name, reason=UNDELIVERED, at_ms=now_ms))
        elif entry.state is State.RESOLVED or now_ms - (entry.ended_at_ms or 0) > limits.unfetched_ms:
            gone.append(name)
    for key, cached in list(book.cache.items()):
        if now_ms - cached.at_ms > limits.cached_ms:
            book.forget_cached(key)
    for name in gone:
        book.forget(name)
    return gone


def set_clock(book: TaskBook, now_ms: int) -> None:
    """Take times that are ahead of ``now_ms`` back to it; a lease of then lasts its length from now."""
    for name in list(book.entries):
        book.retime(name, now_ms)


def restate(book: TaskBook) -> list[events.Event]:
    """Return the events that produce the book's present state."""
    stated: list[events.Event] = [
        events.ResultCached(**key._asdict(), result=cached.result, at_ms=cached.at_ms)
        for key, cached in book.cache.items()
    ]
    entries = sorted(book.entries.values(), key=lambda entry: entry.turn)
    for entry in entries:
        name, held = entry.task.id, entry.lease
        before = entry.attempt - 1 if held else entry.attempt
        stated.append(
            events.TaskSent(
                task=entry.task,
                sent_id=entry.sent_id,
                given_id=entry.given_id,
                at_ms=entry.sent_at_ms,
                attempt=before,
                requeues=entry.requeues,
            )
        )
        if held:
            stated.append(
                events.TaskLeased(
                    task_id=name,
                    lease_id=held.id,
                    leased_to=held.to,
                    lease_expires_at_ms=held.expires_at_ms,
                    at_ms=held.at_ms,
                )
            )
        if entry.result is not None:
            stated.append(events.ResultPosted(result=entry.result, at_ms=entry.ended_at_ms or 0))
        if entry.state is State.RESOLVED:
            stated.append(events.ResultReceived(task_id=name, at_ms=entry.ended_at_ms or 0))
    return stated


def _replay(book: TaskBook, entry: TaskEntry, now_ms: int) -> TaskEntry | None:
    key = Key.of(entry.task)
    cached = book.cache.get(key) if key is not None else None
    if cached is None:
        return None
    if not _has_room(book, entry.task.sender.pubkey, cached.size):
        # The task is not done again only for lack of room; if it is sent again later, it gets the answer.
        return book.emit(events.TaskExpired(task_id=entry.task.id, reason=NO_ROOM, at_ms=now_ms))
    result = cached.result.model_copy(update={"task_id": entry.task.id})
    return book.emit(events.ResultReplayed(result=result, at_ms=now_ms))


def _check_room(book: TaskBook, task: A2ATask) -> None:
    limits, sender, recipient = book.limits, task.sender.pubkey, task.recipient.pubkey
    key = Key.of(task)
    cached = None if key is None else book.cache.get(key)
    size = size_of(task) + (cached.size if cached is not None else 0)
    count, _ = book.held_by(sender)
    fits = _has_room(book, sender, size)
    if not fits or not _may_have(limits.of_sender, limits.entries, count, len(book.entries), 1):
        raise errors.MailboxFullError(
            "as many tasks of yours are kept as may, beside those of others",
            hint="take the answers; `covenant a2a compact` makes room",
        )
    between, waiting = book.open_between(sender, recipient), book.open_of(recipient)
    if not _may_have(limits.open_per_pair, limits.open_per_recipient, between, waiting, 1):
        raise errors.MailboxFullError(
            f"as many tasks of yours wait for `{task.recipient.display}` as may, beside those of others",
            hint="let it take some",
        )


def _has_room(book: TaskBook, sender: str, size: int) -> bool:
    """Whether this sender's tasks and answers may grow by that many bytes."""
    limits, (_, held) = book.limits, book.held_by(sender)
    return _may_have(limits.size_of_sender, limits.size, held, book.size, size)


def _may_have(part: int, whole: int, mine: int, everybodys: int, more: int) -> bool:
    """Whether a sender may have ``more``: at most ``part`` in all, and never more than is free.

    So a sender that has nothing gets in as long as anything is free. If ``n`` senders take all they can, each gets one
    part in ``n + 1``, and one part stays free (Choudhury and Hahne, Dynamic queue length thresholds for shared-memory
    packet switches, 1998).
    """
    return mine + more <= min(part, whole - everybodys)


def _check_task(task: A2ATask) -> None:
    if not 0 < len(task.id) <= _MAX_ID:
        raise errors.TaskInvalidError(f"a task's id has 1 to {_MAX_ID} characters", where="task.id")
    if not task.intent_text:
        raise errors.TaskInvalidError("the task has no text", where="task.intent_text")
    if size_of(task) > MAX_TASK_BYTES:
        raise errors.TaskInvalidError(f"a task may have {MAX_TASK_BYTES} bytes", where="task")


def _open(book: TaskBook, task_id: str) -> TaskEntry:
    # No error repeats the mailbox's name of a task: the caller may know it by another id.
    entry = book.entries.get(task_id)
    if entry is None:
        raise errors.NoTaskError("there is no such task")
    if not entry.open:
        raise errors.TaskStateError("the task has its result already")
    return entry


def _check_lease(entry: TaskEntry, lease_id: str | None) -> None:
    if lease_id is not None and (entry.lease is None or entry.lease.id != lease_id):
        raise errors.LeaseMismatchError(f"the task is not leased under `{lease_id}`")


def _age(entry: TaskEntry) -> tuple[bool, int]:
    """Sort leased tasks first, the oldest lease before the others."""
    return (entry.lease is None, entry.lease.at_ms if entry.lease else entry.turn)


def _skip(entry: TaskEntry, rules: RetryRules, now_ms: int, running: Container[str]) -> Skip | None:
    task, held, declared = entry.task, entry.lease, entry.task.idempotency
    if held is None:
        return Skip.NOT_IN_FLIGHT
    reasons = (
        (Skip.DEADLINE_EXCEEDED, task.deadline_ms is not None and now_ms >= task.deadline_ms),
        (Skip.RUNNING, task.id in running),
        (Skip.LEASE_TOO_YOUNG, now_ms - held.at_ms < rules.min_lease_age_ms),
        (Skip.NOT_DECLARED, declared is None),
        (Skip.UNSAFE, not may_repeat(entry)),
        (Skip.NO_KEY, declared is not None and not declared.key),
        (Skip.ATTEMPTS, entry.attempt >= rules.max_attempts),
        (Skip.REQUEUES, entry.requeues >= rules.max_requeues),
    )
    return next((reason for reason, applies in reasons if applies), None)
