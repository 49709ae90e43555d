"""Serve in the gate's own process: read the agent protocol, and ask the shim for what may be given.

It holds no key. It is in an empty network namespace, and can neither make nor connect a socket: clients come to the one
listener that it was given.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Final, NoReturn, Protocol

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from policy.ssh import keys, protocol, sessions, wire
from policy.ssh.sessions import Binding, Hosts, RefusedError, SignRequest
from sandbox.network.gate.main import GateInput
from sandbox.network.ssh import line as desk_line
from sandbox.network.ssh import private_keys
from sandbox.rate_limit import Tokens

# The relay in the sandbox carries as many (sandbox/rootfs/ssh_relay.S).
CONNECTIONS: Final = 16
PER_SECOND, BURST = 10, 100
MALFORMED, LIMIT, UNAVAILABLE = "malformed", "limit", "unavailable"
_SECRETS: Final = "keys of the run"


class AskDesk(Protocol):
    """The gate's end of the line to the shim."""

    def ask(self, kind: bytes, request: bytes = b"") -> Awaitable[tuple[int, bytes]]: ...


class Client:
    """One connection: the session that it is bound to, or why its binding was refused."""

    def __init__(self) -> None:
        self.binding: Binding | None = None
        self.refused: RefusedError | None = None


class SshServer:
    """Answers the clients of one agent."""

    def __init__(self, hosts: Hosts, line: AskDesk, denied: Callable[[str, str], None]) -> None:
        self.denied = denied
        self._hosts, self._line = hosts, line
        self._tokens = Tokens(PER_SECOND, BURST, time.monotonic())
        self._open = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one client until it ends, or sends what is no message."""
        self._open += 1
        try:
            if self._open > CONNECTIONS:
                self.denied("connections", LIMIT)
                return
            client = Client()
            while (message := await self._message(reader)) is not None:
                writer.write(protocol.framed(await self.answer(client, message)))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # the client is gone
        finally:
            self._open -= 1
            writer.close()

    async def answer(self, client: Client, message: bytes) -> bytes:
        """Return the answer to one message. A refusal is told, and its answer is a failure."""
        if not self._tokens.take(time.monotonic()):
            self.denied("requests", LIMIT)
            return protocol.FAILURE
        try:
            return await self._answer(client, message)
        except RefusedError as e:
            self.denied(e.target, e.code)
        except wire.WireError as e:
            self.denied(str(e), MALFORMED)
        return protocol.FAILURE

    async def _message(self, reader: asyncio.StreamReader) -> bytes | None:
        size = int.from_bytes(await reader.readexactly(4), "big")
        if not 0 < size <= protocol.MESSAGE_BYTES:
            self.denied(f"a message of {size} bytes", MALFORMED)
            return None
        return await reader.readexactly(size)

    async def _answer(self, client: Client, message: bytes) -> bytes:
        kind, fields = message[0], wire.Reader(message[1:])
        if kind == protocol.LIST:
            fields.end()
            return await self._list(client)
        if kind == protocol.SIGN:
            key, data, flags = fields.string(), fields.string(), fields.number()
            fields.end()
            return await self._sign(client, key, data, flags)
        if kind == protocol.EXTENSION and fields.string() == protocol.BIND.encode():
            self._bind(client, fields)
            return protocol.SUCCESS
        raise RefusedError(protocol.REQUEST_REFUSED, protocol.named(kind, wire.Reader(message[1:])))

    def _bind(self, client: Client, fields: wire.Reader) -> None:
        """Bind a connection once. After a refusal it stays unbound: nothing that follows is signed."""
        try:
            if client.refused is not None:
                raise client.refused
            made = Binding.read(fields, self._hosts)
            before = client.binding
            if before is not None and (before.host_key, before.session) != (made.host_key, made.session):
                raise RefusedError(sessions.BINDING_REFUSED, wire.fingerprint(made.host_key))
            client.binding = made
        except wire.WireError:
            client.binding, client.refused = None, RefusedError(sessions.BINDING_REFUSED, "a session")
            raise
        except RefusedError as e:
            client.binding, client.refused = None, e
            raise

    async def _list(self, client: Client) -> bytes:
        """List the keys that the session's host takes; before a binding, all of the run's."""
        if client.refused is not None:
            return protocol.listed([])
        own = self._hosts.secrets if client.binding is None else self._hosts.at(client.binding.host_key)[1]
        status, data = await self._line.ask(desk_line.LIST)
        if status != desk_line.GIVEN:
            raise RefusedError(UNAVAILABLE, _SECRETS)
        return protocol.listed([(blob, name) for name, blob in desk_line.decoded(data) if name in own])

    async def _sign(self, client: Client, key: bytes, data: bytes, flags: int) -> bytes:
        if client.refused is not None:
            raise client.refused
        own = wire.fingerprint(key)
        if client.binding is None:
            raise RefusedError(sessions.NOT_BOUND, own)
        request = SignRequest(key, data, flags, client.binding)
        allowed = sessions.check(request, self._hosts)
        status, signature = await self._line.ask(desk_line.SIGN, request.encoded())
        if status != desk_line.GIVEN:
            code = sessions.KEY_NOT_GRANTED if status == desk_line.NOT_GRANTED else UNAVAILABLE
            raise RefusedError(code, f"{own} at {allowed.host}")
        return protocol.signed(signature)


def serve(gate: GateInput) -> NoReturn:
    """The gate's life."""
    asyncio.run(_serve(gate))
    raise SystemExit("the gate stopped serving")


async def _serve(gate: GateInput) -> None:
    hosts = Hosts([(one["secret"], one["host"], one["key"]) for one in gate.plan["keys"]])
    line = desk_line.DeskLine(gate.fds["line"])
    await _warm()
    server = SshServer(hosts, line, gate.denied)
    listener = socket.socket(fileno=gate.fds["listener"])
    gate.seal()
    line.start(asyncio.get_running_loop())
    async with await asyncio.start_server(server.serve, sock=listener, limit=protocol.MESSAGE_BYTES):
        await asyncio.Event().wait()


class _NoDesk:
    """A line without a shim."""

    async def ask(self, kind: bytes, request: bytes = b"") -> tuple[int, bytes]:
        return desk_line.GIVEN, b""


async def _warm() -> None:
    """Verify a signature of each kind, and serve one client: what is loaded late cannot be loaded once it is sealed."""
    form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    warm: list[private_keys.Private] = [ed25519.Ed25519PrivateKey.generate()]
    for made in (*warm, *(ec.generate_private_key(one()) for one in _CURVES)):
        line = made.public_key().public_bytes(*form).decode("ascii")
        blob = wire.read_line(line)
        if not keys.verifies(blob, private_keys.sign(made, wire.key_type(blob), b"warm"), b"warm"):
            raise SystemExit("the gate verifies no signature")
    modulus = wire.string("ssh-rsa") + wire.integer(65_537) + wire.integer((1 << 2047) + 1)
    for algorithm in keys.RSA_HASHES:
        keys.verifies(modulus, wire.string(algorithm) + wire.string(b"\1" * 256), b"warm")
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    server = SshServer(Hosts([]), _NoDesk(), lambda target, code: None)
    near = await asyncio.open_connection(sock=theirs)
    task = asyncio.get_running_loop().create_task(server.serve(*near))
    for message in (bytes([protocol.LIST]), bytes([22])):
        writer.write(protocol.framed(message))
        await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    await task


_CURVES: Final = (ec.SECP256R1, ec.SECP384R1, ec.SECP521R1)
