"""More of the network than a share: connections, half-open ones, questions and answers without end.

Each is bounded here as well. The observer outside counts what got through; the table names the bound.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import struct
import time

import wire
from harness import Blocked, probe

CONNECTIONS, PROCESSES = 1400, 5
DATAGRAM_PORTS = 3000
HALF_OPEN = 300
LORIS_SECONDS = 9.0  # a gate waits three
ANSWERS = 120


def _room(count: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, count + 64), hard))


@probe("flood_connections")
def flood_connections() -> str:
    """As many connections at once to what is granted, from several processes: each has only so many descriptors."""
    address, port = _granted_door()
    reader, writer = os.pipe()
    children = [_child(address, port, writer) for _ in range(PROCESSES)]
    os.close(writer)
    stood = 0
    try:
        for _ in children:
            stood += int.from_bytes(os.read(reader, 2), "big")
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    if not stood:
        raise Blocked("none stood")
    return f"{stood} connections at once"


def _child(address: str, port: int, writer: int) -> int:
    """A process that connects, tells how many stand, and holds them until it is ended."""
    pid = os.fork()
    if pid == 0:
        # INVARIANT: the child never comes back from here, or it would answer in its parent's name.
        try:
            held = _connected(address, port, CONNECTIONS // PROCESSES)
            os.write(writer, len(held).to_bytes(2, "big"))
            time.sleep(30)
        finally:
            os._exit(0)
    return pid


def _connected(address: str, port: int, count: int) -> list[socket.socket]:
    """Those of so many connections that come to stand."""
    poll, until = select.poll(), time.monotonic() + 6
    waiting: dict[int, socket.socket] = {}
    for _ in range(count):
        made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        made.setblocking(False)
        with contextlib.suppress(BlockingIOError, ConnectionRefusedError):
            made.connect((address, port))
        waiting[made.fileno()] = made
        poll.register(made, select.POLLOUT)
    stood = []
    while waiting and time.monotonic() < until:
        for number, _ in poll.poll(500):
            poll.unregister(number)
            made = waiting.pop(number)
            if made.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                stood.append(made)
    return stood


def _granted_door() -> tuple[str, int]:
    """The granted service by address where it is granted, the granted name's address otherwise."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as made:
        made.settimeout(wire.SECONDS)
        if made.connect_ex((wire.SERVICE, wire.SERVICE_PORT)) == 0:
            return wire.SERVICE, wire.SERVICE_PORT
    return wire.granted_address(), 443


@probe("flood_conntrack")
def flood_conntrack() -> str:
    """One entry a source port: datagrams from thousands of ports to the granted service."""
    answered: set[int] = set()
    for start in range(0, DATAGRAM_PORTS, 500):
        _room(560)
        with contextlib.ExitStack() as held:
            made = [held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) for _ in range(500)]
            for number, one in enumerate(made):
                one.setblocking(False)
                with contextlib.suppress(OSError):
                    one.connect((wire.SERVICE, wire.SERVICE_UDP_PORT))
                    one.send(wire.mark("flood_conntrack") + str(start + number).encode())
            answered |= _answered(made)
    if not answered:
        raise Blocked("nothing was answered")
    return f"{len(answered)} flows of {DATAGRAM_PORTS} answered"


def _answered(made: list[socket.socket]) -> set[int]:
    """The local ports that heard something; a port that is used again is the same flow."""
    ports, until = set(), time.monotonic() + 0.4
    while time.monotonic() < until:
        ready, _, _ = select.select(made, [], [], 0.1)
        for one in ready:
            with contextlib.suppress(OSError):
                if one.recv(64):
                    ports.add(one.getsockname()[1])
            made.remove(one)
        if not ready:
            break
    return ports


@probe("loris_dns")
def loris_dns() -> str:
    """Connections to the resolver that say half a question each; it must still answer others afterwards."""
    return _loris(wire.resolver(), 53, struct.pack("!H", 200) + b"x")


@probe("loris_tls")
def loris_tls() -> str:
    """Connections to the granted name that say half a hello each."""
    return _loris(wire.granted_address(), 443, b"\x16\x03\x01\x02\0\x01")


def _loris(address: str, port: int, half: bytes) -> str:
    _room(HALF_OPEN)
    with contextlib.ExitStack() as held:
        made = []
        for _ in range(HALF_OPEN):
            one = held.enter_context(socket.socket(wire.family(address), socket.SOCK_STREAM))
            one.settimeout(0.5)
            try:
                one.connect((address, port))
                one.sendall(half)
            except OSError:
                continue
            made.append(one)
        standing, until = made, time.monotonic() + LORIS_SECONDS
        while standing and time.monotonic() < until:
            time.sleep(0.5)
            standing = [one for one in standing if _stands(one)]
    if not standing:
        raise Blocked(f"none of {len(made)} stands any more")
    return f"{len(standing)} of {HALF_OPEN} stand"


def _stands(one: socket.socket) -> bool:
    one.setblocking(False)
    try:
        while heard := one.recv(4096):
            if wire.REACHED in heard:
                return True
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


@probe("flood_answers")
def flood_answers() -> str:
    """Names that lead to a dozen addresses each: how many addresses are open afterwards."""
    found: set[bytes] = set()
    for number in range(ANSWERS):
        with contextlib.suppress(OSError, Blocked):
            answer = wire.ask(wire.question(f"many-{number}.{wire.WILD}"))
            found.update(answer[place : place + 4] for place in _records(answer))
    if not found:
        raise Blocked("nothing was answered")
    return f"{len(found)} addresses"


def _records(answer: bytes) -> list[int]:
    needle, places, place = struct.pack("!HH", wire.A, 1), [], 12
    while (place := answer.find(needle, place)) >= 0:
        if answer[place + 8 : place + 10] == b"\0\4":
            places.append(place + 10)
        place += 4
    return places
