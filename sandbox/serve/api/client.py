"""The supervisor as its clients see it: one connection, one request, what is said on the way, one answer.

Light: it imports what ``covenant --help`` does not mind, and sockets.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from policy import errors
from sandbox import unix_wire
from sandbox.kernel.net import unix_address
from sandbox.serve.api import paths

if TYPE_CHECKING:
    from policy import denials

# Limit of the wait before the request is sent. A client waits while the listen queue is full.
CONNECT_SECONDS: Final = 10.0
_SEND_SECONDS: Final = 10.0

# What is said on the way: a name, and what belongs to it.
Said = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Result:
    """The answer of the agent (policy.contract.AgentResult)."""

    text: str
    sources: tuple[str, ...]
    files: tuple[Any, ...] = ()
    runtime_events: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """The resources that the run used (policy.contract.Usage)."""

    cpu_ms: int | None
    memory_peak_bytes: int | None
    wall_ms: int


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of a run that was started, as sandbox.lifecycle.run.RunResult has it."""

    run_id: str
    intent_id: str
    agent_id: str
    policy_digest: str | None
    result: Result | None
    error: errors.CovenantError | None
    stderr: str
    not_enforced: tuple[str, ...]
    unknown_sections: tuple[str, ...]
    denials: tuple[denials.Row, ...]
    timings: Mapping[str, float]
    usage: Usage


def candidates(state: str, *, given: bool) -> list[str]:
    """Where a supervisor may listen for this client: that of ``state``, and the machine's own where ``state`` was not
    ``given`` or cannot be used by this uid anyway."""
    own = paths.socket_of(state)
    return [own] if given and os.geteuid() == 0 else list(dict.fromkeys((own, paths.SYSTEM_SOCKET)))


@contextlib.contextmanager
def connected(path: str) -> Iterator[socket.socket | None]:
    """Connect to the supervisor that listens at ``path``. Yield None where no process listens.

    Raises:
        errors.ImpostorError: the listening process is not root.
        errors.ServiceError: the supervisor does not take connections.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.settimeout(CONNECT_SECONDS)
            # The caller's own state may be a symlink: who listens there is asked below.
            with unix_address.within(os.path.dirname(path), os.path.basename(path), follow=True) as address:
                sock.connect(address)
        except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError, PermissionError):
            yield None
            return
        except OSError as e:
            raise errors.ServiceError(f"the supervisor at `{path}` cannot be asked: {e}", where=path) from e
        uid = unix_wire.peer(sock).uid
        if uid != 0:
            raise errors.ImpostorError(f"whoever listens at `{path}` is uid {uid}, not root", where=path)
        yield sock


def ask(
    sock: socket.socket, kind: str, *, fds: Sequence[int] = (), said: Said = lambda state: None, **fields: Any
) -> dict[str, Any]:
    """Ask once: the document that answers. ``said`` is told what comes before it.

    Closing the connection, or shutting its writing half, is how a client goes away.

    Raises:
        errors.CovenantError: the supervisor refused, as it says.
        errors.ServiceError: it ended before it answered, or does not speak as one.
    """
    try:
        frame = unix_wire.encode({"kind": kind, **fields})
    except UnicodeEncodeError as e:
        raise errors.UsageError("the request is not valid Unicode") from e
    # It may have said no already, and have closed its half: what it said is still to be read.
    with contextlib.suppress(OSError):
        unix_wire.send(sock, frame, until=time.monotonic() + _SEND_SECONDS, fds=fds)
    while True:
        document = _next(sock)
        if document.get("kind") == "error":
            raise errors.restored(document)
        if document.get("kind") not in ("state", "rows"):
            return document
        said(document)


def run(
    sock: socket.socket,
    directory: int,
    text: str,
    *,
    timeout_ms: int | None = None,
    user: str | None = None,
    said: Said = lambda state: None,
) -> Answer:
    """Run the package in the open ``directory`` (``covenant run``).

    Raises:
        errors.CovenantError: as ``ask``.
    """
    optional = {"timeout_ms": timeout_ms, "user": user}
    fields = {name: value for name, value in optional.items() if value is not None}
    return answer_of(ask(sock, "run", fds=[directory], said=said, text=text, **fields))


def answer_of(document: Mapping[str, Any]) -> Answer:
    """The answer in the document of ``sandbox.serve.api.run``.

    Raises:
        errors.ServiceError: it is none.
    """
    try:
        result, error = document["result"], document["error"]
        return Answer(
            run_id=document["run_id"],
            intent_id=document["intent_id"],
            agent_id=document["agent_id"],
            policy_digest=document["policy_digest"],
            result=None if result is None else _result(result),
            error=None if error is None else errors.restored(error),
            stderr=document["stderr"],
            not_enforced=tuple(document["not_enforced"]),
            unknown_sections=tuple(document["unknown_sections"]),
            denials=_denials(document["denials"]),
            timings=document["timings"],
            usage=Usage(**document["usage"]),
        )
    except (KeyError, TypeError) as e:
        raise errors.ServiceError("the supervisor's answer is none of a run") from e


def _result(document: Mapping[str, Any]) -> Result:
    lists = {name: tuple(document[name]) for name in ("sources", "files", "runtime_events")}
    return Result(text=document["text"], **lists)


def _denials(rows: Sequence[Sequence[Any]]) -> tuple[denials.Row, ...]:
    """Most runs have none, and need not import what they are."""
    if not rows:
        return ()
    from policy import denials

    return tuple(denials.Row(denials.Denial(*row[:3]), row[3]) for row in rows)


def _next(sock: socket.socket) -> dict[str, Any]:
    try:
        raw = unix_wire.receive(sock, max_bytes=unix_wire.ANSWER_BYTES, until=None)
        document = None if raw is None else json.loads(raw)
    except ValueError as e:
        raise errors.ServiceError(f"the supervisor does not speak as one: {e}") from e
    if not isinstance(document, dict):
        raise errors.ServiceError(
            "the supervisor ended the conversation before its answer", hint="see the log of covenant-supervisor"
        )
    return document
