"""Check the TLS gate's grants, forwarding and refusals, with socket pairs in place of the network."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from policy import errors
from sandbox.network.tls import connection, plan, splice
from sandbox.network.tls import gate as tls_gate
from sandbox.network.tls.client_hello import Hello
from sandbox.network.tls.connection import Connection, Stage
from sandbox.network.tls.plan import TlsPlan
from sandbox.network.tls.server import target
from sandbox.network.tls.splice import Flow, Pipes
from tests import hello_kit as kit

NAME, OTHER = "api.example.com", "other.example.com"
PLAN = {
    "names": [
        {"pattern": NAME, "ports": [[443, 443]]},
        {"pattern": NAME, "ports": [[8443, 8443]]},
        {"pattern": "*.wild.org", "ports": [[8000, 8010]]},
    ],
    "addresses": [
        {"first": "203.0.113.0", "last": "203.0.113.127", "ports": [[443, 443]]},
        {"first": "fd00::1", "last": "fd00::1", "ports": [[443, 443]]},
    ],
}


def plain(name: str | None, *, ech: bool = False) -> Hello:
    """Return a plain hello with this name."""
    return Hello(name, ech=ech)


@pytest.mark.parametrize(
    ("host", "port", "hello", "expected"),
    [
        ("192.0.2.1", 443, plain(NAME), None),
        ("192.0.2.1", 8443, plain(NAME), None),
        ("192.0.2.1", 444, plain(NAME), "sni_not_granted"),
        ("192.0.2.1", 443, plain("x." + NAME), "sni_not_granted"),
        ("192.0.2.1", 443, plain("example.com"), "sni_not_granted"),
        ("192.0.2.1", 8005, plain("a.wild.org"), None),
        ("192.0.2.1", 8005, plain("a.b.wild.org"), None),
        ("192.0.2.1", 8005, plain("wild.org"), "sni_not_granted"),
        ("192.0.2.1", 8005, plain("evilwild.org"), "sni_not_granted"),
        ("192.0.2.1", 8005, plain("a.wild.org.evil.com"), "sni_not_granted"),
        ("192.0.2.1", 8011, plain("a.wild.org"), "sni_not_granted"),
        ("192.0.2.1", 443, plain(None), "no_sni"),
        ("192.0.2.1", 443, plain(NAME, ech=True), "ech_present"),
        ("192.0.2.1", 443, plain(None, ech=True), "ech_present"),
        ("203.0.113.5", 443, plain(None), None),
        ("203.0.113.5", 443, plain(OTHER, ech=True), None),
        ("203.0.113.5", 444, plain(OTHER), "sni_not_granted"),
        ("203.0.113.128", 443, plain(OTHER), "sni_not_granted"),
        ("fd00::1", 443, plain(None), None),
        ("fd00::2", 443, plain(None), "no_sni"),
        # The same number in the other family is another address.
        ("::cb00:7105", 443, plain(None), "no_sni"),
    ],
)
def test_destination_is_granted_by_its_address_or_by_name(
    host: str, port: int, hello: Hello, expected: str | None
) -> None:
    assert TlsPlan(PLAN).refusal(host, port, hello) == expected


def test_every_name_is_granted_by_star() -> None:
    plan = TlsPlan({"names": [{"pattern": "*", "ports": [[443, 443]]}], "addresses": []})
    assert plan.refusal("192.0.2.1", 443, plain(OTHER)) is None
    assert plan.refusal("192.0.2.1", 443, plain(None)) == "no_sni"


def test_target_is_written_as_people_ask_for_it() -> None:
    assert target(NAME, "192.0.2.1", 443) == f"{NAME}:443/tls"
    assert target(None, "192.0.2.1", 443) == "192.0.2.1:443/tls"
    assert target(None, "fd00::1", 443) == "[fd00::1]:443/tls"


class Gate:
    """One connection with its two far ends: ``agent`` and ``server``."""

    def __init__(self, stack: contextlib.ExitStack, pipes: Pipes) -> None:
        def pair() -> tuple[socket.socket, socket.socket]:
            near, far = socket.socketpair()
            near.setblocking(False)
            far.settimeout(60)
            stack.callback(far.close)
            return near, far

        near, self.agent = pair()
        self.upstream, self.server = pair()
        self.dialled: list[tuple[str, int]] = []
        self.refused: list[tuple[str | None, str]] = []
        self.others: list[str] = []
        self.dead: dict[str, int] = {}
        self.now = 0.0

        def dial(host: str, port: int) -> socket.socket:
            self.dialled.append((host, port))
            if host in self.dead:
                raise OSError(self.dead[host], "dead")
            return self.upstream

        def refused(name: str | None, code: str) -> None:
            self.refused.append((name, code))

        self.connection = Connection(
            near,
            "192.0.2.1",
            443,
            plan=TlsPlan(PLAN),
            pipes=pipes,
            refused=refused,
            now=0,
            others=lambda name: self.others if name == NAME else (),
            connect=dial,
        )
        stack.callback(self.end)

    def end(self) -> None:
        if self.connection.stage is not Stage.CLOSED:
            self.connection.close(reset=False)
        self.upstream.close()

    def serve(self) -> None:
        """Run the connection until it has no more events."""
        for _ in range(1000):
            wanted = self.connection.interest()
            poll = select.poll()
            for fd, mask in wanted.items():
                poll.register(fd, mask)
            if not poll.poll(0):
                return
            self.connection.turn(self.now)
            self.connection.settle()
        raise AssertionError("it turns in vain")

    def heard(self, far: socket.socket) -> bytes:
        """Return the bytes that have reached this end by now; ``b""`` for none or the end of the stream."""
        self.serve()
        return far.recv(1 << 20) if select.select([far], [], [], 0)[0] else b""

    def is_open(self) -> bool:
        self.serve()
        return self.connection.stage is not Stage.CLOSED


@pytest.fixture
def pipes() -> Iterator[Pipes]:
    made = Pipes()
    yield made
    made.close()


@pytest.fixture
def gate(pipes: Pipes) -> Iterator[Gate]:
    with contextlib.ExitStack() as stack:
        yield Gate(stack, pipes)


def carried(gate: Gate) -> Gate:
    """Return the gate after a handshake's first two messages."""
    gate.agent.sendall(kit.hello(NAME))
    assert gate.heard(gate.server) == kit.hello(NAME)
    gate.server.sendall(kit.server_hello())
    assert gate.heard(gate.agent) == kit.server_hello()
    assert gate.connection.stage is Stage.CARRY
    return gate


def test_nothing_is_dialled_before_hello_is_whole_and_granted(gate: Gate) -> None:
    hello = kit.hello(NAME)
    gate.agent.sendall(hello[:-1])
    assert gate.is_open()
    assert gate.dialled == []
    gate.agent.sendall(hello[-1:])
    gate.serve()
    assert gate.dialled == [("192.0.2.1", 443)]


def test_other_addresses_of_name_are_tried_in_turn(gate: Gate) -> None:
    gate.others = ["192.0.2.2", "192.0.2.1", "2001:db8::1"]
    gate.dead = {"192.0.2.1": errno.EHOSTUNREACH, "2001:db8::1": errno.ECONNREFUSED}
    gate.agent.sendall(kit.hello(NAME))
    assert gate.heard(gate.server) == kit.hello(NAME)
    # The agent's choice first, then the families in turn.
    assert [host for host, _ in gate.dialled] == ["192.0.2.1", "2001:db8::1", "192.0.2.2"]
    assert gate.refused == []


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ECONNREFUSED, "connect_refused"),
        (errno.ENETUNREACH, "connect_unreachable"),
        (errno.ETIMEDOUT, "connect_timeout"),
    ],
)
def test_connection_that_cannot_be_made_is_told(gate: Gate, number: int, code: str) -> None:
    gate.dead = {"192.0.2.1": number}
    gate.agent.sendall(kit.hello(NAME))
    assert not gate.is_open()
    assert gate.refused == [(NAME, code)]


@pytest.mark.parametrize(
    ("hello", "refused"),
    [
        (kit.hello(OTHER), (OTHER, "sni_not_granted")),
        (kit.hello(None), (None, "no_sni")),
        (kit.hello(NAME, kit.extension(kit.ECH, b"")), (NAME, "ech_present")),
        (b"GET / HTTP/1.1\r\n", (None, "not_tls")),
    ],
)
def test_what_is_refused_is_never_dialled(gate: Gate, hello: bytes, refused: tuple[str | None, str]) -> None:
    gate.agent.sendall(hello)
    assert not gate.is_open()
    assert (gate.refused, gate.dialled) == ([refused], [])


def test_what_follows_hello_is_held_until_server_wants_no_other(gate: Gate) -> None:
    gate.agent.sendall(kit.hello(NAME) + b"early")
    assert gate.heard(gate.server) == kit.hello(NAME)
    gate.agent.sendall(b" and more")
    assert gate.heard(gate.server) == b""
    gate.server.sendall(kit.record(b"\x01\x70", kind=21) + kit.server_hello()[:-1])
    assert gate.heard(gate.server) == b""
    gate.server.sendall(kit.server_hello()[-1:])
    assert gate.heard(gate.server) == b"early and more"
    gate.server.sendall(b"rest")
    assert gate.heard(gate.agent).endswith(b"rest")


def test_second_hello_passes_when_it_asks_for_same(gate: Gate) -> None:
    retry, ccs = kit.server_hello(retry=True), kit.record(b"\x01", kind=20)
    gate.agent.sendall(kit.hello(NAME) + kit.record(b"early", kind=23))
    gate.serve()
    gate.server.sendall(retry + ccs)
    assert gate.heard(gate.agent) == retry + ccs
    assert gate.heard(gate.server) == kit.hello(NAME)
    assert gate.connection.stage is Stage.AGAIN
    gate.agent.sendall(ccs + kit.hello(NAME.upper()) + b"after")
    assert gate.heard(gate.server) == kit.record(b"early", kind=23) + ccs + kit.hello(NAME.upper())
    gate.server.sendall(kit.server_hello())
    assert gate.heard(gate.server) == b"after"
    assert gate.refused == []


@pytest.mark.parametrize(
    ("second", "refused"),
    [
        (kit.hello(OTHER), (OTHER, "sni_not_granted")),
        (kit.hello(None), (None, "no_sni")),
        (kit.hello(NAME, kit.extension(kit.ECH, b"")), (NAME, "ech_present")),
        (kit.hello("a.wild.org"), ("a.wild.org", "sni_not_granted")),
        (b"x", (NAME, "not_tls")),
    ],
)
@pytest.mark.parametrize("along", [False, True])
def test_second_hello_that_asks_for_another_is_refused(
    gate: Gate, second: bytes, refused: tuple[str | None, str], along: bool
) -> None:
    gate.agent.sendall(kit.hello(NAME) + (second if along else b""))
    gate.serve()
    gate.server.sendall(kit.server_hello(retry=True))
    gate.serve()
    if not along:
        gate.agent.sendall(second)
    assert not gate.is_open()
    assert gate.refused == [refused]
    assert gate.server.recv(1 << 16) == kit.hello(NAME)
    assert gate.server.recv(1 << 16) == b""


def test_server_that_asks_twice_or_does_not_speak_tls_is_cut_off(gate: Gate, pipes: Pipes) -> None:
    gate.agent.sendall(kit.hello(NAME) * 2)
    gate.serve()
    gate.server.sendall(kit.server_hello(retry=True))
    assert gate.heard(gate.server) == kit.hello(NAME) * 2
    gate.server.sendall(kit.server_hello(retry=True))
    assert not gate.is_open()
    with contextlib.ExitStack() as stack:
        other = Gate(stack, pipes)
        other.agent.sendall(kit.hello(NAME))
        other.serve()
        other.server.sendall(b"HTTP/1.1 400 Bad Request\r\n")
        assert not other.is_open()
        assert other.refused == [(NAME, "not_tls")]
        other = Gate(stack, pipes)
        other.agent.sendall(kit.hello(NAME))
        other.serve()
        other.server.sendall(kit.server_hello(retry=True) + kit.server_hello())
        assert not other.is_open()
        assert other.refused == [(NAME, "malformed")]


def test_server_that_says_no_is_heard(gate: Gate) -> None:
    gate.agent.sendall(kit.hello(NAME))
    gate.serve()
    alert = kit.record(b"\x02\x28", kind=21)
    gate.server.sendall(alert)
    gate.server.close()
    assert not gate.is_open()
    assert gate.agent.recv(100) == alert
    assert gate.agent.recv(100) == b""
    assert gate.refused == []


def test_deadlines(gate: Gate, pipes: Pipes) -> None:
    assert gate.connection.deadline == connection.HELLO_SECONDS
    gate.connection.expire(gate.now)
    assert gate.refused == [(None, "hello_timeout")]
    with contextlib.ExitStack() as stack:
        other = carried(Gate(stack, pipes))
        other.now = 1000.0
        other.agent.sendall(b"x")
        other.serve()
        assert other.connection.deadline == 1000 + plan.IDLE_SECONDS
        other.connection.expire(other.now)
        assert other.refused == [(NAME, "idle")]
        assert not other.is_open()


def test_each_side_ends_alone(gate: Gate) -> None:
    carried(gate)
    gate.agent.sendall(b"last words")
    gate.agent.shutdown(socket.SHUT_WR)
    assert gate.heard(gate.server) == b"last words"
    assert gate.server.recv(1) == b""
    gate.server.sendall(b"answer")
    assert gate.heard(gate.agent) == b"answer"
    assert gate.is_open()
    gate.server.shutdown(socket.SHUT_WR)
    assert not gate.is_open()
    assert gate.agent.recv(1) == b""


@pytest.mark.parametrize("most", [0, 1, splice.PIPES])
def test_slow_receiver_gets_every_byte_and_holds_no_more_than_one_pipe(most: int) -> None:
    data = os.urandom(3 << 20)
    pipes = Pipes(most)
    with contextlib.ExitStack() as stack:
        gate = carried(Gate(stack, pipes))
        sent, received = 0, b""
        gate.server.setblocking(False)
        while len(received) < len(data):
            with contextlib.suppress(BlockingIOError):
                sent += gate.server.send(data[sent : sent + 100_000])
            gate.serve()
            received += gate.heard(gate.agent)
        assert received == data
    pipes.close()


def test_pipes_are_counted_and_come_back_empty() -> None:
    pipes = Pipes(1)
    first = pipes.take()
    assert first is not None
    assert pipes.take() is None
    os.write(first[1], b"another's")
    pipes.give(first, empty=False)
    second = pipes.take()
    assert second is not None
    with pytest.raises(BlockingIOError):
        os.read(second[0], 1)
    pipes.give(second, empty=True)
    assert pipes.take() == second
    pipes.give(second, empty=True)
    pipes.close()


def test_flow_closed_leaves_its_bytes_to_nobody(pipes: Pipes) -> None:
    (source, near), (sink, far) = socket.socketpair(), socket.socketpair()
    with source, near, sink, far:
        near.setblocking(False)
        sink.setblocking(False)
        sink.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        source.setblocking(False)
        flow = Flow(near, sink, pipes)
        while not flow.wants_to_write:
            with contextlib.suppress(BlockingIOError):
                source.send(b"secret" * 1000)
            flow.pump()
        flow.close()
        taken = pipes.take()
        assert taken is not None
        with pytest.raises(BlockingIOError):
            os.read(taken[0], 1)
        pipes.give(taken, empty=True)


def test_gate_that_cannot_listen_says_so() -> None:
    def fails(call: Callable[[], Any]) -> Any:
        raise OSError(98, "Address already in use")

    with (
        pytest.raises(errors.KernelError, match="already in use"),
        tls_gate.open({"listen": 8443, **PLAN}, inside=fails, denied=lambda denial: None),
    ):
        raise AssertionError("opened")
