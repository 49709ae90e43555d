"""``net_bps`` holds in both directions and for every protocol: the bytes of a window are counted, with a control."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel import internet
from tests.kernel.internet import Internet, NetworkedWorld, Server

RATE, WINDOW_SECONDS = 100_000, 2
# A bucket holds a second's worth at the beginning; then as much again for what the clocks of two sides differ.
MOST = RATE * WINDOW_SECONDS * 2
GIVE, TAKE = 9100, 9101
GRANTS = internet.entries(
    ("93.184.216.34", f"[{GIVE}, {TAKE}]", "tcp"),
    ("93.184.216.34", f"[{TAKE}]", "udp"),
    ("*.example.com", "[443]", "tls"),
)
CODE = f"""
import socket, ssl, time
HOST, WINDOW = "93.184.216.34", {WINDOW_SECONDS}
def pull():
    got, until = 0, time.monotonic() + WINDOW
    with socket.create_connection((HOST, {GIVE}), timeout=10) as s:
        s.settimeout(0.2)
        while time.monotonic() < until:
            try:
                got += len(s.recv(65536))
            except TimeoutError:
                pass
    return got
def push(s):
    until = time.monotonic() + WINDOW
    s.settimeout(0.2)
    while time.monotonic() < until:
        try:
            s.send(b"x" * 1200)
        except (TimeoutError, BlockingIOError):
            pass
def flood():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect((HOST, {TAKE}))
        push(s)
def upload():
    with socket.create_connection((HOST, {TAKE}), timeout=10) as s:
        push(s)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\\1\\0\\0\\0\\0\\0\\0\\0")
def through_the_gate():
    context = ssl.create_default_context(cafile="/workspace/ca.pem")
    got, until = 0, time.monotonic() + WINDOW
    with socket.create_connection(("api.example.com", 443), timeout=20) as plain:
        with context.wrap_socket(plain, server_hostname="api.example.com") as s:
            s.sendall(b"give 100000000\\n")
            s.settimeout(0.2)
            while time.monotonic() < until:
                try:
                    got += len(s.recv(65536))
                except TimeoutError:
                    pass
    return got
answer = {{"pull": pull(), "gate": through_the_gate()}}
flood()
time.sleep(0.5)
upload()
"""


@pytest.fixture(scope="module")
def net() -> Iterator[Internet]:
    with internet.made() as made, made.bound("world", "93.184.216.34", GIVE) as giver:
        thread = threading.Thread(target=_give, args=(giver,))
        thread.start()
        yield made
        giver.shutdown(socket.SHUT_RDWR)
        thread.join()


def _give(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            taken, _ = listener.accept()
            with taken, contextlib.suppress(OSError):
                taken.settimeout(20)
                while True:
                    taken.sendall(b"y" * 65536)


def _moved(world: NetworkedWorld, tcp: Server, udp: Server, resources: str) -> dict[str, int]:
    """The bytes that moved in each way within a window."""
    before = tcp.received, udp.received
    files = {"ca.pem": world.internet.certificate}
    found: dict[str, int] = world.ask(CODE, network="full", resources=resources, more=GRANTS, files=files, cpu_ms=60000)
    return {**found, "upload": tcp.received - before[0], "flood": udp.received - before[1]}


def test_rate_holds_in_both_directions_and_through_gate(tmp_path: Path, warm: Path, net: Internet) -> None:
    world = internet.configured(NetworkedWorld(tmp_path, warm=warm), net)
    tcp = net.listen("world", "93.184.216.34", TAKE)
    udp = net.listen("world", "93.184.216.34", TAKE, udp=True)
    free = _moved(world, tcp, udp, "")
    held = _moved(world, tcp, udp, f"net_bps = {RATE}")
    assert min(free.values()) > 2 * MOST, free
    assert min(held.values()) > 0, held
    assert max(held.values()) <= MOST, held
    assert net.leftovers() == []
