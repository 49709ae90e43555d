"""The walls, tested from a place that no agent reaches: raw frames from inside its own namespace.

A sentry under the agent's control could send these. The gateway is the real one, with its rules, on the host of the
tests' internet. The namespace has no sandbox in it, so that the test can send.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from policy import errors
from sandbox.config import Config
from sandbox.kernel.net import conntrack
from sandbox.kernel.net import netns as spaces
from sandbox.network import addresses as own
from sandbox.network import base_rules, uplink
from tests.kernel import internet, live_runs
from tests.kernel.internet import METADATA, RESOLVER, Internet
from tests.kernel.open_gateway import Opened
from tests.unit.policy.compile import sample

ENTRIES = (("93.184.216.34", "[123, 5000]", "udp"), ("93.184.216.34", "[80]", "tcp"), (METADATA, "[80]", "tcp"))
_ETH_ARP, _ETH_IP, _ETH_IP6, _ETH_VLAN = 0x0806, 0x0800, 0x86DD, 0x8100


def mac(text: str) -> bytes:
    return bytes.fromhex(text.replace(":", ""))


def ethernet(payload: bytes, kind: int, *, to: str = own.GATEWAY_MAC, by: str = own.AGENT_MAC) -> bytes:
    return mac(to) + mac(by) + struct.pack("!H", kind) + payload


def checksum(data: bytes) -> int:
    data += b"\0" * (len(data) % 2)
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return int(~total & 0xFFFF)


def udp4(
    source: str, to: str, port: int, data: bytes = b"ask", *, fragment: int = 0, whole: bytes | None = None
) -> bytes:
    """An IPv4 packet with a datagram; ``fragment`` is the field of flags and offset, ``whole`` replaces the payload."""
    body = struct.pack("!HHHH", 40000, port, 8 + len(data), 0) + data if whole is None else whole
    head = struct.pack(
        "!BBHHHBBH4s4s", 0x45, 0, 20 + len(body), 7, fragment, 64, 17, 0, socket.inet_aton(source), socket.inet_aton(to)
    )
    return head[:10] + struct.pack("!H", checksum(head)) + head[12:] + body


def udp6(source: str, to: str, port: int, data: bytes = b"ask") -> bytes:
    """An IPv6 packet with a datagram."""
    ends = socket.inet_pton(socket.AF_INET6, source) + socket.inet_pton(socket.AF_INET6, to)
    body = struct.pack("!HHHH", 40000, port, 8 + len(data), 0) + data
    total = checksum(ends + struct.pack("!IxxxB", len(body), 17) + body)
    body = body[:6] + struct.pack("!H", total) + body[8:]
    return struct.pack("!IHBB", 6 << 28, len(body), 17, 64) + ends + body


def arp(sender: str, sender_mac: str, target: str, operation: int = 1) -> bytes:
    head = struct.pack("!HHBBH", 1, _ETH_IP, 6, 4, operation)
    return head + mac(sender_mac) + socket.inet_aton(sender) + bytes(6) + socket.inet_aton(target)


def echo4(source: str, to: str) -> bytes:
    """An ICMP echo request."""
    body = b"\x08\x00" + struct.pack("!HHH", 0, 1, 1) + b"ping"
    body = body[:2] + struct.pack("!H", checksum(body)) + body[4:]
    packet = bytearray(udp4(source, to, 0, whole=body))
    packet[9], packet[10:12] = 1, b"\0\0"
    packet[10:12] = struct.pack("!H", checksum(bytes(packet[:20])))
    return bytes(packet)


@pytest.fixture(scope="module")
def net() -> Iterator[Internet]:
    with internet.made() as made:
        yield made
        assert made.leftovers() == []


@pytest.fixture(scope="module")
def opened(net: Internet) -> Iterator[Opened]:
    artefacts = sample.compiled(
        sample.manifest(network="full", more=sample.entries(*ENTRIES, ("2606:4700::1111", "[123]", "udp")))
    )
    with Opened(net, artefacts) as made:
        yield made


@pytest.fixture
def wire(opened: Opened) -> Iterator[socket.socket]:
    with opened.packet_socket() as made:
        yield made


def answered(wire: socket.socket, frame: bytes, *, port: int = 123, wait: float = 5) -> bool:
    """Whether the world answered this frame: an answer to port 40000 comes back."""
    while True:  # what came before
        wire.setblocking(False)
        try:
            wire.recv(65536)
        except BlockingIOError:
            break
    wire.settimeout(min(wait, 0.3))
    try:
        wire.send(frame)
    except OSError as e:
        if e.errno != errno.ENOBUFS:  # what the wall on this end says
            raise
        return False
    until = time.monotonic() + wait
    while time.monotonic() < until:
        with contextlib.suppress(TimeoutError):
            data = wire.recv(65536)
            if data[:6] == mac(own.AGENT_MAC) and struct.pack("!HH", port, 40000) in data[:64]:
                return True
    return False


GOOD4 = ethernet(udp4(own.AGENT4, "93.184.216.34", 123), _ETH_IP)
GOOD6 = ethernet(udp6(own.AGENT6, "2606:4700::1111", 123), _ETH_IP6)
SPOOFED = {
    "the gateway's address": ethernet(udp4(own.GATEWAY4, "93.184.216.34", 123), _ETH_IP),
    "another's address": ethernet(udp4("192.0.0.3", "93.184.216.34", 123), _ETH_IP),
    "the uplink's address": ethernet(udp4("198.19.0.16", "93.184.216.34", 123), _ETH_IP),
    "the resolver's address": ethernet(udp4(RESOLVER, "93.184.216.34", 123), _ETH_IP),
    "loopback": ethernet(udp4("127.0.0.1", "93.184.216.34", 123), _ETH_IP),
    "no address": ethernet(udp4("0.0.0.0", "93.184.216.34", 123), _ETH_IP),
    "another's address of IPv6": ethernet(udp6("fd00:c0:0:1::3", "2606:4700::1111", 123), _ETH_IP6),
    "the gateway's address of IPv6": ethernet(udp6(own.GATEWAY6, "2606:4700::1111", 123), _ETH_IP6),
    "a link-local address": ethernet(udp6("fe80::2", "2606:4700::1111", 123), _ETH_IP6),
    "another's MAC": ethernet(udp4(own.AGENT4, "93.184.216.34", 123), _ETH_IP, by="02:c0:00:00:00:09"),
    "the gateway's MAC": ethernet(udp4(own.AGENT4, "93.184.216.34", 123), _ETH_IP, by=own.GATEWAY_MAC),
    "a VLAN": ethernet(struct.pack("!HH", 5, _ETH_IP) + udp4(own.AGENT4, "93.184.216.34", 123), _ETH_VLAN),
    "ARP for another": ethernet(arp("192.0.0.3", own.AGENT_MAC, own.GATEWAY4), _ETH_ARP),
    "ARP of another's MAC": ethernet(arp(own.AGENT4, "02:c0:00:00:00:09", own.GATEWAY4), _ETH_ARP),
    "ARP as the gateway": ethernet(arp(own.GATEWAY4, own.AGENT_MAC, own.AGENT4, 2), _ETH_ARP),
    "some other protocol": ethernet(b"hello" * 10, 0x88B5),
}


def test_frames_of_its_own_pass_and_forged_ones_meet_both_walls(opened: Opened, wire: socket.socket) -> None:
    assert answered(wire, GOOD4)
    assert answered(wire, GOOD6) == opened.net.forwards_ipv6()
    for role in ("agent", "gateway"):
        before = opened.dropped(role)
        for name, frame in SPOOFED.items():
            assert not answered(wire, frame, wait=0.2), (role, name)  # the wall's counter says the same
            now = opened.dropped(role)
            assert now > before, (role, name)
            before = now
        assert answered(wire, GOOD4)
        if role == "agent":
            # Without the first wall the second has to stand alone.
            opened.run("agent", "nft", "delete", "table", "netdev", "covenant_walls")
    opened.net.run("agent", "nft", "-f", "-", given=base_rules.AGENT.decode(), within=opened.gateway.spaces.agent)


def test_arp_and_neighbours_are_answered_for_gateway_alone(opened: Opened, wire: socket.socket) -> None:
    def asked(target: str, seconds: float = 0.5) -> bool:
        wire.send(ethernet(arp(own.AGENT4, own.AGENT_MAC, target), _ETH_ARP, to="ff:ff:ff:ff:ff:ff"))
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with contextlib.suppress(TimeoutError):
                data = wire.recv(2000)
                if data[12:14] == struct.pack("!H", _ETH_ARP) and data[20:22] == b"\0\x02":
                    return data[28:32] == socket.inet_aton(target)
        return False

    assert asked(own.GATEWAY4, 30)
    for other in (opened.place.ipv4, own.HOST4, "192.0.0.5"):
        assert not asked(other), other


def test_fragments_are_put_together_before_they_are_judged(opened: Opened, wire: socket.socket) -> None:
    def in_two(port: int, wait: float = 5) -> bool:
        whole = udp4(own.AGENT4, "93.184.216.34", port, b"x" * 64)[20:]
        first = udp4(own.AGENT4, "93.184.216.34", port, fragment=0x2000, whole=whole[:8])
        wire.send(ethernet(first, _ETH_IP))
        second = udp4(own.AGENT4, "93.184.216.34", port, fragment=1, whole=whole[8:])
        return answered(wire, ethernet(second, _ETH_IP), port=port, wait=wait)

    assert in_two(123)
    server = opened.net.listen("world", "93.184.216.34", 124, udp=True)
    assert not in_two(124, wait=1)
    # A later fragment alone, without a header that a rule could read, is nothing.
    alone = ethernet(udp4(own.AGENT4, "93.184.216.34", 0, fragment=1, whole=b"y" * 64), _ETH_IP)
    assert not answered(wire, alone, wait=1)
    assert server.seen == []


def test_echo_is_refused_and_error_about_granted_flow_comes_back(opened: Opened, wire: socket.socket) -> None:
    counter = ("gateway", "nft", "list", "counter", "inet", "covenant", "refused_other")
    before = opened.run(*counter)
    wire.send(ethernet(echo4(own.AGENT4, "93.184.216.34"), _ETH_IP))
    live_runs.until(lambda: opened.run(*counter) != before)

    def ask() -> str:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
            made.settimeout(5)
            # Granted, and no server listens there: the world's own error must arrive.
            made.connect(("93.184.216.34", 5000))
            made.send(b"ask")
            try:
                return str(made.recv(10))
            except ConnectionRefusedError:
                return "refused"

    assert spaces.within(opened.gateway.spaces.agent, ask) == "refused"


def test_run_holds_so_many_connections_and_no_more(opened: Opened) -> None:
    held: list[socket.socket] = []

    def connect() -> int:
        refused = 0
        for _ in range(base_rules.MAX_CONNECTIONS + 40):
            made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            held.append(made)
            made.connect(("93.184.216.34", 123))
            made.send(b"ask")
            made.settimeout(0.5)
            try:
                made.recv(10)
            except OSError:
                refused += 1
        return refused

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    try:
        refused = spaces.within(opened.gateway.spaces.agent, connect)
    finally:
        for one in held:
            one.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert refused >= 40


def test_gateway_takes_no_settings_from_link(opened: Opened) -> None:
    expected = {
        "net.ipv4.conf.agent0.accept_redirects": "0", "net.ipv6.conf.agent0.accept_ra": "0",
        "net.ipv6.conf.agent0.accept_redirects": "0", "net.ipv4.conf.all.accept_source_route": "0",
        "net.ipv4.conf.all.send_redirects": "0", "net.ipv4.icmp_ratelimit": "0", "net.ipv6.icmp.ratelimit": "0",
    }  # fmt: skip
    found = opened.run("gateway", "sysctl", *expected)
    assert dict(line.split(" = ") for line in found.splitlines()) == expected


def test_second_gateway_has_another_place_and_last_takes_table(net: Internet, opened: Opened) -> None:
    artefacts = sample.compiled(sample.manifest(network="full", more=sample.entries(*ENTRIES)))
    with Opened(net, artefacts) as second:
        assert second.place != opened.place
        names = [line.split()[1] for line in net.run("host", "ip", "-o", "link").splitlines() if "cv-" in line]
        assert len(names) == 2
    assert "covenant_uplink" in net.run("host", "nft", "list", "tables")


def test_place_taken_is_left_to_whose_it_is(net: Internet) -> None:
    artefacts = sample.compiled(sample.manifest(network="full"))
    second = Opened(net, artefacts)
    wanted = own.uplink(zlib.crc32(second.run_id.encode()))
    net.run("host", "ip", "route", "add", f"{wanted.ipv4}/32", "dev", "eth0")
    try:
        with second:
            assert second.place == own.uplink(zlib.crc32(second.run_id.encode()) + 1)
    finally:
        net.run("host", "ip", "route", "del", f"{wanted.ipv4}/32", "dev", "eth0")
    with Opened(net, artefacts) as third:
        # The control: while no other holds it, a run gets the place that its id leads to.
        assert third.place == own.uplink(zlib.crc32(third.run_id.encode()))


def test_two_interfaces_at_once_are_refused(net: Internet, opened: Opened) -> None:
    net.run("host", "ip", "link", "add", "eth1", "type", "veth", "peer", "name", "far1")
    try:
        other = Opened(net, sample.compiled(sample.manifest(network="full")))
        other._config = Config(uplink="eth1", resolvers=(RESOLVER,))
        with pytest.raises(errors.NotEnforceableError, match="`eth0`"), other:
            pass
    finally:
        net.run("host", "ip", "link", "del", "eth1")


def test_host_forgets_connections_of_run_over(net: Internet) -> None:
    artefacts = sample.compiled(sample.manifest(network="full", more=sample.entries(*ENTRIES)))

    def remembered() -> list[str]:
        lines = net.within("host", lambda: Path("/proc/thread-self/net/nf_conntrack").read_text()).splitlines()
        return [line for line in lines if f"src={place}" in line]

    with Opened(net, artefacts) as second:
        place = second.place.ipv4

        def connect() -> None:
            with socket.create_connection(("93.184.216.34", 80), timeout=10):
                pass

        spaces.within(second.gateway.spaces.agent, connect)
        assert remembered()
    assert not remembered()


def test_what_is_said_while_run_ends_is_forgotten_too(net: Internet, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a gate does, which ends after the way out: it answers a server whose connection was forgotten a moment ago."""
    artefacts = sample.compiled(sample.manifest(network="full", more=sample.entries(*ENTRIES)))
    forget = conntrack.forget
    with Opened(net, artefacts) as second:
        place, agent = second.place.ipv4, os.dup(second.gateway.spaces.agent)

        def speak() -> None:
            with contextlib.suppress(OSError), socket.create_connection(("93.184.216.34", 80), timeout=1):
                pass

        def forget_and_speak(address: str) -> None:
            forget(address)
            spaces.within(agent, speak)

        spaces.within(agent, speak)
        monkeypatch.setattr(conntrack, "forget", forget_and_speak)
    os.close(agent)
    lines = net.within("host", lambda: Path("/proc/thread-self/net/nf_conntrack").read_text()).splitlines()
    assert not [line for line in lines if f"src={place}" in line]


def test_what_is_remembered_of_run_is_bounded_whatever_it_opens_and_closes(net: Internet) -> None:
    """The kernel would remember a closed connection for two minutes, and `ct count` leaves those out."""
    artefacts = sample.compiled(sample.manifest(network="full", more=sample.entries(*ENTRIES)))
    most = begun = 0
    with Opened(net, artefacts) as second, contextlib.ExitStack() as stack:
        place = second.place.ipv4

        def hold() -> None:
            for _ in range(base_rules.MAX_CONNECTIONS - 32):
                made = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
                made.connect(("93.184.216.34", 123))
                made.send(b"ask")

        def close_at_once(seconds: float) -> int:
            count, until = 0, time.monotonic() + seconds
            while time.monotonic() < until:
                with contextlib.suppress(OSError), socket.create_connection(("93.184.216.34", 80), timeout=10):
                    count += 1
            return count

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        spaces.within(second.gateway.spaces.agent, hold)
        for _ in range(6):
            begun += spaces.within(second.gateway.spaces.agent, lambda: close_at_once(1.0))
            most = max(most, second.gateway.remembered.count())
            second.gateway.collect()
        lines = net.within("host", lambda: Path("/proc/thread-self/net/nf_conntrack").read_text()).splitlines()
        assert begun > base_rules.BEGUN_AT_ONCE
        assert begun + base_rules.MAX_CONNECTIONS - 32 > most
        assert most <= base_rules.MAX_ENTRIES
        assert len([line for line in lines if f"src={place}" in line]) <= base_rules.MAX_ENTRIES

        def taken_away() -> bool:
            before = second.gateway.remembered.count()
            second.gateway.collect()
            return second.gateway.remembered.count() < before

        # The control: an expired entry stays until a collection looks at it.
        live_runs.until(taken_away)


def test_without_ipv6_on_host_agent_hears_so_at_once(
    net: Internet, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulate the answer of a kernel before 6.17 that is no router."""
    artefacts = sample.compiled(sample.manifest(network="full"))
    monkeypatch.setattr(uplink, "held_table", lambda: uplink.Before("eth0", False, None))

    def connect() -> int:
        with socket.socket(socket.AF_INET6) as made:
            made.settimeout(10)
            return made.connect_ex(("2606:4700::1111", 80))

    # Not granted there; where none is forwarded, that is what an agent hears of it.
    there = errno.ECONNREFUSED if net.forwards_ipv6() else errno.ENETUNREACH
    assert spaces.within(opened.gateway.spaces.agent, connect) == there
    with Opened(net, artefacts) as second:
        assert spaces.within(second.gateway.spaces.agent, connect) == errno.ENETUNREACH


def test_host_that_became_router_meanwhile_is_left_one(net: Internet) -> None:
    """As docker makes it one when it starts; `opened` of this module is not used, so that this run is the last."""
    with internet.made() as other:
        artefacts = sample.compiled(sample.manifest(network="full"))
        with Opened(other, artefacts):
            other.run("host", "sysctl", "-q", "-w", "net.ipv4.ip_forward=1")
        assert other.run("host", "sysctl", "-n", "net.ipv4.conf.eth0.forwarding").strip() == "1"
        other.run("host", "sysctl", "-q", "-w", "net.ipv4.ip_forward=0")
        with Opened(other, artefacts):
            assert other.run("host", "sysctl", "-n", "net.ipv4.conf.eth0.forwarding").strip() == "1"
        assert other.leftovers() == []


def test_interface_not_there_is_refused_and_nothing_is_left(net: Internet, opened: Opened) -> None:
    artefacts = sample.compiled(sample.manifest(network="full", more=sample.entries(*ENTRIES)))
    before = net.leftovers()
    one = Opened(net, artefacts)
    one._config = Config(uplink="eth9")
    with pytest.raises(errors.NotEnforceableError), one:
        pass
    assert net.leftovers() == before


def test_interface_that_goes_while_run_is_live_is_refused_to_next(net: Internet) -> None:
    with internet.made() as other:
        artefacts = sample.compiled(sample.manifest(network="full"))
        with Opened(other, artefacts):
            for change in (("down",), ("name", "eth8")):
                other.run("host", "ip", "link", "set", "eth0", *change)
            with pytest.raises(errors.NotEnforceableError, match="is not an interface"), Opened(other, artefacts):
                pass
            other.run("host", "ip", "link", "set", "eth8", "name", "eth0")
        assert other.leftovers() == []
