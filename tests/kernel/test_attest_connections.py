"""Attestation reads the conntrack tables: an entry made by hand lets packets by, and is found; honest ones hold."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from policy.connections import Connection, Ends
from sandbox.attest import network as attest_network
from sandbox.attest import network_view
from sandbox.kernel.net import conntrack, netns
from tests.kernel import internet, planted
from tests.kernel.hands import Tamper, chain, old_nat
from tests.kernel.internet import Internet, NetworkedWorld
from tests.kernel.live_runs import Live, live, until
from tests.kernel.planted import TCP, UDP, ends
from tests.kernel.test_attest_network import Hand

GRANTS = internet.entries(
    ("93.184.216.34", "[80]", "tcp"), ("9.9.9.9", "[123]", "udp"), ("2606:4700::1111", "[80]", "tcp"),
    ("api.example.com", "[80]", "tcp"), ("www.example.com", "[443]", "tls"),
)  # fmt: skip
# Sends to an address that is not granted, and to one that is, until it is ended.
ASKS = """
import socket, time
def sender(port, to):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.bind(("0.0.0.0", port))
    s.connect(to)
    return s
both = [sender(40000, ("9.9.9.9", 9999)), sender(40001, ("9.9.9.9", 123))]
while True:
    for s in both:
        try:
            s.send(b"out")
        except OSError:
            pass
    time.sleep(0.05)
"""
UNGRANTED = ends("192.0.0.2", 40000, "9.9.9.9", 9999)
GRANTED = ends("192.0.0.2", 40001, "9.9.9.9", 123)


@contextlib.contextmanager
def running(
    tmp_path: Path, warm: Path, net: Internet, code: str, files: dict[str, str] | None = None
) -> Iterator[Hand]:
    world = internet.configured(NetworkedWorld(tmp_path, warm=warm), net, attest_seconds=1, on_drift="alarm")
    with live(world, code, files=files, network="full", more=GRANTS) as one:
        yield Hand(one, net)
    assert net.leftovers() == []


def place_of(one: Live) -> str:
    """The gateway's IPv4 address towards the host."""
    network = one.made.network
    assert network is not None
    line = next(line for line in network.gateway.lines if line.startswith("address 198.19."))
    return line.split()[1].partition("/")[0]


def inside(hand: Hand, place: str) -> Callable[[Callable[[], None]], None]:
    network = hand.one.made.network
    assert network is not None
    fd = hand.net.spaces["host"] if place == "host" else getattr(network, place).fd
    return lambda call: netns.within(fd, call)


def tracked(one: Live) -> list[Connection]:
    """Return the connections in the gateway's table."""
    network = one.made.network
    assert network is not None
    return netns.within(network.gateway.fd, conntrack.connections)


def found(one: Live) -> list[tuple[str, str]]:
    return [(layer.name, layer.found) for layer in one.report().layers if not layer.holds]


def test_entry_that_lets_flow_pass_is_drift(tmp_path: Path, warm: Path, net: Internet) -> None:
    with running(tmp_path, warm, net, ASKS) as hand:
        one, place = hand.one, place_of(hand.one)
        server = net.listen("world", "9.9.9.9", 9999, udp=True)
        gateway = inside(hand, "gateway")
        until(lambda: tracked(one))
        time.sleep(0.5)
        assert (found(one), server.received) == ([], 0), "control: the flow is refused, and the granted one is equal"
        gateway(lambda: planted.entry(UDP, UNGRANTED, source=place))
        until(lambda: server.received)
        assert found(one) == [("network", "udp 192.0.0.2:40000 to 9.9.9.9:9999")]
        assert one.drift_after(0)[0][0] == "network", "the supervisor's own round says it as well"
        gateway(lambda: planted.gone(UDP, UNGRANTED))
        until(lambda: not found(one))
        got = server.received
        time.sleep(0.5)
        assert (server.received, found(one)) == (got, []), "control: without the entry it is refused again"


def test_host_entry_that_redirects_is_drift(tmp_path: Path, warm: Path, net: Internet) -> None:
    with running(tmp_path, warm, net, ASKS) as hand:
        one = hand.one
        elsewhere = net.listen("world", "10.8.8.8", 7777, udp=True)
        gateway, host = inside(hand, "gateway"), inside(hand, "host")
        until(lambda: tracked(one))
        assert found(one) == [], "control"
        sent = tracked(one)[0].answered
        begun = planted.back(sent)

        def redirect() -> None:
            planted.gone(UDP, begun)
            planted.entry(UDP, begun, source=internet.HOST, destination="10.8.8.8", port=7777)

        def at_once() -> bool:
            # The agent sends again and again: its next packet may come between the two.
            with contextlib.suppress(FileExistsError):
                host(redirect)
                return True
            return False

        until(at_once)
        until(lambda: elsewhere.received)
        ((layer, what),) = found(one)
        assert (layer, what.endswith("to 9.9.9.9:123, led to 10.8.8.8:7777")) == ("network", True), what
        host(lambda: planted.gone(UDP, begun))
        gateway(lambda: planted.gone(UDP, GRANTED))
        assert found(one) == []


def _by_nft(hand: Hand) -> contextlib.AbstractContextManager[None]:
    base = "nat hook prerouting priority -110; policy accept"
    return chain("host", base, "ip daddr 9.9.9.9 udp dport 123 dnat to 10.8.8.8")(hand)


@pytest.mark.parametrize("make", [_by_nft, old_nat("9.9.9.9/32")], ids=["nft", "iptables"])
def test_host_rule_that_redirects_is_drift(tmp_path: Path, warm: Path, net: Internet, make: Tamper) -> None:
    with running(tmp_path, warm, net, ASKS) as hand:
        one, place = hand.one, place_of(hand.one)
        elsewhere = net.listen("world", "10.8.8.8", 123, udp=True, name="elsewhere")
        until(lambda: tracked(one))
        assert (found(one), elsewhere.received) == ([], 0), "control"
        with make(hand):
            # What is tracked keeps its way: the next packet is the first of a connection again.
            inside(hand, "host")(lambda: conntrack.forget(place))
            until(lambda: elsewhere.received)
            assert [layer for layer, _ in found(one)] == ["network"]
        inside(hand, "host")(lambda: conntrack.forget(place))
        until(lambda: not found(one))


Plant = tuple[str, Callable[[str], None], Callable[[str], None], str]


def _planted(place: str, protocol: int, sent: Callable[[str], Ends], says: str, **more: Any) -> Plant:
    def make(own: str) -> None:
        words: dict[str, Any] = {
            key: value.format(own=own) if isinstance(value, str) else value for key, value in more.items()
        }
        planted.entry(protocol, sent(own), **words)

    return place, make, lambda own: planted.gone(protocol, sent(own)), says


# What is put into a table by hand -> where, and what attestation says.
PLANTED: dict[str, Plant] = {
    "a port that is not granted": _planted(
        "gateway", TCP, lambda own: ends("192.0.0.2", 1, "93.184.216.34", 22), "93.184.216.34:22", source="{own}",
    ),
    "a granted port by another protocol": _planted(
        "gateway", UDP, lambda own: ends("192.0.0.2", 1, "93.184.216.34", 80), "udp", source="{own}",
    ),
    "a granted flow led elsewhere": _planted(
        "gateway", TCP, lambda own: ends("192.0.0.2", 1, "93.184.216.34", 80), "led to 10.8.8.8:22",
        source="{own}", destination="10.8.8.8", port=22,
    ),
    "a granted flow under the agent's own address": _planted(
        "gateway", TCP, lambda own: ends("192.0.0.2", 1, "93.184.216.34", 80), "93.184.216.34:80",
    ),
    "a private address on a name's port": _planted(
        "gateway", TCP, lambda own: ends("192.0.0.2", 1, "10.8.8.8", 80), "10.8.8.8:80", source="{own}",
    ),
    "a name for TLS that goes by the gate": _planted(
        "gateway", TCP, lambda own: ends("192.0.0.2", 1, "93.184.216.35", 443), "93.184.216.35:443", source="{own}",
    ),
    "another address of an agent": _planted(
        "gateway", TCP, lambda own: ends("192.0.0.3", 1, "93.184.216.34", 80), "192.0.0.3", source="{own}",
    ),
    "a way in": _planted(
        "gateway", TCP, lambda own: ends("9.9.9.9", 1, own, 80), "9.9.9.9:1", destination="192.0.0.2", port=80,
    ),
    "a door of the gateway that is none": _planted(
        "gateway", TCP, lambda own: ends("192.0.0.2", 1, "192.0.0.1", 8443), "192.0.0.1:8443",
    ),
    "a port for the gate itself": _planted(
        "gateway", TCP, lambda own: ends(own, 1, "93.184.216.34", 22), "93.184.216.34:22",
    ),
    "a granted flow in a zone": _planted(
        "gateway", TCP, lambda own: ends("192.0.0.2", 1, "93.184.216.34", 80), "zone", source="{own}", zone=7,
    ),
    "IPv6 that is not granted": _planted(
        "gateway", UDP, lambda own: ends("fd00:c0:0:1::2", 1, "2606:4700::2222", 443), "2606:4700::2222",
    ),
    "an entry in the agent's namespace": _planted(
        "agent", UDP, lambda own: ends("192.0.0.2", 1, "93.184.216.34", 80), "udp",
    ),
}  # fmt: skip


def test_every_entry_that_no_rule_lets_begin_is_drift(tmp_path: Path, warm: Path, net: Internet) -> None:
    with running(tmp_path, warm, net, "import time\ntime.sleep(300)\n") as hand:
        one, own = hand.one, place_of(hand.one)
        assert found(one) == [], "control"
        for name, (place, make, undo, says) in PLANTED.items():
            inside(hand, place)(functools.partial(make, own))
            ((layer, what),) = found(one)
            assert (layer, says in what) == ("network", True), (name, what)
            if name != "a granted flow in a zone":
                inside(hand, place)(functools.partial(undo, own))
            else:
                inside(hand, place)(lambda: conntrack.forget("192.0.0.2"))
            assert found(one) == [], name
        granted = ends("192.0.0.2", 1, "93.184.216.34", 80)
        inside(hand, "gateway")(lambda: planted.entry(TCP, granted, source=own))
        assert found(one) == [], "control: an entry that the rules would let begin holds"
        helped = ends("192.0.0.2", 2, "93.184.216.34", 80)
        inside(hand, "gateway")(lambda: planted.entry(TCP, helped, helper="ftp"))
        assert [what.endswith("(helper)") for _, what in found(one)] == [True]
        inside(hand, "gateway")(lambda: planted.expected(TCP, helped, ends("93.184.216.34", 1, own, 5000)))
        network, state = one.made.network, one.world.state
        assert network is not None
        view = attest_network.view(network, network_view.ListingCache(), state=state)
        rules = (one.directory / "policy" / "firewall.nft").read_bytes()
        layers = attest_network.judge(network, view, rules, state=state, family=set())
        assert view.gateway.expected == 1
        assert any("expects" in layer.expected for layer in layers)


MANY = """
import socket, ssl, time
held = []
for at in range(120):
    held.append(socket.create_connection(("93.184.216.34", 80), timeout=10))
for at in range(40):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.connect(("9.9.9.9", 123))
    s.send(b"x")
    held.append(s)
(*_, (address, _)) = [one[4] for one in socket.getaddrinfo("www.example.com", 443, socket.AF_INET, socket.SOCK_STREAM)]
named = socket.getaddrinfo("api.example.com", 80, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]
for at in range(30):
    held.append(socket.create_connection((named, 80), timeout=10))
context = ssl.create_default_context(cafile="/workspace/ca.pem")
for at in range(8):
    plain = socket.create_connection((address, 443), timeout=10)
    held.append(context.wrap_socket(plain, server_hostname="www.example.com"))
refused = 0
for host, port in (("9.9.9.9", 80), ("10.8.8.8", 22), ("93.184.216.34", 443), ("192.0.0.1", 8443), ("192.0.0.7", 53)):
    try:
        held.append(socket.create_connection((host, port), timeout=2))
    except OSError:
        refused += 1
for host in ("192.0.0.1", "192.0.0.7", "224.0.0.1", "255.255.255.255", "198.19.0.1"):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
    try:
        s.sendto(b"no question", (host, 53))
    except OSError:
        pass
    held.append(s)
s = socket.create_connection(("93.184.216.34", 80), timeout=10)
s.send(b"all is open")
held.append(s)
end, turn = time.monotonic() + 240, 0
while time.monotonic() < end:
    # New ones come and go all the time.
    try:
        socket.create_connection(("93.184.216.34", 80), timeout=5).close()
        turn += 1
        if turn % 40 == 0:
            socket.getaddrinfo("api.example.com", 80)
    except OSError:
        pass
    time.sleep(0.05)
"""


def test_many_granted_flows_are_no_drift(tmp_path: Path, warm: Path, net: Internet) -> None:
    with running(tmp_path, warm, net, MANY, {"ca.pem": net.certificate}) as hand:
        one = hand.one
        until(lambda: len(tracked(one)) > 205)
        time.sleep(3)
        assert (found(one), one.drift()) == ([], [])
        # Connections outlive the elements by which they began.
        for name in (name for name in hand.sets().values() if name.startswith("n")):
            hand.nft("gateway", "flush", "set", "inet", "covenant", name)
        time.sleep(2)
        assert (found(one), one.drift()) == ([], [])
        assert len(tracked(one)) > 205, "control: they are open still"
        assert not one.answers
