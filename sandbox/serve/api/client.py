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
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from policy import errors
from sandbox import unix_wire
from sandbox.kernel.net import unix_address
from sandbox.run_result import RunResult
from sandbox.serve.api import paths

if TYPE_CHECKING:
    from sandbox.run_io import CallerStreams

# Limit of the wait before the request is sent. A client waits while the listen queue is full.
CONNECT_SECONDS: Final = 10.0
_SEND_SECONDS: Final = 10.0

# What is said on the way: a name, and what belongs to it.
Said = Callable[[Mapping[str, Any]], None]


class GivenWorkspace(NamedTuple):
    """An open directory that becomes the workspace of a run, the earlier run that it resumes, and whether it is kept.

    ``fds`` has the common directory of git too, where it is a linked worktree. ``resume`` is empty for a workspace
    without changes.
    """

    fds: tuple[int, ...]
    resume: str = ""
    keep: bool = False

    def fields(self) -> dict[str, Any]:
        """Return the fields of a request that brings it."""
        resume = {"resume": self.resume} if self.resume else {}
        given = dict.fromkeys(("workspace", "repository")[: len(self.fds)], True)
        return {**given, **resume, **({"keep_workspace": True} if self.keep else {})}


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
    stderr: Callable[[str], None] | None = None,
    said: Said = lambda state: None,
    workspace: GivenWorkspace | None = None,
) -> RunResult:
    """Run the package in the open ``directory`` (``covenant run``). ``stderr`` takes the agent's first lines there.

    ``workspace`` becomes the agent's workspace.

    Raises:
        errors.CovenantError: as ``ask``.
    """
    optional = {"timeout_ms": timeout_ms, "user": user, "stderr": None if stderr is None else True}
    fields = {name: value for name, value in optional.items() if value is not None}

    def heard(state: Mapping[str, Any]) -> None:
        if stderr is not None and state.get("state") == "stderr":
            stderr(str(state.get("text", "")))
        else:
            said(state)

    fds = [directory] if workspace is None else [directory, *workspace.fds]
    fields |= {} if workspace is None else workspace.fields()
    return RunResult.from_json(ask(sock, "run", fds=fds, said=heard, text=text, **fields))


def session(
    sock: socket.socket,
    directory: int,
    caller: CallerStreams,
    *,
    timeout_ms: int | None = None,
    said: Said = lambda state: None,
    workspace: GivenWorkspace | None = None,
) -> RunResult:
    """Open a session with the package in the open ``directory``; ``caller`` are pipes for the supervisor.

    The session of a terminal goes on if the caller ``stays`` or sends DETACH, and may begin without pipes.

    Raises:
        errors.CovenantError: as ``ask``.
    """
    fields: dict[str, Any] = {} if timeout_ms is None else {"timeout_ms": timeout_ms}
    fds = [directory, caller.stdin, caller.stdout, caller.stderr]
    if caller.size is not None:
        rows, columns = caller.size
        fields["terminal"] = {"rows": rows, "columns": columns}
        fds[3] = caller.resizes
        if caller.recording >= 0:
            fields["recording"] = True
            fds.append(caller.recording)
        if caller.stays:
            fields["keep"] = True
        if caller.stdin < 0:
            fields["attached"] = False
            fds = [directory]
    if workspace is not None:
        fields |= workspace.fields()
        fds += workspace.fds
    return RunResult.from_json(ask(sock, "session", fds=fds, said=said, **fields))


def attach(sock: socket.socket, run: str, caller: CallerStreams, *, said: Said = lambda state: None) -> dict[str, Any]:
    """Attach to the terminal of a run, whose record is the answer; ``caller`` are pipes for the supervisor.

    Raises:
        errors.CovenantError: as ``ask``.
    """
    assert caller.size is not None
    rows, columns = caller.size
    fds, terminal = [caller.stdin, caller.stdout, caller.resizes], {"rows": rows, "columns": columns}
    answer = ask(sock, "attach", fds=fds, said=said, run=run, terminal=terminal)
    record: dict[str, Any] = answer["record"]
    return record


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
