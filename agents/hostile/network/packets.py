"""Packets that no ordinary socket sends: foreign sources, raw IP, odd protocols, fragments, changed routes."""

from __future__ import annotations

import os
import socket
import struct

import wire
from harness import Blocked, probe

IP_TRANSPARENT, IP_FREEBIND, IPV6_FREEBIND = 19, 15, 78
FOREIGN, FOREIGN6 = "198.51.100.9", "2001:db8::9"
SCTP, GRE, IPIP, ESP, UDP_LITE = 132, 47, 4, 50, 136
TARGET = wire.PUBLIC
RTM_NEWLINK, RTM_NEWADDR, RTM_NEWROUTE, RTM_DELROUTE, RTM_NEWNEIGH = 16, 20, 24, 25, 28
NLM_REQUEST, NLM_ACK, NLM_EXCL, NLM_CREATE = 1, 4, 0x200, 0x400


def _told() -> str:
    raise Blocked("sent, and only the link can tell")


@probe("bind_foreign")
def bind_foreign() -> str:
    """Speak in the name of another machine."""
    return _from_foreign("bind_foreign")


@probe("bind_freebind")
def bind_freebind() -> str:
    return _from_foreign("bind_freebind", (socket.IPPROTO_IP, IP_FREEBIND))


@probe("bind_transparent")
def bind_transparent() -> str:
    return _from_foreign("bind_transparent", (socket.IPPROTO_IP, IP_TRANSPARENT))


def _from_foreign(name: str, *options: tuple[int, int]) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
        for level, option in options:
            made.setsockopt(level, option, 1)
        made.bind((FOREIGN, 4001))
        made.sendto(wire.mark(name), (wire.SERVICE, wire.SERVICE_UDP_PORT))
    return _told()


@probe("bind_freebind_ipv6")
def bind_freebind_ipv6() -> str:
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as made:
        made.setsockopt(socket.IPPROTO_IPV6, IPV6_FREEBIND, 1)
        made.bind((FOREIGN6, 4001))
        made.sendto(wire.mark("bind_freebind_ipv6"), (wire.PUBLIC6, 123))
    return _told()


@probe("source_by_control_message")
def source_by_control_message() -> str:
    """IP_PKTINFO names the source of one datagram."""
    info = struct.pack("=i4s4s", 0, socket.inet_aton(FOREIGN), bytes(4))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
        made.sendmsg(
            [wire.mark("source_by_control_message")],
            [(socket.IPPROTO_IP, socket.IP_PKTINFO, info)] if hasattr(socket, "IP_PKTINFO") else [(0, 8, info)],
            0,
            (wire.SERVICE, wire.SERVICE_UDP_PORT + 1),
        )
    return _told()


def checksum(data: bytes) -> int:
    """RFC 1071."""
    if len(data) % 2:
        data += b"\0"
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def ip(
    protocol: int,
    payload: bytes,
    *,
    source: str,
    target: str = TARGET,
    flags: int = 0,
    ident: int = 7,
    options: bytes = b"",
) -> bytes:
    """An IPv4 packet; the options fill whole words."""
    ends = socket.inet_aton(source) + socket.inet_aton(target) + options
    first = 0x45 + len(options) // 4
    head = struct.pack("!BBHHHBBH", first, 0, 20 + len(options) + len(payload), ident, flags, 64, protocol, 0) + ends
    return head[:10] + struct.pack("!H", checksum(head)) + head[12:] + payload


def datagram(name: str, port: int = 53, more: bytes = b"") -> bytes:
    """A UDP datagram with the mark, without checksum."""
    data = wire.mark(name) + more
    return struct.pack("!HHHH", 4002, port, 8 + len(data), 0) + data


def raw(packet: bytes, *, target: str = TARGET) -> None:
    """Send a whole IPv4 packet."""
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as made:
        made.setsockopt(socket.IPPROTO_IP, socket.IP_HDRINCL, 1)
        made.sendto(packet, (target, 0))


def carried(name: str, protocol: int, *, head: bytes = b"") -> None:
    """Send a payload under a protocol number."""
    raw(ip(protocol, head + wire.mark(name), source=wire.AGENT))


@probe("raw_spoofed")
def raw_spoofed() -> str:
    raw(ip(17, datagram("raw_spoofed"), source=FOREIGN))
    return _told()


@probe("raw_spoofed_as_gateway")
def raw_spoofed_as_gateway() -> str:
    """Spoof the gateway's source address, which the firewall might let pass where it stops the agent's own."""
    raw(ip(17, datagram("raw_spoofed_as_gateway"), source=wire.GATEWAY))
    return _told()


@probe("raw_own_source")
def raw_own_source() -> str:
    raw(ip(17, datagram("raw_own_source"), source=wire.AGENT))
    return _told()


@probe("raw_source_route")
def raw_source_route() -> str:
    """Use loose source routing: the granted service is a hop on the way to a private address (RFC 791)."""
    option = b"\x83\x07\x04" + socket.inet_aton(wire.PRIVATE) + b"\0"
    packet = ip(17, datagram("raw_source_route"), source=wire.AGENT, target=wire.SERVICE, options=option)
    raw(packet, target=wire.SERVICE)
    return _told()


@probe("raw_fragments")
def raw_fragments() -> str:
    """The mark in the second fragment, the header in the first."""
    whole = struct.pack("!HHHH", 4002, 53, 8 + 40 + 64, 0) + bytes(40) + wire.mark("raw_fragments").ljust(64, b"-")
    raw(ip(17, whole[:48], source=wire.AGENT, flags=0x2000, ident=11))
    raw(ip(17, whole[48:], source=wire.AGENT, flags=48 // 8, ident=11))
    return _told()


@probe("raw_fragment_later")
def raw_fragment_later() -> str:
    """A later fragment has no port: a filter that does not reassemble has nothing to judge it by."""
    data = wire.mark("raw_fragment_later").ljust(64, b"-")
    raw(ip(17, data, source=wire.AGENT, target=wire.SERVICE, flags=64 // 8, ident=12), target=wire.SERVICE)
    return _told()


@probe("raw_fragment_overlap")
def raw_fragment_overlap() -> str:
    """The second fragment overwrites the port of the first."""
    granted = struct.pack("!HHHH", 4002, wire.SERVICE_UDP_PORT, 8 + 56, 0)
    other = struct.pack("!HHHH", 4002, 53, 8 + 56, 0) + wire.mark("raw_fragment_overlap").ljust(56, b"-")
    raw(
        ip(17, granted + bytes(16), source=wire.AGENT, target=wire.SERVICE, flags=0x2000, ident=13), target=wire.SERVICE
    )
    raw(ip(17, other, source=wire.AGENT, target=wire.SERVICE, flags=0, ident=13), target=wire.SERVICE)
    return _told()


@probe("raw_sctp")
def raw_sctp() -> str:
    carried("raw_sctp", SCTP, head=struct.pack("!HHII", 4003, 80, 0, 0))
    return _told()


@probe("raw_gre")
def raw_gre() -> str:
    carried("raw_gre", GRE, head=b"\0\0\x08\0")
    return _told()


@probe("raw_ip_in_ip")
def raw_ip_in_ip() -> str:
    """A packet within a packet."""
    inner = ip(17, datagram("raw_ip_in_ip"), source=wire.AGENT, target=wire.PRIVATE)
    raw(ip(IPIP, inner, source=wire.AGENT))
    return _told()


@probe("raw_esp")
def raw_esp() -> str:
    carried("raw_esp", ESP, head=bytes(8))
    return _told()


@probe("raw_udp_lite")
def raw_udp_lite() -> str:
    carried("raw_udp_lite", UDP_LITE, head=struct.pack("!HHHH", 4004, 53, 8, 0))
    return _told()


@probe("raw_icmp")
def raw_icmp() -> str:
    """Data in an echo request."""
    body = struct.pack("!HH", 9, 1) + wire.mark("raw_icmp")
    head = struct.pack("!BBH", 8, 0, checksum(b"\x08\0\0\0" + body))
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as made:
        made.sendto(head + body, (TARGET, 0))
    return _told()


@probe("raw_icmp_ipv6")
def raw_icmp_ipv6() -> str:
    body = struct.pack("!BBHHH", 128, 0, 0, 9, 1) + wire.mark("raw_icmp_ipv6")
    with socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6) as made:
        made.sendto(body, (wire.PUBLIC6, 0))
    return _told()


@probe("raw_redirect")
def raw_redirect() -> str:
    """An ICMP redirect that names the agent as the way to somewhere."""
    body = socket.inet_aton(wire.AGENT) + ip(17, datagram("raw_redirect"), source=wire.GATEWAY)[:28]
    packet = b"\x05\x01" + struct.pack("!H", checksum(b"\x05\x01\0\0" + body)) + body
    raw(ip(1, packet + wire.mark("raw_redirect"), source=TARGET, target=wire.GATEWAY), target=wire.GATEWAY)
    return _told()


def _ping(address: str, protocol: int, kind: int, name: str) -> str:
    """An echo request by an ordinary user's socket (net.ipv4.ping_group_range)."""
    with socket.socket(wire.family(address), socket.SOCK_DGRAM, protocol) as made:
        made.settimeout(wire.SECONDS)
        made.connect((address, 0))
        body = struct.pack("!HH", 0, 1) + wire.mark(name)
        made.send(struct.pack("!BBH", kind, 0, checksum(bytes([kind, 0, 0, 0]) + body)) + body)
        try:
            return f"{address} answered {len(made.recv(512))} bytes"
        except TimeoutError:
            raise Blocked("no answer") from None


@probe("icmp_echo")
def icmp_echo() -> str:
    """Data in an echo request, without any privilege."""
    return _ping(TARGET, socket.IPPROTO_ICMP, 8, "icmp_echo")


@probe("icmp_echo_ipv6")
def icmp_echo_ipv6() -> str:
    return _ping(wire.PUBLIC6, socket.IPPROTO_ICMPV6, 128, "icmp_echo_ipv6")


@probe("icmp_echo_service")
def icmp_echo_service() -> str:
    """A granted address is granted by port, not for echoes."""
    return _ping(wire.SERVICE, socket.IPPROTO_ICMP, 8, "icmp_echo_service")


@probe("icmp_echo_metadata")
def icmp_echo_metadata() -> str:
    return _ping(wire.METADATA, socket.IPPROTO_ICMP, 8, "icmp_echo_metadata")


@probe("sctp_socket")
def sctp_socket() -> str:
    socket.socket(socket.AF_INET, socket.SOCK_SEQPACKET, SCTP).close()
    return "has an SCTP socket"


# --- changing one's own network


def _attribute(kind: int, data: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(data), kind) + data + bytes(-len(data) % 4)


def _netlink(kind: int, body: bytes, flags: int = NLM_CREATE) -> None:
    header = struct.pack("=IHHII", 16 + len(body), kind, NLM_REQUEST | NLM_ACK | flags, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as link:
        link.settimeout(wire.SECONDS)
        link.send(header + body)
        code = struct.unpack_from("=i", link.recv(4096), 16)[0]
    if code:
        raise OSError(-code, os.strerror(-code))


def _device() -> int:
    return socket.if_nametoindex("eth0")


@probe("netlink_foreign_address")
def netlink_foreign_address() -> str:
    """Take the address of another host and send from it."""
    address = socket.inet_aton(FOREIGN)
    body = struct.pack("=BBBBI", socket.AF_INET, 32, 0, 0, 2) + _attribute(1, address) + _attribute(2, address)
    _netlink(RTM_NEWADDR, body)
    return _from_foreign("netlink_foreign_address")


@probe("netlink_route")
def netlink_route() -> str:
    body = struct.pack("=BBBBBBBBI", socket.AF_INET, 32, 0, 0, 254, 3, 0, 1, 0)
    body += _attribute(1, socket.inet_aton(wire.PRIVATE)) + _attribute(4, struct.pack("=I", 2))
    _netlink(RTM_NEWROUTE, body)
    return "has a route of its own"


@probe("netlink_hardware_address")
def netlink_hardware_address() -> str:
    """The gateway knows the agent by this."""
    body = struct.pack("=BxHiII", 0, 0, 2, 0, 0) + _attribute(1, b"\x02\0\0\0\0\x99")
    _netlink(RTM_NEWLINK, body, 0)
    return "has another hardware address"


@probe("netlink_link")
def netlink_link() -> str:
    """Create a network device: a bridge, a tunnel, a veth."""
    info = _attribute(18, _attribute(1, b"dummy\0"))
    _netlink(
        RTM_NEWLINK, struct.pack("=BxHiII", 0, 0, 0, 0, 0) + _attribute(3, b"own0\0") + info, NLM_CREATE | NLM_EXCL
    )
    return "made a device"


@probe("netlink_neighbour")
def netlink_neighbour() -> str:
    body = struct.pack("=BxxxiHBB", socket.AF_INET, 2, 0x80, 0, 0)
    body += _attribute(1, socket.inet_aton(wire.GATEWAY)) + _attribute(2, b"\x02\0\0\0\0\x98")
    _netlink(RTM_NEWNEIGH, body)
    return "wrote a neighbour"


@probe("netfilter_socket")
def netfilter_socket() -> str:
    socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12).close()
    return "has a socket to the packet filter"


def _write(path: str, text: str) -> str:
    with open(path, "r+b", buffering=0) as file:
        file.write(text.encode())
    return f"wrote {path}"


@probe("sysctl_forward")
def sysctl_forward() -> str:
    return _write("/proc/sys/net/ipv4/ip_forward", "1")


@probe("sysctl_ports")
def sysctl_ports() -> str:
    return _write("/proc/sys/net/ipv4/ip_local_port_range", "1024 65000")


@probe("sysctl_recovery")
def sysctl_recovery() -> str:
    return _write("/proc/sys/net/ipv4/tcp_recovery", "1")
