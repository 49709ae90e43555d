"""Send the DNS gate's queries to the resolvers and its elements to the sets, both through the broker.

Each query has its own socket, with a port chosen by the kernel, a random id and random case. The gate itself never
holds a UDP socket that can send: the broker sends, and the gate reads the answer. If a resolver does not keep the case,
or its answer is truncated, the query is repeated over TCP. The gate learns which of EDNS, TCP and case a resolver does
not support, and does without for some minutes (``_Manner``).
"""

from __future__ import annotations

import collections
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
# The pause before a request is repeated for which the broker's line has no room, and the most that wait so.
_FULL_SECONDS, _REQUESTS = 0.005, 1024
_REPLIES = 16
# The most datagrams on one socket that do not answer the query; then the gate gives it up.
_STRAY = 8
_ANSWER_BYTES = 4096
# How long a resolver that did not answer is asked after the others, and how long its manner is remembered.
_SILENT_SECONDS, _MANNER_SECONDS = 10.0, 300.0


class UpstreamError(Exception):
    """No resolver answered."""


class BrokerClient:
    """The gate's end of the broker. ``add`` and ``connected`` are answered in the order in which they come back.

    ``resolvers`` is how many there are now. ``changes`` is a number that differs once they are others.
    """

    def __init__(self, loop: Loop, fd: int, resolvers: int) -> None:
        self._loop = loop
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, fileno=fd)
        self._asked: dict[int, Future] = {}
        self._unsent: collections.deque[bytes] = collections.deque()
        self._next = 0
        self.resolvers, self.changes = resolvers, 0
        loop.on_readable(fd, self._read)

    async def add(self, ttl: int, patterns: Sequence[int], packed: Sequence[bytes]) -> int:
        """Put addresses into the sets of patterns; a status of broker_wire, DONE when the kernel has them."""
        status, _ = await self._ask(lambda ident: broker_wire.add_request(ident, ttl, patterns, packed))
        return status

    async def approved(self, host: str, seconds: float) -> bool:
        """Whether a name may be resolved under a lease; an operator may need so long to say so."""
        status, _ = await self._ask(lambda ident: broker_wire.ask_request(ident, host), seconds + _BROKER_SECONDS)
        return status == broker_wire.DONE

    async def leased(self, ttl: int, host: str, packed: Sequence[bytes]) -> int:
        """Put the addresses of a name with a lease into its sets; as ``add``."""
        status, _ = await self._ask(lambda ident: broker_wire.leased_request(ident, ttl, host, packed))
        return status

    async def asked(self, resolver: int, query: bytes) -> int | None:
        """A UDP socket for the answer to a query that was sent; the caller's to close, None when none was sent."""
        _, fd = await self._ask(lambda ident: broker_wire.udp_request(ident, resolver, query))
        return fd

    async def connected(self, resolver: int) -> int | None:
        """Return a TCP socket to a resolver, which the caller closes. None if none can be made."""
        _, fd = await self._ask(lambda ident: broker_wire.tcp_request(ident, resolver))
        return fd

    async def _ask(self, request: Callable[[int], bytes], seconds: float = _BROKER_SECONDS) -> tuple[int, int | None]:
        if len(self._unsent) >= _REQUESTS:
            return broker_wire.FAILED, None
        self._next = ident = (self._next + 1) & 0xFFFFFFFF
        future = self._asked[ident] = Future()
        self._unsent.append(request(ident))
        if len(self._unsent) == 1:
            self._send()
        found = await self._loop.result(future, time.monotonic() + seconds)
        self._asked.pop(ident, None)
        return found or (broker_wire.FAILED, None)

    def _send(self) -> None:
        """Send what waits, in order. The line holds some hundred messages, or ten on a kernel with other limits."""
        while self._unsent:
            try:
                self._socket.send(self._unsent[0])
            except BlockingIOError:
                self._loop.at(time.monotonic() + _FULL_SECONDS, self._send)
                return
            self._unsent.popleft()

    def _read(self) -> None:
        for _ in range(_REPLIES):
            try:
                message, fds, _, _ = socket.recv_fds(self._socket, 64, 1)
            except BlockingIOError:
                return
            if not message:
                os._exit(1)  # the supervisor is gone
            ident, status, self.resolvers, self.changes = broker_wire.REPLY.unpack(message)
            future = self._asked.pop(ident, None)
            if future is not None and not future.done:
                future.set((status, fds[0] if fds else None))
            else:
                for fd in fds:  # too late: no coroutine waits for it
                    os.close(fd)


class _Manner:
    """Features that a resolver was seen to lack. ``silent_until`` puts it behind the others."""

    def __init__(self, now: float) -> None:
        self.edns = self.stream = self.case = True
        self.silent_until = 0.0
        self.ends = now + _MANNER_SECONDS


class Upstream:
    """Queries the resolvers: those that answered lately first, in the operator's order."""

    def __init__(self, loop: Loop, broker: BrokerClient) -> None:
        self._loop, self._broker = loop, broker
        self._manners: dict[int, _Manner] = {}
        self._changes = broker.changes

    async def ask(self, name: str, kind: int, until: float) -> wire.Answer:
        """Query the resolvers for a name and a type, and return the answer.

        Raises:
            UpstreamError: Raised when none of them answers by ``until``, or all of them fail.
        """
        failed: wire.Answer | None = None
        changed = True
        while changed:
            changed = False
            # In the second round without EDNS: some resolvers and some firewalls drop what they do not know.
            for turn, resolver in enumerate(2 * self._order()):
                answer = await self._tried(resolver, name, kind, until, again=turn >= self._broker.resolvers)
                if answer is not None and answer.rcode in (wire.NOERROR, wire.NXDOMAIN):
                    return answer
                failed = answer or failed
                changed = self._changed()
                if changed or time.monotonic() >= until:
                    break
                if failed is not None and turn >= self._broker.resolvers - 1:
                    break
            changed = changed and time.monotonic() < until
        raise UpstreamError(f"resolvers answer {failed.rcode}" if failed else "no resolver answers")

    def _order(self) -> list[int]:
        now = time.monotonic()
        silent = {number for number, manner in self._manners.items() if manner.silent_until > now}
        # One is asked for even where there is none: by its answer the broker says how many there are now.
        return sorted(range(max(1, self._broker.resolvers)), key=lambda number: (number in silent, number))

    def _changed(self) -> bool:
        """Whether the operator's resolvers are others than before. Their manners are then forgotten."""
        if self._broker.changes == self._changes:
            return False
        self._changes = self._broker.changes
        self._manners.clear()
        return True

    async def _tried(self, resolver: int, name: str, kind: int, until: float, *, again: bool) -> wire.Answer | None:
        now = time.monotonic()
        manner = self._manners.get(resolver)
        if manner is None or manner.ends < now:
            manner = self._manners[resolver] = _Manner(now)
        try:
            answer = await self._once(resolver, manner, name, kind, until, plain=again)
        except (OSError, wire.MalformedError):
            return None
        manner.silent_until = 0.0 if answer is not None else time.monotonic() + _SILENT_SECONDS
        return answer

    async def _once(
        self, resolver: int, manner: _Manner, name: str, kind: int, until: float, *, plain: bool
    ) -> wire.Answer | None:
        """One try: over UDP, and over TCP where that cannot be trusted or does not fit."""
        edns = manner.edns and not plain
        answer, again = await self._datagram(resolver, manner, name, kind, until, edns=edns)
        if edns and answer is not None and answer.rcode in (wire.FORMERR, wire.NOTIMP):
            edns = False
            answer, again = await self._datagram(resolver, manner, name, kind, until, edns=False)
        if answer is not None and not edns and answer.rcode in (wire.NOERROR, wire.NXDOMAIN):
            manner.edns = False
        if not again and (answer is None or not answer.truncated):
            return answer
        small = manner.stream
        if manner.stream:
            found = await self._stream(resolver, name, kind, min(until, time.monotonic() + 2 * _TRY_SECONDS))
            if found is not None:
                return found
            manner.stream = False
        if again and manner.case:
            # It keeps no case and has no TCP: the id and the port are what a forger has to guess.
            manner.case = False
            answer, _ = await self._datagram(resolver, manner, name, kind, until, edns=edns)
        if small and answer is not None and answer.truncated:
            large, _ = await self._datagram(resolver, manner, name, kind, until, edns=edns)
            answer = large or answer
        # Without TCP, some of the addresses are better than none.
        return answer if answer is None or not answer.truncated or answer.addresses or answer.services else None

    async def _datagram(
        self, resolver: int, manner: _Manner, name: str, kind: int, until: float, *, edns: bool
    ) -> tuple[wire.Answer | None, bool]:
        """The answer, and whether to ask again over TCP instead."""
        until = min(until, time.monotonic() + _TRY_SECONDS)
        ident, asked = _random(16), wire.question(name, kind, cased=_cased(name) if manner.case else None)
        payload = (wire.PAYLOAD_BYTES if manner.stream else wire.LARGE_BYTES) if edns else 0
        fd = await self._broker.asked(resolver, wire.upstream_query(ident, asked, payload=payload))
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
        """The answer over TCP. None if there is none, or it is malformed."""
        fd = await self._broker.connected(resolver)
        if fd is None:
            return None
        with _closing(fd):
            ident, asked = _random(16), wire.question(name, kind)
            query = wire.upstream_query(ident, asked)
            if not await self._loop.ready(fd, WRITE, until):
                return None
            whole = struct.pack("!H", len(query)) + query
            try:
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
            except OSError:
                return None  # refused or reset: a resolver without TCP
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
