"""Netlink's own framing (netlink(7)): headers, attributes, and the messages of one datagram."""

from __future__ import annotations

import struct
from collections.abc import Iterator

HEADER = struct.Struct("=IHHII")  # struct nlmsghdr: length, type, flags, sequence, port
ATTRIBUTE = struct.Struct("=HH")  # struct nlattr: length, type
NESTED = 0x8000
_TYPE = 0x3FFF  # NLA_TYPE_MASK


def attribute(kind: int, value: bytes) -> bytes:
    """One attribute, padded to four bytes."""
    size = ATTRIBUTE.size + len(value)
    return ATTRIBUTE.pack(size, kind) + value + bytes(-size % 4)


def attributes(data: bytes) -> dict[int, bytes]:
    """The attributes by type, the last of each; what is cut off or malformed ends them."""
    found, at = dict[int, bytes](), 0
    while at + ATTRIBUTE.size <= len(data):
        size, kind = ATTRIBUTE.unpack_from(data, at)
        if size < ATTRIBUTE.size:
            break
        found[kind & _TYPE] = data[at + ATTRIBUTE.size : at + size]
        at += size + -size % 4
    return found


def messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Type and body of each message in a datagram; what is cut off or malformed ends them."""
    at = 0
    while at + HEADER.size <= len(data):
        size, kind, *_ = HEADER.unpack_from(data, at)
        if size < HEADER.size:
            return
        yield kind, data[at + HEADER.size : at + size]
        at += size + -size % 4
