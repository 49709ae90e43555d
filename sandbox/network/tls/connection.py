"""Handle one connection of the agent through the TLS gate: check its hello, then carry bytes.

    hello ──granted──▶ connect ──▶ answer ──ServerHello──▶ carry
                                     │ ▲
                    HelloRetryRequest▼ │granted, the same name
                                    again

Until the server has answered with a ServerHello only checked hellos of the agent pass, because a server that requests
a second one may take the name from there. After a ServerHello a second plaintext hello is an error for every server, so
from then on the gate need not read the bytes (docs/adr/0026).
"""

from __future__ import annotations

import enum
import errno
import select
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from msgspec import Struct

from sandbox.network.tls.by_proxy import ProxyAttempt
from sandbox.network.tls.client_hello import AnswerReader, Hello, HelloReader, Refused
from sandbox.network.tls.plan import TlsPlan
from sandbox.network.tls.race import Race, in_turn
from sandbox.network.tls.splice import Flow, Pipes

HELLO_SECONDS: Final = 3.0
ANSWER_SECONDS: Final = 30.0
# A connection of which one side has ended, and whose other side says nothing.
HALF_SECONDS: Final = 900.0
_READ_BYTES: Final = 16384
# Closing with this sends a reset: the agent's next call fails at once instead of waiting for an answer.
_RESET: Final = struct.pack("ii", 1, 0)


class Stage(enum.Enum):
    """Stages of a connection; see the diagram above."""

    HELLO = "hello"
    CONNECT = "connect"
    ANSWER = "answer"
    AGAIN = "again"
    CARRY = "carry"
    CLOSED = "closed"


# The code of a connection that is ended in a stage by its deadline.
_EXPIRED: Final = {
    Stage.HELLO: "hello_timeout",
    Stage.AGAIN: "hello_timeout",
    Stage.ANSWER: "answer_timeout",
    Stage.CARRY: "idle",
}
CODES: Final = frozenset(_EXPIRED.values())


class _Way(Struct, frozen=True):
    """The other side of a connection, and the flow of each direction."""

    upstream: socket.socket
    up: Flow
    down: Flow


class Connection:
    """One agent's connection, whose original destination is ``host`` and ``port``.

    ``agent`` does not block and is closed with the connection. ``refused`` is called with the name, if any, and the
    code. Times are seconds of the caller's clock; ``deadline`` is when ``expire`` is due. ``others`` returns the other
    addresses of a name. ``name`` is the one of the first granted hello, and ``leased`` says that a lease alone grants
    it. ``meant`` is that name where it is granted and the agent has not connected to an address that is granted as
    such, else "". ``connect`` begins a connection and does not wait for it. ``divert`` hands a connection to a host
    whose requests are read over to the gate that reads them, and returns the stream to carry in its place. ``by_proxy``
    begins a connection by the operator's proxy in the place of all others, with the granted name or "".
    """

    def __init__(
        self,
        agent: socket.socket,
        host: str,
        port: int,
        *,
        plan: TlsPlan,
        pipes: Pipes,
        refused: Callable[[str | None, str], None],
        now: float,
        others: Callable[[str], Sequence[str]] = lambda _: (),
        connect: Callable[[str, int], socket.socket] | None = None,
        divert: Callable[[str, int, socket.socket], socket.socket] | None = None,
        by_proxy: Callable[[str, str, int, float], ProxyAttempt] | None = None,
    ) -> None:
        self.stage = Stage.HELLO
        self._agent = agent
        self._host, self._port = host, port
        self._plan, self._pipes, self._refused = plan, pipes, refused
        self._others, self._dial, self._divert, self._by_proxy = others, connect or dial, divert, by_proxy
        self._handed: socket.socket | None = None
        self._reader, self._answer = HelloReader(), AnswerReader()
        self._name: str | None = None
        self.name: str | None = None
        self.meant = ""
        self.leased = False
        self._retried = False
        self._race: Race | ProxyAttempt | None = None
        self._way: _Way | None = None
        self.deadline = now + HELLO_SECONDS

    @property
    def is_made(self) -> bool:
        """Whether a server took it, at any time."""
        return self._way is not None

    @property
    def carried(self) -> int:
        """The bytes that were carried so far, both ways."""
        return 0 if self._way is None else self._way.up.moved + self._way.down.moved

    def interest(self) -> Mapping[int, int]:
        """Return the events to wait for, by descriptor, as in epoll(7). Descriptors without any are left out."""
        if self.stage is Stage.CLOSED:
            return {}
        way = self._way
        if way is None and self._race is not None:
            return dict.fromkeys(self._race.fds(), self._race.events)
        if way is None:
            return {self._agent.fileno(): select.EPOLLIN}
        reads = {
            Stage.ANSWER: (False, not way.down.wants_to_write),
            Stage.AGAIN: (True, False),
            Stage.CARRY: (way.up.wants_to_read, way.down.wants_to_read),
        }[self.stage]
        writes = (way.down.wants_to_write, way.up.wants_to_write)
        wanted = {}
        for one, read, write in zip((self._agent, way.upstream), reads, writes, strict=True):
            mask = (select.EPOLLIN if read else 0) | (select.EPOLLOUT if write else 0)
            if mask:
                wanted[one.fileno()] = mask
        return wanted

    def turn(self, now: float) -> None:
        """Do what can be done now, and never wait."""
        try:
            if self._way is None:
                if self.stage is Stage.HELLO:
                    self._hello(now)
                elif self._race is not None:
                    self._connect(self._race, now)
                return
            steps = {
                Stage.ANSWER: self._await_answer,
                Stage.AGAIN: self._again,
                Stage.CARRY: self._carry,
            }
            if (step := steps.get(self.stage)) is not None:
                step(self._way, now)
        except BlockingIOError:
            pass
        except Refused as refusal:
            self._refuse(refusal.code)
        except OSError:
            self.close()

    def expire(self, now: float) -> None:
        """End a connection whose deadline has come, or try the next address. Each end is told."""
        if self.stage is Stage.CONNECT:
            self.turn(now)
        elif self.stage is not Stage.CLOSED:
            self._refuse(_EXPIRED[self.stage])

    def settle(self) -> None:
        """Close the attempts to connect that are over, once no epoll has them any more."""
        if self._race is not None and self._way is not None:
            self._race.close()
            self._race = None
        if self._handed is not None:
            self._handed.close()
            self._handed = None

    def close(self, *, reset: bool = True) -> None:
        """Close both sides, by a reset unless all bytes were carried."""
        self.stage = Stage.CLOSED
        sockets = [self._agent]
        if self._race is not None:
            self._race.close()
            self._race = None
        if self._handed is not None:
            self._handed.close()
            self._handed = None
        if self._way is not None:
            self._way.up.close()
            self._way.down.close()
            sockets.append(self._way.upstream)
        for one in sockets:
            if reset:
                reset_on_close(one)
            one.close()

    def _refuse(self, code: str) -> None:
        self._refused(self._name, code)
        self.close()

    def _hello(self, now: float) -> None:
        hello = self._read_hello()
        if hello is None:
            return
        self._name = hello.name
        self._judge(hello)
        self.name = hello.name
        self.leased = bool(hello.name and self._plan.leased(hello.name, self._port))
        self.meant = hello.name if hello.name and self._plan.named(hello.name, self._port) else ""
        self.stage = Stage.CONNECT
        if self._by_proxy is not None:
            self._race = self._by_proxy(self.meant, self._host, self._port, now)
        else:
            others = self._others(self.meant) if self.meant else ()
            # An address that is granted as such is the only one that is meant, with any name in the hello.
            if self._host not in others and self._plan.by_address(self._host, self._port):
                self.meant, others = "", ()
            self._race = Race(in_turn(self._host, others), self._port, dial=self._dial, now=now)
        self._connect(self._race, now)

    def _read_hello(self) -> Hello | None:
        """Read until the hello is whole; None when the agent went away before it began one."""
        while True:
            data = self._agent.recv(_READ_BYTES)
            if not data:
                # Half a hello is a failed connection; no byte at all is a check whether the port is open.
                if self._reader.begun:
                    raise Refused("malformed")
                self.close(reset=False)
                return None
            hello = self._reader.feed(data)
            if hello is not None:
                return hello

    def _judge(self, hello: Hello) -> None:
        if self.leased and hello.name == self.name and not hello.ech:
            return  # the second hello of the one connection of a lease
        code = self._plan.refusal(self._host, self._port, hello)
        if code is not None:
            raise Refused(code)

    def _connect(self, race: Race | ProxyAttempt, now: float) -> None:
        try:
            upstream = race.turn(now)
        except ConnectionError as e:
            raise Refused(str(e)) from None
        self.deadline = race.deadline
        if upstream is None:
            return
        if self._divert is not None and self._name and self._plan.injected(self._name):
            # INVARIANT: closed by ``settle``, when no epoll has it any more; its number could be the stream's.
            self._handed = upstream
            upstream = self._divert(self._name, self._port, upstream)
        up = Flow(self._agent, upstream, self._pipes, pending=self._reader.raw)
        self._way = way = _Way(upstream, up, Flow(upstream, self._agent, self._pipes))
        self.stage, self.deadline = Stage.ANSWER, now + ANSWER_SECONDS
        self._await_answer(way, now)

    def _await_answer(self, way: _Way, now: float) -> None:
        """Pass checked hellos up and all bytes of the server down, which are parsed on the way."""
        way.up.flush()
        while self.stage is Stage.ANSWER and way.down.flush():
            data = way.upstream.recv(_READ_BYTES)
            if not data:
                # It said no, perhaps with an alert, which has been passed on and shall be read.
                self._agent.shutdown(socket.SHUT_WR)
                self.close(reset=False)
                return
            way.down.push(data)
            retry = self._answer.feed(data)
            if retry:
                self._expect_second(way, now)
            elif retry is not None:
                # What the agent sent after its hello has been held until now.
                way.up.push(self._reader.rest)
                self.stage, self.deadline = Stage.CARRY, now + self._plan.idle_seconds

    def _expect_second(self, way: _Way, now: float) -> None:
        if self._retried:
            raise Refused("malformed")  # RFC 8446, 4.1.4: a second HelloRetryRequest is none
        self._retried = True
        held, begun = self._reader.rest, self._answer.rest
        self._reader, self._answer = HelloReader(again=True), AnswerReader()
        self.stage, self.deadline = Stage.AGAIN, now + HELLO_SECONDS
        if self._answer.feed(begun) is not None:
            raise Refused("malformed")  # an answer to a hello that it has not seen
        self._second(way, self._reader.feed(held), now)

    def _again(self, way: _Way, now: float) -> None:
        way.down.flush()
        self._second(way, self._read_hello(), now)

    def _second(self, way: _Way, hello: Hello | None, now: float) -> None:
        if hello is None:
            return
        if hello.name != self._name:
            # RFC 8446, 4.1.2: the second hello is the first with the requested changes.
            self._name = hello.name
            raise Refused("sni_not_granted" if hello.name else "no_sni")
        self._judge(hello)
        way.up.push(self._reader.raw)
        self.stage, self.deadline = Stage.ANSWER, now + ANSWER_SECONDS

    def _carry(self, way: _Way, now: float) -> None:
        way.up.pump()
        way.down.pump()
        half = way.up.ended or way.down.ended
        self.deadline = now + (min(HALF_SECONDS, self._plan.idle_seconds) if half else self._plan.idle_seconds)
        if way.up.ended and way.down.ended:
            self.close(reset=False)


def dial(host: str, port: int) -> socket.socket:
    """A socket that does not block and is connecting to an address.

    Raises:
        OSError: the kernel refused at once.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    send_at_once(made)
    notice_death(made)
    result = made.connect_ex((host, port))
    if result not in (0, errno.EINPROGRESS):
        made.close()
        raise OSError(result, "connect")
    return made


def send_at_once(one: socket.socket) -> None:
    """Send each write at once: small pieces from one side were meant as small pieces."""
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def notice_death(one: socket.socket) -> None:
    """Ask a server that says nothing for two minutes whether it still has the connection (tcp(7)).

    The agent's side is not asked: a suspended agent could not answer.
    """
    one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4)):
        one.setsockopt(socket.IPPROTO_TCP, option, value)


def reset_on_close(one: socket.socket) -> None:
    """Make the next close of this socket send a reset."""
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
