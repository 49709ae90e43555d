"""An agent on the host kernel's stack (runsc_network = "host") gets the same answers as with gVisor's own.

The agent's own namespace may accept anything: the gateway's rules and the walls are outside it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox import config, doctor_network
from sandbox.host import facts as host_facts
from sandbox.host import runsc_network
from tests.kernel import internet
from tests.kernel.internet import Internet, NetworkedWorld
from tests.kernel.live_runs import live
from tests.kernel.world import SLOWNESS


@pytest.fixture(params=["sandbox", "host"])
def networked(request: pytest.FixtureRequest, tmp_path: Path, warm: Path, net: Internet) -> Iterator[NetworkedWorld]:
    yield internet.configured(NetworkedWorld(tmp_path, warm=warm), net, runsc_network=request.param)
    assert net.leftovers() == []


GRANTS = internet.entries(
    ("93.184.216.34", "[80]", "tcp"),
    ("2606:4700::1111", "[80]", "tcp"),
    ("www.example.com", "[443]", "tls"),
    ("rebind.example.com", "[80]", "tcp"),
)
# What an agent tries beside sockets of its own: frames and packets made by hand, another's address as its own.
HAND = """
def made(*kind):
    try:
        with socket.socket(*kind): return "made"
    except OSError as e:
        return errno.errorcode.get(e.errno or 0, str(e))
def bound(address, to=("93.184.216.34", 80)):
    with socket.socket() as s:
        s.settimeout(10)
        try:
            s.bind((address, 0))
            s.connect(to)
            return "connected"
        except OSError as e:
            return errno.errorcode.get(e.errno or 0, str(e))
"""
PROBES = {
    "tcp('93.184.216.34', 80)": {"connected"},
    "tcp('2606:4700::1111', 80)": {"connected"},
    "tcp('::ffff:93.184.216.34', 80)": {"connected"},
    "tls('www.example.com')": {"www.example.com"},
    "bound('0.0.0.0')": {"connected"},
    "tcp('93.184.216.34', 443)": {"ECONNREFUSED"},
    "tcp('9.9.9.9', 80)": {"ECONNREFUSED"},
    "tcp('::ffff:9.9.9.9', 80)": {"ECONNREFUSED"},
    "tcp('2606:4700::2222', 80)": {"ECONNREFUSED"},
    "udp('9.9.9.9', 123)": {"ECONNREFUSED"},
    "tcp('169.254.169.254', 80)": {"ECONNREFUSED", "EHOSTUNREACH", "ENETUNREACH"},
    "tls('other.example.com', '93.184.216.35')": {"ECONNRESET"},
    "resolve('other.example.com')": {"gaierror -2"},
    "resolve('rebind.example.com')": {"gaierror -5"},
    "bound('198.51.100.7')": {"EADDRNOTAVAIL"},
    "made(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)": {"EPERM", "EACCES"},
    "made(socket.AF_PACKET, socket.SOCK_RAW, 0)": {"EPERM", "EACCES"},
}


def test_what_passes_and_what_does_not_is_same(networked: NetworkedWorld) -> None:
    answer = networked.ask(
        HAND.replace("def made", "import errno, socket\ndef made", 1) + internet.probes(list(PROBES)),
        network="full",
        more=GRANTS,
        files={"ca.pem": networked.internet.certificate},
    )
    wrong = {
        probe: found for (probe, wanted), found in zip(PROBES.items(), answer, strict=True) if str(found) not in wanted
    }
    assert wrong == {}


def test_stack_is_tried_and_told(networked: NetworkedWorld, net: Internet) -> None:
    settled = config.load(networked.state)
    facts = host_facts.runsc_facts(settled)
    status, said, _ = net.within("host", lambda: doctor_network.way(settled, facts, 60.0 * SLOWNESS))
    assert status == doctor_network.OK
    by_host = settled.runsc_network == "host"
    assert ("--network=host" in said) == by_host
    known = runsc_network.known(settled, sha256=facts.sha256, kernel=os.uname().release)
    assert known is not None
    assert (known.name == "host") == by_host


def test_what_runs_is_attested_and_another_stack_is_drift(networked: NetworkedWorld) -> None:
    with live(networked, network="full", more=GRANTS) as one:
        time.sleep(1)
        assert one.report().holds
        flags = one.family().sandbox.arguments
        stack = config.load(networked.state).runsc_network
        assert f"--network={stack}" in flags
