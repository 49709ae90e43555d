"""Serve in the tool gate's process: one loop between the service gate, the tool servers and the supervisor.

It has no network and no file, and starts nothing: the supervisor starts a server and sends the two ends of its pipes.
The process is sealed before it reads a byte that the agent or a server wrote.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import json
import os
import select
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple, NoReturn

from policy import errors
from policy.grants import restore
from policy.manifest.tools import document
from sandbox.kernel.proc import pipes
from sandbox.network.gate.main import GateInput
from sandbox.network.tools import mcp_session, wire
from sandbox.network.tools.desk import Effects, ToolDesk
from sandbox.network.tools.guard import ToolGuard
from sandbox.run_io import BUSY, IDLE

# Bytes that wait for a reader. Beyond them what would add to them is not read.
_WAITING: Final = 2 * wire.MESSAGE_BYTES
_FDS: Final = (2, 3)
# A server without a call under way is frozen after so many seconds, and thawed by the next call.
IDLE_SECONDS: Final = 3.0
# Codecs are modules that Python imports when they are first used. Once it is sealed the gate opens no file.
_CODECS: Final = ("ascii", "unicode_escape", "utf-8")


class Writer:
    """A descriptor that does not block, with the bytes that wait for it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._waiting = bytearray()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, data: bytes) -> None:
        """Write it, as far as the reader takes it.

        Raises:
            BrokenPipeError: there is no reader.
        """
        self._waiting += data
        self.flush()

    def flush(self) -> None:
        """Write what waits, as far as the reader takes it.

        Raises:
            BrokenPipeError: there is no reader.
        """
        try:
            while self._waiting:
                del self._waiting[: os.write(self.fd, self._waiting[: pipes.CHUNK_BYTES])]
        except BlockingIOError:
            return


class ServerPipes:
    """The pipes of one started server. Lines for it wait in ``early`` until they are there."""

    def __init__(self) -> None:
        self.early = bytearray()
        self.writer: Writer | None = None
        self.read_fd = -1
        self.rest = bytearray()
        # The pipe to its shim, what was said over it last, and when the server will have been idle for long enough.
        self.calls_fd: int | None = None
        self.said = BUSY
        self.rests_at: float | None = None

    def close(self) -> None:
        """Close all ends."""
        if self.writer is not None:
            os.close(self.writer.fd)
            os.close(self.read_fd)
        if self.calls_fd is not None:
            os.close(self.calls_fd)

    def tell(self, word: bytes) -> None:
        """Say to its shim whether calls are under way. A shim that reads no more has ended, which its pipes tell."""
        if self.calls_fd is not None and self.said != word:
            with contextlib.suppress(BrokenPipeError, BlockingIOError):
                os.write(self.calls_fd, word)
                self.said = word

    def look(self, now: float, *, is_idle: bool) -> None:
        """Say that it is idle, once it was so for long enough."""
        if not is_idle or self.writer is None or self.writer:
            self.rests_at = None
        elif self.rests_at is None:
            self.rests_at = now + IDLE_SECONDS
        elif self.rests_at <= now:
            self.tell(IDLE)


class LineRequest(NamedTuple):
    """A request of a line. ``headers`` are those of MCP over HTTP, None from the broker."""

    number: int
    kind: int
    alias: str
    headers: dict[str, str] | None
    message: bytes


class RequestLine:
    """A line of requests, that of the service gate or that of the broker, whose numbers in the desk begin at ``first``.

    It does not block.
    """

    def __init__(self, fd: int, first: int) -> None:
        os.set_blocking(fd, False)
        self.fd, self.first, self.out = fd, first, Writer(fd)
        self._in = bytearray()

    def take(self, data: bytes) -> Iterator[LineRequest]:
        """Take what came, and yield the whole requests.

        Raises:
            SystemExit: a frame is none of an honest process.
        """
        self._in += data
        while len(self._in) >= wire.REQUEST.size:
            number, kind, alias_bytes, header_bytes, size = wire.REQUEST.unpack_from(self._in)
            wrong = alias_bytes > wire.ALIAS_BYTES or header_bytes > wire.HEADER_BYTES
            wrong = wrong or size > wire.MESSAGE_BYTES or number >= wire.BROKERS
            if wrong or kind not in (wire.MESSAGE, wire.CANCEL):
                raise SystemExit("a line asks what it may not")
            head = wire.REQUEST.size + alias_bytes
            at = head + header_bytes
            if len(self._in) < at + size:
                return
            alias = self._in[wire.REQUEST.size : head].decode("ascii", "replace")
            headers = json.loads(self._in[head:at]) if header_bytes else None
            message = bytes(self._in[at : at + size])
            del self._in[: at + size]
            yield LineRequest(number + self.first, kind, alias, headers, message)


class ToolLoop:
    """The loop of one tool gate."""

    def __init__(self, gate: GateInput) -> None:
        plan = gate.plan
        tools = document.parse(plan["tools"].encode())
        skills = restore.effective(plan["grants"]).skills
        self._log_fd, self._control = gate.fds["log"], socket.socket(fileno=gate.fds["control"])
        guard = ToolGuard(skills, tools, self._log, closed=plan["closed"])
        guard.prepare()
        self._children = gate.fds.get("children")
        self._desk = ToolDesk(guard, tools, clock=time.monotonic, spawns=self._children is not None)
        # Without this line no operator can be asked, and a call that needs one is refused.
        self._questions = gate.fds.get("questions", -1)
        self._lines = [RequestLine(gate.fds["line"], 0)]
        if "broker" in gate.fds:
            self._lines.append(RequestLine(gate.fds["broker"], wire.BROKERS))
        self._awaited = 0
        self._servers: dict[str, ServerPipes] = {}
        self._epoll = select.epoll()
        self._masks: dict[int, int] = {}
        self._handlers: dict[int, Callable[[int], None]] = {
            self._control.fileno(): self._on_control,
            **{one.fd: functools.partial(self._on_line, one) for one in self._lines},
        }
        self._asks, self._outcomes = Writer(-1), bytearray()
        if self._children is not None:
            os.set_blocking(self._children, False)
            self._asks = Writer(self._children)
            self._handlers[self._children] = self._on_children
        if self._questions >= 0:
            os.set_blocking(self._questions, True)
            self._handlers[self._questions] = self._on_verdict

    def run(self) -> NoReturn:
        """Serve until a peer is gone."""
        while True:
            self._watch()
            due = self._due()
            for fd, events in self._epoll.poll(None if due is None else max(0.0, due - time.monotonic())):
                if (handler := self._handlers.get(fd)) is not None:
                    handler(events)
            if due is not None and due <= time.monotonic():
                self._apply(self._desk.tick())

    def _due(self) -> float | None:
        """Return when something is to be done next, without a message. Tells which servers are idle."""
        now, due = time.monotonic(), self._desk.due()
        for alias, one in self._servers.items():
            one.look(now, is_idle=self._desk.is_idle(alias))
            if one.rests_at is not None and one.said == BUSY and one.calls_fd is not None:
                due = one.rests_at if due is None else min(due, one.rests_at)
        return due

    def _watch(self) -> None:
        """Read where there is room for what comes of it, and write where something waits."""
        full = any(len(one.out) > _WAITING for one in self._lines)
        full = full or len(self._asks) > _WAITING
        crowded = any(one.writer is not None and len(one.writer) > _WAITING for one in self._servers.values())
        reads = 0 if full or crowded else select.EPOLLIN
        wanted = {one.fd: reads | (select.EPOLLOUT if one.out else 0) for one in self._lines}
        wanted[self._control.fileno()] = select.EPOLLIN
        if self._children is not None:
            wanted[self._children] = select.EPOLLIN | (select.EPOLLOUT if self._asks else 0)
        if self._questions >= 0:
            wanted[self._questions] = reads
        for one in self._servers.values():
            if one.writer is not None:
                if not full:
                    wanted[one.read_fd] = select.EPOLLIN
                wanted[one.writer.fd] = select.EPOLLOUT if one.writer else 0
        for fd in self._masks.keys() - wanted.keys():
            self._epoll.unregister(fd)
        for fd, mask in wanted.items():
            if fd not in self._masks:
                self._epoll.register(fd, mask)
            elif self._masks[fd] != mask:
                self._epoll.modify(fd, mask)
        self._masks = wanted

    # --- the service gate and the broker ----------------------------------------------------------------

    def _on_line(self, line: RequestLine, events: int) -> None:
        if events & select.EPOLLOUT:
            line.out.flush()
        if not events & ~select.EPOLLOUT:
            return
        data = os.read(line.fd, pipes.CHUNK_BYTES)
        if not data:
            raise SystemExit("the service gate or the broker is gone")
        # INVARIANT: the rows of these calls before their lines. All wait for one sync of the log.
        wanted = []
        for asked in line.take(data):
            if asked.kind == wire.CANCEL:
                wanted.append(self._desk.cancel(asked.number))
            else:
                wanted.append(self._desk.take(asked.number, asked.alias, asked.message, asked.headers))
        # A frozen server thaws while the rows are written.
        for alias in {alias for one in wanted for alias, _ in one.lines if alias in self._servers}:
            self._servers[alias].tell(BUSY)
        self._await_rows()
        for one in wanted:
            self._apply(one)

    def _apply(self, effects: Effects) -> None:
        for alias in effects.starts:
            self._servers[alias] = ServerPipes()
            self._control.send(alias.encode())
        for question in effects.questions:
            self._ask(question)
        for number, said, message in effects.replies:
            line = self._lines[number >= wire.BROKERS]
            line.out.put(wire.REPLY.pack(number - line.first, said, len(message)) + message)
        for number, message in effects.children:
            self._asks.put(wire.SPAWN.pack(number, len(message)) + message)
        for alias, data in effects.lines:
            if (server := self._servers.get(alias)) is None:
                continue
            server.tell(BUSY)
            try:
                if server.writer is None:
                    server.early += data
                else:
                    server.writer.put(data)
            except ConnectionError:
                self._ended(alias)

    # --- the supervisor -------------------------------------------------------------------------------

    def _log(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Send a row. ``_await_rows`` waits for those of calls, before they are sent."""
        message = json.dumps({"kind": kind, "fields": dict(fields)}, separators=(",", ":")).encode()
        if len(message) > wire.ROW_BYTES:
            raise SystemExit("a row is too long")
        os.write(self._log_fd, message)
        self._awaited += kind == wire.AWAITED

    def _await_rows(self) -> None:
        """Wait until the rows of all calls are durable."""
        while self._awaited > 0:
            said = os.read(self._log_fd, self._awaited)
            if not said:
                raise SystemExit("the supervisor is gone")
            self._awaited -= len(said)

    def _ask(self, question: Mapping[str, Any]) -> None:
        """Ask an operator about a call that is held."""
        if self._questions < 0:
            self._apply(self._desk.answered(question["number"], granted=False))
            return
        os.write(self._questions, json.dumps(question, separators=(",", ":")).encode())

    def _on_verdict(self, events: int) -> None:
        message = os.read(self._questions, wire.VERDICT.size)
        if not message:
            raise SystemExit("the supervisor is gone")
        number, granted = wire.VERDICT.unpack(message)
        effects = self._desk.answered(number, granted=granted)
        self._await_rows()  # INVARIANT: the row of the call before its line
        self._apply(effects)

    def _on_control(self, events: int) -> None:
        message, fds, _, _ = socket.recv_fds(self._control, wire.ALIAS_BYTES, max(_FDS))
        if not message:
            self._desk.close()
            raise SystemExit("the run is over")
        alias = message.decode()
        server = self._servers.get(alias)
        if len(fds) not in _FDS or server is None or server.writer is not None:
            for fd in fds:
                os.close(fd)
            self._ended(alias)
            return
        write_fd, server.read_fd, *rest = fds
        server.calls_fd = rest[0] if rest else None
        server.writer = Writer(write_fd)
        self._handlers[write_fd] = lambda events: self._to_server(alias, events)
        self._handlers[server.read_fd] = lambda events: self._from_server(alias)
        early, server.early = bytes(server.early), bytearray()
        self._apply(Effects(lines=[(alias, early)]))

    def _on_children(self, events: int) -> None:
        """Take outcomes of children."""
        assert self._children is not None
        self._asks.flush()
        if not events & ~select.EPOLLOUT:
            return
        data = os.read(self._children, pipes.CHUNK_BYTES)
        if not data:
            raise SystemExit("the run is over")
        self._outcomes += data
        while len(self._outcomes) >= wire.SPAWN.size:
            number, size = wire.SPAWN.unpack_from(self._outcomes)
            if size > wire.OUTCOME_BYTES:
                raise SystemExit("an outcome is too long")
            if len(self._outcomes) < wire.SPAWN.size + size:
                return
            raw = bytes(self._outcomes[wire.SPAWN.size : wire.SPAWN.size + size])
            del self._outcomes[: wire.SPAWN.size + size]
            self._apply(self._desk.child_ended(number, raw))

    # --- servers --------------------------------------------------------------------------------------

    def _to_server(self, alias: str, events: int) -> None:
        writer = self._servers[alias].writer
        assert writer is not None
        if events & (select.EPOLLERR | select.EPOLLHUP):
            self._ended(alias)
            return
        try:
            writer.flush()
        except ConnectionError:
            self._ended(alias)

    def _from_server(self, alias: str) -> None:
        server = self._servers[alias]
        try:
            data = os.read(server.read_fd, pipes.CHUNK_BYTES)
        except BlockingIOError:
            return
        except ConnectionResetError:  # the daemon's line ended with calls that it had not read
            data = b""
        if not data:
            self._ended(alias)
            return
        *lines, rest = (server.rest + data).split(b"\n")
        server.rest = bytearray(rest)
        try:
            for line in lines:
                self._apply(self._desk.from_server(alias, bytes(line)))
            if len(rest) > mcp_session.LINE_BYTES:
                raise errors.ToolServerError("a line of it is too long")
        except errors.ToolServerError:
            self._ended(alias)

    def _ended(self, alias: str) -> None:
        server = self._servers.pop(alias, None)
        if server is not None:
            if server.writer is not None:
                for fd in (server.writer.fd, server.read_fd):
                    self._handlers.pop(fd, None)
                    # The number may be another's next. The kernel forgets a closed descriptor by itself only with its
                    # last copy, and the supervisor has one of the daemon's line (epoll(7), questions 6).
                    if self._masks.pop(fd, None) is not None:
                        self._epoll.unregister(fd)
            server.close()
        self._apply(self._desk.ended(alias))


def serve(gate: GateInput) -> NoReturn:
    """The gate's life."""
    loop = ToolLoop(gate)
    for name in _CODECS:
        codecs.lookup(name)
    gate.seal()
    loop.run()
