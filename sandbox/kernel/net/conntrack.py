"""Forget the connections that the kernel tracks of one address, and list tracked connections: by nfnetlink, in the
calling thread's namespace.

What is forgotten is neither answered nor translated any more, and its place in the table is free at once, not after the
days that an open TCP connection is kept for. Formats: include/uapi/linux/netfilter/nfnetlink_conntrack.h.
"""

from __future__ import annotations

import errno
import functools
import ipaddress
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from policy import errors
from policy.connections import PROTOCOLS, Connection, Ends
from sandbox.kernel.net.netlink_wire import attribute, attributes, messages

_NETFILTER, _SUBSYSTEM, _GET, _DELETE = 12, 1, 1, 2
_REQUEST, _ACK, _DUMP, _NESTED, _ERROR, _DONE = 0x1, 0x4, 0x300, 0x8000, 2, 3
_TUPLE_ORIG, _TUPLE_IP, _V4_SRC, _V6_SRC = 1, 1, 1, 3
_ID, _ZONE = 12, 18
# Packets and bytes of each direction, where the namespace counts them (nf_conntrack_acct).
_COUNTERS, _BYTES = (9, 10), 2
# Attributes that no connection of ours has: a helper, a connection that it belongs to, a zone.
_ODD = {5: "helper", 14: "master", _ZONE: "zone"}
_TUPLE_REPLY, _TUPLE_PROTO = 2, 2
_TUPLE_ZONE, _EXPECTATIONS = 3, 2
_FILTER, _ORIG_FLAGS, _REPLY_FLAGS, _BY_SOURCE = 25, 1, 2, 1
_COUNT = Path("/proc/sys/net/netfilter/nf_conntrack_count")
_LISTED = Path("/proc/thread-self/net/nf_conntrack")
_SECONDS = 10
# An agent that is being ended may begin more meanwhile, for as long as it takes to be ended.
_ROUNDS = 32
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def forget(address: str) -> None:
    """Forget every connection that was begun from ``address``.

    It sends one message if the kernel can filter deletions, else one for each connection. An older kernel (Linux 6.1
    still) takes the source for a whole connection, and returns ENOENT.

    Raises:
        errors.KernelError: Raised when the kernel refuses.
    """
    at = ipaddress.ip_address(address)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETFILTER) as made:
            made.settimeout(_SECONDS)
            if _deleted(made, at, _by_source(at)):
                return
            for _ in range(_ROUNDS):
                left = list(_begun_from(made, at))
                for one in left:
                    _deleted(made, at, one)
                if not left:
                    return
    except OSError as e:
        raise errors.KernelError(f"connections of {address}: {e.strerror or e}") from e
    raise errors.KernelError(f"connections of {address}: there are new ones again and again")


def count() -> int:
    """Count the entries of the calling thread's namespace, with expired ones."""
    return int(_COUNT.read_text())


def connections() -> list[Connection]:
    """Return every entry of the table.

    The kernel's text lists 262,144 places in 0.2 ms; netlink, which locks each of them, takes 10 to 30 ms. So the text
    tells which entries exist, and netlink their content. The text continues by position: it may miss an entry while
    others are removed. Then, and if a kernel has no such text, netlink lists all.

    Raises:
        errors.KernelError: Raised when the kernel does not list them.
    """
    before = count()
    try:
        lines = _LISTED.read_text().splitlines()
    except FileNotFoundError:
        return dumped()
    if len(lines) < min(before, count()):
        return dumped()
    parsed = [_line(line) for line in lines]
    plain = [(one.protocol, one.sent) for one in parsed if not one.odd and one.protocol in PROTOCOLS]
    odd = [one for one in parsed if one.odd or one.protocol not in PROTOCOLS]
    return [*odd, *looked_up(plain)]


def dumped() -> list[Connection]:
    """As ``connections``, by netlink alone."""
    return [_connection(body) for body in _dumped(_SUBSYSTEM, 0, b"")]


def _line(line: str) -> Connection:
    """One line of nf_conntrack: a family, a protocol, a time, then both directions word by word."""
    fields = line.split()
    held: dict[str, list[str]] = {}
    for field in fields:
        name, equals, value = field.partition("=")
        if equals:
            held.setdefault(name, []).append(value)
    zone = next((name for name, values in held.items() if name.startswith("zone") and values != ["0"]), "")
    ports = held.get("sport", ["0", "0"]), held.get("dport", ["0", "0"])
    try:
        sent, answered = (
            Ends(_packed(held["src"][at]), _packed(held["dst"][at]), int(ports[0][at]), int(ports[1][at]))
            for at in (0, 1)
        )
        return Connection(int(fields[3]), sent, answered, zone)
    except (ValueError, LookupError) as e:
        raise errors.KernelError(f"connections cannot be listed: {line[:80]!r} is no entry") from e


@functools.lru_cache(maxsize=4096)
def _packed(address: str) -> bytes:
    return ipaddress.ip_address(address).packed


def looked_up(begun: Iterable[tuple[int, Ends]]) -> list[Connection]:
    """The entries of the connections that began so: each by protocol and first packet. Those without one are left out.

    Raises:
        errors.KernelError: the kernel does not say.
    """
    found = []
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETFILTER) as made:
            made.settimeout(_SECONDS)
            for protocol, ends in begun:
                family = socket.AF_INET if len(ends.source) == 4 else socket.AF_INET6
                made.send(_message(_GET, _REQUEST, family, _written(protocol, ends)))
                for kind, body in messages(made.recv(1 << 16)):
                    if kind != _ERROR:
                        found.append(_connection(body[4:]))
                    elif (number := -struct.unpack_from("=i", body)[0]) not in (0, errno.ENOENT):
                        raise OSError(number, os.strerror(number))
    except OSError as e:
        raise errors.KernelError(f"connections cannot be looked up: {e.strerror or e}") from e
    return found


def _written(protocol: int, ends: Ends) -> bytes:
    """The attribute that names a connection by its first packet."""
    at = _V4_SRC if len(ends.source) == 4 else _V6_SRC
    ip = attribute(at, ends.source) + attribute(at + 1, ends.destination)
    ports = (attribute(key, port.to_bytes(2)) for key, port in ((2, ends.source_port), (3, ends.destination_port)))
    above = attribute(1, bytes([protocol])) + b"".join(ports)
    both = attribute(_TUPLE_IP | _NESTED, ip) + attribute(_TUPLE_PROTO | _NESTED, above)
    return attribute(_TUPLE_ORIG | _NESTED, both)


def expectations() -> int:
    """How many connections the kernel expects: it lets each begin as related to another.

    Raises:
        errors.KernelError: the kernel does not list them.
    """
    return sum(1 for _ in _dumped(_EXPECTATIONS, 0, b""))


def _dumped(subsystem: int, family: int, rest: bytes) -> Iterator[bytes]:
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETFILTER) as made:
            made.settimeout(_SECONDS)
            made.send(_message(_GET, _REQUEST | _DUMP, family, rest, subsystem=subsystem))
            while True:
                for kind, body in messages(made.recv(1 << 18)):
                    if kind == _ERROR and (number := -struct.unpack_from("=i", body)[0]):
                        raise OSError(number, os.strerror(number))
                    if kind in (_DONE, _ERROR):
                        return
                    yield body[4:]
    except OSError as e:
        raise errors.KernelError(f"connections cannot be listed: {e.strerror or e}") from e


def _connection(body: bytes) -> Connection:
    found = attributes(body)
    sent, answered = (_tuple(found.get(one, b"")) for one in (_TUPLE_ORIG, _TUPLE_REPLY))
    odd = [name for key, name in _ODD.items() if key in found]
    odd += ["zone of one direction"] if sent.zoned or answered.zoned else []
    return Connection(sent.protocol, sent.ends, answered.ends, " ".join(odd))


class Counted(NamedTuple):
    """An entry with the kernel's number of it, and the bytes of both directions, with headers."""

    id: int
    connection: Connection
    bytes: int


class _Tuple(NamedTuple):
    protocol: int
    ends: Ends
    zoned: bool


@functools.lru_cache(maxsize=4096)
def _tuple(raw: bytes) -> _Tuple:
    """One direction; ports are 0 where the protocol has none."""
    outer = attributes(raw)
    ip, above = attributes(outer.get(_TUPLE_IP, b"")), attributes(outer.get(_TUPLE_PROTO, b""))
    source, destination = (ip.get(v4, ip.get(v4 + 2, b"")) for v4 in (1, 2))
    first, last = (int.from_bytes(above.get(one, b"")) for one in (2, 3))
    ends = Ends(source, destination, first, last)
    return _Tuple(int.from_bytes(above.get(1, b"")), ends, _TUPLE_ZONE in outer)


def _by_source(at: _Address) -> bytes:
    """All that began there, as a filter."""
    source = attribute(_V4_SRC if at.version == 4 else _V6_SRC, at.packed)
    flags = attribute(_ORIG_FLAGS, struct.pack("=I", _BY_SOURCE)) + attribute(_REPLY_FLAGS, struct.pack("=I", 0))
    body = attribute(_TUPLE_ORIG | _NESTED, attribute(_TUPLE_IP | _NESTED, source))
    return body + attribute(_FILTER | _NESTED, flags)


def _begun_from(made: socket.socket, at: _Address) -> Iterator[bytes]:
    """Yield the key of each connection from this source address: both ends, and the kernel's id and zone."""
    key = _V4_SRC if at.version == 4 else _V6_SRC
    # Linux 5.8 and newer leave the others out; older ones list them all.
    made.send(_message(_GET, _REQUEST | _DUMP, _family(at), _by_source(at)))
    while True:
        for kind, body in messages(made.recv(1 << 18)):
            if kind == _ERROR and (number := -struct.unpack_from("=i", body)[0]):
                raise OSError(number, os.strerror(number))
            if kind in (_DONE, _ERROR):
                return
            found = attributes(body[4:])
            tuple_ = found.get(_TUPLE_ORIG, b"")
            if attributes(attributes(tuple_).get(_TUPLE_IP, b"")).get(key) == at.packed:
                rest = b"".join(attribute(one, found[one]) for one in (_ID, _ZONE) if one in found)
                yield attribute(_TUPLE_ORIG | _NESTED, tuple_) + rest


def _deleted(made: socket.socket, at: _Address, which: bytes) -> bool:
    """Whether the kernel deleted it. False if it was gone already, or if the kernel does not know the filter."""
    made.send(_message(_DELETE, _REQUEST | _ACK, _family(at), which))
    _, number = struct.unpack_from("=4xH10xi", made.recv(65536))
    if -number not in (0, errno.ENOENT, errno.EINVAL, errno.EOPNOTSUPP):
        raise OSError(-number, os.strerror(-number))
    return bool(number == 0)


def _family(at: _Address) -> int:
    return socket.AF_INET if at.version == 4 else socket.AF_INET6


def _message(what: int, flags: int, family: int, rest: bytes = b"", *, subsystem: int = _SUBSYSTEM) -> bytes:
    body = struct.pack("=BBH", family, 0, 0) + rest
    return struct.pack("=IHHII", 16 + len(body), subsystem << 8 | what, flags, 1, 0) + body


class Remembered:
    """Counts the connections in one namespace's table, and removes expired ones. Made by a thread inside it.

    The kernel removes an expired entry when it is looked up, or within a minute. Until then the entry takes a place in
    the table. A listing looks up all of them.
    """

    def __init__(self) -> None:
        self._count = os.open("/proc/sys/net/netfilter/nf_conntrack_count", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETFILTER)
        except OSError:
            os.close(self._count)
            raise
        self._socket.settimeout(_SECONDS)

    def close(self) -> None:
        """Close both descriptors."""
        os.close(self._count)
        self._socket.close()

    def count(self) -> int:
        """Count the entries, with expired ones."""
        return int(os.pread(self._count, 32, 0))

    def counted(self) -> list[Counted]:
        """Return every entry with its counts, by a listing that also removes expired ones.

        Raises:
            errors.KernelError: Raised when the kernel does not list them.
        """
        found: list[Counted] = []
        try:
            self._socket.send(_message(_GET, _REQUEST | _DUMP, socket.AF_UNSPEC))
            while True:
                for kind, body in messages(self._socket.recv(1 << 18)):
                    if kind in (_DONE, _ERROR):
                        return found
                    found.append(_counted(body[4:]))
        except OSError as e:
            raise errors.KernelError(f"connections cannot be listed: {e.strerror or e}") from e


def _counted(body: bytes) -> Counted:
    found = attributes(body)
    counters = (attributes(found[one]) for one in _COUNTERS if one in found)
    carried = sum(int.from_bytes(one.get(_BYTES, b"")) for one in counters)
    return Counted(int.from_bytes(found.get(_ID, b"")), _connection(body), carried)
