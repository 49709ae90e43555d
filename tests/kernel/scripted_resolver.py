"""A resolver that gives a test's scripted answers, over UDP and TCP, and records every question that reached it."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset

# (name, type) to lines of a zone file; a name with no line at all does not exist.
Zone = Mapping[tuple[str, str], Sequence[str]]


@dataclass
class Resolver:
    """``zone`` may be changed while it runs; ``asked`` are (name, type, transport) as they came,
    ``seen`` the same as bytes."""

    zone: dict[tuple[str, str], Sequence[str]]
    ttl: int = 300
    # Names about which it behaves badly: a function from the right answer to the bytes that it sends, None for none.
    odd: dict[str, Callable[[dns.message.Message], bytes | None]] = field(default_factory=dict)
    odd_over: tuple[str, ...] = ("udp",)
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    seen: list[bytes] = field(default_factory=list)

    def names(self) -> set[str]:
        """Every name that it was asked for, in lower case."""
        return {name for name, _, _ in self.asked}

    def answer(self, wire: bytes, transport: str) -> bytes | None:
        """Return the answer to ``wire``."""
        self.seen.append(wire)
        query = dns.message.from_wire(wire)
        (question,) = query.question
        name = question.name.to_text(omit_final_dot=True).lower()
        kind = dns.rdatatype.to_text(question.rdtype)
        self.asked.append((name, kind, transport))
        response = dns.message.make_response(query, recursion_available=True)
        self._fill(response, question.name.to_text(), name, kind)
        if name in self.odd and transport in self.odd_over:
            return self.odd[name](response)
        wire = response.to_wire(max_size=65535)
        if transport == "udp" and len(wire) > (max(512, query.payload) if query.edns >= 0 else 512):
            response.answer.clear()
            response.flags |= dns.flags.TC
            wire = response.to_wire()
        return wire

    def _fill(self, response: dns.message.Message, owner: str, name: str, kind: str) -> None:
        for _ in range(16):
            found = self.zone.get((name, kind), ())
            if found:
                response.answer.append(dns.rrset.from_text_list(owner, self.ttl, "IN", kind, found))
                return
            alias = self.zone.get((name, "CNAME"), ())
            if not alias:
                break
            response.answer.append(dns.rrset.from_text_list(owner, self.ttl, "IN", "CNAME", alias))
            owner, name = alias[0], alias[0].removesuffix(".").lower()
            if (name, "LATER") in self.zone:
                return  # it has not followed the alias: the asker has to
        if not any(known == name for known, _ in self.zone):
            response.set_rcode(dns.rcode.NXDOMAIN)
        soa = "ns.example. root.example. 1 2 3 4 5"
        response.authority.append(dns.rrset.from_text_list("example.", self.ttl, "IN", "SOA", [soa]))

    def datagrams(self, server: socket.socket) -> None:
        """Serve a UDP socket until it is shut down."""
        with contextlib.suppress(OSError):
            while True:
                wire, peer = server.recvfrom(4096)
                if not wire:
                    return
                answer = self.answer(wire, "udp")
                if answer is not None:
                    server.sendto(answer, peer)

    def streams(self, server: socket.socket) -> None:
        """Serve a listening socket until it is shut down; one question a connection."""
        with contextlib.suppress(OSError):
            while True:
                made, _ = server.accept()
                with made, contextlib.suppress(OSError, EOFError):
                    made.settimeout(5)
                    size = int.from_bytes(_exactly(made, 2), "big")
                    answer = self.answer(_exactly(made, size), "tcp") or b""
                    made.sendall(struct.pack("!H", len(answer)) + answer)


def _exactly(made: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = made.recv(size - len(data))
        if not more:
            raise EOFError
        data += more
    return data


@contextlib.contextmanager
def serving(
    resolver: Resolver,
    host: str,
    within: Callable[[Callable[[], socket.socket]], socket.socket],
    port: int = 53,
    *,
    streams: bool = True,
) -> Iterator[Resolver]:
    """Run it at an address; ``within`` runs a call in the namespace where it is to be.

    Without ``streams`` it refuses TCP.
    """

    def made(kind: socket.SocketKind) -> Callable[[], socket.socket]:
        def make() -> socket.socket:
            one = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, kind)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind((host, port))
            return one

        return make

    with within(made(socket.SOCK_DGRAM)) as udp, within(made(socket.SOCK_STREAM)) as tcp:
        threads = [threading.Thread(target=resolver.datagrams, args=(udp,))]
        if streams:
            tcp.listen(16)
            threads.append(threading.Thread(target=resolver.streams, args=(tcp,)))
        for thread in threads:
            thread.start()
        try:
            yield resolver
        finally:
            for one in (udp, tcp):
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join(10)
