"""Read from nfnetlink_log the packets that the gateway's firewall refused: from a group of the namespace, by netlink.

The log rule is the first in chain ``refuse`` and rate-limited (policy.compile.network.firewall), so a flood reaches
this process as some 64 packets a second. The number of the others is read from the ruleset's counters at the end. The
messages contain packet headers that an agent made. Only the destination is used, by which the kernel decided as well.

Message formats: include/uapi/linux/netfilter/nfnetlink_log.h and nf_tables.h; tests/kernel/test_nflog.py checks them
against the kernel.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator

from policy import denials, errors
from policy.compile.network.firewall import LOG_BYTES, LOG_GROUP, REFUSED
from policy.compile.network.nft import TABLE
from sandbox.kernel.net.netlink_wire import HEADER, attribute, attributes, messages

_NETLINK_NETFILTER, _SOL_NETLINK, _NO_ENOBUFS = 12, 270, 5
_SUBSYSTEM = 4  # NFNL_SUBSYS_ULOG
_PACKET, _CONFIG = _SUBSYSTEM << 8, _SUBSYSTEM << 8 | 1
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_REQUEST_ACK, _REQUEST_DUMP = 0x5, 0x301
# NFNL_SUBSYS_NFTABLES with NFT_MSG_NEWOBJ and NFT_MSG_GETOBJ; NFTA_OBJ_*, NFTA_COUNTER_PACKETS, NFT_OBJECT_COUNTER.
_NEW_OBJECT, _GET_OBJECT = 10 << 8 | 18, 10 << 8 | 19
_OBJ_TABLE, _OBJ_NAME, _OBJ_TYPE, _OBJ_DATA, _COUNTER_PACKETS, _COUNTER = 1, 2, 3, 4, 2, 1
_INET = 1  # NFPROTO_INET
_GENERIC = struct.Struct("=BBH")
# NFULA_CFG_CMD with NFULNL_CFG_CMD_BIND; NFULA_CFG_MODE with NFULNL_COPY_PACKET; NFULA_CFG_QTHRESH.
_CFG_CMD, _BIND, _CFG_MODE, _COPY_PACKET, _CFG_QTHRESH = 1, 1, 2, 2, 5
_NFULA_PACKET_HDR, _NFULA_PAYLOAD = 1, 9
_LOCAL_IN, _FORWARD = 1, 2
# The most messages in one turn: it bounds the delay for a client that waits for the agent.
_AT_ONCE = 64
_BUFFER_BYTES = 256 << 10

_TRANSPORTS = {socket.IPPROTO_TCP: "tcp", socket.IPPROTO_UDP: "udp"}
_OTHERS = {socket.IPPROTO_ICMP: "icmp", socket.IPPROTO_ICMPV6: "icmp", socket.IPPROTO_IGMP: "igmp", 132: "sctp"}
# RFC 8200: hop-by-hop, routing, fragment, destination options; each with its length in units of 8 bytes, but fragment.
_EXTENSIONS, _FRAGMENT = {0, 43, 60}, 44
_MOST_EXTENSIONS = 8


class RefusedPackets:
    """The group's reader. ``fileno`` is readable when ``ready`` has something to do; ``ready`` never blocks.

    INVARIANT: made inside the gateway's network namespace, to which a netlink socket belongs for good.
    """

    def __init__(self, told: denials.Told) -> None:
        """Bind the group.

        Raises:
            errors.KernelError: the kernel has no nfnetlink_log, or another process reads this group.
        """
        self._told = told
        self._heard = 0
        flags = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        self._socket = socket.socket(socket.AF_NETLINK, flags, _NETLINK_NETFILTER)
        try:
            self._socket.bind((0, 0))
            # What does not fit is lost and counted by nft's counters alone; an error would say no more.
            self._socket.setsockopt(_SOL_NETLINK, _NO_ENOBUFS, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
            self._configure(attribute(_CFG_CMD, bytes([_BIND])))
            mode = struct.pack("=IBx", socket.htonl(LOG_BYTES), _COPY_PACKET)
            # Deliver each message at once: the kernel would otherwise keep them for a second.
            self._configure(attribute(_CFG_MODE, mode), attribute(_CFG_QTHRESH, struct.pack("!I", 1)))
        except OSError as e:
            self._socket.close()
            raise errors.KernelError(f"refused packets cannot be read: {e.strerror}") from e

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._socket.fileno()

    def ready(self) -> None:
        """Tell of the packets that have arrived."""
        for _ in range(_AT_ONCE):
            try:
                data = self._socket.recv(65536)
            except (BlockingIOError, InterruptedError):
                return
            self._heard += sum(kind == _PACKET for kind, _ in messages(data))
            for denial in parse(data):
                self._told(denial)

    def close(self) -> None:
        """Tell of the last ones, and of how many there were beyond the rate; leave the group."""
        if self._socket.fileno() < 0:
            return
        try:
            self.ready()
            untold = self._refused() - self._heard
            if untold > 0:
                self._told(denials.Denial("packet", denials.REST_TARGET, denials.REST_CODE), count=untold)
        finally:
            self._socket.close()

    def _refused(self) -> int:
        """Count the refused packets by the ruleset's counters. 0 if they are gone or cannot be read."""
        body = _GENERIC.pack(_INET, 0, 0) + attribute(_OBJ_TABLE, TABLE.encode() + b"\0")
        body += attribute(_OBJ_TYPE, struct.pack("!I", _COUNTER))
        found = 0
        with contextlib.suppress(OSError):
            self._socket.send(HEADER.pack(HEADER.size + len(body), _GET_OBJECT, _REQUEST_DUMP, 2, 0) + body)
            # A packet refused meanwhile may be among the answers; it is read and counted.
            while True:
                data = self._socket.recv(65536)
                self._heard += sum(kind == _PACKET for kind, _ in messages(data))
                for denial in parse(data):
                    self._told(denial)
                found += sum(_refused(body) for kind, body in messages(data) if kind == _NEW_OBJECT)
                if any(kind in (_NLMSG_DONE, _NLMSG_ERROR) for kind, _ in messages(data)):
                    break
        return found

    def _configure(self, *attributes: bytes) -> None:
        body = _GENERIC.pack(socket.AF_UNSPEC, 0, socket.htons(LOG_GROUP)) + b"".join(attributes)
        self._socket.send(HEADER.pack(HEADER.size + len(body), _CONFIG, _REQUEST_ACK, 1, 0) + body)
        # The kernel answers before send returns; a packet refused meanwhile may come before the answer.
        for _ in range(_AT_ONCE):
            data = self._socket.recv(65536)
            _, kind, *_ = HEADER.unpack_from(data)
            if kind == _NLMSG_ERROR:
                (code,) = struct.unpack_from("=i", data, HEADER.size)
                if code:
                    raise OSError(-code, os.strerror(-code))
                return
        raise OSError(0, "the kernel does not answer")


def _refused(body: bytes) -> int:
    """The packets in one counter of the ruleset's, 0 for a counter of a grant's."""
    found = attributes(body[_GENERIC.size :])
    if found.get(_OBJ_NAME, b"").rstrip(b"\0").decode("ascii", "replace") not in REFUSED:
        return 0
    packets = attributes(found.get(_OBJ_DATA, b"")).get(_COUNTER_PACKETS, b"")
    return int.from_bytes(packets, "big")


def parse(data: bytes) -> Iterator[denials.Denial]:
    """The refusals in one datagram of the kernel's. What is not understood is skipped: it is an agent's packet."""
    for kind, body in messages(data):
        if kind != _PACKET:
            continue
        found = attributes(body[_GENERIC.size :])
        header, payload = found.get(_NFULA_PACKET_HDR, b""), found.get(_NFULA_PAYLOAD, b"")
        if len(header) >= 3 and (denial := _denial(header[2], payload)) is not None:
            yield denial


def _denial(hook: int, packet: bytes) -> denials.Denial | None:
    """None also for what was not the agent's wish: what a gate was refused is told by the gate."""
    if hook not in (_LOCAL_IN, _FORWARD):
        return None
    found = destination(packet)
    if found is None:
        return None
    host, protocol, port = found
    shown = f"[{host}]" if ":" in host else host
    if hook == _LOCAL_IN and not _is_multicast(host):
        code = "gateway"
    elif protocol in _TRANSPORTS.values():
        code = denials.NOT_GRANTED
    elif _is_multicast(host) and protocol in ("icmp", "igmp"):
        # A network stack's own noise: which groups it listens to, whether there is a router.
        return None
    else:
        code = "protocol"
    where = f"{shown}/{protocol}" if port is None else f"{shown}:{port}/{protocol}"
    return denials.Denial("packet", where, code)


def destination(packet: bytes) -> tuple[str, str, int | None] | None:
    """Parse destination, protocol and port of an IP packet that may be cut short. None if it is malformed."""
    version = packet[0] >> 4 if packet else 0
    if version == 4 and len(packet) >= 20:
        host: ipaddress.IPv4Address | ipaddress.IPv6Address = ipaddress.IPv4Address(packet[16:20])
        fragment = bool(int.from_bytes(packet[6:8], "big") & 0x1FFF)
        number, at = packet[9], (packet[0] & 0xF) * 4
        if at < 20:
            return None
    elif version == 6 and len(packet) >= 40:
        host = ipaddress.IPv6Address(packet[24:40])
        number, at, fragment = _upper(packet)
    else:
        return None
    name = _TRANSPORTS.get(number)
    if name is None or fragment or len(packet) < at + 4:
        return str(host), name or _OTHERS.get(number, f"protocol-{number}"), None
    return str(host), name, int.from_bytes(packet[at + 2 : at + 4], "big")


def _upper(packet: bytes) -> tuple[int, int, bool]:
    """The upper protocol of an IPv6 packet, where its header begins, and whether this is a later fragment."""
    number, at = packet[6], 40
    for _ in range(_MOST_EXTENSIONS):
        if len(packet) < at + 8:
            break
        if number in _EXTENSIONS:
            number, at = packet[at], at + 8 * (packet[at + 1] + 1)
        elif number == _FRAGMENT:
            if int.from_bytes(packet[at + 2 : at + 4], "big") >> 3:
                return packet[at], at + 8, True
            number, at = packet[at], at + 8
        else:
            break
    return number, at, False


def _is_multicast(host: str) -> bool:
    return ipaddress.ip_address(host).is_multicast
