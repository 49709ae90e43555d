"""Send the DNS gate's queries to the resolvers and its elements to the sets, both through the broker.

Each query has its own socket, with a port chosen by the kernel, a random id and random case. The gate itself never
holds a UDP socket that can send: the broker sends, and the gate reads the answer. If a resolver does not keep the case,
or its answer is truncated, the query is repeated over TCP.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence

from sandbox.network.dns import broker_wire, wire
from sandbox.network.dns.loop import READ, WRITE, Future, Loop

# Seconds: one try over UDP, and all work for one query of the agent, whose libc retries after 5.
_TRY_SECONDS, TOTAL_SECONDS = 1.0, 4.5
_BROKER_SECONDS = 2.0
# The most datagrams on one socket that do not answer the query; then the gate gives it up.
_STRAY = 8
_ANSWER_BYTES = 4096


class UpstreamError(Exception):
    """No resolver answered."""


class BrokerClient:
    """The gate's end of the broker. ``add`` and ``connected`` are answered in the order in which they come back."""

    def __init__(self, loop: Loop, fd: int) -> None:
        self._loop = loop
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, fileno=fd)
        self._asked: dict[int, Future] = {}
        self._next = 0
        loop.on_readable(fd, self._read)

    async def add(self, ttl: int, patterns: Sequence[int], packed: Sequence[bytes]) -> int:
        """Put addresses into the sets of patterns; a status of broker_wire, DONE when the kernel has them."""
        status, _ = await self._ask(lambda ident: broker_wire.add_request(ident, ttl, patterns, packed))
        return status

    async def asked(self, resolver: int, query: bytes) -> int | None:
        """A UDP socket for the answer to a query that was sent; the caller's to close, None when none was sent."""
        _, fd = await self._ask(lambda ident: broker_wire.udp_request(ident, resolver, query))
        return fd

    async def connected(self, resolver: int) -> int | None:
        """Return a TCP socket to a resolver, which the caller closes. None if none can be made."""
        _, fd = await self._ask(lambda ident: broker_wire.tcp_request(ident, resolver))
        return fd

    async def _ask(self, request: Callable[[int], bytes]) -> tuple[int, int | None]:
        self._next = ident = (self._next + 1) & 0xFFFFFFFF
        future = self._asked[ident] = Future()
        try:
            self._socket.send(request(ident))
        except BlockingIOError:
            del self._asked[ident]
            return broker_wire.FAILED, None
        found = await self._loop.result(future, time.monotonic() + _BROKER_SECONDS)
        self._asked.pop(ident, None)
        return found or (broker_wire.FAILED, None)

    def _read(self) -> None:
        try:
            message, fds, _, _ = socket.recv_fds(self._socket, 64, 1)
        except BlockingIOError:
            return
        if not message:
            os._exit(1)  # the supervisor is gone
        ident, status = broker_wire.REPLY.unpack(message)
        future = self._asked.pop(ident, None)
        if future is not None and not future.done:
            future.set((status, fds[0] if fds else None))
        else:
            for fd in fds:  # too late: no coroutine waits for it
                os.close(fd)


class Upstream:
    """Queries the resolvers, the one that answered last first."""

    def __init__(self, loop: Loop, broker: BrokerClient, resolvers: int) -> None:
        self._loop, self._broker, self._count = loop, broker, resolvers
        self._first = 0

    async def ask(self, name: str, kind: int, until: float) -> wire.Answer:
        """Query the resolvers for a name and a type, and return the answer.

        Raises:
            UpstreamError: Raised when none of them answers by ``until``, or all of them fail.
        """
        failed: wire.Answer | None = None
        for turn in range(2 * self._count):
            resolver = (self._first + turn) % self._count
            try:
                answer = await self._once(resolver, name, kind, until)
            except (OSError, wire.MalformedError):
                answer = None
            if answer is not None and answer.rcode in (wire.NOERROR, wire.NXDOMAIN):
                self._first = resolver
                return answer
            failed = answer or failed
            if time.monotonic() >= until or (failed is not None and turn >= self._count - 1):
                break
        raise UpstreamError(f"resolvers answer {failed.rcode}" if failed else "no resolver answers")

    async def _once(self, resolver: int, name: str, kind: int, until: float) -> wire.Answer | None:
        """One try: over UDP, and over TCP where that cannot be trusted or does not fit."""
        now = time.monotonic()
        answer, again = await self._datagram(resolver, name, kind, min(until, now + _TRY_SECONDS))
        if again or (answer is not None and answer.truncated):
            return await self._stream(resolver, name, kind, min(until, time.monotonic() + 2 * _TRY_SECONDS))
        return answer

    async def _datagram(self, resolver: int, name: str, kind: int, until: float) -> tuple[wire.Answer | None, bool]:
        """The answer, and whether to ask again over TCP instead."""
        ident, asked = _random(16), wire.question(name, kind, cased=_cased(name))
        fd = await self._broker.asked(resolver, wire.upstream_query(ident, asked))
        if fd is None:
            return None, False
        with _closing(fd):
            for _ in range(_STRAY):
                if not await self._loop.ready(fd, READ, until):
                    return None, False
                data = os.read(fd, _ANSWER_BYTES)
                answer = wire.parse_answer(data, ident, asked, name, kind)
                if answer is not None:
                    return answer, False
                if data[:2] == ident.to_bytes(2, "big"):
                    return None, True  # a resolver that does not keep the case, or a forged answer: TCP decides
        return None, True

    async def _stream(self, resolver: int, name: str, kind: int, until: float) -> wire.Answer | None:
        fd = await self._broker.connected(resolver)
        if fd is None:
            return None
        with _closing(fd):
            ident, asked = _random(16), wire.question(name, kind)
            query = wire.upstream_query(ident, asked)
            if not await self._loop.ready(fd, WRITE, until):
                return None
            whole = struct.pack("!H", len(query)) + query
            if os.write(fd, whole) != len(whole):
                return None
            data = b""
            while len(data) < 2 or len(data) < 2 + int.from_bytes(data[:2], "big"):
                if not await self._loop.ready(fd, READ, until):
                    return None
                more = os.read(fd, 65536)
                if not more:
                    return None
                data += more
            size = int.from_bytes(data[:2], "big")
            return wire.parse_answer(data[2 : 2 + size], ident, asked, name, kind)


def _random(bits: int) -> int:
    """That many random bits; the module secrets would load OpenSSL for it."""
    size = (bits + 7) // 8
    return int.from_bytes(os.urandom(size), "big") >> (8 * size - bits)


def _cased(name: str) -> bytes:
    """The name with the case of each letter drawn (draft-vixie-dnsext-dns0x20)."""
    bits = _random(len(name))
    return "".join(c.upper() if bits >> i & 1 else c for i, c in enumerate(name)).encode("ascii")


@contextlib.contextmanager
def _closing(fd: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(fd)
