"""The life of the inject gate's process: it makes the run's authority, tries itself once, is sealed, and serves.

What is imported late cannot be imported once the process is sealed: so one whole request goes through it before, to a
host of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Final, NoReturn

from policy.grants.credentials import InjectRule, InjectSet
from sandbox.network.gate.main import GateInput
from sandbox.network.inject import upstream, wire
from sandbox.network.inject.authority import Authority
from sandbox.network.inject.line import InjectEntry, Line
from sandbox.network.inject.server import InjectServer

_HOST: Final = "warm.covenant.invalid"
_SECRET: Final = b"no-secret-at-all"


def serve(gate: GateInput) -> NoReturn:
    """The gate's life."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    loop.run_until_complete(_serve(gate))
    raise SystemExit("the gate stopped serving")


async def _serve(gate: GateInput) -> None:
    plan = gate.plan
    injected = wire.requests(plan)
    authority = Authority(injected.hosts, seconds=plan["seconds"])
    await _warm()
    line = Line(gate.fds["line"])
    line.certificate(authority.pem)
    server = InjectServer(injected, authority.contexts, upstream.verifying(plan["bundles"]), line)
    connections = socket.socket(fileno=gate.fds["connections"])
    gate.seal()
    server.denied = gate.denied
    loop = asyncio.get_running_loop()
    line.start(loop)
    loop.add_reader(connections.fileno(), _take, connections, server)
    await asyncio.Event().wait()


def _take(connections: socket.socket, server: InjectServer) -> None:
    """Take the connections that the TLS gate hands over."""
    while True:
        try:
            message, fds, _, _ = socket.recv_fds(connections, wire.NAME_BYTES, 2)
        except BlockingIOError:
            return
        if not message:
            raise SystemExit("the TLS gate is gone")
        sockets = [socket.socket(fileno=fd) for fd in fds]
        if len(sockets) != 2:
            raise SystemExit("the TLS gate says what it may not")
        for one in sockets:
            one.setblocking(False)
        name, _, port = message.decode("ascii").rpartition(":")
        server.take(name, int(port), *sockets)


class _NoLine(Line):
    """A line without a supervisor, for the request that nothing is told of."""

    def __init__(self) -> None:
        self.ended = 0

    async def ask(self, host: str, method: str, path: str, digest: str = "") -> tuple[InjectEntry, bytes | None]:
        return InjectEntry(0, 0.0), _SECRET

    def cut_by(self, entry: InjectEntry, cut: Callable[[str], None]) -> None:
        """No supervisor takes its secret away."""

    def end(self, entry: InjectEntry) -> None:
        self.ended += 1


async def _warm() -> None:
    """Send one request through a gate of its own, to a host of its own."""
    rule = InjectRule(_HOST, "warm", "Authorization", "Bearer {}", "", "*", "/*")
    injected = InjectSet.of((rule,))
    authority = Authority(injected.hosts, seconds=3600)
    trusts = upstream.verifying(())
    trusts.load_verify_locations(cadata=authority.pem.decode())
    server = InjectServer(injected, authority.contexts, trusts, _NoLine())
    (agent, near), (made, host) = socket.socketpair(), socket.socketpair()
    for one in (agent, near, made, host):
        one.setblocking(False)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = b'{"access_token": "' + b"a" * 40 + b'", "echo": "' + _SECRET + b'"}'
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n")
        writer.write(b"Connection: close\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        await writer.drain()
        writer.close()

    loop = asyncio.get_running_loop()
    reads = asyncio.StreamReader()
    serving = asyncio.StreamReaderProtocol(reads, answer)
    accepting = loop.create_task(loop.connect_accepted_socket(lambda: serving, host, ssl=authority.contexts[_HOST]))
    task = server.take(_HOST, 443, near, made)
    reader, writer = await asyncio.open_connection(sock=agent, ssl=trusts, server_hostname=_HOST)
    writer.write(b"POST / HTTP/1.1\r\nHost: %b\r\nContent-Length: 2\r\n\r\nhi" % _HOST.encode())
    said = await reader.read()
    writer.close()
    await accepting
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    await task
    if not said.startswith(b"HTTP/1.1 200") or _SECRET in said or b"a" * 40 in said:
        raise SystemExit("the gate does not hide a secret")
