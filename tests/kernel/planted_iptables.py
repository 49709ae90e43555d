"""Rules of the older iptables that root's hand loads, without its program: IPT_SO_SET_REPLACE (linux/ip_tables.h)."""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator

_SET_REPLACE = 64
_NAT_HOOKS = (0, 1, 3, 4)  # NF_INET_PRE_ROUTING, LOCAL_IN, LOCAL_OUT, POST_ROUTING
_ACCEPT, _RETURN = -2, -5
_LIBC = ctypes.CDLL(None, use_errno=True)


def rule(target: bytes, *, destination: str = "", source: str = "", device: str = "", match: bytes = b"") -> bytes:
    """struct ipt_entry with its matches and its target."""
    sides = [ipaddress.ip_network(one or "0.0.0.0/0") for one in (source, destination)]
    head = b"".join(one.network_address.packed for one in sides) + b"".join(one.netmask.packed for one in sides)
    name = device.rstrip("*").encode()
    mask = b"" if not device else b"\xff" * (len(name) + (not device.endswith("*")))
    head += name.ljust(16, b"\0") + bytes(16) + mask.ljust(16, b"\0") + bytes(16) + bytes(4)
    offset = 112 + len(match)
    return head + struct.pack("=IHHI16x", 0, offset, offset + len(target), 0) + match + target


def verdict(number: int) -> bytes:
    """A standard target: a verdict, or the place of a chain's first rule."""
    return struct.pack("=H29sBi4x", 40, b"", 0, number)


def dnat(to: str) -> bytes:
    """The target DNAT, revision 0, with one range of one address."""
    packed = int.from_bytes(ipaddress.ip_address(to).packed, "little")
    return struct.pack("=H29sBIIIIHH4x", 56, b"DNAT", 0, 1, 1, packed, packed, 0, 0)


def error(name: str) -> bytes:
    """The target that begins a chain of a user, and that ends a table."""
    return struct.pack("=H29sB30s2x", 64, b"ERROR", 0, name.encode())


def load_nat(*first: bytes, chains: tuple[bytes, ...] = ()) -> None:
    """Load the table nat of the calling thread's namespace: these rules in PREROUTING, and all policies accept.

    ``chains`` are the entries of user chains. ``load_nat`` moves nothing: a jump must hold its place already.
    """
    entries, hooks, underflows = b"".join(first), [0] * 5, [0] * 5
    for hook in _NAT_HOOKS:
        hooks[hook] = 0 if hook == 0 else len(entries)
        underflows[hook] = len(entries)
        entries += rule(verdict(_ACCEPT))
    entries += b"".join(chains) + rule(error("ERROR"))
    count, at = 0, 0
    while at < len(entries):
        count, at = count + 1, at + struct.unpack_from("=H", entries, at + 90)[0]
    valid = sum(1 << hook for hook in _NAT_HOOKS)
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as sock:
        old = _count(sock)
        counters = ctypes.create_string_buffer(16 * max(old, 1))
        head = struct.pack("=32sIII5I5IIQ", b"nat", valid, count, len(entries), *hooks, *underflows, old,
                           ctypes.addressof(counters))  # fmt: skip
        whole = ctypes.create_string_buffer(head + entries, len(head) + len(entries))
        if _LIBC.setsockopt(sock.fileno(), socket.IPPROTO_IP, _SET_REPLACE, whole, len(head) + len(entries)):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _count(sock: socket.socket) -> int:
    """How many rules the table has now; who asks makes it."""
    info, size = ctypes.create_string_buffer(b"nat", 84), ctypes.c_uint32(84)
    if _LIBC.getsockopt(sock.fileno(), socket.IPPROTO_IP, 64, info, ctypes.byref(size)):
        raise OSError(ctypes.get_errno(), "the kernel has no such table")
    return int(struct.unpack_from("=I", info.raw, 76)[0])


@contextlib.contextmanager
def nat(*first: bytes) -> Iterator[None]:
    """These rules, and none afterwards."""
    load_nat(*first)
    try:
        yield
    finally:
        load_nat()
