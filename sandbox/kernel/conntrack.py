"""Connections that the kernel remembers of one address, forgotten: by nfnetlink, in the calling thread's namespace.

What is forgotten is neither answered nor translated any more, and its place in the table is free at once, not after the
days that an open TCP connection is kept for. Formats: include/uapi/linux/netfilter/nfnetlink_conntrack.h.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct

from policy import errors
from sandbox.kernel.netlink_wire import attribute, messages

_NETFILTER, _SUBSYSTEM, _GET, _DELETE = 12, 1, 1, 2
_REQUEST, _ACK, _DUMP, _NESTED, _ERROR, _DONE = 0x1, 0x4, 0x300, 0x8000, 2, 3
_TUPLE_ORIG, _TUPLE_IP, _V4_SRC, _V6_SRC = 1, 1, 1, 3
_FILTER, _ORIG_FLAGS, _REPLY_FLAGS, _BY_SOURCE = 25, 1, 2, 1
_SECONDS = 10


def forget(address: str) -> None:
    """Forget every connection that was begun from ``address``.

    Raises:
        errors.KernelError: the kernel does not (the filter needs Linux 5.8).
    """
    at = ipaddress.ip_address(address)
    source = attribute(_V4_SRC if at.version == 4 else _V6_SRC, at.packed)
    flags = attribute(_ORIG_FLAGS, struct.pack("=I", _BY_SOURCE)) + attribute(_REPLY_FLAGS, struct.pack("=I", 0))
    family = socket.AF_INET if at.version == 4 else socket.AF_INET6
    body = struct.pack("=BBH", family, 0, 0)
    body += attribute(_TUPLE_ORIG | _NESTED, attribute(_TUPLE_IP | _NESTED, source))
    body += attribute(_FILTER | _NESTED, flags)
    message = struct.pack("=IHHII", 16 + len(body), _SUBSYSTEM << 8 | _DELETE, _REQUEST | _ACK, 1, 0) + body
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETFILTER) as made:
            made.settimeout(_SECONDS)
            made.send(message)
            kind, number = struct.unpack_from("=4xH10xi", made.recv(65536))
    except OSError as e:
        raise errors.KernelError(f"connections of {address}: {e.strerror or e}") from e
    if kind != _ERROR or number != 0:
        raise errors.KernelError(f"connections of {address}: {os.strerror(-number)}")


class Remembered:
    """How much the kernel remembers in one namespace, and an end to what is over. Made by a thread inside it.

    An entry whose time is up goes when somebody looks for it, or within a minute: until then it has its place in the
    table. A listing looks at all of them.
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
        """Let go of both."""
        os.close(self._count)
        self._socket.close()

    def count(self) -> int:
        """How many entries there are, those included whose time is up."""
        return int(os.pread(self._count, 32, 0))

    def collect(self) -> None:
        """Take away every entry whose time is up, by a listing of which we want nothing.

        Raises:
            errors.KernelError: the kernel does not list them.
        """
        head = struct.pack("=BBH", socket.AF_INET, 0, 0)
        message = struct.pack("=IHHII", 16 + len(head), _SUBSYSTEM << 8 | _GET, _REQUEST | _DUMP, 1, 0) + head
        try:
            self._socket.send(message)
            while not any(kind in (_DONE, _ERROR) for kind, _ in messages(self._socket.recv(1 << 18))):
                pass
        except OSError as e:
            raise errors.KernelError(f"connections cannot be listed: {e.strerror or e}") from e
