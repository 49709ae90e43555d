"""Parse the kernel's log of a refused packet from bytes; tests/kernel/test_nflog.py reads the kernel's own."""

from __future__ import annotations

import ipaddress
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.denials import Denial
from sandbox.kernel.net import nflog

FORWARD, LOCAL_IN, LOCAL_OUT = 2, 1, 3


def v4(host: str, protocol: int, port: int = 0, *, offset: int = 0, options: bytes = b"") -> bytes:
    head = struct.pack("!BBHHHBBH", 0x40 | (5 + len(options) // 4), 0, 60, 1, offset, 64, protocol, 0)
    return head + bytes(4) + ipaddress.IPv4Address(host).packed + options + struct.pack("!HH", 40000, port)


def v6(host: str, number: int, rest: bytes) -> bytes:
    head = struct.pack("!IHBB", 6 << 28, len(rest), number, 64)
    return head + bytes(16) + ipaddress.IPv6Address(host).packed + rest


def ports(port: int) -> bytes:
    return struct.pack("!HH", 40000, port)


def message(packet: bytes, hook: int = FORWARD, kind: int = 0x400) -> bytes:
    attributes = b""
    for number, value in ((1, struct.pack("!HBx", 0x800, hook)), (10, b"\0"), (9, packet)):
        attributes += struct.pack("=HH", 4 + len(value), number) + value + bytes(-len(value) % 4)
    body = b"\2\0\0\x1b" + attributes
    return struct.pack("=IHHII", 16 + len(body), kind, 0, 0, 0) + body


@pytest.mark.parametrize(
    ("packet", "target"),
    [
        (v4("203.0.113.5", 6, 443), "203.0.113.5:443/tcp"),
        (v4("203.0.113.5", 17, 53), "203.0.113.5:53/udp"),
        (v4("203.0.113.5", 6, 443, options=bytes(8)), "203.0.113.5:443/tcp"),
        (v4("203.0.113.5", 6, 443, offset=1), "203.0.113.5/tcp"),
        (v4("203.0.113.5", 6, 443)[:22], "203.0.113.5/tcp"),
        (v6("2001:db8::5", 17, ports(53)), "[2001:db8::5]:53/udp"),
        (v6("2001:db8::5", 0, b"\x06\0" + bytes(6) + ports(80)), "[2001:db8::5]:80/tcp"),
        (v6("2001:db8::5", 60, b"\x2b\1" + bytes(14) + b"\x06\0" + bytes(6) + ports(80)), "[2001:db8::5]:80/tcp"),
        (v6("2001:db8::5", 44, b"\x06\0\0\1" + bytes(4) + ports(80)), "[2001:db8::5]:80/tcp"),
        (v6("2001:db8::5", 44, b"\x06\0\0\x09" + bytes(4) + ports(80)), "[2001:db8::5]/tcp"),
    ],
)
def test_destination_is_written_as_policy_why_asks_for_it(packet: bytes, target: str) -> None:
    assert list(nflog.parse(message(packet))) == [Denial("packet", target, "not_granted")]


@pytest.mark.parametrize(
    ("packet", "target"),
    [
        (v4("203.0.113.5", 1), "203.0.113.5/icmp"),
        (v6("2001:db8::5", 58, bytes(8)), "[2001:db8::5]/icmp"),
        (v4("203.0.113.5", 47), "203.0.113.5/protocol-47"),
        (v4("203.0.113.5", 132, 5), "203.0.113.5/sctp"),
    ],
)
def test_what_no_grant_can_allow_has_another_code(packet: bytes, target: str) -> None:
    (denial,) = nflog.parse(message(packet))
    assert denial == Denial("packet", target, "protocol")
    assert denial.grant is None


def test_gateways_own_doors_and_gates_own_packets() -> None:
    packet = v4("192.0.0.1", 6, 22)
    assert list(nflog.parse(message(packet, LOCAL_IN))) == [Denial("packet", "192.0.0.1:22/tcp", "gateway")]
    assert list(nflog.parse(message(packet, LOCAL_OUT))) == []


@pytest.mark.parametrize("packet", [v6("ff02::2", 58, b"\x85" + bytes(7)), v4("224.0.0.22", 2)])
def test_network_stacks_own_noise_is_no_denial(packet: bytes) -> None:
    for hook in (LOCAL_IN, FORWARD):
        assert list(nflog.parse(message(packet, hook))) == []


def test_several_messages_in_one_datagram() -> None:
    data = message(v4("192.0.2.1", 6, 1)) + message(b"", kind=3) + message(v4("192.0.2.1", 6, 2))
    assert [denial.target for denial in nflog.parse(data)] == ["192.0.2.1:1/tcp", "192.0.2.1:2/tcp"]


@given(st.binary(max_size=200), st.sampled_from([FORWARD, LOCAL_IN, LOCAL_OUT, 255]))
def test_any_packet_is_read_without_error(packet: bytes, hook: int) -> None:
    for denial in nflog.parse(message(packet, hook)):
        assert denial.layer == "packet"
        assert len(denial.target) < 80


@given(st.binary(max_size=400))
def test_any_datagram_is_read_without_error(data: bytes) -> None:
    list(nflog.parse(data))
