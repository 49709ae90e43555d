"""Connect by the operator's proxy to the destinations of a run's tls grants, and to nothing else.

A process beside the TLS gate, in the supervisor's network namespace. The gate has no socket of its own there and no
connect(2). The DNS gate tells this process the addresses of granted names. An attacker in the TLS gate can therefore
ask for granted destinations alone, at addresses that no name may lead around.
"""

from __future__ import annotations

import errno
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn

from policy.grants.sets import addresses
from sandbox.network.dns import names
from sandbox.network.gate.main import GateInput
from sandbox.network.gate.proxy import Proxy, ProxyError
from sandbox.network.gate.told_names import ToldNames
from sandbox.network.tls import proxy_wire
from sandbox.network.tls.connection import notice_death, send_at_once
from sandbox.network.tls.plan import TlsPlan

# A dead proxy holds each of them for the whole time.
THREADS: Final = 16
_WAITING: Final = 256
_STACK_BYTES: Final = 256 * 1024
_SECONDS: Final = 10.0
_ADDRESSES: Final = 4
# An agent that connects at the end of an answer's time still finds its addresses here (``broker.GRACE_SECONDS``).
_GRACE_SECONDS: Final = 10.0
# TEST-NET-1 (RFC 5737) is no address of a host, unless the host lets every address be bound.
_NOT_OURS: Final = "192.0.2.1"
_OF_THE_PROXY: Final = ("proxy_unreachable", "proxy_auth", "proxy_malformed", "proxy_certificate")
_NUMBERS: Final = {errno.ECONNREFUSED: "connect_refused", errno.ETIMEDOUT: "connect_timeout"}


class RefusedDestination(Exception):
    """Raised for a request that an honest gate would not make."""


class Destinations:
    """The destinations of the plan. ``told`` returns the addresses of a name that the agent was told."""

    def __init__(self, plan: Mapping[str, Any], told: Callable[[str], list[str]]) -> None:
        self._plan, self._told = TlsPlan(plan), told
        self._public = names.Public(addresses.PUBLIC)
        proxy = Proxy.of(plan["proxy"])
        assert proxy is not None
        self.proxy = proxy

    def of(self, name: str, host: str, port: int) -> list[str]:
        """Return the addresses to try for a connection of the agent to ``host``.

        Raises:
            RefusedDestination: Raised when neither the name nor the address is granted on this port.
        """
        if not name:
            if not self._plan.by_address(host, port):
                raise RefusedDestination
            return [host]
        if not self._plan.named(name, port) and not self._plan.asks(name, port):
            raise RefusedDestination
        found = [one for one in self._told(name) if self._may(one, port)]
        return sorted(found, key=lambda one: (one != host, (":" in one) != (":" in host)))[:_ADDRESSES]

    def connected(self, name: str, found: list[str], port: int) -> socket.socket:
        """Return a connection.

        Raises:
            ProxyError: Raised when the proxy does not make it.
            OSError: Raised when a host that is reached directly does not take it.
        """
        if not found:
            raise OSError(errno.EHOSTUNREACH, "the name has no address now")
        barred = set() if name in self.proxy.direct else _addresses(self.proxy.host)
        usable = [one for one in found if one not in barred and not is_local(one)]
        # An address that stands for a name is none of the proxy's.
        if not usable or (name == self.proxy.host.lower() and name not in self.proxy.direct):
            raise ProxyError(errno.EACCES, "proxy_itself", "an address of this host or of its proxy")
        if name in self.proxy.direct:
            return self._first(usable, lambda one, s: socket.create_connection((one, port), timeout=s))
        if name and self.proxy.looks_up(name):
            return self.proxy.connected(name, port, _SECONDS)
        return self._first(usable, lambda one, s: self.proxy.connected(one, port, s))

    @staticmethod
    def _first(hosts: list[str], connect: Callable[[str, float], socket.socket]) -> socket.socket:
        failed: OSError | None = None
        for one in hosts:
            try:
                return connect(one, _SECONDS / len(hosts))
            except OSError as e:
                failed = failed or e
                # Another address would meet the same proxy.
                if isinstance(e, ProxyError) and e.code in _OF_THE_PROXY:
                    break
        assert failed is not None
        raise failed

    def _may(self, address: str, port: int) -> bool:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.inet_pton(family, address) in self._public or self._plan.by_address(address, port)


def is_local(address: str) -> bool:
    """Whether this is an address of this host. Only such an address can be bound, where the host takes no other."""
    if not _binds(address):
        return False
    if not _binds(_NOT_OURS):
        return True
    # net.ipv4.ip_nonlocal_bind: then the kernel says by the source that it chooses.
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.connect((address, 9))
        return bool(asking.getsockname()[0] == address)


def _binds(address: str) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as one:
        try:
            one.bind((address, 0))
        except OSError:
            return False
        return True


def _addresses(host: str) -> set[str]:
    try:
        return {str(address[0]) for *_, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return {host}


def serve(gate: GateInput) -> NoReturn:
    """The connector's life."""
    told = ToldNames(socket.socket(fileno=gate.fds["names"]) if "names" in gate.fds else None)

    def known(name: str) -> list[str]:
        told.take(now := time.monotonic())
        return told.of(name, now - _GRACE_SECONDS)

    found = Destinations(gate.plan, known)
    line = socket.socket(fileno=gate.fds["line"])
    line.setblocking(True)
    # The libraries of the resolver are loaded before the filter.
    _addresses(found.proxy.host)
    _addresses("localhost")
    threading.stack_size(_STACK_BYTES)
    gate.seal()
    wanted: queue.Queue[tuple[socket.socket, str, list[str], int]] = queue.Queue(_WAITING)
    for _ in range(THREADS):
        threading.Thread(target=_work, args=(found, wanted), daemon=True).start()
    waits = select.poll()
    for fd in (line.fileno(), told.fileno()):
        if fd >= 0:
            waits.register(fd, select.POLLIN)
    while True:
        ready = {fd for fd, _ in waits.poll()}
        told.take(time.monotonic())
        if line.fileno() not in ready:
            continue
        request, fds, _, _ = socket.recv_fds(line, proxy_wire.REQUEST_BYTES + 1, 1)
        asked = proxy_wire.read(request)
        if not request or not fds or asked is None:
            break
        answer = socket.socket(fileno=fds[0])
        try:
            wanted.put_nowait((answer, asked[0], found.of(*asked), asked[2]))
        except queue.Full:
            answer.close()
        except (RefusedDestination, ValueError):
            break
    raise SystemExit("the TLS gate is gone, or asked for what it may not have")


def _work(found: Destinations, wanted: queue.Queue[tuple[socket.socket, str, list[str], int]]) -> None:
    while True:
        answer, name, hosts, port = wanted.get()
        with answer:
            try:
                with found.connected(name, hosts, port) as made:
                    if made.family != socket.AF_UNIX:  # one end of the relay's pair, whose connection has both
                        send_at_once(made)
                        notice_death(made)
                    socket.send_fds(answer, [bytes([proxy_wire.MADE])], [made.fileno()])
            except OSError as e:
                _say(answer, e.code if isinstance(e, ProxyError) else _NUMBERS.get(e.errno or 0, "connect_unreachable"))


def _say(answer: socket.socket, code: str) -> None:
    try:
        answer.send(bytes([proxy_wire.CODES.index(code) + 1]))
    except OSError:
        return  # the agent went away, and the gate with its side
