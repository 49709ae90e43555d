"""A2A over the mailbox: a message to an agent of this host is a task of its caller, under an id made of the message's.

The same rules hold as for ``send_a2_a_task``: grants, limits and rows of the log. A caller sees the tasks that it sent
to that agent and no others: each sender has its own namespace of ids in the mailbox.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from covenant.handlers import billing
from covenant.handlers.caller import Caller
from covenant.handlers.server import Server
from covenant.stores.mailbox.interface import State, TaskEntry
from covenant.wire import requests, responses
from covenant.wire.a2a import calls, faults, shapes
from covenant.wire.a2a.shapes import TaskView
from covenant.wire.types import A2ATask, A2ATaskResult
from policy import errors
from policy.signing import strict_json

# The namespace of tasks by message: the same caller, agent and message give the same id, also after a restart.
_TASKS: Final = uuid.UUID("0b9d4c1e-7a52-5f1c-9c0b-3d6f2a8e4b70")
KIND: Final = "a2a.message"
_CANCELLED: Final = "cancelled"
_REFUSED: Final = (errors.CapabilityMissingError.code, errors.CapabilityScopeError.code)
# A page of tasks is cut from at most so many of the caller's newest: each takes time of the daemon's loop.
_MOST_LOOKED_AT: Final = 1000


def about(server: Server, agent_id: str) -> Mapping[str, Any]:
    """Return what a card of the agent says of it.

    Raises:
        errors.NoAgentError: there is no such agent.
    """
    manifest = server.agents.find(agent_id).manifest
    known = manifest.agent
    tags = [*manifest.capabilities.required, *manifest.capabilities.optional] or ["covenant"]
    said = known.description or f"The agent {known.name}."
    return {"agent_id": known.id, "name": known.name, "about": said, "version": known.version, "tags": tags}


async def send(server: Server, caller: Caller, agent_id: str, asked: calls.Send) -> TaskView:
    """Put the message into the mailbox as a task for the agent. The same message twice is one task.

    Raises:
        errors.CovenantError: as ``send_a2_a_task`` refuses it.
        errors.UnsupportedError: the message continues a task: each message is a task of its own.
    """
    if asked.task_id is not None:
        view(find(server, caller, agent_id, asked.task_id))
        raise errors.UnsupportedError(
            "a task of this daemon takes one message", hint="send the message without a task, in the same context"
        )
    task = A2ATask(
        id=task_id(caller, agent_id, asked),
        sender=caller.agent,
        recipient=billing.budget_of(agent_id),
        intent_text=asked.text,
        task_kind=KIND,
        parent=asked.context_id,
    )
    await _respond(server, caller, requests.SendA2ATask(task=task))
    return view(find(server, caller, agent_id, task.id))


def task_id(caller: Caller, agent_id: str, asked: calls.Send) -> str:
    """Return the id of the task that a message of this caller is. Another content under the same message id, which A2A
    does not forbid, is another task."""
    content = hashlib.sha256(json.dumps([asked.context_id, asked.text]).encode()).hexdigest()
    return str(uuid.uuid5(_TASKS, f"{caller.agent.pubkey}/{agent_id}/{content}/{asked.message_id}"))


async def cancel(server: Server, caller: Caller, agent_id: str, name: str) -> TaskView:
    """Cancel a task.

    Raises:
        errors.NoTaskError: the caller sent no such task to this agent.
        errors.TaskStateError: it has ended.
    """
    find(server, caller, agent_id, name)
    answer = await _respond(server, caller, requests.CancelA2ATask(task_id=name, reason="tasks/cancel"))
    if isinstance(answer, responses.A2ACancelled) and not answer.cancelled:
        raise errors.TaskStateError(f"task `{strict_json.shown(name)}` has ended")
    return view(find(server, caller, agent_id, name))


def get(server: Server, caller: Caller, agent_id: str, name: str) -> TaskView:
    """Return a task. Counts as a request of the caller's.

    Raises:
        errors.NoTaskError: the caller sent no such task to this agent.
        errors.BusyError: the caller asks too often.
    """
    server.rates.admit(caller, server.refusals, server.now_ms())
    return view(find(server, caller, agent_id, name))


def listed(server: Server, caller: Caller, agent_id: str, asked: calls.ListTasks) -> tuple[list[TaskView], str, int]:
    """Return a page of the caller's tasks for this agent, last changed first, the token of the next page, and their
    number.

    Raises:
        errors.BusyError: the caller asks too often.
        errors.HttpRefusedError: the page's token names no task.
    """
    server.rates.admit(caller, server.refusals, server.now_ms())
    found = [entry for entry in _mine(server, caller, agent_id) if _is_listed(entry, asked)]
    found.sort(key=_at_ms, reverse=True)
    ids = [entry.id_of_sender for entry in found]
    if asked.token and asked.token not in ids:
        raise faults.refused(faults.INVALID_PARAMS, "`pageToken` is one that a page named")
    begin = ids.index(asked.token) + 1 if asked.token else 0
    page = [view(entry) for entry in found[begin : begin + asked.size]]
    return page, ids[begin + asked.size - 1] if begin + asked.size < len(ids) else "", len(ids)


def _is_listed(entry: TaskEntry, asked: calls.ListTasks) -> bool:
    state = asked.state is None or asked.state == shapes.state_word(_state(entry), calls.Dialect.V1)
    return state and asked.context_id in (None, _context_id(entry))


def follow(server: Server, name: str, called: Callable[[TaskView], None]) -> Callable[[], None]:
    """Call ``called`` with the task at each change, until the returned function is called. ``name`` is the mailbox's
    own name of the task."""

    def heard(entry: TaskEntry) -> None:
        if entry.task.id == name:
            called(view(entry))

    return server.mailbox.watch(heard)


def follow_all(server: Server, called: Callable[[str], None]) -> Callable[[], None]:
    """Call ``called`` with the mailbox's name of each task that changes, until the returned function is called."""
    return server.mailbox.watch(lambda entry: called(entry.task.id))


def let_in(server: Server, caller: Caller) -> bool:
    """Whether the caller is still admitted by some token."""
    pubkey = caller.agent.pubkey
    return pubkey == server.identity.agent.pubkey or bool(server.peers.of(pubkey))


def find(server: Server, caller: Caller, agent_id: str, name: str) -> TaskEntry:
    """Return the entry of a task that the caller sent to this agent.

    Raises:
        errors.NoTaskError: there is none; the error is the same where others have one.
    """
    entry: TaskEntry | None = server.mailbox.sent(caller.agent.pubkey, name)
    if entry is None or entry.task.recipient != billing.budget_of(agent_id):
        raise errors.NoTaskError(f"there is no task `{strict_json.shown(name)}` of yours")
    return entry


def view(entry: TaskEntry) -> TaskView:
    """Return a task as its sender sees it."""
    result = entry.result
    return TaskView(
        id=entry.id_of_sender,
        context_id=_context_id(entry),
        state=_state(entry),
        at_ms=_at_ms(entry),
        text=None if result is None or result.status == "error" else _text(result),
        reason=None if result is None or result.status != "error" else result.error_message or "failed",
        more={} if result is None else _more(result),
    )


def _mine(server: Server, caller: Caller, agent_id: str) -> Iterator[TaskEntry]:
    pubkey, recipient = caller.agent.pubkey, billing.budget_of(agent_id)
    for entry in server.mailbox.recent(pubkey, _MOST_LOOKED_AT):
        if entry.task.sender.pubkey == pubkey and entry.task.recipient == recipient:
            yield entry


def _context_id(entry: TaskEntry) -> str:
    return entry.task.parent or str(uuid.uuid5(_TASKS, entry.id_of_sender))


def _state(entry: TaskEntry) -> str:
    if entry.open:
        return shapes.WORKING if entry.state is State.IN_FLIGHT else shapes.SUBMITTED
    result = entry.result
    if result is None or result.error_message == _CANCELLED:
        return shapes.CANCELED
    if result.status != "error":
        return shapes.COMPLETED
    refused = (result.error_message or "").partition(":")[0] in _REFUSED
    return shapes.REJECTED if refused else shapes.FAILED


def _at_ms(entry: TaskEntry) -> int:
    if entry.ended_at_ms is not None:
        return entry.ended_at_ms
    return entry.sent_at_ms if entry.lease is None else entry.lease.at_ms


def _text(result: A2ATaskResult) -> str:
    texts = (block.get("text") for block in result.content if block.get("type") == "text")
    return "\n".join(text for text in texts if isinstance(text, str))


def _more(result: A2ATaskResult) -> dict[str, Any]:
    """Return the ids of the intent and the run, by which the audit log is searched."""
    meta: Mapping[str, Any] = next(
        (block["_meta"] for block in result.content if isinstance(block.get("_meta"), dict)), {}
    )
    return {name: meta[name] for name in ("covenant/intent_id", "covenant/run_id") if isinstance(meta.get(name), str)}


async def _respond(server: Server, caller: Caller, asked: requests.Request) -> responses.Response:
    """Ask as any transport does; a refusal is raised."""
    answer = await server.respond(caller, asked)
    if isinstance(answer, responses.Error):
        raise errors.restored(answer.model_dump())
    return answer
