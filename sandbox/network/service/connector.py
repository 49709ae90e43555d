"""Connect to the operator's providers and to granted hosts of pages, and to nothing else: a process beside the gate.

It is in the supervisor's network namespace, asks the host's resolvers, and reads nothing of what is sent. The gate
names a provider by its number; host and port come from providers.toml. An attacker in the gate can therefore only talk
to providers and hosts that the run is granted, and never to an address that is not public by a name of its choice.
"""

from __future__ import annotations

import errno
import queue
import socket
import threading
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from policy.grants.sets import addresses
from sandbox.network.dns import names
from sandbox.network.gate.main import GateInput
from sandbox.network.gate.proxy import Proxy
from sandbox.network.service import connector_wire

# Names take their time to be looked up: so many at once.
THREADS: Final = 6
_WAITING: Final = 1024
_HTTPS: Final = 443
_PAGE_SECONDS: Final = 10.0
_ADDRESSES: Final = 4


class Targets:
    """The places that the plan lets the gate be connected to."""

    def __init__(self, plan: Mapping[str, Any]) -> None:
        self.providers = [(str(host), int(port), float(seconds)) for host, port, seconds in plan["providers"]]
        self._direct = frozenset(plan.get("direct", ()))
        self._hosts = names.Patterns(plan["hosts"])
        self._places = {str(host): (str(where), int(port)) for host, (where, port) in plan["places"].items()}
        self._public = names.Public(addresses.PUBLIC)
        self._proxy = Proxy.of(plan.get("proxy"))

    def known(self, number: int, host: bytes) -> bool:
        """Whether an honest gate would ask for it."""
        if number != connector_wire.BY_NAME:
            return number < len(self.providers) and not host
        return (
            0 < len(host) <= connector_wire.NAME_BYTES and host.isascii() and bool(self._hosts.covering(host.decode()))
        )

    def connected(self, number: int, host: str) -> socket.socket:
        """Return a socket to it.

        Raises:
            PermissionError: Raised when the name leads to no public address.
            OSError: Raised when there is no connection.
        """
        if number != connector_wire.BY_NAME:
            where, port, seconds = self.providers[number]
            if number in self._direct:
                return socket.create_connection((where, port), timeout=seconds)
            return self._to(where, where, port, seconds)
        if host in self._places:
            where, port = self._places[host]
            return self._to(host, where, port, _PAGE_SECONDS)
        if self._proxy is not None and host not in self._proxy.direct and self._proxy.resolves_alone(host):
            return self._proxy.connected(host, _HTTPS, _PAGE_SECONDS)
        found = [one for one in _addresses(host) if self._is_public(one)]
        if not found:
            raise PermissionError(errno.EACCES, "no public address")
        for one in found[:_ADDRESSES]:
            try:
                return self._to(host, one, _HTTPS, _PAGE_SECONDS / len(found[:_ADDRESSES]))
            except OSError:
                continue
        raise OSError(errno.EHOSTUNREACH, "no address answers")

    def first(self) -> list[tuple[str, int]]:
        """The places of which a name is looked up here: those of hosts that are reached by the proxy are its own."""
        direct = [(host, port) for host, port, _ in self.providers if self._proxy is None or host in self._proxy.direct]
        return direct if self._proxy is None else [*direct, (self._proxy.host, self._proxy.port)]

    def _to(self, name: str, where: str, port: int, seconds: float) -> socket.socket:
        """Connect to an address of a name, by the proxy unless the name is one that is reached directly."""
        if self._proxy is None or name in self._proxy.direct or where in self._proxy.direct:
            return socket.create_connection((where, port), timeout=seconds)
        return self._proxy.connected(where, port, seconds)

    def _is_public(self, address: str) -> bool:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.inet_pton(family, address) in self._public


def _addresses(host: str) -> list[str]:
    """The addresses of a name, each once."""
    found = socket.getaddrinfo(host, _HTTPS, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def serve(gate: GateInput) -> NoReturn:
    """The connector's life."""
    targets = Targets(gate.plan)
    line = socket.socket(fileno=gate.fds["line"])
    line.setblocking(True)
    for host, port in targets.first():
        _warm(host, port)
    _warm("localhost", _HTTPS)
    gate.seal()
    wanted: queue.Queue[tuple[int, int, str]] = queue.Queue(_WAITING)
    for _ in range(THREADS):
        threading.Thread(target=_work, args=(line, targets, wanted), daemon=True).start()
    while request := line.recv(connector_wire.REQUEST.size + connector_wire.NAME_BYTES + 1):
        ident, number = connector_wire.REQUEST.unpack_from(request)
        name = request[connector_wire.REQUEST.size :]
        if not targets.known(number, name):
            break
        try:
            wanted.put_nowait((ident, number, name.decode()))
        except queue.Full:
            _say(line, ident, errno.EAGAIN)
    raise SystemExit("the service gate is gone, or asked for another provider")


def _warm(host: str, port: int) -> None:
    """Have the libraries of the resolver loaded. The answer does not matter: it is asked for again."""
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return


def _work(line: socket.socket, targets: Targets, wanted: queue.Queue[tuple[int, int, str]]) -> None:
    while True:
        ident, number, host = wanted.get()
        try:
            with targets.connected(number, host) as made:
                if made.family != socket.AF_UNIX:
                    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                socket.send_fds(line, [connector_wire.REPLY.pack(ident, 0)], [made.fileno()])
        except OSError as e:
            _say(line, ident, e.errno or errno.ETIMEDOUT)


def _say(line: socket.socket, ident: int, status: int) -> None:
    try:
        line.send(connector_wire.REPLY.pack(ident, status if 0 < status < 1 << 16 else errno.EIO))
    except OSError:
        return  # the gate is gone
