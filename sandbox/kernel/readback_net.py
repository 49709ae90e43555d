"""What a network namespace holds, as the kernel dumps it: devices, addresses, routes, rules, neighbours, queues.

Each thing is one line of text, so that two dumps are compared as sets of lines. What changes by itself (counts, ages,
neighbours that were learned) is left out. Everything is of the calling thread's namespace.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from policy import errors
from sandbox.kernel import libc
from sandbox.kernel.netlink_wire import HEADER, attributes, messages

_REQUEST, _DUMP = 0x1, 0x300
_ERROR, _DONE = 2, 3
# linux/rtnetlink.h: GETLINK, GETADDR, GETROUTE, GETNEIGH, GETRULE, GETQDISC
_LINK, _ADDRESS, _ROUTE, _NEIGHBOUR, _RULE, _QUEUE = 18, 22, 26, 30, 34, 38
# ifinfomsg, ifaddrmsg, rtmsg, ndmsg, fib_rule_hdr, tcmsg
_HEAD_BYTES: Final = {_LINK: 16, _ADDRESS: 8, _ROUTE: 12, _NEIGHBOUR: 12, _RULE: 12, _QUEUE: 20}
_NUD_PERMANENT, _TABLE_LOCAL = 0x80, 255
# linux/netfilter/nf_tables.h
_GETGEN: Final = (10 << 8) | 16
_GEN_ID = 1
_NETLINK_NETFILTER = 12
# linux/bpf.h: BPF_TCX_INGRESS, BPF_TCX_EGRESS (from Linux 6.6); programs there need no queue that would be listed.
_PROGRAMS: Final = {"ingress": 46, "egress": 47}
_SECONDS = 10.0
_ROUTE_TYPES: Final = {1: "unicast", 2: "local", 3: "broadcast", 4: "anycast", 5: "multicast", 6: "blackhole"}

Attributes = Mapping[int, bytes]


def lines() -> frozenset[str]:
    """Everything in the namespace, a line each.

    Raises:
        errors.KernelError: the kernel does not say.
    """
    found: set[str] = set()
    with _socket(socket.NETLINK_ROUTE) as sock:
        for number, (kind, say) in enumerate(_TABLE.items(), 1):
            for body in _dump(sock, kind, number):
                found.update(say(body))
    return frozenset(found)


def generation() -> int:
    """The number of the namespace's nftables transaction: what it lists has not changed while this has not.

    Raises:
        errors.KernelError: the kernel does not say.
    """
    with _socket(_NETLINK_NETFILTER) as sock:
        try:
            sock.send(HEADER.pack(HEADER.size + 4, _GETGEN, _REQUEST, 1, 0) + bytes(4))
            for _, body in messages(sock.recv(1 << 16)):
                value = attributes(body[4:]).get(_GEN_ID)
                if value is not None:
                    return int(struct.unpack(">I", value)[0])
        except OSError as e:
            raise errors.KernelError(f"nfnetlink: {e.strerror or e}") from e
    raise errors.KernelError("nfnetlink: no number of the rules")


def _socket(protocol: int) -> socket.socket:
    try:
        sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
        sock.settimeout(_SECONDS)
        sock.bind((0, 0))
    except OSError as e:
        raise errors.KernelError(f"netlink: {e.strerror}") from e
    return sock


def _dump(sock: socket.socket, kind: int, number: int) -> Iterator[bytes]:
    try:
        # The head of its kind with nothing asked for, to the byte: the kernel logs what is left over.
        size = _HEAD_BYTES[kind]
        sock.send(HEADER.pack(HEADER.size + size, kind, _REQUEST | _DUMP, number, 0) + bytes(size))
        while True:
            for what, body in messages(sock.recv(1 << 18)):
                if what == _DONE:
                    return
                if what == _ERROR:
                    number = -struct.unpack_from("=i", body)[0]
                    raise errors.KernelError(f"rtnetlink: dump {kind} fails with errno {number}")
                yield body
    except OSError as e:
        raise errors.KernelError(f"rtnetlink: {e.strerror or e}") from e


def _link(body: bytes) -> Iterator[str]:
    index, flags = struct.unpack_from("=iI", body, 4)
    found = attributes(body[16:])
    kind = attributes(found.get(18, b"")).get(1, b"").rstrip(b"\0").decode("ascii", "replace")
    name = found.get(3, b"").rstrip(b"\0").decode("ascii", "replace")
    master = f" master {_number(found[10])}" if 10 in found else ""
    # IFLA_XDP: a program that sees frames before everything else, and may send them elsewhere.
    xdp = " xdp" if attributes(found.get(43, b"")).get(2, b"\0") != b"\0" else ""
    mtu = _number(found.get(4, bytes(4)))
    yield f"device {index} {name} {kind} {found.get(1, b'').hex(':')} mtu {mtu} up {flags & 1}{master}{xdp}"
    for place, number in _PROGRAMS.items():
        if count := libc.attached_programs(index, number):
            yield f"program at {place} of device {index}: {count}"


def _address(body: bytes) -> Iterator[str]:
    family, length, _, _, index = struct.unpack_from("=BBBBI", body)
    found = attributes(body[8:])
    yield f"address {_ip(found.get(2) or found.get(1), family)}/{length} at device {index}"


def _route(body: bytes) -> Iterator[str]:
    family, length, source, tos, table, _, _, kind, flags = struct.unpack_from("=BBBBBBBBI", body)
    if flags & 0x200:  # RTM_F_CLONED: what the kernel remembers of a way that it took
        return
    found = attributes(body[12:])
    where = _number(found[15]) if 15 in found else table
    via = f" via {_ip(found[5], family)}" if 5 in found else ""
    device = f" by device {_number(found[4])}" if 4 in found else ""
    # Several ways at once, a way by another family, an encapsulation, a source, a type of service: as they are.
    odd = "".join(f" {key}={found[key].hex()}" for key in (2, 9, 18, 22) if key in found)
    odd += f" from/{source} tos {tos}" if source or tos else ""
    to = f"{_ip(found.get(1), family)}/{length}"
    if (_ROUTE_TYPES.get(kind), to, where) == ("multicast", "ff00::/8", _TABLE_LOCAL):
        return  # the kernel makes one for each device when its other end is up, which is later than we look
    yield f"route {_ROUTE_TYPES.get(kind, str(kind))} {to} in table {where}{via}{device}{odd}"


def _neighbour(body: bytes) -> Iterator[str]:
    family, _, _, index, state, _, _ = struct.unpack_from("=BBHiHBB", body)
    found = attributes(body[12:])
    if state & _NUD_PERMANENT:
        yield f"neighbour {_ip(found.get(1), family)} {found.get(2, b'').hex(':')} at device {index}"


def _rule(body: bytes) -> Iterator[str]:
    family, *head = struct.unpack_from("=BBBBBBBBI", body)
    rest = ",".join(f"{key}={value.hex()}" for key, value in sorted(attributes(body[12:]).items()))
    yield f"rule {family} {head} {rest}"


def _queue(body: bytes) -> Iterator[str]:
    _, index, _, parent, _ = struct.unpack_from("=BxxxiIII", body)
    name = attributes(body[20:]).get(1, b"").rstrip(b"\0").decode("ascii", "replace")
    yield f"queue {name} at device {index} below {parent:x}"


_TABLE: Final[Mapping[int, Callable[[bytes], Iterator[str]]]] = {
    _LINK: _link,
    _ADDRESS: _address,
    _ROUTE: _route,
    _NEIGHBOUR: _neighbour,
    _RULE: _rule,
    _QUEUE: _queue,
}


def _number(value: bytes) -> int:
    return int(struct.unpack("=I", value[:4])[0])


def _ip(value: bytes | None, family: int) -> str:
    if value is None:
        value = bytes(4 if family == socket.AF_INET else 16)
    return str(ipaddress.ip_address(value)) if len(value) in (4, 16) else value.hex()
