"""The compiled ruleset on real packets: granted destinations connect, others are refused at once.

Every denial has its control: the same probe from the same place, before the ruleset was loaded, or with a grant.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from policy.compile.artefacts import Artefacts
from policy.compile.network.firewall import DNS_PORT, GATE_UID, TLS_PORT
from tests.kernel import three_namespaces
from tests.kernel.three_namespaces import AGENT, GATEWAY, GATEWAY6, WORLD, WORLD6, Namespaces
from tests.unit.policy.compile import sample

ENTRIES = (
    ("10.9.9.9", "[5432]", "tcp"),
    ("203.0.113.5", "[123]", "udp"),
    ("api.example.com", "[80]", "tcp"),
    ("secure.example.com", "[443]", "tls"),
    ("198.51.100.7", "[443]", "tls"),
    ("fd00:9::9", '["5430-5440"]', "tcp"),
)
TCP_PORTS = (80, 443, 5432)
PUBLIC, PRIVATE, V6 = "93.184.216.34", "10.8.8.8", "2606:4700::1111"
_SO_ORIGINAL_DST = 80  # linux/netfilter_ipv4.h


class Gateway:
    """The three namespaces with listeners, and what a probe from one of them came to."""

    def __init__(self, spaces: Namespaces, artefacts: Artefacts) -> None:
        self.spaces = spaces
        self.artefacts = artefacts
        self.sets = {grant["host"]: grant["sets"] for grant in artefacts.json("network.json")["grants"]}

    def connect(self, host: str, port: int, *, role: str = "agent", uid: int | None = None, wait: float = 20) -> str:
        """``connected``, the name of the error, or ``silence``."""

        def probe() -> str:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            with socket.socket(family, socket.SOCK_STREAM) as made:
                made.settimeout(wait)
                try:
                    made.connect((host, port))
                except TimeoutError:
                    return "silence"
                except OSError as e:
                    return errno.errorcode[e.errno or 0]
                return "connected"

        return self.spaces.within(role, probe, uid=uid)

    def ask(self, server: socket.socket, host: str, port: int) -> str:
        """Send a datagram from the agent and have it answered: ``answered`` or the name of the error."""

        def probe() -> str:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            with socket.socket(family, socket.SOCK_DGRAM) as made:
                made.settimeout(20)
                made.connect((host, port))
                made.send(b"ask")
                # It arrives, or an error comes back: whichever there is, however late.
                if server in select.select([server, made], [], [], 20)[0]:
                    server.sendto(b"answer", server.recvfrom(16)[1])
                try:
                    return "answered" if made.recv(16) == b"answer" else "garbled"
                except TimeoutError:
                    return "silence"
                except OSError as e:
                    return errno.errorcode[e.errno or 0]

        return self.spaces.within("agent", probe)

    def fill(self, host: str, address: str) -> None:
        """Fill a set as the DNS gate does before it answers."""
        name = next(name for name in self.sets[host] if name[1] == ("6" if ":" in address else "4"))
        self.spaces.run("gateway", "nft", "add", "element", "inet", "covenant", name, f"{{ {address} timeout 60s }}")


@pytest.fixture(scope="module")
def spaces() -> Iterator[Namespaces]:
    with three_namespaces.made() as made, contextlib.ExitStack() as stack:
        for port in TCP_PORTS:
            for host in ("0.0.0.0", "::"):
                stack.enter_context(made.listen("world", host, port))
        stack.enter_context(made.listen("agent", AGENT, 80))
        yield made


@pytest.fixture(scope="module")
def artefacts() -> Artefacts:
    return sample.compiled(sample.manifest(network="full", more=sample.entries(*ENTRIES)))


@pytest.fixture
def gateway(spaces: Namespaces, artefacts: Artefacts, tmp_path: Path) -> Iterator[Gateway]:
    """The ruleset freshly loaded: no element, no connection that was made before."""
    path = tmp_path / "firewall.nft"
    path.write_bytes(artefacts.files["firewall.nft"])
    spaces.run("gateway", "nft", "-f", str(path))
    yield Gateway(spaces, artefacts)
    spaces.run("gateway", "nft", "delete", "table", "inet", "covenant")


@pytest.fixture
def open_gateway(spaces: Namespaces, artefacts: Artefacts) -> Gateway:
    """The control: the same links without the ruleset."""
    return Gateway(spaces, artefacts)


def test_control_without_ruleset_everything_connects(open_gateway: Gateway) -> None:
    for host in (*WORLD, *WORLD6):
        for port in TCP_PORTS:
            assert open_gateway.connect(host, port) == "connected", (host, port)
    assert open_gateway.connect(AGENT, 80, role="world") == "connected"
    for host in ("203.0.113.5", "9.9.9.9", V6):
        for port in (123, 124):
            with open_gateway.spaces.listen("world", host, port, udp=True) as server:
                assert open_gateway.ask(server, host, port) == "answered", (host, port)
    with open_gateway.spaces.listen("gateway", "0.0.0.0", TLS_PORT):
        assert open_gateway.connect(GATEWAY, TLS_PORT) == "connected"


def test_granted_address_connects_and_its_neighbours_are_refused_at_once(gateway: Gateway) -> None:
    assert gateway.connect("10.9.9.9", 5432) == "connected"
    assert gateway.connect("fd00:9::9", 5432) == "connected"
    for host, port in (("10.9.9.9", 80), ("10.9.9.9", 443), ("9.9.9.9", 5432), ("fd00:9::9", 80), (V6, 5432)):
        assert gateway.connect(host, port) == "ECONNREFUSED", (host, port)


def test_granted_datagram_is_answered_and_others_meet_unreachable_port(gateway: Gateway) -> None:
    for host, port, expected in (
        ("203.0.113.5", 123, "answered"),
        ("203.0.113.5", 124, "ECONNREFUSED"),
        ("9.9.9.9", 123, "ECONNREFUSED"),
        (V6, 123, "ECONNREFUSED"),
    ):
        with gateway.spaces.listen("world", host, port, udp=True) as server:
            assert gateway.ask(server, host, port) == expected, (host, port)


def test_name_connects_once_its_answer_is_in_set(gateway: Gateway) -> None:
    for address in (PUBLIC, V6):
        assert gateway.connect(address, 80) == "ECONNREFUSED"
        gateway.fill("api.example.com", address)
        assert gateway.connect(address, 80) == "connected"
        assert gateway.connect(address, 5432) == "ECONNREFUSED"


def test_answer_with_private_address_gives_nothing(gateway: Gateway) -> None:
    for private, public in ((PRIVATE, PUBLIC), ("fd00:9::9", V6)):
        for address in (private, public):
            gateway.fill("api.example.com", address)
        assert gateway.connect(private, 80) == "ECONNREFUSED"
        assert gateway.connect(public, 80) == "connected"


def test_tls_lands_on_gate_and_on_nothing_else(gateway: Gateway) -> None:
    for address in (PUBLIC, V6):
        gateway.fill("secure.example.com", address)
    # Without the gate there is no way round it.
    assert gateway.connect("198.51.100.7", 443) == "ECONNREFUSED"
    with gateway.spaces.listen("gateway", "0.0.0.0", TLS_PORT) as gate:
        for address in ("198.51.100.7", PUBLIC):
            assert gateway.connect(address, 443) == "connected"
            taken, peer = gate.accept()
            raw = taken.getsockopt(socket.SOL_IP, _SO_ORIGINAL_DST, 16)
            taken.close()
            assert (socket.inet_ntoa(raw[4:8]), struct.unpack("!H", raw[2:4])[0], peer[0]) == (address, 443, AGENT)
        # The gate has no door of its own.
        assert gateway.connect(GATEWAY, TLS_PORT) == "ECONNREFUSED"
    with gateway.spaces.listen("gateway", "::", TLS_PORT):
        assert gateway.connect(V6, 443) == "connected"
        assert gateway.connect(GATEWAY6, TLS_PORT) == "ECONNREFUSED"


def test_tls_to_private_address_of_name_meets_no_gate(gateway: Gateway) -> None:
    gateway.fill("secure.example.com", PRIVATE)
    with gateway.spaces.listen("gateway", "0.0.0.0", TLS_PORT) as gate:
        assert gateway.connect(PRIVATE, 443) == "ECONNREFUSED"
        assert gateway.connect("198.51.100.7", 443) == "connected"
        taken, _ = gate.accept()
        taken.close()


def test_gate_reaches_what_tls_grants_name_and_gateway_nothing_else(gateway: Gateway) -> None:
    for address in (PUBLIC, PRIVATE):
        gateway.fill("secure.example.com", address)
    gate = {"role": "gateway", "uid": GATE_UID}
    for address, port, expected in (
        ("198.51.100.7", 443, "connected"),
        (PUBLIC, 443, "connected"),
        (PRIVATE, 443, "ECONNREFUSED"),
        ("198.51.100.7", 80, "ECONNREFUSED"),
        ("10.9.9.9", 5432, "ECONNREFUSED"),
    ):
        assert gateway.connect(address, port, **gate) == expected, (address, port)  # type: ignore[arg-type]
    assert gateway.connect("198.51.100.7", 443, role="gateway", uid=0, wait=0.3) == "silence"


def test_world_begins_nothing(gateway: Gateway) -> None:
    assert gateway.connect(AGENT, 80, role="world", wait=0.3) == "silence"
    with gateway.spaces.listen("gateway", "0.0.0.0", TLS_PORT):
        assert gateway.connect("10.201.0.1", TLS_PORT, role="world", wait=0.3) == "silence"


def test_dns_gate_is_one_door_of_gateway(gateway: Gateway) -> None:
    with gateway.spaces.listen("gateway", GATEWAY, DNS_PORT, udp=True) as server:
        assert gateway.ask(server, GATEWAY, DNS_PORT) == "answered"
    with gateway.spaces.listen("gateway", GATEWAY, DNS_PORT):
        assert gateway.connect(GATEWAY, DNS_PORT) == "connected"
    with gateway.spaces.listen("gateway", GATEWAY, 80):
        assert gateway.connect(GATEWAY, 80) == "ECONNREFUSED"
    with gateway.spaces.listen("gateway", GATEWAY, 123, udp=True) as server:
        assert gateway.ask(server, GATEWAY, 123) == "ECONNREFUSED"


def test_what_was_let_through_and_what_was_refused_is_counted(gateway: Gateway) -> None:
    def packets(name: str) -> int:
        listed = gateway.spaces.run("gateway", "nft", "list", "counter", "inet", "covenant", name)
        return int(listed.partition("packets ")[2].split()[0])

    grants = gateway.artefacts.json("network.json")["grants"]
    counter = next(grant["counter"] for grant in grants if grant["host"] == "10.9.9.9")
    assert (packets(counter), packets("refused_tcp")) == (0, 0)
    gateway.connect("10.9.9.9", 5432)
    gateway.connect("10.9.9.9", 80)
    assert (packets(counter), packets("refused_tcp")) == (1, 1)
