"""The agent's broker: its one descriptor to the supervisor, over which it asks for children and for credentials.

    one line, one answer    JSON objects: {"id", "kind", ...} -> {"id", "ok": {...}} | {"id", "error": {"code", ...}}
    in any order            a slow answer does not hold up the next; ``id`` names its request
    client                  the agent of this run, and each process that it gave the descriptor to

All input is hostile. A line is bounded, and requests are bounded in number and rate. The broker stops reading while the
agent does not read its answers. Reads are plain, so that no descriptor can be sent along (unix(7): without room for
them they are closed). No request gives the agent a right: a handler decides by the supervisor's own facts of the run.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from policy import errors
from policy.signing import strict_json
from sandbox.kernel.proc.secret_memory import Locked
from sandbox.rate_limit import Tokens
from sandbox.run_io import Outcome, PeriodicCheck

LINE_BYTES: Final = 1 << 20
# Bounds of unanswered requests, of requests in a second and at once, and of malformed lines before the broker
# closes the descriptor.
OUTSTANDING, PER_SECOND, BURST, MALFORMED = 256, 64, 320, 16
# With so much unread the broker stops reading. One answer is at most a result, which is bounded itself.
_UNREAD_BYTES = 1 << 20
_CHUNK = 65536
# A long line counts as so many requests for each chunk.
_PER_CHUNK = 4
# So much is done in one turn: the run's own clocks and gates alternate with its agent's requests.
_LINES, _EVENTS = 16, 16
# Interval until an agent that asked too fast is read again (seconds).
_AGAIN_SECONDS = 0.1


@dataclass
class BrokerCall:
    """Hold one request, to be answered once, at once or later. ``fields`` are the agent's, without id and kind."""

    fields: Mapping[str, Any]
    _say: Callable[[Mapping[str, Any], Locked | None], None]
    answered: bool = field(default=False, init=False)

    def answer(self, fields: Mapping[str, Any], *, secret: Locked | None = None) -> None:
        """Answer with success.

        ``secret`` becomes the field `value` of the answer, as the inside of a JSON string. It goes through locked
        memory alone, which is overwritten once it is sent.
        """
        self._once({"ok": dict(fields)}, secret)

    def refuse(self, code: str, message: str, **more: Any) -> None:
        """Answer that the request was refused."""
        self._once({"error": {"code": code, "message": message, **more}})

    def failed(self, error: errors.CovenantError) -> None:
        """Answer with an error that has a code of its own."""
        hint = {"hint": error.hint} if error.hint else {}
        self.refuse(error.code, error.message, **hint)

    def _once(self, what: Mapping[str, Any], secret: Locked | None = None) -> None:
        if not self.answered:
            self.answered = True
            self._say(what, secret)


Handler = Callable[[BrokerCall], None]


class Broker:
    """Serve the supervisor's end of one run's broker. Use as a context manager.

    ``watches`` and ``round`` are for the exchange, and ``guest`` is for the agent. ``table`` maps each kind of request
    to its handler. A handler may ask to be called when another descriptor is readable (``watch``), so that the exchange
    needs one watch for all requests of a run.
    """

    def __init__(
        self, table: Mapping[str, Handler] | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._table, self._clock = dict(table or {}), clock
        self._rate = Tokens(PER_SECOND, BURST, clock())
        self._malformed = self._open = self._unread = 0
        self._in, self._out = bytearray(), deque[memoryview]()
        self._looked = 0  # up to here no line ends in it
        # For each line that waits: the locked memory that holds it, where it has a secret.
        self._held = deque[Locked | None]()
        self._others: dict[int, Callable[[], None]] = {}
        self._begin: list[Callable[[], None]] = []
        self._close: list[Callable[[], None]] = []
        self._look: list[Callable[[], None]] = []
        self._alive = False

    def __enter__(self) -> Broker:
        with contextlib.ExitStack() as stack:
            self._epoll = stack.enter_context(contextlib.closing(select.epoll()))
            self._own, self._guest = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            for end in (self._own, self._guest):
                stack.callback(end.close)
            self._own.setblocking(False)
            self._mask = select.EPOLLIN
            self._epoll.register(self._own.fileno(), self._mask)
            self._stack = stack.pop_all()
        self._alive = True
        return self

    def __exit__(self, *exc: object) -> None:
        if self._alive:
            self._hang_up()
        with self._stack:
            for close in self._close:
                close()

    def add(
        self,
        table: Mapping[str, Handler],
        *,
        begin: Callable[[], None] = lambda: None,
        close: Callable[[], None] = lambda: None,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        """Answer these kinds of requests as well.

        ``begin`` is called when the agent is about to be given its intent, ``close`` when its run has ended, and
        ``look`` periodically in between.
        """
        self._table |= table
        self._look.append(look)
        self._begin.append(begin)
        self._close.append(close)

    def begin(self) -> None:
        """Tell all handlers that the agent is about to be given its intent."""
        for begin in self._begin:
            begin()

    @property
    def room(self) -> bool:
        """Whether the agent reads its answers. The round checks again for handlers that wait for it."""
        return self._unread <= _UNREAD_BYTES

    @property
    def guest(self) -> int:
        """Return the agent's end of the socket pair; ``started`` closes it here."""
        return self._guest.fileno()

    def started(self) -> None:
        """Close the agent's end here: the sandbox has it, and an end of file now means that its last holder is gone."""
        self._guest.close()

    @property
    def watches(self) -> dict[int, Callable[[], Outcome]]:
        """Return the watches for the exchange."""
        return {self._epoll.fileno(): self.serve}

    def round(self) -> PeriodicCheck:
        """Return the check for the exchange, which reads again from an agent that asked too fast."""
        return PeriodicCheck(_AGAIN_SECONDS, self._again)

    def watch(self, fd: int, ready: Callable[[], None]) -> None:
        """Call ``ready`` when ``fd`` is readable or at its end."""
        self._others[fd] = ready
        self._epoll.register(fd, select.EPOLLIN)

    def forget(self, fd: int) -> None:
        """Stop watching ``fd``. Call it before closing: the number may be reused afterwards."""
        if self._others.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def serve(self) -> Outcome:
        """Serve what is ready, a bounded amount of it."""
        for fd, events in self._epoll.poll(0, _EVENTS):
            if fd in self._others:
                self._others[fd]()
            elif self._alive and fd == self._own.fileno():
                if events & select.EPOLLOUT:
                    self._flush()
                if events & ~select.EPOLLOUT:
                    self._read()
        return None

    def _again(self) -> Outcome:
        if self._alive:
            self._lines()
        for again in self._look:
            again()
        return None

    def _read(self) -> None:
        try:
            data = self._own.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._hang_up()
            return
        self._in += data
        self._lines()

    def _lines(self) -> None:
        """Handle the requests in the buffer, as many as the rate allows."""
        for _ in range(_LINES):
            if not self._alive or self._unread > _UNREAD_BYTES:
                break
            end = self._end()
            if end < 0:
                if len(self._in) > LINE_BYTES:
                    self._say({"id": None, "error": _error("line_too_long", f"a line is over {LINE_BYTES} bytes")})
                    self._hang_up()
                break
            if not self._rate.take(self._clock()):
                break
            for _ in range(end // _CHUNK * _PER_CHUNK):
                self._rate.take(self._clock())  # a long line counts as the requests that would take its time
            line = bytes(self._in[:end])
            del self._in[: end + 1]
            self._looked = 0
            self._one(line)
        self._watch_own()

    def _end(self) -> int:
        """Return the offset of the first line's end, below 0 where there is none.

        No byte is searched twice, since a long line may come byte by byte.
        """
        end = self._in.find(b"\n", self._looked)
        self._looked = len(self._in) if end < 0 else end
        return end

    def _one(self, line: bytes) -> None:
        try:
            request = strict_json.loads(line, max_bytes=LINE_BYTES)
            if not isinstance(request, dict):
                raise strict_json.MalformedJsonError("not an object")
            ident, kind = request.pop("id", None), request.pop("kind", None)
            if type(ident) is not int or not 0 <= ident < 2**53 or not isinstance(kind, str):
                raise strict_json.MalformedJsonError("no `id` (a number) or no `kind` (a text)")
        except strict_json.MalformedJsonError as e:
            self._malformed += 1
            self._say({"id": None, "error": _error("malformed_request", str(e))})
            if self._malformed >= MALFORMED:
                self._hang_up()
            return
        self._open += 1
        call = BrokerCall(request, lambda what, secret: self._answer(ident, what, secret))
        handler = self._table.get(kind)
        if handler is None:
            call.refuse("unknown_kind", f"there is no request of kind `{strict_json.shown(kind)}` here")
        elif self._open > OUTSTANDING:
            call.refuse("too_many_requests", f"{OUTSTANDING} requests are without an answer")
        else:
            try:
                handler(call)
            except errors.LedgerError:
                raise  # a row that cannot be written ends the run
            except errors.CovenantError as e:
                call.failed(e)

    def _answer(self, ident: int, what: Mapping[str, Any], secret: Locked | None) -> None:
        self._open -= 1
        self._say({"id": ident, **what}, secret)

    def _say(self, what: Mapping[str, Any], secret: Locked | None = None) -> None:
        if not self._alive:
            return
        if secret is not None:
            what = {**what, "ok": {**what["ok"], "value": ""}}
        data = json.dumps(what, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace") + b"\n"
        held = None if secret is None else _filled(data, secret)
        line = memoryview(data) if held is None else held.view
        self._out.append(line)
        self._held.append(held)
        self._unread += len(line)
        self._flush()

    def _flush(self) -> None:
        while self._out and self._alive:
            try:
                sent = self._own.send(self._out[0], socket.MSG_NOSIGNAL)
            except BlockingIOError:
                break
            except OSError:
                self._hang_up()
                return
            self._unread -= sent
            self._out[0] = self._out[0][sent:]
            if not self._out[0]:
                self._out.popleft()
                self._overwrite(self._held.popleft())
        self._watch_own()

    def _watch_own(self) -> None:
        """Read unless requests wait in the buffer, and write while answers wait."""
        if not self._alive:
            return
        wanted = 0 if self._end() >= 0 or self._unread > _UNREAD_BYTES else select.EPOLLIN
        wanted |= select.EPOLLOUT if self._out else 0
        if wanted != self._mask:
            self._mask = wanted
            self._epoll.modify(self._own.fileno(), wanted)

    def _hang_up(self) -> None:
        """Close the descriptor. Requests that have begun go on, without an answer."""
        if self._alive:
            self._alive = False
            self._epoll.unregister(self._own.fileno())
            self._own.close()
        self._out.clear()
        self._unread = 0
        while self._held:
            self._overwrite(self._held.popleft())

    @staticmethod
    def _overwrite(held: Locked | None) -> None:
        if held is not None:
            held.close()


def _filled(line: bytes, secret: Locked) -> Locked:
    """Return an answer with the secret as its last text, which is empty in ``line``."""
    tail = b'"}}\n'
    assert line.endswith(b'"' + tail)
    held = Locked(len(line) + len(secret))
    at = len(line) - len(tail)
    held.view[:at] = line[:at]
    held.view[at : at + len(secret)] = secret.view
    held.view[at + len(secret) :] = tail
    return held


def _error(code: str, message: str) -> dict[str, str]:
    return {"code": code, "message": message}
