"""Tasks and their events as A2A writes them, in each dialect."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from covenant.wire.a2a.calls import Dialect, PushTarget

SUBMITTED: Final = "SUBMITTED"
WORKING: Final = "WORKING"
COMPLETED: Final = "COMPLETED"
FAILED: Final = "FAILED"
CANCELED: Final = "CANCELED"
REJECTED: Final = "REJECTED"
ENDS: Final = frozenset({COMPLETED, FAILED, CANCELED, REJECTED})
_ANSWER: Final = "answer"
# The preliminary version of HTTP+JSON spells one state otherwise.
_SPELLED: Final = {(Dialect.HTTP_03, CANCELED): "TASK_STATE_CANCELLED"}


class TaskView(Struct, frozen=True):
    """A task as its sender sees it. ``text`` is the agent's answer, ``reason`` why a task has none."""

    id: str
    context_id: str
    state: str
    at_ms: int
    text: str | None = None
    reason: str | None = None
    more: Mapping[str, Any] = {}

    @property
    def ended(self) -> bool:
        """Whether nothing changes any more."""
        return self.state in ENDS


def task(view: TaskView, dialect: Dialect, *, artifacts: bool = True) -> dict[str, Any]:
    """Return the task."""
    found: dict[str, Any] = {"id": view.id, "contextId": view.context_id, "status": _status(view, dialect)}
    if dialect is Dialect.RPC_03:
        found["kind"] = "task"
    if view.text is not None and artifacts:
        found["artifacts"] = [_artifact(view, dialect)]
    if view.more:
        found["metadata"] = dict(view.more)
    return found


def sent(view: TaskView, dialect: Dialect) -> dict[str, Any]:
    """Return the result of sending a message: the task."""
    return task(view, dialect) if dialect is Dialect.RPC_03 else {"task": task(view, dialect)}


def page(views: Sequence[TaskView], *, size: int, token: str, total: int, artifacts: bool) -> dict[str, Any]:
    """Return a page of tasks (version 1.0 alone has them)."""
    listed = [task(view, Dialect.V1, artifacts=artifacts) for view in views]
    return {"tasks": listed, "nextPageToken": token, "pageSize": size, "totalSize": total}


def events(view: TaskView, dialect: Dialect, *, first: bool) -> Iterator[dict[str, Any]]:
    """Return the events of a stream for a task that is now so: as its first, the task; later its answer and state."""
    if first:
        yield sent(view, dialect)
        return
    ids = {"taskId": view.id, "contextId": view.context_id}
    if view.text is not None:
        yield _event(
            "artifact", {**ids, "artifact": _artifact(view, dialect), "append": False, "lastChunk": True}, dialect
        )
    last = {} if dialect is Dialect.V1 else {"final": view.ended}
    yield _event("status", {**ids, "status": _status(view, dialect), **last}, dialect)


def push_config(task_id: str, target: PushTarget, dialect: Dialect) -> dict[str, Any]:
    """Return a push configuration, without the credentials that its owner gave."""
    config: dict[str, Any] = {"id": target.id, "url": target.url}
    if target.token:
        config["token"] = target.token
    if target.scheme:
        name, value = ("scheme", target.scheme) if dialect is Dialect.V1 else ("schemes", [target.scheme])
        config["authentication"] = {name: value}
    if dialect is Dialect.V1:
        return {"taskId": task_id, **config}
    if dialect is Dialect.HTTP_03:
        name = f"tasks/{task_id}/pushNotificationConfigs/{target.id}"
        return {"name": name, "pushNotificationConfig": config}
    return {"taskId": task_id, "pushNotificationConfig": config}


def _event(kind: str, body: dict[str, Any], dialect: Dialect) -> dict[str, Any]:
    return {"kind": f"{kind}-update", **body} if dialect is Dialect.RPC_03 else {f"{kind}Update": body}


def _status(view: TaskView, dialect: Dialect) -> dict[str, Any]:
    found: dict[str, Any] = {"state": state_word(view.state, dialect), "timestamp": _time(view.at_ms)}
    if view.reason is not None:
        found["message"] = _message(view, view.reason, dialect)
    return found


def state_word(state: str, dialect: Dialect) -> str:
    """Return the word of a state in a dialect."""
    if dialect is Dialect.RPC_03:
        return state.lower()
    return _SPELLED.get((dialect, state), f"TASK_STATE_{state}")


def _message(view: TaskView, text: str, dialect: Dialect) -> dict[str, Any]:
    parts = "content" if dialect is Dialect.HTTP_03 else "parts"
    found: dict[str, Any] = {"messageId": f"{view.id}/{view.state.lower()}", parts: [_part(text, dialect)]}
    found |= {"taskId": view.id, "contextId": view.context_id}
    if dialect is Dialect.RPC_03:
        return {"kind": "message", "role": "agent", **found}
    return {"role": "ROLE_AGENT", **found}


def _artifact(view: TaskView, dialect: Dialect) -> dict[str, Any]:
    return {"artifactId": _ANSWER, "name": _ANSWER, "parts": [_part(view.text or "", dialect)]}


def _part(text: str, dialect: Dialect) -> dict[str, Any]:
    if dialect is Dialect.RPC_03:
        return {"kind": "text", "text": text}
    return {"text": text, "mediaType": "text/plain"} if dialect is Dialect.V1 else {"text": text}


def _time(at_ms: int) -> str:
    try:
        when = datetime.datetime.fromtimestamp(at_ms / 1000, datetime.UTC)
    except (OverflowError, ValueError):
        # A clock that was far ahead when the row was written.
        when = datetime.datetime.fromtimestamp(0, datetime.UTC)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")
