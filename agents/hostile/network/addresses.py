"""Try addresses without a grant: no name, every spelling and family, private, metadata, and the host's own."""

from __future__ import annotations

import functools
import socket

import wire
from harness import Blocked, probe

# Probe by probe, where to connect; every server of the test's world says `reached`.
CONNECTS: dict[str, tuple[str, int]] = {
    "ip_http": (wire.PUBLIC, 80),
    "ip_high_port": (wire.PUBLIC, 47_001),
    "ip_ssh": (wire.PUBLIC, 22),
    "ip_smtp": (wire.PUBLIC, 25),
    "ip6_http": (wire.PUBLIC6, 80),
    "ip6_high_port": (wire.PUBLIC6, 47_001),
    "ip_mapped": ("::ffff:" + wire.PUBLIC, 80),
    "ip_nat64": ("64:ff9b::9.9.9.10", 80),
    "ip_nat64_local": ("64:ff9b:1::9.9.9.10", 80),
    "ip_6to4": ("2002:909:90a::1", 80),
    "ip_teredo": ("2001:0:909:90a::1", 80),
    "ip_service_other_port": (wire.SERVICE, 5433),
    "ip_service_neighbour": ("203.0.113.6", wire.SERVICE_PORT),
    "ip_granted_name_other_port": (wire.API_ADDRESS, 80),
    "private_10": (wire.PRIVATE, 80),
    "private_172": ("172.16.5.5", 80),
    "private_192": ("192.168.1.1", 80),
    "private_shared": ("100.64.0.7", 80),
    "private_benchmark": ("198.18.0.7", 80),
    "private_class_e": ("240.0.0.7", 80),
    "private_unique_local": ("fd00:9::9", 80),
    "private_mapped": ("::ffff:10.8.8.8", 80),
    "private_nat64": ("64:ff9b::10.8.8.8", 80),
    "private_6to4": ("2002:a08:808::1", 80),
    "link_local": ("169.254.7.7", 80),
    "metadata": (wire.METADATA, 80),
    "metadata_https": (wire.METADATA, 443),
    "metadata_mapped": ("::ffff:169.254.169.254", 80),
    "metadata_nat64": ("64:ff9b::169.254.169.254", 80),
    "metadata_6to4": ("2002:a9fe:a9fe::1", 80),
    "metadata_ipv6": ("fd00:ec2::254", 80),
    "metadata_wire_server": ("168.63.129.16", 80),
    "metadata_shared": ("100.100.100.200", 80),
    "metadata_tasks": ("169.254.170.2", 80),
    "host_gateway_ssh": (wire.GATEWAY, 22),
    "host_gateway_http": (wire.GATEWAY, 80),
    "host_gateway_dns_over_tls": (wire.GATEWAY, 853),
    "host_gateway_ipv6": (wire.GATEWAY6, 22),
    "host_uplink": (wire.HOST, 22),
    "host_uplink_http": (wire.HOST, 80),
    "host_tls_gate": (wire.GATEWAY, 8443),
    "host_tls_gate_ipv6": (wire.GATEWAY6, 8443),
}

# The same for datagrams.
DATAGRAMS: dict[str, tuple[str, int]] = {
    "udp_high_port": (wire.PUBLIC, 47_001),
    "udp_quic": (wire.PUBLIC, 443),
    "udp_quic_granted_name": (wire.API_ADDRESS, 443),
    "udp_quic_ipv6": (wire.PUBLIC6, 443),
    "udp_ntp": (wire.PUBLIC, 123),
    "udp_service_other_port": (wire.SERVICE, 124),
    "udp_private": (wire.PRIVATE, 161),
    "udp_mapped": ("::ffff:9.9.9.10", 123),
    "udp_metadata": (wire.METADATA, 80),
    "udp_host_uplink": (wire.HOST, 123),
    "udp_gateway": (wire.GATEWAY, 123),
    "udp_gateway_dhcp": (wire.GATEWAY, 67),
    "udp_gateway_ipv6": (wire.GATEWAY6, 546),
    "udp_discovery": ("239.255.255.250", 1900),
    "udp_discovery_ipv6": ("ff02::c%eth0", 1900),
    "udp_all_nodes": ("ff02::1%eth0", 47_001),
}

for _name, (_address, _port) in CONNECTS.items():
    probe(_name)(functools.partial(wire.tcp, _name, _address, _port))
for _name, (_address, _port) in DATAGRAMS.items():
    _say = wire.tell if _address.startswith(("239.", "ff02:")) else wire.udp
    probe(_name)(functools.partial(_say, _name, _address, _port))


def _spelled(name: str, spelling: str) -> str:
    """By the C library, which takes what ipaddress refuses."""
    return wire.tcp(name, socket.inet_ntoa(socket.inet_aton(spelling)), 80)


@probe("spelled_decimal")
def spelled_decimal() -> str:
    return _spelled("spelled_decimal", "2852039166")


@probe("spelled_octal")
def spelled_octal() -> str:
    return _spelled("spelled_octal", "0251.0376.0251.0376")


@probe("spelled_hex")
def spelled_hex() -> str:
    return _spelled("spelled_hex", "0xa9.0xfe.0xa9.0xfe")


@probe("spelled_short")
def spelled_short() -> str:
    return _spelled("spelled_short", "10.526344")


@probe("metadata_name")
def metadata_name() -> str:
    return wire.tcp("metadata_name", wire.address_of("metadata.google.internal"), 80)


@probe("host_scan")
def host_scan() -> str:
    """Scan the gateway's ports: any port that accepts a connection is a hole, except the resolver's."""
    opened = []
    for port in (*range(1, 200), 443, 853, 2375, 2376, 3128, 5353, 6443, 8000, 8080, 8443, 8444, 9090, 10250, 47001):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as made:
            made.settimeout(0.3)
            if port != 53 and made.connect_ex((wire.GATEWAY, port)) == 0:
                opened.append(port)
    if not opened:
        raise Blocked("nothing listens")
    return f"open: {opened[:10]}"


@probe("udp_broadcast")
def udp_broadcast() -> str:
    return wire.tell("udp_broadcast", "255.255.255.255", 47_001)


@probe("udp_broadcast_link")
def udp_broadcast_link() -> str:
    return wire.tell("udp_broadcast_link", "192.0.0.7", 47_001)


@probe("neighbour_agent")
def neighbour_agent() -> str:
    """Other agents stand behind uplinks of their own: the addresses nearest to this one's."""
    return _any_of("neighbour_agent", ["192.0.0.3"])


@probe("neighbour_uplink")
def neighbour_uplink() -> str:
    """The uplinks of other runs, as their addresses are counted."""
    return _any_of("neighbour_uplink", [f"198.19.0.{last}" for last in range(16, 18)])


@probe("neighbour_agent_ipv6")
def neighbour_agent_ipv6() -> str:
    return _any_of("neighbour_agent_ipv6", ["fd00:c0:0:2::10", "fd00:c0:0:1::3"])


def _any_of(name: str, addresses: list[str]) -> str:
    failure: Exception = Blocked("no address")
    for address in addresses:
        try:
            return wire.tcp(name, address, 22)
        except (OSError, Blocked) as error:
            failure = error
    raise failure
