"""The requests of the DNS gate to its broker, as bytes; each end imports this and nothing of the other's."""

from __future__ import annotations

import struct
from collections.abc import Sequence

ADD, UDP, TCP, ASK, LEASED = 1, 2, 3, 4, 5
DONE, FULL, FAILED = 0, 1, 2
MESSAGE_BYTES = 4096
# A name of 127 labels is covered by so many patterns, and an answer has no more addresses than wire.RECORDS.
PATTERNS, ADDRESSES = 128, 32
QUERY_BYTES = 512
# The most resolvers of an operator (sandbox.network.resolvers).
RESOLVERS = 3
# operation, id, time to live in seconds or number of the resolver, how many patterns, how many addresses
HEADER = struct.Struct("!BIIHH")
# id, status, how many resolvers there are, and a number that changes with them; with a descriptor when it is DONE and a
# socket was asked for
REPLY = struct.Struct("!IBBB")


def add_request(ident: int, ttl: int, patterns: Sequence[int], packed: Sequence[bytes]) -> bytes:
    """An ADD: the addresses go into the sets of these patterns of the plan."""
    numbers = struct.pack(f"!{len(patterns)}H", *patterns)
    body = b"".join(bytes([len(one)]) + one for one in packed)
    return HEADER.pack(ADD, ident, ttl, len(patterns), len(packed)) + numbers + body


def ask_request(ident: int, host: str) -> bytes:
    """An ASK: may this name, which needs a lease, be resolved? The answer may take as long as an operator may."""
    return HEADER.pack(ASK, ident, 0, 0, 0) + host.encode("ascii")


def leased_request(ident: int, ttl: int, host: str, packed: Sequence[bytes]) -> bytes:
    """A LEASED: the addresses of a name that has a lease go into the sets of its patterns."""
    body = b"".join(bytes([len(one)]) + one for one in packed)
    return HEADER.pack(LEASED, ident, ttl, 0, len(packed)) + bytes([len(host)]) + host.encode("ascii") + body


def host_of(data: bytes) -> tuple[str, bytes] | None:
    """The name of a LEASED, and what follows it. None when it is none."""
    name, rest = data[1 : 1 + data[0]] if data else b"", data[1 + data[0] :] if data else b""
    return (name.decode("ascii"), rest) if name and name.isascii() and len(name) == data[0] else None


def udp_request(ident: int, resolver: int, query: bytes) -> bytes:
    """A UDP: send this to that resolver, and give the socket on which its answer comes."""
    return HEADER.pack(UDP, ident, resolver, 0, 0) + query


def tcp_request(ident: int, resolver: int) -> bytes:
    """A TCP: a socket that is being connected to that resolver."""
    return HEADER.pack(TCP, ident, resolver, 0, 0)


def patterns_of(data: bytes, count: int) -> tuple[tuple[int, ...], bytes] | None:
    """The numbers of ``count`` patterns and what follows them; None when there are fewer."""
    size = 2 * count
    return (struct.unpack(f"!{count}H", data[:size]), data[size:]) if len(data) >= size else None


def addresses_of(data: bytes, count: int) -> list[bytes] | None:
    """``count`` packed addresses, each after its length; None when that is not what they are."""
    out, at = [], 0
    for _ in range(count):
        size = data[at] if at < len(data) else 0
        one = data[at + 1 : at + 1 + size]
        if size not in (4, 16) or len(one) != size:
            return None
        out.append(one)
        at += 1 + size
    return out if at == len(data) else None
