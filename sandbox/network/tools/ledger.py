"""The supervisor's end of a tool gate's lines: rows of the log, and servers that are to start.

What the gate says is checked: it is the process that reads the agent's calls and the servers' answers. A call that was
under way when the gate ended has its row too.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from msgspec import Struct

from policy import errors
from sandbox.kernel.proc import pipes
from sandbox.network.tools import wire
from sandbox.network.tools.questions import HoldTerms, ToolQuestions
from sandbox.network.tools.spawn_line import Spawn, SpawnLine

_AT_ONCE: Final = 64
_UNDER_WAY: Final = 4096
_MOST: Final = 1 << 48
_STDERR_BYTES: Final = 2048
# How long a gate may take for its last rows.
_LAST_SECONDS: Final = 0.5
_TEXT, _MAYBE = (str,), (str, type(None))
_CALLED: Final = {
    "uri": _TEXT,
    "side_effect_class": _MAYBE,
    "arguments_hash_hex": _MAYBE,
    "argument_bytes": (int,),
}
_ROWS: Final[Mapping[str, Mapping[str, tuple[type, ...]]]] = {
    "tool_called": {**_CALLED, "call": _TEXT},
    "tool_refused": {**_CALLED, "denial": _TEXT, "code": _TEXT, "grant": _MAYBE, "count": (int,)},
    "tool_answered": {
        "uri": _TEXT,
        "call": _TEXT,
        "status": _TEXT,
        "code": _MAYBE,
        "answer_hash_hex": _MAYBE,
        "answer_bytes": (int,),
        "duration_ms": (int,),
    },
}

# Writes an event.
Log = Callable[[str, Mapping[str, Any]], None]


class StartedServer(Struct, frozen=True):
    """Descriptors of a server that is starting. The caller closes them.

    ``calls`` says to its shim whether calls are under way; None for a server that is never frozen. ``stderr`` is -1
    for the daemon, which has a log of its own.
    """

    stdin: int
    stdout: int
    stderr: int
    calls: int | None = None

    @property
    def gates(self) -> list[int]:
        """Return the descriptors of the tool gate."""
        return [self.stdin, self.stdout, *([] if self.calls is None else [self.calls])]


class BrokerLine(Protocol):
    """The line from the run's broker to the tool gate. ``started`` closes the gate's end, which the gate has."""

    @property
    def gate_end(self) -> int:
        """Return the gate's descriptor."""

    def started(self) -> None:
        """Close the gate's end here."""


class ToolTerms(Struct, frozen=True):
    """The tools of a run: the grants and tools.json for the gate, and the supervisor's part of it.

    ``log`` writes an event, and ``sync`` makes all that were written durable. ``settle`` does what ``sync`` put off,
    and is called once the calls that waited for ``sync`` may be made. ``start`` starts a server, or returns None where
    it cannot. ``spawn`` starts a child of the run; None where the run may have none. ``hold`` asks an operator about
    calls, where the grants demand it. ``asks`` is the broker's line to the gate. ``closed`` are granted tools that this
    run does not have, with the reason.
    """

    grants: Mapping[str, Any]
    tools: str
    agent_id: str
    log: Log
    start: Callable[[str], StartedServer | None]
    sync: Callable[[], None] = lambda: None
    spawn: Spawn | None = None
    hold: HoldTerms | None = None
    asks: BrokerLine | None = None
    closed: Mapping[str, str] = {}
    settle: Callable[[], None] = lambda: None

    def plan(self) -> dict[str, Any]:
        """Return what the tool gate's process is given."""
        return {"grants": self.grants, "tools": self.tools, "closed": dict(self.closed)}


class ToolLedger:
    """Serves one tool gate."""

    def __init__(self, terms: ToolTerms) -> None:
        self._terms = terms
        self._under_way: dict[str, str] = {}
        self.hung_up = False
        self._log, self._gates_log = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control, self._gates_control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._questions = None if terms.hold is None else ToolQuestions(terms.hold)
        self._epoll = select.epoll()
        self._children = None if terms.spawn is None else SpawnLine(terms.spawn, self._writes_outcomes)
        if self._children is not None:
            self._epoll.register(self._children.fileno(), select.EPOLLIN)
        if self._questions is not None:
            self._epoll.register(self._questions.fileno(), select.EPOLLIN)
        # What servers wrote to stderr last, by descriptor: alias and text.
        self._stderr: dict[int, tuple[str, bytearray]] = {}
        for end in (self._log, self._control):
            end.setblocking(False)
            self._epoll.register(end.fileno(), select.EPOLLIN)

    def close(self) -> None:
        """Release all ends."""
        for end in (self._log, self._gates_log, self._control, self._gates_control, self._epoll):
            end.close()
        if self._children is not None:
            self._children.close()
        if self._questions is not None:
            self._questions.close()
        while self._stderr:
            os.close(self._stderr.popitem()[0])

    @property
    def gate_ends(self) -> dict[str, int]:
        """Return the gate's descriptors by name; ``started`` closes them here."""
        found = {"log": self._gates_log.fileno(), "control": self._gates_control.fileno()}
        if self._children is not None:
            found["children"] = self._children.gates_end.fileno()
        if self._questions is not None:
            found["questions"] = self._questions.gate_end
        if self._terms.asks is not None:
            found["broker"] = self._terms.asks.gate_end
        return found

    def started(self) -> None:
        """Close the gate's ends here: from now on, its death is the end of both lines."""
        self._gates_log.close()
        self._gates_control.close()
        if self._children is not None:
            self._children.gates_end.close()
        if self._questions is not None:
            self._questions.started()
        if self._terms.asks is not None:
            self._terms.asks.started()

    def fileno(self) -> int:
        """Return the descriptor to watch."""
        return self._epoll.fileno()

    def serve(self) -> errors.RunError | None:
        """Serve what is ready, a bounded amount of it."""
        for fd, _ in self._epoll.poll(0, _AT_ONCE):
            if fd in self._stderr:
                self._read_stderr(fd)
            elif self._children is not None and fd == self._children.fileno():
                if (wrong := self._children.serve()) is not None:
                    self.hung_up = self._children.hung_up
                    return wrong
            elif self._questions is not None and fd == self._questions.fileno():
                if (wrong := self._questions.serve()) is not None:
                    return wrong
            elif (wrong := self._rows() if fd == self._log.fileno() else self._starts()) is not None:
                return wrong
        return None

    def _rows(self) -> errors.RunError | None:
        """Take the rows that are there, and write them with one sync where a call waits for its own."""
        wrong, awaited = None, 0
        for _ in range(_AT_ONCE):
            message = _received(self._log, wire.ROW_BYTES)
            if message is None:
                break
            if not message:
                wrong = self._gone()
                break
            kind = self._row(message)
            if not kind:
                wrong = errors.GateError("the tool gate tells what it may not")
                break
            awaited += kind == wire.AWAITED
        if awaited:
            self._terms.sync()
            with contextlib.suppress(OSError):  # it is gone, which the end of its line tells
                self._log.send(wire.ACK * awaited)
            self._terms.settle()
        return wrong

    def _row(self, message: bytes) -> str:
        """Write a row. Returns its kind, empty where no honest gate sends it."""
        found = _read(message)
        if found is None:
            return ""
        kind, fields = found
        if kind == "tool_called":
            if fields["call"] in self._under_way or len(self._under_way) >= _UNDER_WAY:
                return ""
            if self._questions is not None and not self._questions.passes(fields):
                return ""
            self._under_way[fields["call"]] = fields["uri"]
        if kind == "tool_answered" and self._under_way.pop(fields["call"], None) != fields["uri"]:
            return ""
        self._terms.log(kind, {**fields, "agent_id": self._terms.agent_id})
        return kind

    def _writes_outcomes(self, waiting: bool) -> None:
        """Watch whether the gate reads outcomes, while some wait for it."""
        if self._children is not None:
            self._epoll.modify(self._children.fileno(), select.EPOLLIN | (select.EPOLLOUT if waiting else 0))

    def _gone(self) -> errors.RunError:
        self.hung_up = True
        return errors.GateError("the tool gate hung up")

    def _starts(self) -> errors.RunError | None:
        message = _received(self._control, wire.ALIAS_BYTES)
        if message is None:
            return None
        if not message:
            return self._gone()
        try:
            alias = message.decode("ascii")
        except UnicodeDecodeError:
            return errors.GateError("the tool gate asks for a server that there is not")
        made = self._terms.start(alias)
        fds = [] if made is None else made.gates
        try:
            for fd in fds:
                os.set_blocking(fd, False)  # of the gate's ends alone, which cannot do it itself
            socket.send_fds(self._control, [message], fds)
        except OSError:
            return self._gone()
        finally:
            for fd in fds:
                os.close(fd)
            if made is not None and made.stderr >= 0:
                os.set_blocking(made.stderr, False)
                self._stderr[made.stderr] = alias, bytearray()
                self._epoll.register(made.stderr, select.EPOLLIN)
        return None

    def _read_stderr(self, fd: int) -> None:
        """Read what a server writes to stderr, so that it never waits for a reader. It is for no client."""
        try:
            data = os.read(fd, pipes.CHUNK_BYTES)
        except BlockingIOError:
            return
        if data:
            kept = self._stderr[fd][1]
            kept += data
            del kept[:-_STDERR_BYTES]
            return
        self._epoll.unregister(fd)
        del self._stderr[fd]
        os.close(fd)

    def wind_up(self) -> None:
        """Tell the gate that the run is over, and write its last rows. Waits briefly: the gate may be frozen."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)
        until = time.monotonic() + _LAST_SECONDS
        while not self.hung_up and (left := until - time.monotonic()) > 0:
            if not pipes.readable(self._log.fileno(), left) or self._rows() is not None:
                return

    def finish(self) -> None:
        """Write the rest, once the gate has ended: also the calls that it could not end."""
        while message := _received(self._log, wire.ROW_BYTES):
            if not self._row(message):
                break
        while self._under_way:
            call, uri = self._under_way.popitem()
            ended = {"status": "failed", "code": "run_ended", "answer_hash_hex": None}
            fields = {"uri": uri, "call": call, **ended, "answer_bytes": 0, "duration_ms": 0}
            self._terms.log("tool_answered", {**fields, "agent_id": self._terms.agent_id})


def _received(line: socket.socket, most: int) -> bytes | None:
    """Return a message; None when there is none yet, empty at the end."""
    try:
        return line.recv(most + 1)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _read(message: bytes) -> tuple[str, dict[str, Any]] | None:
    """Return kind and fields of a row. None if it is none of an honest gate."""
    try:
        row = json.loads(message)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or set(row) != {"kind", "fields"} or not isinstance(row["fields"], dict):
        return None
    shape = _ROWS.get(row["kind"]) if isinstance(row["kind"], str) else None
    fields = {name: value for name, value in row["fields"].items() if name != "agent_id"}
    if shape is None or set(fields) != set(shape):
        return None
    fine = all(type(fields[name]) in kinds for name, kinds in shape.items())
    if not fine or any(type(value) is int and not 0 <= value < _MOST for value in fields.values()):
        return None
    return row["kind"], fields
