"""The lines of ``a2a/events.jsonl``, one event each, tagged by ``type``.

The names of version 1 keep their meaning. New are ``task_lease_expired``, ``task_expired``, ``task_cancelled`` and the
fields with times. A compaction writes the remaining state with the same events.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import pydantic

from covenant.wire.types import U64, A2ATask, A2ATaskResult, AgentId, Wire
from policy import errors


class _Event(Wire):
    # Version 1 may have written rows without a time; these count as old.
    at_ms: U64 = 0


class TaskSent(_Event):
    """A task was accepted. ``attempt`` and ``requeues`` are more than 0 only after a compaction.

    ``sent_id`` and ``given_id`` are new: the ids that its sender and its recipient use, if they differ from its id.
    """

    type: Literal["task_sent"] = "task_sent"
    task: A2ATask
    sent_id: str | None = None
    given_id: str | None = None
    attempt: U64 = 0
    requeues: U64 = 0


class TaskReceived(_Event):
    """Version 1's first form of a lease, without a name or an end. Read, never written."""

    type: Literal["task_recv"] = "task_recv"
    task_id: str


class TaskLeased(_Event):
    """The recipient has the task until ``lease_expires_at_ms``. Version 1's rows have no end."""

    type: Literal["task_leased"] = "task_leased"
    task_id: str
    lease_id: str
    leased_to: AgentId | None = None
    lease_expires_at_ms: U64 | None = None


class TaskRequeued(_Event):
    """A leased task was put back. ``by`` is repair, auto_retry or restart."""

    type: Literal["task_requeued"] = "task_requeued"
    task_id: str
    lease_id: str | None = None
    duplicate_risk: str | None = None
    reason: str = ""
    by: str = "repair"


class TaskLeaseExpired(_Event):
    """New: the lease ended without a result, and the task waits again."""

    type: Literal["task_lease_expired"] = "task_lease_expired"
    task_id: str
    lease_id: str


class TaskForceErrored(_Event):
    """Sender or recipient ended the task with an error."""

    type: Literal["task_force_errored"] = "task_force_errored"
    task_id: str
    lease_id: str | None = None
    message: str
    reason: str = ""


class TaskExpired(_Event):
    """New: the mailbox ended the task with an error. ``reason`` is the result's ``error_message``."""

    type: Literal["task_expired"] = "task_expired"
    task_id: str
    reason: str


class TaskCancelled(_Event):
    """New: the sender cancelled the task."""

    type: Literal["task_cancelled"] = "task_cancelled"
    task_id: str
    reason: str = ""


class ResultPosted(_Event):
    """The task has its result."""

    type: Literal["result_posted"] = "result_posted"
    result: A2ATaskResult


class ResultReceived(_Event):
    """The sender has the result."""

    type: Literal["result_recv"] = "result_recv"
    task_id: str


class ResultCached(_Event):
    """An idempotent task was answered; equal tasks get this answer. ``what`` is task_kind or intent_text."""

    type: Literal["idempotency_result_cached"] = "idempotency_result_cached"
    sender: str
    recipient: str
    what: str
    key: str
    result: A2ATaskResult


class ResultReplayed(_Event):
    """The task was answered from the cache; ``result`` has the task's own id."""

    type: Literal["idempotency_result_replayed"] = "idempotency_result_replayed"
    result: A2ATaskResult


Event = Annotated[
    TaskSent
    | TaskReceived
    | TaskLeased
    | TaskRequeued
    | TaskLeaseExpired
    | TaskForceErrored
    | TaskExpired
    | TaskCancelled
    | ResultPosted
    | ResultReceived
    | ResultCached
    | ResultReplayed,
    pydantic.Field(discriminator="type"),
]

_READER: Final[pydantic.TypeAdapter[Event]] = pydantic.TypeAdapter(Event)


def encode(event: Event) -> bytes:
    """Return the line of an event, without its newline."""
    return event.model_dump_json(exclude_none=True).encode()


def decode(line: bytes, *, where: str) -> Event:
    """Return the event of a line.

    Raises:
        errors.StoreError: the line is no event.
    """
    try:
        return _READER.validate_json(line)
    except pydantic.ValidationError as e:
        first = e.errors(include_url=False, include_input=False)[0]
        raise errors.StoreError(
            f"a line is no event of the mailbox: {first['msg'].lower()}",
            hint="put the file back as it was, or take the line out and say so in the file's history",
            where=where,
        ) from e
