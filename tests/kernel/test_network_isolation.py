"""Where an agent cannot go: the host, other runs, private and metadata addresses; and each where it is granted.

Each table is one sandbox. A refusal has its control: the same probe where the grant names it, or from another place.
"""

from __future__ import annotations

import functools
import json
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from sandbox.network import addresses
from sandbox.rundir import directory
from tests.kernel import internet
from tests.kernel.internet import HOST, HOST6, HOST_PORT, LOOPBACK_PORT, METADATA, Internet, NetworkedWorld
from tests.kernel.world import HEAD, TAIL

REFUSED, CONNECTED = "ECONNREFUSED", "connected"
NOT_PUBLIC = ("10.8.8.8", "192.168.7.7", "172.16.7.7", "100.64.7.7", "203.0.113.5", METADATA, "fd00:9::9")


def _compare(networked: NetworkedWorld, expected: Mapping[str, object], **fields: Any) -> None:
    answer = networked.ask(internet.probes(list(expected)), **fields)
    assert dict(zip(expected, answer, strict=True)) == expected


def test_control_hosts_services_answer_others(net: Internet) -> None:
    for host, port, role in (
        (HOST, HOST_PORT, "world"),
        (HOST6, HOST_PORT, "world"),
        ("127.0.0.1", LOOPBACK_PORT, "host"),
        (METADATA, 80, "host"),
    ):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with net.within(role, functools.partial(socket.socket, family)) as made:
            made.settimeout(10)
            made.connect((host, port))


def test_any_public_address_is_public_and_nothing_else(networked: NetworkedWorld) -> None:
    _compare(
        networked,
        {
            "tcp('93.184.216.34', 80)": CONNECTED,
            "tcp('2606:4700::1111', 80)": CONNECTED,
            "tcp('::ffff:93.184.216.34', 80)": CONNECTED,
            "udp('9.9.9.9', 123)": "answered",
            **{f"tcp('{host}', 80)": REFUSED for host in NOT_PUBLIC},
            f"udp('{METADATA}', 123)": REFUSED,
            f"tcp('::ffff:{METADATA}', 80)": REFUSED,
            f"tcp('{HOST}', {HOST_PORT})": REFUSED,
            f"tcp('{HOST6}', {HOST_PORT})": REFUSED,
            f"tcp('127.0.0.1', {LOOPBACK_PORT})": REFUSED,
            f"tcp('::1', {LOOPBACK_PORT})": REFUSED,
            f"tcp('{addresses.HOST4}', {HOST_PORT})": REFUSED,
            f"tcp('{addresses.GATEWAY4}', {HOST_PORT})": REFUSED,
            f"tcp('{addresses.GATEWAY4}', 8443)": REFUSED,
            f"tcp('{addresses.GATEWAY6}', 8443)": REFUSED,
            f"tcp('{addresses.GATEWAY4}', 53)": CONNECTED,
            "resolve('other.example.com')": ["9.9.9.9"],
            "resolve('metadata.example.com')": "gaierror -5",
            "ping()": "EPERM",
        },
        network="full",
    )


def test_entry_opens_private_address_and_never_host(networked: NetworkedWorld) -> None:
    grants = internet.entries(
        ("10.0.0.0/8", "[80, 7002]", "tcp"),
        (METADATA, "[80]", "tcp"),
        ("fd00:9::/64", "[80]", "tcp"),
        ("198.18.0.0/15", "[80, 7002]", "tcp"),
        (HOST6, "[7002]", "tcp"),
        ("192.0.0.0/24", "[80, 7002]", "tcp"),
        ("127.0.0.0/8", "[7001]", "tcp"),
    )
    _compare(
        networked,
        {
            "tcp('10.8.8.8', 80)": CONNECTED,
            f"tcp('{METADATA}', 80)": CONNECTED,
            "tcp('fd00:9::9', 80)": CONNECTED,
            "tcp('10.8.8.8', 22)": REFUSED,
            f"tcp('{HOST}', {HOST_PORT})": REFUSED,
            f"tcp('{HOST6}', {HOST_PORT})": REFUSED,
            f"tcp('{addresses.HOST4}', {HOST_PORT})": REFUSED,
            f"tcp('{addresses.GATEWAY4}', 80)": REFUSED,
            f"tcp('127.0.0.1', {LOOPBACK_PORT})": REFUSED,
        },
        network="full",
        more=grants,
    )


HTTPS = {
    "tls('api.example.com')": "api.example.com",
    "tls('www.example.com')": "www.example.com",
    "tcp('93.184.216.34', 80)": REFUSED,
    "udp('9.9.9.9', 443)": REFUSED,
    "tcp('10.8.8.8', 443)": REFUSED,
    f"tcp('{METADATA}', 443)": REFUSED,
    "raw_https('93.184.216.34')": "closed",
}


def test_outbound_https_only_carries_tls_on_443_alone(networked: NetworkedWorld) -> None:
    _compare(networked, HTTPS, network="outbound-https-only", files={"ca.pem": networked.internet.certificate})


FIRST = """
import socket
listener = socket.create_server(("", 9000))
listener.settimeout(0.2)
answer = "alone"
socket.create_connection(("198.18.7.7", 9000), timeout=10).close()
while True:
    try:
        listener.accept()
        answer = "met"
    except TimeoutError:
        pass
    with socket.socket() as done:
        if done.connect_ex(("198.18.7.7", 9001)) == 0:
            break
"""


def test_two_agents_do_not_meet(networked: NetworkedWorld) -> None:
    """The first serves on its only address; the second may go to every address where runs are, and reaches none."""
    net = networked.internet
    grants = internet.entries(("198.18.0.0/15", "[9000, 9001]", "tcp"), ("198.18.0.0/15", "[9000]", "udp"))
    files = {"main.py": HEAD + FIRST + TAIL}
    first = networked.package(files, name="first", id="first", cpu_ms=120000, network="full", more=grants)
    networked.sign(first)
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(networked.run(first)))
    # The control: an address of the same block that is no run's is reached, by the same grant.
    net.run("world", "ip", "address", "add", "198.18.7.7/32", "dev", "lo")
    control = net.listen("world", "198.18.7.7", 9000)
    net.listen("world", "198.18.7.7", 9000, udp=True)
    thread.start()
    try:
        place = _place(networked, control)
        probes = {
            "tcp('198.18.7.7', 9000)": CONNECTED,
            "udp('198.18.7.7', 9000)": "answered",
            f"tcp('{place}', 9000)": REFUSED,
            f"udp('{place}', 9000)": REFUSED,
            f"tcp('{addresses.HOST4}', 9000)": REFUSED,
            f"tcp('{addresses.GATEWAY4}', 9000)": REFUSED,
        }
        second = networked.ask(internet.probes(list(probes)), name="second", id="second", network="full", more=grants)
        assert dict(zip(probes, second, strict=True)) == probes
    finally:
        net.listen("world", "198.18.7.7", 9001)
        thread.join()
    assert answers[0].error is None, answers[0]
    assert json.loads(answers[0].result.text) == "alone"


def _place(networked: NetworkedWorld, server: internet.Server) -> str:
    """The address of the one live run, as the host sees it, once its agent has spoken to ``server``."""
    until = time.monotonic() + 60
    while not server.seen:
        assert time.monotonic() < until, "the first agent does not begin"
        time.sleep(0.05)
    (noted,) = filter(None, map(directory.network_of, (networked.state / "runs").glob("*-*")))
    return str(noted["ipv4"])
