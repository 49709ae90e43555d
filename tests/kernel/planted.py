"""Entries that root's hand puts into the conntrack table of the calling thread's namespace."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct

from policy.connections import Ends
from sandbox.kernel.net import conntrack
from sandbox.kernel.net.netlink_wire import NESTED, attribute

UDP, TCP = socket.IPPROTO_UDP, socket.IPPROTO_TCP
_NEW, _DELETE = 0, 2
_REQUEST, _ACK, _CREATE, _EXCL = 0x1, 0x4, 0x400, 0x200
_ORIG, _REPLY, _STATUS, _NAT_SRC, _TIMEOUT, _NAT_DST, _ZONE, _PROTOINFO, _HELP = 1, 2, 3, 6, 7, 13, 18, 4, 5
_SEEN_REPLY, _ASSURED, _CONFIRMED = 0x2, 0x4, 0x8
_ESTABLISHED = 3  # TCP_CONNTRACK_ESTABLISHED
_EXPECTATIONS, _EXP_MASTER, _EXP_TUPLE, _EXP_MASK, _EXP_TIMEOUT = 2, 1, 2, 3, 4


def ends(source: str, source_port: int, destination: str, destination_port: int) -> Ends:
    """One direction in words."""
    first, last = (ipaddress.ip_address(one).packed for one in (source, destination))
    return Ends(first, last, source_port, destination_port)


def back(sent: Ends) -> Ends:
    """Return the direction of an answer without address translation."""
    return Ends(sent.destination, sent.source, sent.destination_port, sent.source_port)


def entry(
    protocol: int, sent: Ends, *, source: str = "", destination: str = "", port: int = 0, zone: int = 0,
    helper: str = "",
) -> None:  # fmt: skip
    """An established connection; ``source`` and ``destination`` (with ``port``) are what NAT makes of its own."""
    rest = conntrack._written(protocol, sent) + _tuple(_REPLY, protocol, back(sent))
    rest += attribute(_STATUS, struct.pack(">I", _SEEN_REPLY | _ASSURED | _CONFIRMED))
    rest += attribute(_TIMEOUT, struct.pack(">I", 600))
    if source:
        rest += _nat(_NAT_SRC, source, 0)
    if destination:
        rest += _nat(_NAT_DST, destination, port)
    if zone:
        rest += attribute(_ZONE, struct.pack(">H", zone))
    if helper:
        rest += attribute(_HELP | NESTED, attribute(1, helper.encode() + b"\0"))
    if protocol == TCP:
        state = attribute(1, bytes([_ESTABLISHED])) + attribute(4, b"\x08\x08") + attribute(5, b"\x08\x08")
        rest += attribute(_PROTOINFO | NESTED, attribute(1 | NESTED, state))
    _ask(_NEW, _REQUEST | _ACK | _CREATE | _EXCL, sent, rest)


def gone(protocol: int, sent: Ends) -> None:
    """Delete that entry."""
    _ask(_DELETE, _REQUEST | _ACK, sent, conntrack._written(protocol, sent))


def expected(protocol: int, master: Ends, sent: Ends) -> None:
    """A connection that the kernel takes for related to ``master``, for ten seconds at most."""
    mask = Ends(b"\xff" * 4, b"\xff" * 4, 0, 0xFFFF)
    rest = _tuple(_EXP_MASTER, protocol, master) + _tuple(_EXP_TUPLE, protocol, sent)
    rest += _tuple(_EXP_MASK, protocol, mask) + attribute(_EXP_TIMEOUT, struct.pack(">I", 10))
    _ask(_NEW, _REQUEST | _ACK | _CREATE, sent, rest, subsystem=_EXPECTATIONS)


def _tuple(kind: int, protocol: int, which: Ends) -> bytes:
    whole = conntrack._written(protocol, which)
    return attribute(kind | NESTED, whole[4:])


def _nat(kind: int, address: str, port: int) -> bytes:
    packed = ipaddress.ip_address(address).packed
    rest = attribute(1 if len(packed) == 4 else 4, packed)
    if port:
        rest += attribute(3 | NESTED, attribute(1, port.to_bytes(2)) + attribute(2, port.to_bytes(2)))
    return attribute(kind | NESTED, rest)


def _ask(what: int, flags: int, sent: Ends, rest: bytes, *, subsystem: int = 1) -> None:
    family = socket.AF_INET if len(sent.source) == 4 else socket.AF_INET6
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 12) as sock:
        sock.send(conntrack._message(what, flags, family, rest, subsystem=subsystem))
        _, number = struct.unpack_from("=4xH10xi", sock.recv(65536))
    if number:
        raise OSError(-number, os.strerror(-number))
