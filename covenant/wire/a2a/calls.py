"""Calls of A2A: a message of JSON-RPC, or a path with query and body of HTTP+JSON, read into one set of structs.

Both versions name the same acts. A document's fields are read in camel case and in snake case, since the clients of
version 0.3 send both. Unknown fields are ignored, as both versions ask.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from msgspec import Struct

from covenant.wire.a2a import faults
from policy import errors, wire_json
from policy.signing import strict_json

ID_CHARACTERS: Final = 256
PAGE: Final = 50
MOST_OF_PAGE: Final = 100
_URL_CHARACTERS: Final = 2048
_SECRET_CHARACTERS: Final = 4096
_CAPITAL: Final = re.compile(r"(?<!^)([A-Z])")
_VERSIONS: Final = re.compile(r"(0\.3|1\.0|1)(?:\.[0-9]{1,4})?")
_TEXT_MODES: Final = frozenset({"text", "text/plain", "text/*", "*/*", "*"})
# A path below an agent's address: `message:send`, `tasks`, `tasks/ID`, `tasks/ID:cancel`, and push configurations.
_TASK: Final = re.compile(r"tasks/([^/:]{1,256})(?::(cancel|subscribe))?")
_PUSH: Final = re.compile(r"tasks/([^/:]{1,256})/pushNotificationConfigs(?:/([^/]{1,256}))?")


class Dialect(enum.Enum):
    """A way to write tasks: version 1.0 in both bindings, version 0.3 in JSON-RPC and in HTTP+JSON."""

    V1 = "1.0"
    RPC_03 = "0.3 JSON-RPC"
    HTTP_03 = "0.3 HTTP+JSON"


class PushTarget(Struct, frozen=True):
    """A push configuration: the URL to call, and the secrets that its owner checks there."""

    url: str
    id: str = ""
    token: str = ""
    scheme: str = ""
    credentials: str = ""


class Send(Struct, frozen=True):
    """A message to the agent. ``waits``: the reply is the task at its end; ``streams``: the task's events."""

    message_id: str
    text: str
    context_id: str | None = None
    task_id: str | None = None
    waits: bool = True
    streams: bool = False
    push: PushTarget | None = None


class GetTask(Struct, frozen=True):
    """Return a task."""

    id: str


class CancelTask(Struct, frozen=True):
    """Cancel a task."""

    id: str


class Subscribe(Struct, frozen=True):
    """Stream the events of a task from now on."""

    id: str


class ListTasks(Struct, frozen=True):
    """Return a page of the caller's tasks, last changed first. ``token`` is the id of the last task of the page
    before."""

    context_id: str | None = None
    state: str | None = None
    size: int = PAGE
    token: str = ""
    artifacts: bool = False


class SetPush(Struct, frozen=True):
    """Set a push configuration of a task."""

    id: str
    target: PushTarget


class GetPush(Struct, frozen=True):
    """Return a push configuration of a task; the first with an empty ``config_id``."""

    id: str
    config_id: str = ""


class ListPush(Struct, frozen=True):
    """Return the push configurations of a task."""

    id: str


class DeletePush(Struct, frozen=True):
    """Delete a push configuration of a task."""

    id: str
    config_id: str


class GetExtendedCard(Struct, frozen=True):
    """Return a card with more than the public one has: there is none."""


Call = Send | GetTask | CancelTask | Subscribe | ListTasks | SetPush | GetPush | ListPush | DeletePush | GetExtendedCard


class RpcMessage(NamedTuple):
    """A message of JSON-RPC: its id, its method and its parameters."""

    id: str | int | None
    method: str
    params: Any


def check_version(header: str | None) -> str:
    """Return the version that a client's header ``A2A-Version`` names; none means 0.3.

    Raises:
        errors.HttpRefusedError: another version.
    """
    if not header:
        return "0.3"
    found = _VERSIONS.fullmatch(header.strip())
    if found is None:
        raise faults.refused(faults.NO_VERSION, "this version of A2A is not spoken", hint="0.3 or 1.0")
    return "0.3" if found[1] == "0.3" else "1.0"


def envelope(raw: bytes) -> RpcMessage:
    """Read a message of JSON-RPC.

    Raises:
        errors.HttpRefusedError: it is no JSON, or no message. The reply to it has no id.
    """
    document = _read(raw)
    if not isinstance(document, dict) or document.get("jsonrpc") != "2.0":
        raise faults.refused(faults.INVALID_REQUEST, "a message is one JSON-RPC 2.0 object")
    method = document.get("method")
    if not isinstance(method, str):
        raise faults.refused(faults.INVALID_REQUEST, "there is no method")
    number = document.get("id")
    if number is not None and (isinstance(number, bool) or not isinstance(number, str | int) or _long(number)):
        raise faults.refused(faults.INVALID_REQUEST, "an id is a string or a whole number")
    return RpcMessage(number, method, document.get("params", {}))


def of_method(method: str, params: Any) -> tuple[Dialect, Call]:
    """Return the call that a method of JSON-RPC is, and the dialect of its reply.

    Raises:
        errors.HttpRefusedError: there is no such method, or its parameters are wrong.
    """
    found = _METHODS.get(method)
    if found is None:
        raise faults.refused(faults.NO_METHOD, f"there is no method `{strict_json.shown(method[:ID_CHARACTERS])}`")
    if not isinstance(params, dict):
        raise _wrong("parameters are given by name")
    dialect = Dialect.RPC_03 if "/" in method else Dialect.V1
    return dialect, found(params)


def of_path(method: str, path: str, query: Mapping[str, str], raw: bytes) -> tuple[Dialect, Call]:
    """Return the call that a request of HTTP+JSON is, and the dialect of its reply. ``path`` is what follows the
    agent's address and a slash; version 0.3 has ``v1/`` before it.

    Raises:
        errors.HttpRefusedError: there is no such path or method, or a field is wrong.
    """
    legacy = is_legacy(path)
    path = path.removeprefix("v1/")
    body = _read(raw) if raw else {}
    if not isinstance(body, dict):
        raise faults.refused(faults.INVALID_REQUEST, "a body is a JSON object")
    return (Dialect.HTTP_03 if legacy else Dialect.V1), _routed(method, path, query, body, legacy=legacy)


def is_legacy(path: str) -> bool:
    """Whether a path below an agent's address is one of version 0.3."""
    return path.startswith("v1/")


def _routed(method: str, path: str, query: Mapping[str, str], body: Mapping[str, Any], *, legacy: bool) -> Call:
    if (method, path) in (("POST", "message:send"), ("POST", "message:stream")):
        # The protobuf form of version 0.3 leaves a false `blocking` out.
        return _send(body, streams=path.endswith("stream"), waits=not legacy)
    if (method, path) == ("GET", "card" if legacy else "extendedAgentCard"):
        return GetExtendedCard()
    if (method, path) == ("GET", "tasks") and not legacy:
        return _list(_from_query(query))
    if (task := _TASK.fullmatch(path)) is not None and (made := _OF_TASK.get((method, task[2]))) is not None:
        return made(task[1])
    if (push := _PUSH.fullmatch(path)) is not None:
        if push[2] is None and method == "POST":
            return SetPush(push[1], _target(body))
        if push[2] is None and method == "GET":
            return ListPush(push[1])
        if push[2] is not None and method in ("GET", "DELETE"):
            return GetPush(push[1], push[2]) if method == "GET" else DeletePush(push[1], push[2])
    raise faults.refused(faults.NO_METHOD, "there is no such path and method")


# The fields of calls --------------------------------------------------------------------------------------------------


def _send(params: Mapping[str, Any], *, streams: bool, waits: bool = True) -> Send:
    """Return the call of a message. ``waits`` is what a message without a word about it means."""
    # HTTP+JSON of version 0.3 calls the message `request` in snake case.
    message = _take(params, "message")
    message = params.get("request") if message is None else message
    if not isinstance(message, dict):
        raise _wrong("`message` is missing or no object")
    if (role := message.get("role")) not in ("user", "ROLE_USER"):
        raise _wrong(f"`role` of a message to an agent is the user's, not `{strict_json.shown(str(role)[:64])}`")
    how = _object(params, "configuration")
    modes = _take(how, "acceptedOutputModes") or []
    if not isinstance(modes, list) or (modes and not any(mode in _TEXT_MODES for mode in modes if type(mode) is str)):
        raise faults.refused(faults.CONTENT_TYPE, "an agent's answer is text", hint="accept text/plain")
    blocking, at_once = _flag(how, "blocking"), _flag(how, "returnImmediately")
    push = _object(how, "pushNotificationConfig") or _object(how, "taskPushNotificationConfig")
    return Send(
        message_id=_id(message, "messageId"),
        text=_text(message),
        context_id=_optional(message, "contextId"),
        task_id=_optional(message, "taskId"),
        waits=(waits if blocking is None else blocking) and not at_once,
        streams=streams,
        push=_target(push or _object(how, "pushNotification")) if push or _object(how, "pushNotification") else None,
    )


def _text(message: Mapping[str, Any]) -> str:
    """Return the text of a message: its parts of text and, as JSON, of data, each on a line of its own."""
    parts = message.get("parts", message.get("content"))
    if not isinstance(parts, list) or not parts:
        raise _wrong("`parts` of a message is a list that is not empty")
    found = []
    for part in parts:
        if not isinstance(part, dict):
            raise _wrong("a part is an object")
        if isinstance(text := part.get("text"), str):
            found.append(text)
        elif "data" in part:
            found.append(json.dumps(part["data"], ensure_ascii=False))
        elif not {"file", "raw", "url"}.isdisjoint(part):
            raise faults.refused(faults.CONTENT_TYPE, "agents of this daemon take text and data, and no files")
        else:
            raise _wrong("a part has `text` or `data`")
    text = "\n".join(found)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _wrong("the text is not valid Unicode") from None
    return text


def _list(params: Mapping[str, Any]) -> ListTasks:
    size = _take(params, "pageSize")
    if size is not None and (type(size) is not int or not 1 <= size <= MOST_OF_PAGE):
        raise _wrong(f"`pageSize` is a number from 1 to {MOST_OF_PAGE}")
    state = _optional(params, "status")
    if _take(params, "statusTimestampAfter") is not None:
        raise faults.refused(faults.UNSUPPORTED, "tasks are not listed by their time")
    return ListTasks(
        context_id=_optional(params, "contextId"),
        state=None if state == "TASK_STATE_UNSPECIFIED" else state,
        size=PAGE if size is None else size,
        token=_optional(params, "pageToken") or "",
        artifacts=_flag(params, "includeArtifacts") is True,
    )


def _from_query(query: Mapping[str, str]) -> dict[str, Any]:
    """Return the parameters of a list with the types that a body has."""
    found: dict[str, Any] = dict(query)
    for name in ("pageSize", "page_size", "historyLength", "history_length"):
        if (said := query.get(name)) is not None:
            found[name] = int(said) if said.isascii() and said.isdecimal() and len(said) < 10 else said
    for name in ("includeArtifacts", "include_artifacts"):
        if name in query:
            found[name] = {"true": True, "false": False}.get(query[name].lower(), query[name])
    return found


def _set_push(params: Mapping[str, Any]) -> SetPush:
    return SetPush(_id(params, "taskId"), _target(params))


def _target(params: Mapping[str, Any]) -> PushTarget:
    """Return a push configuration; version 0.3 has it in a field of its own, in HTTP+JSON in a field of a field."""
    for name in ("config", "pushNotificationConfig"):
        params = _object(params, name) or params
    url = _take(params, "url")
    if not isinstance(url, str) or not 0 < len(url) <= _URL_CHARACTERS:
        raise _wrong(f"`url` is missing, or longer than {_URL_CHARACTERS} characters")
    how = _object(params, "authentication")
    scheme, schemes = _take(how, "scheme"), _take(how, "schemes")
    if scheme is None and isinstance(schemes, list) and schemes:
        scheme = schemes[0]
    return PushTarget(
        url=url,
        id=_optional(params, "id") or "",
        token=_secret(params.get("token")),
        scheme=_secret(scheme),
        credentials=_secret(_take(how, "credentials")),
    )


def _secret(value: Any) -> str:
    """Return a header's value."""
    value = value or ""
    if not isinstance(value, str) or len(value) > _SECRET_CHARACTERS or not (value.isascii() and value.isprintable()):
        raise _wrong("what authenticates a push is printable ASCII")
    return value


def _take(params: Mapping[str, Any], name: str) -> Any:
    found = params.get(name)
    return params.get(_CAPITAL.sub(r"_\1", name).lower()) if found is None else found


def _object(params: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = _take(params, name)
    if found is not None and not isinstance(found, dict):
        raise _wrong(f"`{name}` is an object")
    return found or {}


def _flag(params: Mapping[str, Any], name: str) -> bool | None:
    found = _take(params, name)
    if found is not None and not isinstance(found, bool):
        raise _wrong(f"`{name}` is true or false")
    return found


def _optional(params: Mapping[str, Any], name: str) -> str | None:
    found = _take(params, name)
    if found is None or found == "":
        return None
    if not isinstance(found, str) or len(found) > ID_CHARACTERS or not found.isprintable():
        raise _wrong(f"`{name}` has 1 to {ID_CHARACTERS} printable characters")
    return found


def _id(params: Mapping[str, Any], name: str) -> str:
    found = _optional(params, name)
    if found is None:
        raise _wrong(f"`{name}` is missing")
    return found


def _long(number: str | int) -> bool:
    return len(number) > ID_CHARACTERS if isinstance(number, str) else abs(number) >= 1 << 63


def _read(raw: bytes) -> Any:
    try:
        return wire_json.read(raw)
    except errors.MalformedRequestError as e:
        raise faults.refused(faults.PARSE, e.message, hint=e.hint) from None


def _wrong(message: str) -> errors.HttpRefusedError:
    return faults.refused(faults.INVALID_PARAMS, message)


_OF_TASK: Final[Mapping[tuple[str, str | None], Callable[[str], Call]]] = {
    ("GET", None): GetTask,
    ("POST", "cancel"): CancelTask,
    ("POST", "subscribe"): Subscribe,
    ("GET", "subscribe"): Subscribe,
}
_METHODS: Final[Mapping[str, Callable[[Mapping[str, Any]], Call]]] = {
    "message/send": lambda params: _send(params, streams=False),
    "message/stream": lambda params: _send(params, streams=True),
    "tasks/get": lambda params: GetTask(_id(params, "id")),
    "tasks/cancel": lambda params: CancelTask(_id(params, "id")),
    "tasks/resubscribe": lambda params: Subscribe(_id(params, "id")),
    "tasks/pushNotificationConfig/set": _set_push,
    "tasks/pushNotificationConfig/get": lambda params: GetPush(
        _id(params, "id"), _optional(params, "pushNotificationConfigId") or ""
    ),
    "tasks/pushNotificationConfig/list": lambda params: ListPush(_id(params, "id")),
    "tasks/pushNotificationConfig/delete": lambda params: DeletePush(
        _id(params, "id"), _id(params, "pushNotificationConfigId")
    ),
    "agent/getAuthenticatedExtendedCard": lambda params: GetExtendedCard(),
    "SendMessage": lambda params: _send(params, streams=False),
    "SendStreamingMessage": lambda params: _send(params, streams=True),
    "GetTask": lambda params: GetTask(_id(params, "id")),
    "ListTasks": _list,
    "CancelTask": lambda params: CancelTask(_id(params, "id")),
    "SubscribeToTask": lambda params: Subscribe(_id(params, "id")),
    "CreateTaskPushNotificationConfig": _set_push,
    "GetTaskPushNotificationConfig": lambda params: GetPush(_id(params, "taskId"), _optional(params, "id") or ""),
    "ListTaskPushNotificationConfigs": lambda params: ListPush(_id(params, "taskId")),
    "DeleteTaskPushNotificationConfig": lambda params: DeletePush(_id(params, "taskId"), _id(params, "id")),
    "GetExtendedAgentCard": lambda params: GetExtendedCard(),
}
