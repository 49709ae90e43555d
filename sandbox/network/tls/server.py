"""Serve in the TLS gate's own process: accept the connections that the ruleset redirects, and carry the granted ones.

It has one thread and one epoll, and does not copy the carried bytes. It runs as the firewall's gate uid in the
gateway's namespace, where the ruleset restricts all its connections: a compromised gate reaches only the destinations
of the agent's tls grants. ``sandbox.network.tls.gate`` starts it.
"""

from __future__ import annotations

import fcntl
import functools
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from sandbox.network.gate.told_names import ToldNames
from sandbox.network.reached import REST, TARGETS
from sandbox.network.tls.by_proxy import ProxyAttempt
from sandbox.network.tls.connection import Connection, Stage, reset_on_close, send_at_once
from sandbox.network.tls.leased_names import LeasedNames
from sandbox.network.tls.plan import TlsPlan
from sandbox.network.tls.splice import Pipes

# More wait in the listener's backlog. A run has 512 (``base_rules``): a carried one counts twice, a waiting one once.
CONNECTIONS: Final = 192
# The time between two reports that connections wait (seconds).
_TOLD_SECONDS: Final = 10.0
# The interval of deadline checks while there are connections (seconds).
_LOOK_SECONDS: Final = 0.25
# The most destinations that wait to be reported: a wildcard has any number. The others are summed, as in the log.
_MOST_UNCOUNTED: Final = 4 * TARGETS
# New connections that are taken in one turn: the others are served in between.
_AT_ONCE: Final = 64
# linux/netfilter_ipv4.h and linux/netfilter_ipv6/ip6_tables.h give both the same number.
_SO_ORIGINAL_DST: Final = 80


class TlsServer:
    """Serves ``listeners``, which do not block. ``denied`` is called with target and code of each refusal.

    ``reached`` is called with a destination and the connections and bytes since the last call; while it returns False
    they are kept, until ``uncounted`` returns them. ``ends`` is readable once the supervisor asks for them. ``inject``
    is the line to the gate that reads requests, where there is one, ``by_proxy`` that to the connector of the
    operator's proxy.
    """

    def __init__(
        self,
        plan: Mapping[str, Any],
        listeners: Sequence[socket.socket],
        denied: Callable[[str, str], None],
        *,
        names: ToldNames | None = None,
        leases: LeasedNames | None = None,
        reached: Callable[[str, int, int], bool] = lambda target, connections, carried: True,
        ends: int = -1,
        inject: socket.socket | None = None,
        by_proxy: socket.socket | None = None,
        most: int = CONNECTIONS,
    ) -> None:
        self._leases = leases or LeasedNames()
        self._plan, self._denied, self._most = TlsPlan(plan, self._leases), denied, most
        # Connections that are the only one of their lease, until a server has taken them.
        self._only: set[Connection] = set()
        # Each connection under a lease, with the number of the lease.
        self._met: dict[Connection, int] = {}
        self._pipes = Pipes()
        self._epoll = select.epoll()
        self._listeners = {one.fileno(): one for one in listeners}
        self._connections: set[Connection] = set()
        self._by_fd: dict[int, Connection] = {}
        self._waited: dict[Connection, Mapping[int, int]] = {}
        self._next_look = self._next_told = 0.0
        self._names = names or ToldNames(None)
        self._reached, self._inject, self._by_proxy = reached, inject, by_proxy
        self._places: dict[Connection, tuple[str, int]] = {}
        self._counted: dict[Connection, int] = {}
        self._uncounted: dict[str, tuple[int, int]] = {}
        self._ends, self._is_over = ends, False
        self._listens = False
        self._listen()
        if ends >= 0:
            self._epoll.register(ends, select.EPOLLIN)
        if self._names.fileno() >= 0:
            self._epoll.register(self._names.fileno(), select.EPOLLIN)
        if self._leases.fileno() >= 0:
            self._epoll.register(self._leases.fileno(), select.EPOLLIN)

    def serve(self) -> None:
        """Serve until the supervisor asks for what is left."""
        while not self._is_over:
            self.turn(_LOOK_SECONDS if self._connections else None)

    def turn(self, wait_seconds: float | None) -> None:
        """Wait so long for something to do (None: without end), and do what can be done."""
        events = self._epoll.poll(wait_seconds)
        now = time.monotonic()
        for fd, _ in events:
            if fd == self._names.fileno():
                self._names.take(now)
            elif fd == self._leases.fileno():
                self._leases.read()
            elif fd == self._ends:
                self._is_over = True
            elif fd in self._listeners:
                self._accept(self._listeners[fd], now)
            elif (connection := self._by_fd.get(fd)) is not None:
                connection.turn(now)
                self._wait_for(connection)
        self._end(self._leases.ended())
        if now >= self._next_look:
            self._next_look = now + _LOOK_SECONDS
            for connection in [one for one in self._connections if one.deadline <= now]:
                connection.expire(now)
                self._wait_for(connection)
            for connection in self._connections:
                self._count(connection)
            if not self._listens:
                self._tell_crowd(now)
        self._listen()
        self._report()

    def uncounted(self) -> Mapping[str, tuple[int, int]]:
        """The destinations that were not reported, with their connections and bytes."""
        for connection in self._connections:
            self._count(connection)
        return self._uncounted

    def _accept(self, listener: socket.socket, now: float) -> None:
        for _ in range(_AT_ONCE):
            if len(self._connections) >= self._most:
                return
            try:
                agent, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError:
                # ECONNABORTED, or no descriptor left on the machine: not in a busy loop.
                select.poll().poll(20)
                return
            try:
                self._take(agent, now)
            except OSError:
                reset_on_close(agent)
                agent.close()

    def _end(self, leases: Sequence[int]) -> None:
        """End the connections of leases that are over."""
        for connection in [one for one, number in self._met.items() if number in leases] if leases else ():
            connection.close()
            self._wait_for(connection)

    def _lease(self, connection: Connection) -> None:
        """Count a connection under a lease: it may be the only one, which counts once a server has taken it."""
        assert connection.name is not None
        if connection not in self._met:
            self._met[connection], only = self._leases.take(connection.name)
            if only:
                self._only.add(connection)
        over = connection.stage is Stage.CLOSED
        if connection in self._only and (connection.is_made or over):
            self._only.discard(connection)
            if connection.is_made:
                self._leases.used(connection.name)
            else:
                self._leases.give_back(connection.name, self._met[connection])
        if over:
            self._met.pop(connection, None)

    def _count(self, connection: Connection) -> None:
        """Count what a connection carried since it was last counted."""
        if not connection.is_made:
            return
        shown = target(connection.meant or None, *self._places[connection])
        if shown not in self._uncounted and len(self._uncounted) >= _MOST_UNCOUNTED:
            shown = REST
        before = self._counted.get(connection)
        carried = connection.carried - (before or 0)
        if before is None or carried:
            connections, known = self._uncounted.get(shown, (0, 0))
            self._uncounted[shown] = connections + (before is None), known + carried
            self._counted[connection] = connection.carried

    def _report(self) -> None:
        for shown, (connections, carried) in tuple(self._uncounted.items()):
            if not self._reached(shown, connections, carried):
                return
            del self._uncounted[shown]

    def _listen(self) -> None:
        """Take new connections while there is room for them. The others wait in the kernel, as at a busy server."""
        room = len(self._connections) < self._most
        if room is not self._listens:
            for fd in self._listeners:
                (self._epoll.register if room else self._epoll.unregister)(fd, *((select.EPOLLIN,) if room else ()))
            self._listens = room

    def _tell_crowd(self, now: float) -> None:
        """Report now and then that connections wait."""
        waits = select.poll()
        for fd in self._listeners:
            waits.register(fd, select.POLLIN)
        if now >= self._next_told and waits.poll(0):
            self._next_told = now + _TOLD_SECONDS
            self._denied(f"{self._most} connections", "connections_wait")

    def _take(self, agent: socket.socket, now: float) -> None:
        host, port = _original_destination(agent)
        code = self._not_taken(agent, host, port)
        if code is not None:
            self._denied(target(None, host, port), code)
            reset_on_close(agent)
            agent.close()
            return
        # Not socket.setblocking, whose ioctl the gate's filter does not have.
        fcntl.fcntl(agent, fcntl.F_SETFL, fcntl.fcntl(agent, fcntl.F_GETFL) | os.O_NONBLOCK)
        send_at_once(agent)

        def refused(name: str | None, code: str) -> None:
            self._denied(target(name, host, port), code)

        connection = Connection(
            agent,
            host,
            port,
            plan=self._plan,
            pipes=self._pipes,
            refused=refused,
            others=lambda name: self._names.of(name, now),
            now=now,
            divert=None if self._inject is None else functools.partial(_handed_over, self._inject),
            by_proxy=None if self._by_proxy is None else functools.partial(ProxyAttempt, self._by_proxy),
        )
        self._connections.add(connection)
        self._places[connection] = host, port
        connection.turn(now)
        self._wait_for(connection)

    def _not_taken(self, agent: socket.socket, host: str, port: int) -> str | None:
        # A connection that was not redirected has this gate as destination; the ruleset refuses it too (`ct status
        # dnat`).
        return "not_redirected" if (host, port) == agent.getsockname()[:2] else None

    def _wait_for(self, connection: Connection) -> None:
        """Register the connection's present events with epoll."""
        if connection.leased:
            self._lease(connection)
        before, after = self._waited.get(connection, {}), connection.interest()
        if connection.stage is Stage.CLOSED:
            self._count(connection)
            self._places.pop(connection, None)
            self._counted.pop(connection, None)
            # Closed descriptors have left the epoll by themselves; their numbers may be another's already.
            self._connections.discard(connection)
            self._waited.pop(connection, None)
            for fd in before:
                if self._by_fd.get(fd) is connection:
                    del self._by_fd[fd]
            return
        if before == after:
            return
        if connection not in self._counted:
            self._count(connection)
        self._change(connection, before, after)
        connection.settle()

    def _change(self, connection: Connection, before: Mapping[int, int], after: Mapping[int, int]) -> None:
        for fd in before.keys() - after.keys():
            # A descriptor registered without events would still report a hang-up, again and again.
            self._epoll.unregister(fd)
            del self._by_fd[fd]
        for fd, mask in after.items():
            if fd not in before:
                self._epoll.register(fd, mask)
                self._by_fd[fd] = connection
            elif before[fd] != mask:
                self._epoll.modify(fd, mask)
        self._waited[connection] = after


def serve(gate: Any) -> None:
    """Serve TLS as the gate process: seal, then serve the listeners ``v4`` and ``v6``.

    ``names`` is the line on which the DNS gate tells the addresses of names, where there is one, and ``leases`` the one
    to the supervisor about names that need a lease. ``way`` is the line to the connector of the operator's proxy.
    """
    listeners = [socket.socket(fileno=gate.fds[name]) for name in ("v4", "v6")]
    names = ToldNames(socket.socket(fileno=gate.fds["names"]) if "names" in gate.fds else None)
    inject = socket.socket(fileno=gate.fds["inject"]) if "inject" in gate.fds else None
    leases = LeasedNames(socket.socket(fileno=gate.fds["leases"]) if "leases" in gate.fds else None)
    by_proxy = socket.socket(fileno=gate.fds["way"]) if "way" in gate.fds else None
    server = TlsServer(
        gate.plan,
        listeners,
        gate.denied,
        names=names,
        leases=leases,
        reached=gate.reached,
        ends=gate.reports,
        inject=inject,
        by_proxy=by_proxy,
    )
    gate.seal()
    server.serve()
    # Its end closes all connections. A reset would take back what was counted and not sent.
    gate.end(server.uncounted())


def _handed_over(line: socket.socket, name: str, port: int, made: socket.socket) -> socket.socket:
    """Give the gate that reads requests a connection to a host, and return the stream of the agent's side.

    Raises:
        OSError: that gate takes no more now.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            fcntl.fcntl(ours, fcntl.F_SETFL, fcntl.fcntl(ours, fcntl.F_GETFL) | os.O_NONBLOCK)
            socket.send_fds(line, [f"{name}:{port}".encode()], [theirs.fileno(), made.fileno()])
        except BaseException:
            ours.close()
            raise
    return ours


def target(name: str | None, host: str, port: int) -> str:
    """A destination as ``covenant policy why --connect`` takes it, with the protocol behind it."""
    shown = name or (f"[{host}]" if ":" in host else host)
    return f"{shown}:{port}/tls"


def _original_destination(agent: socket.socket) -> tuple[str, int]:
    """Where the agent wanted to go before the ruleset redirected it.

    Raises:
        OSError: connection tracking does not know this connection.
    """
    if agent.family == socket.AF_INET6:
        raw = agent.getsockopt(socket.IPPROTO_IPV6, _SO_ORIGINAL_DST, 28)
        return socket.inet_ntop(socket.AF_INET6, raw[8:24]), struct.unpack("!H", raw[2:4])[0]
    raw = agent.getsockopt(socket.SOL_IP, _SO_ORIGINAL_DST, 16)
    return socket.inet_ntop(socket.AF_INET, raw[4:8]), struct.unpack("!H", raw[2:4])[0]
