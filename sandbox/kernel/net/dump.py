"""Dump the content of the calling thread's network namespace, one line of text for each object.

It covers devices with their settings, addresses, routes and next hops, rules, neighbours, queues, transformations
(xfrm), and the tables of the older iptables. Two dumps are compared as sets of lines. Values that change by themselves
(counts, ages, learned neighbours) are left out.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import ipaddress
import os
import re
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from policy import errors
from policy.decompile.network.nft import BASE_V6
from policy.grants.sets.spans import Spans
from sandbox.kernel import libc
from sandbox.kernel.net.netlink_wire import HEADER, attribute, attributes, messages

_REQUEST, _DUMP = 0x1, 0x300
_ERROR, _DONE = 2, 3
# linux/rtnetlink.h: GETLINK, GETADDR, GETROUTE, GETNEIGH, GETRULE, GETQDISC, GETNETCONF, GETNEXTHOP
_LINK, _ADDRESS, _ROUTE, _NEIGHBOUR, _RULE, _QUEUE, _SETTINGS, _NEXT_HOP = 18, 22, 26, 30, 34, 38, 82, 106
# linux/xfrm.h: XFRM_MSG_GETSA, XFRM_MSG_GETPOLICY
_NETLINK_XFRM: Final = 6
_XFRM: Final = {18: "association", 21: "policy"}
# A request for the proxied neighbours: NTF_PROXY in ndm_flags.
_PROXIES: Final = struct.pack("=BBHiHBB", 0, 0, 0, 0, 0, 8, 0)
_NUD_PERMANENT, _TABLE_LOCAL = 0x80, 255
# SOL_NETLINK, NETLINK_GET_STRICT_CHK: a request about one device gets answers about this device only.
_STRICT: Final = (270, 12)
_NDA_IFINDEX, _RTA_OIF = 8, 4
# net/ip_tables.h and its like: tables that no listing of nftables has.
_OLD_TABLES: Final = ("ip_tables_names", "ip6_tables_names", "arp_tables_names")
# linux/netfilter/nf_tables.h
_GETGEN: Final = (10 << 8) | 16
_GEN_ID = 1
_NETNS_COOKIE: Final = 71  # SO_NETNS_COOKIE of asm-generic/socket.h, from Linux 5.14
_NETLINK_NETFILTER = 12
# linux/bpf.h: BPF_TCX_INGRESS, BPF_TCX_EGRESS (from Linux 6.6); programs there need no queue that would be listed.
_PROGRAMS: Final = {"ingress": 46, "egress": 47}
# BPF_FLOW_DISSECTOR, BPF_SK_LOOKUP: which socket takes a packet, past the gates that listen for it.
_SPACE_PROGRAMS: Final = {"flow_dissector": 17, "sk_lookup": 36}
_SECONDS = 10.0
_ROUTE_TYPES: Final = {1: "unicast", 2: "local", 3: "broadcast", 4: "anycast", 5: "multicast", 6: "blackhole"}


def lines() -> frozenset[str]:
    """Return all objects in the namespace, a line each.

    Raises:
        errors.KernelError: Raised when a dump fails.
    """
    found = {*_transformations(), *_old_tables(), *_space_programs()}
    with _socket(socket.NETLINK_ROUTE) as sock:
        for number, (kind, head, say) in enumerate(_TABLE, 1):
            for body in _dump(sock, kind, number, head):
                found.update(say(body))
    return frozenset(found)


def device_lines(index: int) -> frozenset[str]:
    """Return the objects of one device, a line each; empty if the device is gone.

    Its forwarding flag is left out: it follows a setting of the whole namespace, which other programs control.

    Raises:
        errors.KernelError: Raised when a dump fails.
    """
    found: set[str] = set()
    by_device, by_way = (attribute(key, struct.pack("=i", index)) for key in (_NDA_IFINDEX, _RTA_OIF))
    asked: tuple[tuple[int, bytes, Callable[[bytes], Iterator[str]]], ...] = (
        (_ADDRESS, struct.pack("=BBBBi", 0, 0, 0, 0, index), _address),
        (_NEIGHBOUR, bytes(12) + by_device, _neighbour),
        (_NEIGHBOUR, _PROXIES + by_device, _proxy),
        *((_ROUTE, bytes([family]) + bytes(11) + by_way, _route) for family in _IP),
        (_QUEUE, bytes(20), _queue),
    )
    mine = re.compile(rf"\bdevice {index}\b")
    with _socket(socket.NETLINK_ROUTE) as sock:
        sock.setsockopt(*_STRICT, 1)
        for body in _one(sock, _LINK, struct.pack("=BxHiII", 0, 0, index, 0, 0)):
            found.update(_link(body, forwards=False))
        if not found:
            return frozenset()
        for number, (kind, head, say) in enumerate(asked, 2):
            for body in _dump(sock, kind, number, head):
                # The kernel cannot filter every kind by device.
                found.update(line for line in say(body) if mine.search(line))
    return frozenset(found)


def routing_rules(device: str, own: Spans) -> frozenset[str]:
    """The namespace's routing rules that name a device, or an address of ``own`` (on policy.grants.sets.addresses'
    line).

    Raises:
        errors.KernelError: the kernel does not say.
    """
    found: set[str] = set()
    with _socket(socket.NETLINK_ROUTE) as sock:
        for body in _dump(sock, _RULE, 1, bytes(12)):
            if _rule_names(body, device, own):
                found.update(_rule(body))
    return frozenset(found)


def _rule_names(body: bytes, device: str, own: Spans) -> bool:
    family, lengths, found = body[0], body[1:3], attributes(body[12:])
    # FRA_IIFNAME, FRA_OIFNAME; FRA_DST and FRA_SRC with the lengths of their prefixes (linux/fib_rules.h).
    if device.encode() in (found.get(key, b"").rstrip(b"\0") for key in (3, 17)):
        return True
    held = [(found[key], length) for key, length in ((1, lengths[0]), (2, lengths[1])) if key in found and length]
    nets = [ipaddress.ip_network((address, length), strict=False) for address, length in held]
    base = BASE_V6 if family == socket.AF_INET6 else 0
    return any(
        first <= int(one.broadcast_address) + base and int(one.network_address) + base <= last
        for one in nets
        for first, last in own
    )


def index_of(device: str) -> int:
    """Return the index of the namespace's device of this name.

    Raises:
        errors.KernelError: Raised when there is none.
    """
    try:
        return socket.if_nametoindex(device)
    except OSError as e:
        raise errors.KernelError(f"device `{device}`: {e.strerror}") from e


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


def cookie() -> str:
    """A name of the calling thread's namespace that no other has had since the machine started, and of that start.

    Raises:
        errors.KernelError: the kernel does not say.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
            number = struct.unpack("=Q", sock.getsockopt(socket.SOL_SOCKET, _NETNS_COOKIE, 8))[0]
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {number}"
    except OSError as e:
        raise errors.KernelError(f"network namespace: {e.strerror}") from e


def _socket(protocol: int) -> socket.socket:
    try:
        sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
        sock.settimeout(_SECONDS)
        sock.bind((0, 0))
    except OSError as e:
        raise errors.KernelError(f"netlink: {e.strerror}") from e
    return sock


def _one(sock: socket.socket, kind: int, head: bytes) -> Iterator[bytes]:
    """Yield the one requested object, if it exists."""
    try:
        sock.send(HEADER.pack(HEADER.size + len(head), kind, _REQUEST, 1, 0) + head)
        for what, body in messages(sock.recv(1 << 18)):
            if what == _ERROR and -struct.unpack_from("=i", body)[0] not in (0, errno.ENODEV):
                raise errors.KernelError(f"rtnetlink: {kind} fails with errno {-struct.unpack_from('=i', body)[0]}")
            if what not in (_ERROR, _DONE):
                yield body
    except OSError as e:
        raise errors.KernelError(f"rtnetlink: {e.strerror or e}") from e


def _dump(sock: socket.socket, kind: int, number: int, head: bytes) -> Iterator[bytes]:
    try:
        # The head of its kind, to the byte: the kernel logs what is left over.
        sock.send(HEADER.pack(HEADER.size + len(head), kind, _REQUEST | _DUMP, number, 0) + head)
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


def _transformations() -> Iterator[str]:
    """Yield the kernel's IPsec associations and policies. Empty if the kernel has no IPsec."""
    try:
        sock = _socket(_NETLINK_XFRM)
    except errors.KernelError:
        return
    with sock:
        for number, (kind, name) in enumerate(_XFRM.items(), 1):
            for body in _dump(sock, kind, number, b""):
                yield f"transformation {name} {hashlib.sha256(body[:64]).hexdigest()[:16]}"


def _old_tables() -> Iterator[str]:
    for name in _OLD_TABLES:
        with contextlib.suppress(FileNotFoundError):
            for table in Path("/proc/thread-self/net", name).read_text().split():
                yield f"old table {table} of {name.partition('_')[0]}"


def _space_programs() -> Iterator[str]:
    fd = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        for place, number in _SPACE_PROGRAMS.items():
            if count := libc.attached_programs(fd, number):
                yield f"program at {place} of the namespace: {count}"
    finally:
        os.close(fd)


def raw_sockets() -> frozenset[str]:
    """The namespace's sockets below TCP and UDP, by kind and owner: each may read or write packets past all rules."""
    found: set[str] = set()
    for kind in ("packet", "raw", "raw6"):
        with contextlib.suppress(FileNotFoundError):
            lines = Path("/proc/thread-self/net", kind).read_text().splitlines()[1:]
            found.update({f"socket {kind}: {len(lines)}"} if lines else ())
    return frozenset(found)


def _next_hop(body: bytes) -> Iterator[str]:
    # Its number, and all its attributes.
    rest = ",".join(f"{key}={value.hex()}" for key, value in sorted(attributes(body[8:]).items()))
    yield f"next hop {body[0]} {rest}"


def _proxy(body: bytes) -> Iterator[str]:
    family, _, _, index, _, flags, _ = struct.unpack_from("=BBHiHBB", body)
    if flags & 8:
        yield f"neighbour {_ip(attributes(body[12:]).get(1), family)} answered for at device {index}"


def _setting(body: bytes) -> Iterator[str]:
    # What one device, `all` (-1) or `default` (-2) may forward and answer for (linux/netconf.h).
    found = attributes(body[4:])
    index = struct.unpack("=i", found.get(1, bytes(4)))[0]
    rest = ",".join(f"{key}={value.hex()}" for key, value in sorted(found.items()) if key != 1)
    yield f"forwarding {body[0]} of {index}: {rest}"


def _settings(index: int, found: bytes, *, forwards: bool) -> Iterator[str]:
    """Return the values below /proc/sys/net/*/conf/DEVICE in the kernel's order. The first is forwarding."""
    families = attributes(found)
    for family, key in ((socket.AF_INET, 1), (socket.AF_INET6, 2)):
        held = attributes(families.get(family, b"")).get(key, b"")
        values = list(struct.unpack(f"={len(held) // 4}i", held[: len(held) // 4 * 4]))
        if values and not forwards:
            values[0] = 0
        yield f"settings of device {index} {family}: {','.join(map(str, values))}"


def _link(body: bytes, *, forwards: bool = True) -> Iterator[str]:
    index, flags = struct.unpack_from("=iI", body, 4)
    found = attributes(body[16:])
    kind = attributes(found.get(18, b"")).get(1, b"").rstrip(b"\0").decode("ascii", "replace")
    name = found.get(3, b"").rstrip(b"\0").decode("ascii", "replace")
    master = f" master {_number(found[10])}" if 10 in found else ""
    # IFLA_XDP: a program that gets frames first, and may send them elsewhere.
    xdp = " xdp" if attributes(found.get(43, b"")).get(2, b"\0") != b"\0" else ""
    mtu = _number(found.get(4, bytes(4)))
    yield f"device {index} {name} {kind} {found.get(1, b'').hex(':')} mtu {mtu} up {flags & 1}{master}{xdp}"
    yield from _settings(index, found.get(26, b""), forwards=forwards)
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


_IP: Final = (socket.AF_INET, socket.AF_INET6)
# Each with a head that requests all: ifinfomsg, ifaddrmsg, rtmsg, ndmsg, fib_rule_hdr, tcmsg, netconfmsg, nhmsg.
_TABLE: Final[tuple[tuple[int, bytes, Callable[[bytes], Iterator[str]]], ...]] = (
    (_LINK, bytes(16), _link),
    (_ADDRESS, bytes(8), _address),
    (_ROUTE, bytes(12), _route),
    (_NEIGHBOUR, bytes(12), _neighbour),
    (_NEIGHBOUR, _PROXIES, _proxy),
    (_RULE, bytes(12), _rule),
    (_QUEUE, bytes(20), _queue),
    *((_SETTINGS, bytes([family, 0, 0, 0]), _setting) for family in _IP),
    (_NEXT_HOP, bytes(8), _next_hop),
)


def _number(value: bytes) -> int:
    return int(struct.unpack("=I", value[:4])[0])


def _ip(value: bytes | None, family: int) -> str:
    if value is None:
        value = bytes(4 if family == socket.AF_INET else 16)
    return str(ipaddress.ip_address(value)) if len(value) in (4, 16) else value.hex()
