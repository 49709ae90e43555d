"""Connect to the operator's providers, and to nothing else: a process beside the service gate.

It is in the supervisor's network namespace, asks the host's resolvers, and reads nothing of what is sent. The gate
names a provider by its number; host and port come from providers.toml. An attacker in the gate can therefore only talk
to providers that the run is granted.
"""

from __future__ import annotations

import errno
import queue
import socket
import threading
from typing import Final, NoReturn

from sandbox.network.gate.main import GateInput
from sandbox.network.service import connector_wire

# Names take their time to be looked up: so many at once.
THREADS: Final = 6
_WAITING: Final = 1024


def serve(gate: GateInput) -> NoReturn:
    """The connector's life."""
    providers = [(str(host), int(port), float(seconds)) for host, port, seconds in gate.plan["providers"]]
    line = socket.socket(fileno=gate.fds["line"])
    line.setblocking(True)
    for host, port, _ in providers:
        _warm(host, port)
    gate.seal()
    wanted: queue.Queue[tuple[int, int]] = queue.Queue(_WAITING)
    for _ in range(THREADS):
        threading.Thread(target=_work, args=(line, providers, wanted), daemon=True).start()
    while request := line.recv(connector_wire.REQUEST.size + 1):
        ident, number = connector_wire.REQUEST.unpack(request)
        if number >= len(providers):
            break
        try:
            wanted.put_nowait((ident, number))
        except queue.Full:
            _say(line, ident, errno.EAGAIN)
    raise SystemExit("the service gate is gone, or asked for another provider")


def _warm(host: str, port: int) -> None:
    """Have the libraries of the resolver loaded. The answer does not matter: it is asked for again."""
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return


def _work(line: socket.socket, providers: list[tuple[str, int, float]], wanted: queue.Queue[tuple[int, int]]) -> None:
    while True:
        ident, number = wanted.get()
        host, port, seconds = providers[number]
        try:
            with socket.create_connection((host, port), timeout=seconds) as made:
                made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                socket.send_fds(line, [connector_wire.REPLY.pack(ident, 0)], [made.fileno()])
        except OSError as e:
            _say(line, ident, e.errno or errno.ETIMEDOUT)


def _say(line: socket.socket, ident: int, status: int) -> None:
    try:
        line.send(connector_wire.REPLY.pack(ident, status if 0 < status < 1 << 16 else errno.EIO))
    except OSError:
        return  # the gate is gone
