"""Frames on the link: false claims about the agent's own address and about those of others."""

from __future__ import annotations

import socket
import struct

import wire
from harness import Blocked, probe
from packets import FOREIGN, checksum, datagram, ip

ETH_ALL, IPV4, ARP, VLAN, IPV6, LOCAL_EXPERIMENT, PPPOE = 3, 0x0800, 0x0806, 0x8100, 0x86DD, 0x88B5, 0x8863
EVERYBODY = b"\xff" * 6
STRANGER = b"\x02\0\0\0\0\x77"
ALL_NODES = b"\x33\x33\0\0\0\1"


def _frame(kind: int, payload: bytes, *, to: bytes = EVERYBODY, sender: bytes = wire.AGENT_MAC) -> None:
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_ALL)) as made:
        made.bind(("eth0", ETH_ALL))
        made.send(to + sender + struct.pack("!H", kind) + payload)


def _told() -> str:
    raise Blocked("sent, and only the link can tell")


@probe("frame_socket")
def frame_socket() -> str:
    socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_ALL)).close()
    return "has a packet socket"


@probe("frame_listen")
def frame_listen() -> str:
    """Hear everything on the link, other protocols included."""
    with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ETH_ALL)) as made:
        made.bind(("eth0", ETH_ALL))
        made.settimeout(wire.SECONDS)
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
                other.sendto(wire.mark("frame_listen"), (wire.GATEWAY, 47_001))
            return f"heard {len(made.recv(2048))} bytes"
        except TimeoutError:
            raise Blocked("heard nothing") from None


@probe("frame_arp_gateway")
def frame_arp_gateway() -> str:
    """Claim the gateway's address to the whole link."""
    _frame(ARP, _arp(STRANGER, wire.GATEWAY, wire.GATEWAY) + wire.mark("frame_arp_gateway"))
    return _told()


@probe("frame_arp_stranger")
def frame_arp_stranger() -> str:
    """Announce an address that no host on the link has."""
    _frame(ARP, _arp(STRANGER, "192.0.0.5", wire.GATEWAY) + wire.mark("frame_arp_stranger"))
    return _told()


def _arp(sender: bytes, address: str, target: str) -> bytes:
    """Build an ARP reply (RFC 826)."""
    head = struct.pack("!HHBBH", 1, IPV4, 6, 4, 2)
    return head + sender + socket.inet_aton(address) + EVERYBODY + socket.inet_aton(target)


@probe("frame_nd_gateway")
def frame_nd_gateway() -> str:
    """Claim the gateway's address by a neighbour advertisement with the override flag (RFC 4861)."""
    _frame(IPV6, _advertisement("frame_nd_gateway", wire.GATEWAY6), to=ALL_NODES)
    return _told()


@probe("frame_nd_stranger")
def frame_nd_stranger() -> str:
    _frame(IPV6, _advertisement("frame_nd_stranger", "fd00:c0:0:1::5"), to=ALL_NODES)
    return _told()


def _advertisement(name: str, address: str) -> bytes:
    target = socket.inet_pton(socket.AF_INET6, address)
    body = struct.pack("!BBHI", 136, 0, 0, 0x20000000) + target + b"\x02\x01" + STRANGER
    return _icmp6(body + wire.mark(name).ljust(40, b"-"), source=address)


def _icmp6(body: bytes, *, source: str, target: str = "ff02::1", hops: int = 255) -> bytes:
    ends = socket.inet_pton(socket.AF_INET6, source) + socket.inet_pton(socket.AF_INET6, target)
    value = checksum(ends + struct.pack("!II", len(body), 58) + body)
    body = body[:2] + struct.pack("!H", value) + body[4:]
    return struct.pack("!IHBB", 6 << 28, len(body), 58, hops) + ends + body


@probe("frame_router_advertisement")
def frame_router_advertisement() -> str:
    """Claim to be the router of this link."""
    body = struct.pack("!BBHBBHII", 134, 0, 0, 64, 0, 1800, 0, 0) + b"\x01\x01" + STRANGER
    body += wire.mark("frame_router_advertisement").ljust(48, b"-")
    _frame(IPV6, _icmp6(body, source="fe80::77"), to=ALL_NODES)
    return _told()


@probe("frame_foreign_hardware")
def frame_foreign_hardware() -> str:
    """Send the agent's address from another device."""
    packet = ip(17, datagram("frame_foreign_hardware", 123), source=wire.AGENT, target=wire.SERVICE)
    _frame(IPV4, packet, to=wire.GATEWAY_MAC, sender=STRANGER)
    return _told()


@probe("frame_foreign_source")
def frame_foreign_source() -> str:
    packet = ip(17, datagram("frame_foreign_source", 123), source=FOREIGN, target=wire.SERVICE)
    _frame(IPV4, packet, to=wire.GATEWAY_MAC)
    return _told()


@probe("frame_foreign_source_ipv6")
def frame_foreign_source_ipv6() -> str:
    ends = socket.inet_pton(socket.AF_INET6, "2001:db8::9") + socket.inet_pton(socket.AF_INET6, wire.PUBLIC6)
    data = datagram("frame_foreign_source_ipv6")
    value = checksum(ends + struct.pack("!II", len(data), 17) + data) or 0xFFFF
    data = data[:6] + struct.pack("!H", value) + data[8:]
    _frame(IPV6, struct.pack("!IHBB", 6 << 28, len(data), 17, 64) + ends + data, to=wire.GATEWAY_MAC)
    return _told()


@probe("frame_not_granted")
def frame_not_granted() -> str:
    """Write a frame straight to the wire, past netstack; only the destination is not the agent's own."""
    packet = ip(17, datagram("frame_not_granted"), source=wire.AGENT)
    _frame(IPV4, packet, to=wire.GATEWAY_MAC)
    return _told()


@probe("frame_vlan")
def frame_vlan() -> str:
    """Write the same frame with a VLAN tag, inside which a rule on ethertypes may not look."""
    inner = ip(17, datagram("frame_vlan"), source=wire.AGENT)
    _frame(VLAN, struct.pack("!HH", 5, IPV4) + inner, to=wire.GATEWAY_MAC)
    return _told()


@probe("frame_ethertype")
def frame_ethertype() -> str:
    _frame(LOCAL_EXPERIMENT, wire.mark("frame_ethertype"))
    return _told()


@probe("frame_pppoe")
def frame_pppoe() -> str:
    _frame(PPPOE, b"\x11\x09\0\0\0\x04\x01\x01\0\0" + wire.mark("frame_pppoe"))
    return _told()


@probe("frame_dhcp")
def frame_dhcp() -> str:
    """Offer a lease to every DHCP client on the link, as a rogue server would."""
    packet = ip(17, datagram("frame_dhcp", 68), source="0.0.0.0", target="255.255.255.255")  # noqa: S104
    _frame(IPV4, packet)
    return _told()
