"""Links, addresses, neighbours and routes by rtnetlink(7): requests that say what they are, sent in one go.

Six kinds of message are all that a run needs. They are built here and not by a library, because the one for Python
takes as long to import as a sandbox to start (docs/adr/0024).
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Sequence

from msgspec import Struct

from policy import errors
from sandbox.kernel.net.netlink_wire import HEADER, NESTED, attribute, attributes

# linux/netlink.h
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_REQUEST, _ACK, _EXCL, _CREATE, _DUMP = 0x1, 0x4, 0x200, 0x400, 0x300
# linux/rtnetlink.h
RTM_NEWLINK, RTM_DELLINK, RTM_GETLINK = 16, 17, 18
RTM_NEWADDR, RTM_NEWROUTE, RTM_NEWNEIGH = 20, 24, 28
_RT_TABLE_MAIN, _RTPROT_STATIC, _RTN_UNICAST, _RTNH_F_ONLINK = 254, 4, 1, 4
_RT_SCOPE_UNIVERSE, _RT_SCOPE_LINK = 0, 253
_RTA_DST, _RTA_OIF, _RTA_GATEWAY = 1, 4, 5
# linux/if_link.h, linux/veth.h, linux/if_addr.h, linux/neighbour.h
_IFLA_ADDRESS, _IFLA_IFNAME, _IFLA_LINKINFO, _IFLA_GROUP, _IFLA_NET_NS_FD = 1, 3, 18, 27, 28
_IFLA_INFO_KIND, _IFLA_INFO_DATA, _VETH_INFO_PEER = 1, 2, 1
_IFF_UP = 1
_IFA_ADDRESS, _IFA_LOCAL, _IFA_FLAGS, _IFA_F_NODAD = 1, 2, 8, 0x02
_NDA_DST, _NDA_LLADDR, _NUD_PERMANENT = 1, 2, 0x80
_SECONDS = 10

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class NetlinkRequest(Struct, frozen=True):
    """One message: its type, its flags beside request and acknowledgement, its body, and itself in words."""

    kind: int
    flags: int
    body: bytes
    words: str

    def describe(self) -> str:
        """The operation in words."""
        return self.words


class End(Struct, frozen=True):
    """One end of a veth. ``namespace`` is a descriptor, None for that of the socket; ``index`` 0 leaves the number to
    the kernel."""

    name: str
    mac: str
    namespace: int | None = None
    index: int = 0


def veth(one: End, other: End) -> NetlinkRequest:
    """Make a pair of devices, both down."""
    peer = _link(0, other.index) + _end(other)
    data = _nested(_IFLA_INFO_DATA, _nested(_VETH_INFO_PEER, peer))
    info = _nested(_IFLA_LINKINFO, attribute(_IFLA_INFO_KIND, b"veth\0") + data)
    body = _link(0, one.index) + _end(one) + info
    return NetlinkRequest(RTM_NEWLINK, _CREATE | _EXCL, body, f"make the devices {one.name} and {other.name}")


def down(index: int) -> NetlinkRequest:
    """Bring a device down: no packet passes it any more, in either direction."""
    body = struct.pack("=BxHiII", socket.AF_UNSPEC, 0, index, 0, _IFF_UP)
    return NetlinkRequest(RTM_NEWLINK, 0, body, f"bring device {index} down")


def grouped(index: int, group: int) -> NetlinkRequest:
    """Put a device into a group, which is a number alone."""
    body = _link(0, index) + attribute(_IFLA_GROUP, struct.pack("=I", group))
    return NetlinkRequest(RTM_NEWLINK, 0, body, f"put device {index} into group {group}")


def delete_group(group: int) -> NetlinkRequest:
    """Take all devices of a group away at once: the kernel waits for what is under way once, not for each of them."""
    body = _link(0, 0) + attribute(_IFLA_GROUP, struct.pack("=I", group))
    return NetlinkRequest(RTM_DELLINK, 0, body, f"remove the devices of group {group}")


def up(index: int) -> NetlinkRequest:
    """Bring a device up."""
    return NetlinkRequest(RTM_NEWLINK, 0, _link(_IFF_UP, index), f"bring device {index} up")


def delete(index: int) -> NetlinkRequest:
    """Take a device away, and with a veth its other end."""
    return NetlinkRequest(RTM_DELLINK, 0, _link(0, index), f"remove device {index}")


def address(index: int, ip: str, prefix: int) -> NetlinkRequest:
    """Give a device an address that is used at once: no other host on these links can have it."""
    at = ipaddress.ip_address(ip)
    body = struct.pack("=BBBBI", _family(at), prefix, 0, 0, index)
    body += attribute(_IFA_LOCAL, at.packed) + attribute(_IFA_ADDRESS, at.packed)
    body += attribute(_IFA_FLAGS, struct.pack("=I", _IFA_F_NODAD if at.version == 6 else 0))
    return NetlinkRequest(RTM_NEWADDR, _CREATE | _EXCL, body, f"give device {index} the address {ip}/{prefix}")


def neighbour(index: int, ip: str, mac: str) -> NetlinkRequest:
    """Set the MAC address of an IP address permanently: no answer from the link changes it."""
    at = ipaddress.ip_address(ip)
    body = struct.pack("=BBHiHBB", _family(at), 0, 0, index, _NUD_PERMANENT, 0, 0)
    body += attribute(_NDA_DST, at.packed) + attribute(_NDA_LLADDR, _mac(mac))
    return NetlinkRequest(RTM_NEWNEIGH, _CREATE | _EXCL, body, f"{ip} is at {mac}")


def route(index: int, to: str | None, *, via: str | None = None) -> NetlinkRequest:
    """Add a route by a device to an address, or to all addresses of ``via``'s family if ``to`` is None.

    A route to an address that another device has fails with EEXIST.
    """
    at = ipaddress.ip_address(to if to is not None else via or "")
    scope = _RT_SCOPE_LINK if via is None and at.version == 4 else _RT_SCOPE_UNIVERSE
    length = at.max_prefixlen if to is not None else 0
    head = (_family(at), length, 0, 0, _RT_TABLE_MAIN, _RTPROT_STATIC, scope, _RTN_UNICAST)
    body = struct.pack("=BBBBBBBBI", *head, _RTNH_F_ONLINK if via is not None else 0)
    body += attribute(_RTA_OIF, struct.pack("=I", index))
    if to is not None:
        body += attribute(_RTA_DST, at.packed)
    if via is not None:
        body += attribute(_RTA_GATEWAY, ipaddress.ip_address(via).packed)
    return NetlinkRequest(
        RTM_NEWROUTE, _CREATE | _EXCL, body, f"route {to or f'all IPv{at.version}'} by device {index}"
    )


class Route:
    """A socket of NETLINK_ROUTE in the namespace of the thread that makes it. Use as a context manager."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
        self._socket.settimeout(_SECONDS)
        self._socket.bind((0, 0))
        self._sequence = 0

    def __enter__(self) -> Route:
        return self

    def __exit__(self, *exc: object) -> None:
        self._socket.close()

    def do(self, requests: Sequence[NetlinkRequest]) -> None:
        """Send them together; the kernel does one after the other, and each has its answer.

        Raises:
            errors.KernelError: one was refused, which is named; ``__cause__`` has its errno. Others may have been done.
        """
        first, message = self._sequence + 1, b""
        for request in requests:
            self._sequence += 1
            head = (request.kind, _REQUEST | _ACK | request.flags, self._sequence, 0)
            message += HEADER.pack(HEADER.size + len(request.body), *head) + request.body
        failed = None
        try:
            self._socket.send(message)
            waiting = set(range(first, self._sequence + 1))
            while waiting:
                for kind, sequence, body in self._receive():
                    if kind == _NLMSG_ERROR and sequence in waiting:
                        waiting.discard(sequence)
                        number = -struct.unpack_from("=i", body)[0]
                        if number and failed is None:
                            failed = (requests[sequence - first], number)
        except OSError as e:
            raise errors.KernelError(f"rtnetlink: {e.strerror or e}") from e
        if failed is not None:
            request, number = failed
            raise errors.KernelError(f"cannot {request.describe()}: {os.strerror(number)}") from OSError(
                number, os.strerror(number)
            )

    def links(self) -> dict[str, int]:
        """Name to index of every device there.

        Raises:
            errors.KernelError: the kernel does not say.
        """
        return {name: index for name, (index, _) in self.links_in_groups().items()}

    def links_in_groups(self) -> dict[str, tuple[int, int]]:
        """Name to index and group of every device there.

        Raises:
            errors.KernelError: the kernel does not say.
        """
        self._sequence += 1
        body = _link(0, 0)
        found: dict[str, tuple[int, int]] = {}
        try:
            self._socket.send(
                HEADER.pack(HEADER.size + len(body), RTM_GETLINK, _REQUEST | _DUMP, self._sequence, 0) + body
            )
            while True:
                for kind, sequence, answer in self._receive():
                    if sequence != self._sequence:
                        continue
                    if kind in (_NLMSG_DONE, _NLMSG_ERROR):
                        return found
                    index = struct.unpack_from("=i", answer, 4)[0]
                    said = attributes(answer[16:])
                    name = said.get(_IFLA_IFNAME, b"").rstrip(b"\0").decode("ascii", "replace")
                    found[name] = index, int.from_bytes(said.get(_IFLA_GROUP, b""), sys.byteorder)
        except OSError as e:
            raise errors.KernelError(f"rtnetlink: {e.strerror or e}") from e

    def _receive(self) -> list[tuple[int, int, bytes]]:
        """The messages of one datagram: type, sequence, body."""
        data, out = self._socket.recv(1 << 18), []
        while len(data) >= HEADER.size:
            length, kind, _, sequence, _ = HEADER.unpack_from(data)
            out.append((kind, sequence, data[HEADER.size : length]))
            data = data[_aligned(max(length, HEADER.size)) :]
        return out


def _link(flags: int, index: int) -> bytes:
    """struct ifinfomsg with ``flags`` set and no other changed."""
    return struct.pack("=BxHiII", socket.AF_UNSPEC, 0, index, flags, flags)


def _end(end: End) -> bytes:
    out = attribute(_IFLA_IFNAME, end.name.encode("ascii") + b"\0") + attribute(_IFLA_ADDRESS, _mac(end.mac))
    if end.namespace is not None:
        out += attribute(_IFLA_NET_NS_FD, struct.pack("=I", end.namespace))
    return out


def _family(at: Address) -> int:
    return socket.AF_INET if at.version == 4 else socket.AF_INET6


def _mac(text: str) -> bytes:
    return bytes.fromhex(text.replace(":", ""))


def _nested(kind: int, value: bytes) -> bytes:
    return attribute(kind | NESTED, value)


def _aligned(length: int) -> int:
    return (length + 3) & ~3
