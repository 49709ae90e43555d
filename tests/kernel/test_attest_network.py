"""Attestation of a live run with a network: each thing that holds it is changed by hand, and found.

One run whose operator is only told. Every change is made inside of the run's own namespaces, and undone.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from policy import errors
from sandbox.attest import network as attest_network
from sandbox.kernel.net import dump, netlink, netns
from sandbox.network import addresses
from sandbox.network import namespaces as run_netns
from tests.kernel import internet
from tests.kernel.internet import Internet, NetworkedWorld
from tests.kernel.live_runs import Live, live

GRANTS = internet.entries(
    ("93.184.216.34", "[80]", "tcp"), ("2606:4700::1111", "[80]", "tcp"), ("api.example.com", "[443]", "tls"),
)  # fmt: skip


@dataclass(frozen=True)
class Hand:
    """Root's hand in the namespaces of one run."""

    one: Live
    net: Internet

    def do(self, place: str, *command: str) -> str:
        """Run a command in ``agent``, ``gateway`` or the ``host``."""
        network = self.one.made.network
        assert network is not None
        fd = self.net.spaces["host"] if place == "host" else getattr(network, place).fd
        done: subprocess.CompletedProcess[str] = netns.within(
            fd, lambda: subprocess.run(command, capture_output=True, text=True, timeout=60)
        )
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout

    def nft(self, place: str, *words: str) -> str:
        """Change or show rules there."""
        return self.do(place, "/usr/sbin/nft", *words)

    def ip(self, place: str, *words: str) -> str:
        """Change devices, addresses or routes there."""
        return self.do(place, "/usr/sbin/ip", *words)

    @contextlib.contextmanager
    def both(self, place: str, program: str, make: str, undo: str) -> Iterator[None]:
        """Make something, and undo it."""
        self.do(place, program, *make.split())
        try:
            yield
        finally:
            self.do(place, program, *undo.split())

    def sets(self) -> dict[str, str]:
        """The gateway's sets by the first letters of their names."""
        lines = [line.split() for line in self.nft("gateway", "list", "sets", "table", "inet", "covenant").splitlines()]
        return {words[1][:2]: words[1] for words in lines if words[:1] == ["set"]}


@contextlib.contextmanager
def rewritten(hand: Hand, place: str, *words: str) -> Iterator[None]:
    """Change rules by one command; put the whole table back afterwards."""
    table = next(words[i : i + 2] for i in range(len(words)) if words[i] in ("inet", "netdev"))
    before = hand.nft(place, "-s", "list", "table", *table)
    hand.nft(place, *words)
    try:
        yield
    finally:
        again = f"delete table {' '.join(table)}\n{before}"
        path = Path(hand.one.world.base, "again.nft")
        path.write_text(again)
        hand.nft(place, "-f", str(path))


def _rule(hand: Hand, chain: str, says: str) -> contextlib.AbstractContextManager[None]:
    """A rule less."""
    listed = hand.nft("gateway", "-a", "list", "chain", "inet", "covenant", chain).splitlines()
    handle = next(line for line in listed if says in line).rpartition(" ")[2]
    return rewritten(hand, "gateway", "delete", "rule", "inet", "covenant", chain, "handle", handle)


@contextlib.contextmanager
def a_stranger(hand: Hand, place: str) -> Iterator[None]:
    """Start a foreign process in the namespace."""
    network = hand.one.made.network
    assert network is not None
    fd = getattr(network, place).fd
    stranger = netns.within(fd, lambda: subprocess.Popen(["/usr/bin/sleep", "60"]))
    with stranger:
        try:
            yield
        finally:
            stranger.kill()


@contextlib.contextmanager
def _unbound(hand: Hand) -> Iterator[None]:
    """One limit of the gates' own cgroup is raised."""
    network = hand.one.made.network
    assert network is not None
    file, held = next((Path(file), value) for file, value in network.gates.items() if "pids.max" in file)
    file.write_text("100")
    try:
        yield
    finally:
        file.write_text(held)


@contextlib.contextmanager
def _escaped(hand: Hand) -> Iterator[None]:
    """Move a gate's requesting process out of the cgroup that bounds both.

    It lives in the host's network, not the gateway's.
    """
    network = hand.one.made.network
    assert network is not None
    place = next(Path(file).parent for file in network.gates if "pids.max" in file)
    pid = (place / "cgroup.procs").read_text().split()[0]
    (place.parent / "cgroup.procs").write_text(pid)
    try:
        yield
    finally:
        (place / "cgroup.procs").write_text(pid)


IP, NFT, SYSCTL = "/usr/sbin/ip", "/usr/sbin/nft", "/usr/sbin/sysctl"
ELEMENT = "inet covenant {} {{ {} }}"
Tamper = Callable[[Hand], "contextlib.AbstractContextManager[None]"]
# What is done by hand -> the layer that says so, and a word of what it says.
TAMPERS: dict[str, tuple[Tamper, str, str]] = {
    "a rule less, which grants no more": (lambda h: _rule(h, "forward", "goto refuse"), "firewall", "grants no more"),
    "a rule less that refuses": (lambda h: _rule(h, "granted", "goto refuse"), "firewall", ""),
    "a rule more": (
        lambda h: rewritten(h, "gateway", "insert", "rule", "inet", "covenant", "forward", "accept"), "firewall", "",
    ),
    "a policy that accepts": (
        lambda h: rewritten(h, "gateway", "chain", "inet", "covenant", "forward", "{ policy accept ; }"),
        "firewall", "",
    ),
    "an address more": (
        lambda h: h.both("gateway", NFT, f"add element {ELEMENT.format(h.sets()['a4'], '9.9.9.9')}",
                         f"delete element {ELEMENT.format(h.sets()['a4'], '9.9.9.9')}"),
        "firewall", "9.9.9.9",
    ),
    "a name that leads to a private address": (
        lambda h: h.both("gateway", NFT, f"add element {ELEMENT.format(h.sets()['n4'], '10.8.8.8 timeout 60s')}",
                         f"delete element {ELEMENT.format(h.sets()['n4'], '10.8.8.8')}"),
        "firewall", "no address that a name may lead to",
    ),
    "a name that leads somewhere for ever": (
        lambda h: h.both("gateway", NFT, f"add element {ELEMENT.format(h.sets()['n4'], '9.9.9.9')}",
                         f"delete element {ELEMENT.format(h.sets()['n4'], '9.9.9.9')}"),
        "firewall", "for ever",
    ),
    "another table": (
        lambda h: h.both("gateway", NFT, "add table inet more", "delete table inet more"), "network", "other tables",
    ),
    "the gateway without its wall": (
        lambda h: rewritten(h, "gateway", "flush", "chain", "netdev", "covenant_walls", "frames"), "network", "",
    ),
    "the agent without its wall": (
        lambda h: rewritten(h, "agent", "flush", "chain", "netdev", "covenant_walls", "frames"), "network", "",
    ),
    "the host's table": (
        lambda h: rewritten(h, "host", "flush", "chain", "inet", "covenant_uplink", "input"), "network", "",
    ),
    "a device more": (
        lambda h: h.both("gateway", IP, "link add name more type veth peer name other", "link delete more"),
        "network", "device",
    ),
    "a device more for the agent": (
        lambda h: h.both("agent", IP, "link add name more type veth peer name other", "link delete more"),
        "network", "device",
    ),
    "an address of the gateway": (
        lambda h: h.both("gateway", IP, "address add 10.9.9.9/32 dev lo", "address delete 10.9.9.9/32 dev lo"),
        "network", "10.9.9.9",
    ),
    "a route": (
        lambda h: h.both("gateway", IP, "route add blackhole 9.9.9.9/32", "route delete blackhole 9.9.9.9/32"),
        "network", "9.9.9.9",
    ),
    "a routing rule": (
        lambda h: h.both("gateway", IP, "rule add from 192.0.0.2 lookup 99", "rule delete from 192.0.0.2 lookup 99"),
        "network", "rule",
    ),
    "a setting": (
        lambda h: h.both("gateway", SYSCTL, "-q -w net.ipv4.conf.all.send_redirects=1",
                         "-q -w net.ipv4.conf.all.send_redirects=0"),
        "network", "1",
    ),
    "a stranger in the gateway": (lambda h: a_stranger(h, "gateway"), "namespace", "process"),
    "a stranger beside the agent": (lambda h: a_stranger(h, "agent"), "namespace", "process"),
}  # fmt: skip


def _at_the_device(make: str, undo: str, program: str = IP) -> Tamper:
    """At the run's own device of the host."""

    def tamper(hand: Hand) -> contextlib.AbstractContextManager[None]:
        name = addresses.host_device(hand.one.made.run_id)
        return hand.both("host", program, make.format(name), undo.format(name))

    return tamper


# Those that are looked for from outside alone: what lets packets by beside the rules, or changes them on their way.
FURTHER: dict[str, tuple[Tamper, str]] = {
    "a setting of one device": (
        lambda h: h.both("gateway", SYSCTL, "-q -w net.ipv4.conf.agent0.accept_local=1",
                         "-q -w net.ipv4.conf.agent0.accept_local=0"),
        "settings of device",
    ),
    "a setting of one device for IPv6": (
        lambda h: h.both("gateway", SYSCTL, "-q -w net.ipv6.conf.agent0.accept_source_route=1",
                         "-q -w net.ipv6.conf.agent0.accept_source_route=-1"),
        "settings of device",
    ),
    "an address that the gateway answers for": (
        lambda h: h.both("gateway", IP, "neigh add proxy 9.9.9.9 dev agent0", "neigh del proxy 9.9.9.9 dev agent0"),
        "9.9.9.9 answered for",
    ),
    "a next hop": (lambda h: h.both("gateway", IP, "nexthop add id 7 blackhole", "nexthop del id 7"), "next hop"),
    "a queue at the host's device": (
        _at_the_device("qdisc add dev {} root pfifo", "qdisc del dev {} root", "/usr/sbin/tc"), "queue pfifo",
    ),
    "an address at the host's device": (
        _at_the_device("address add 10.77.0.1/32 dev {}", "address del 10.77.0.1/32 dev {}"), "10.77.0.1",
    ),
    "a route by the host's device": (
        _at_the_device("route add 10.78.0.0/24 dev {}", "route del 10.78.0.0/24 dev {}"), "10.78.0.0",
    ),
    "a setting of the host's device": (
        lambda h: h.both(
            "host", SYSCTL, f"-q -w net.ipv4.conf.{addresses.host_device(h.one.made.run_id)}.rp_filter=2",
            f"-q -w net.ipv4.conf.{addresses.host_device(h.one.made.run_id)}.rp_filter=1",
        ),
        "settings of device",
    ),
}  # fmt: skip


def _in_turn() -> list[str]:
    """Names of tampers so that two that the log says in the same words do not follow on each other: what is undone and
    done again within one period is one drift."""
    by_layer: dict[str, list[str]] = {}
    for name, (_, layer, _) in TAMPERS.items():
        by_layer.setdefault(layer, []).append(name)
    return [name for row in itertools.zip_longest(*by_layer.values()) for name in row if name is not None]


def test_every_tamper_with_network_is_found_and_told(tmp_path: Path, warm: Path, net: Internet) -> None:
    world = internet.configured(NetworkedWorld(tmp_path, warm=warm), net, attest_seconds=1, on_drift="alarm")
    with live(world, network="full", more=GRANTS) as one:
        hand = Hand(one, net)
        time.sleep(2.5)
        assert one.drift() == [], "control: nothing was tampered with"
        assert one.report().holds
        public = ELEMENT.format(hand.sets()["n4"], "93.184.216.34 timeout 60s")
        hand.nft("gateway", "add", "element", *public.split())
        time.sleep(1.5)
        assert one.report().holds, "control: what the DNS gate does is no drift"
        for name in _in_turn():
            tamper, layer, says = TAMPERS[name]
            before = len(one.drift())
            with tamper(hand):
                from_outside = {found.name: found for found in one.report().layers if not found.holds}
                assert list(from_outside) == [layer], (name, from_outside)
                found = one.drift_after(before)
                assert found[0][0] == layer, (name, found)
                assert says in found[0][1], (name, found)
            assert one.report().holds, name
        for name, (tamper, says) in FURTHER.items():
            with tamper(hand):
                found_now = [found for found in one.report().layers if not found.holds]
                assert [found.name for found in found_now] == ["network"], (name, found_now)
                assert says in found_now[0].found, (name, found_now)
            assert one.report().holds, name
        for own, layer in ((_unbound, "cgroup"), (_escaped, "cgroup")):
            with own(hand):
                found_now = [found for found in one.report().layers if not found.holds]
                assert [found.name for found in found_now] == [layer], (own, found_now)
            assert one.report().holds, own
        assert not one.answers, "an alarm ends nothing"
    assert net.leftovers() == []


def test_rule_deleted_by_hand_ends_agent(tmp_path: Path, warm: Path, net: Internet) -> None:
    world = internet.configured(NetworkedWorld(tmp_path, warm=warm), net, attest_seconds=1)
    with live(world, network="full", more=GRANTS) as one:
        hand = Hand(one, net)
        hand.nft("gateway", "flush", "chain", "inet", "covenant", "refuse")
        answer = one.wait()
    assert isinstance(answer.error, errors.DriftError)
    assert answer.error.details["layer"] == "firewall"
    kinds = [row["kind"].get("state", row["kind"]["type"]) for row in world.rows()]
    assert kinds[-4:] == ["drift", "Terminated", "Archived", "run_ended"]
    assert net.leftovers() == []


def test_what_was_made_is_put_down_when_kernel_has_settled() -> None:
    """The kernel adds the routes of an IPv6 address in its own time: one that came later was taken for drift."""

    def once() -> tuple[int, int]:
        with run_netns.made() as spaces:
            run_netns.connect(spaces)
            run_netns.open_link(spaces)
            own = netns.current()
            try:
                run_netns.connect_uplink(spaces, "cv-settle", own)
            finally:
                os.close(own)
            with netlink.Route() as route:
                index = route.links()["cv-settle"]
                route.do([netlink.up(index)])
                run_netns.open_uplink(spaces, addresses.uplink(5), ipv6=True)
                made = attest_network.Network.made(spaces, device="cv-settle", nft=Path("/usr/sbin/nft"))
                route.do([netlink.delete(index)])
            return len(made.gateway.lines), len(made.agent.lines)

    (fd,) = netns.make()
    try:
        found = {netns.within(fd, once) for _ in range(5)}
    finally:
        os.close(fd)
    assert len(found) == 1


def test_what_no_listing_of_rules_shows_is_read_as_well() -> None:
    """IPsec and the tables of the older iptables, in a namespace of the test's own: neither can be undone there."""
    (fd,) = netns.make()
    try:
        before = netns.within(fd, dump.lines)
        for words in ("state allocspi src 192.0.0.2 dst 9.9.9.9 proto esp reqid 1 mode tunnel",
                      "policy add src 192.0.0.2/32 dst 9.9.9.9/32 dir fwd action block"):  # fmt: skip
            command = ["/usr/sbin/ip", "xfrm", *words.split()]
            run = functools.partial(subprocess.run, command, check=True, capture_output=True, timeout=60)
            netns.within(fd, run)
        netns.within(fd, _old_table)
        more = sorted(netns.within(fd, dump.lines) - before)
    finally:
        os.close(fd)
    assert [line.rpartition(" ")[0] for line in more[1:]] == ["transformation association", "transformation policy"]
    assert more[0] == "old table filter of ip"


def _old_table() -> None:
    # A question about a table creates it: struct ipt_getinfo, IPT_SO_GET_INFO (linux/netfilter_ipv4/ip_tables.h).
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as sock:
        libc = ctypes.CDLL(None, use_errno=True)
        info, size = ctypes.create_string_buffer(b"filter", 84), ctypes.c_uint32(84)
        if libc.getsockopt(sock.fileno(), socket.IPPROTO_IP, 64, info, ctypes.byref(size)):
            raise OSError(ctypes.get_errno(), "the kernel has no such table")
