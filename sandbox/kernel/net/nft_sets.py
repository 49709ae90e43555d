"""Add and delete elements of named nftables sets in process, acknowledged by the kernel.

One netlink batch is one transaction: when the call returns it is in effect whole, or not at all. It takes about 0.3 ms,
a run of nft(8) 5 ms (sandbox-facts). So an address can be in its set before the answer that names it leaves. The
messages are those of linux/netfilter/nf_tables.h, for tables of family inet only.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from sandbox.kernel.net.netlink_wire import ATTRIBUTE, HEADER, attribute

NETLINK_NETFILTER = 12
_SOL_NETLINK, _NETLINK_CAP_ACK = 270, 10
_NLMSG_ERROR = 2
_REQUEST, _ACK, _CREATE = 0x1, 0x4, 0x400
_NESTED = 0x8000
_SUBSYS = 10  # NFNL_SUBSYS_NFTABLES
_BATCH_BEGIN, _BATCH_END = 16, 17
_NEWSETELEM, _DELSETELEM = _SUBSYS << 8 | 12, _SUBSYS << 8 | 14
_INET = 1  # NFPROTO_INET
_LIST_TABLE, _LIST_SET, _LIST_ELEMENTS, _LIST_ELEM = 1, 2, 3, 1
_KEY, _TIMEOUT, _VALUE = 1, 4, 1

_GENERIC = struct.Struct("=BBH")
_RECEIVE = 65536


class Element(Struct, frozen=True):
    """An address, packed, with the seconds that it stays; None for as long as it is not deleted."""

    address: bytes
    seconds: float | None = None


Change = Mapping[str, Sequence[Element]]


def open_socket() -> socket.socket:
    """Open a netlink socket to the nftables of the caller's network namespace. The socket stays in that namespace.

    Raises:
        OSError: Raised when the kernel has no nfnetlink.
    """
    made = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_NETFILTER)
    try:
        made.bind((0, 0))
        made.setsockopt(_SOL_NETLINK, _NETLINK_CAP_ACK, 1)
    except BaseException:
        made.close()
        raise
    return made


class Elements:
    """Changes the sets of one table through a socket from ``open_socket``, which stays the caller's."""

    def __init__(self, table: str, netlink: socket.socket) -> None:
        self._table, self._netlink = table, netlink
        self._sequence = 0

    def add(self, change: Change, *, instead: Change | None = None) -> None:
        """Add elements to sets, by the sets' names; those of ``instead`` are deleted in the same transaction.

        An element that is there already keeps its old time on kernels before 6.12: delete it in ``instead``.

        Raises:
            OSError: Raised when nothing was changed. ENFILE: a set is full. ENOENT: a set, or an element of
                ``instead``, does not exist. EPERM: the caller may not change the namespace.
        """
        self._batch([*self._messages(_DELSETELEM, instead or {}), *self._messages(_NEWSETELEM, change)])

    def delete(self, change: Change) -> None:
        """Delete elements.

        Raises:
            OSError: Raised when nothing was changed. ENOENT: one of them does not exist.
        """
        self._batch(list(self._messages(_DELSETELEM, change)))

    def _messages(self, kind: int, change: Change) -> Iterable[tuple[int, bytes]]:
        for name, elements in change.items():
            body = b"".join(_attribute(_LIST_ELEM | _NESTED, _element(one)) for one in elements)
            yield kind, b"".join((
                _attribute(_LIST_TABLE, self._table.encode() + b"\0"),
                _attribute(_LIST_SET, name.encode() + b"\0"),
                _attribute(_LIST_ELEMENTS | _NESTED, body),
            ))  # fmt: skip

    def _batch(self, messages: Sequence[tuple[int, bytes]]) -> None:
        if not messages:
            return
        parts = [self._message(_BATCH_BEGIN, _REQUEST, b"", batch=True)]
        for index, (kind, body) in enumerate(messages):
            # Request one acknowledgement, of the last message: the kernel reports errors of the others anyway.
            acknowledged = _ACK if index == len(messages) - 1 else 0
            create = _CREATE if kind == _NEWSETELEM else 0
            parts.append(self._message(kind, _REQUEST | create | acknowledged, body))
        awaited = self._sequence
        parts.append(self._message(_BATCH_END, _REQUEST, b"", batch=True))
        self._netlink.send(b"".join(parts))
        self._acknowledged(awaited)

    def _message(self, kind: int, flags: int, body: bytes, *, batch: bool = False) -> bytes:
        self._sequence = (self._sequence + 1) & 0x7FFFFFFF
        generic = _GENERIC.pack(socket.AF_UNSPEC, 0, socket.htons(_SUBSYS)) if batch else _GENERIC.pack(_INET, 0, 0)
        return HEADER.pack(HEADER.size + len(generic) + len(body), kind, flags, self._sequence, 0) + generic + body

    def _acknowledged(self, awaited: int) -> None:
        # The kernel works a batch off within sendmsg(2): what it has to say is there.
        seen, failed = False, 0
        while True:
            try:
                data = self._netlink.recv(_RECEIVE, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            for sequence, number in _errors(data):
                failed = failed or number
                seen = seen or sequence == awaited
        if failed or not seen:
            number = failed or errno.EPROTO
            raise OSError(number, f"nf_tables: {os.strerror(number)}")


def _element(one: Element) -> bytes:
    key = _attribute(_KEY | _NESTED, _attribute(_VALUE, one.address))
    if one.seconds is None:
        return key
    return key + _attribute(_TIMEOUT, struct.pack("!Q", max(1, round(one.seconds * 1000))))


def _attribute(kind: int, value: bytes) -> bytes:
    if ATTRIBUTE.size + len(value) > 0xFFFF:
        raise OSError(errno.E2BIG, "nf_tables: too many elements for one message")
    return attribute(kind, value)


def _errors(data: bytes) -> Iterable[tuple[int, int]]:
    """(sequence, errno) of each acknowledgement in a datagram."""
    at = 0
    while at + HEADER.size + 4 <= len(data):
        size, kind, _, sequence, _ = HEADER.unpack_from(data, at)
        if kind == _NLMSG_ERROR:
            yield sequence, -struct.unpack_from("=i", data, at + HEADER.size)[0]
        at += max(HEADER.size, size + -size % 4)
