"""Set elements by netlink against the real nf_tables, and the broker that a gate asks for them."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from policy import errors
from sandbox.kernel.net import nft_sets
from sandbox.kernel.net.nft_sets import Element
from sandbox.network.dns import broker, broker_wire
from tests.kernel import three_namespaces
from tests.kernel.three_namespaces import Namespaces

_RULES = """table inet covenant {
	set n4_a {
		type ipv4_addr
		flags timeout
		size 8
	}
	set n6_a {
		type ipv6_addr
		flags timeout
		size 8
	}
	set n4_b {
		type ipv4_addr
		flags timeout
		size 8
	}
}
"""
PLAN: dict[str, Any] = {
    "names": [
        {"pattern": "a.example", "sets": {"v4": ["n4_a"], "v6": ["n6_a"]}},
        {"pattern": "b.example", "sets": {"v4": ["n4_a", "n4_b"], "v6": []}},
    ],
    "ttl_seconds": [1, 3600],
    "queries_per_second": 1,
    "burst": 1,
}
PUBLIC, OTHER, V6 = bytes([93, 184, 216, 34]), bytes([93, 184, 216, 35]), bytes.fromhex("26064700" + "0" * 20 + "1111")


class Space:
    """A network namespace with the table of a gateway."""

    def __init__(self, spaces: Namespaces) -> None:
        self.spaces = spaces

    def listed(self, name: str) -> str:
        """A set as nft prints it."""
        return self.spaces.run("it", "nft", "list", "set", "inet", "covenant", name)


@pytest.fixture(scope="module")
def empty() -> Iterator[Namespaces]:
    """One namespace."""
    spaces = Namespaces()
    with three_namespaces.anchor() as pid:
        spaces.pids["it"] = pid
        spaces.run("it", "ip", "link", "set", "lo", "up")
        yield spaces


@pytest.fixture
def space(empty: Namespaces, tmp_path: Path) -> Iterator[Space]:
    (tmp_path / "rules").write_text(_RULES)
    empty.run("it", "nft", "-f", str(tmp_path / "rules"))
    yield Space(empty)
    empty.run("it", "nft", "delete", "table", "inet", "covenant")


@pytest.fixture
def netlink(space: Space) -> Iterator[socket.socket]:
    """A socket that was opened there and is used from here."""
    with space.spaces.within("it", nft_sets.open_socket) as made:
        yield made


def test_elements_come_and_go_in_one_transaction(space: Space, netlink: socket.socket) -> None:
    elements = nft_sets.Elements("covenant", netlink)
    elements.add({"n4_a": [Element(PUBLIC, 60)], "n6_a": [Element(V6, 60), Element(b"\1" * 16)]})
    assert "93.184.216.34 timeout 1m expires" in space.listed("n4_a")
    assert "2606:4700::1111" in space.listed("n6_a")
    assert "101:101:101:101:101:101:101:101" in space.listed("n6_a")
    elements.add({"n4_a": [Element(PUBLIC, 600)]}, instead={"n4_a": [Element(PUBLIC)]})
    assert "93.184.216.34 timeout 10m expires" in space.listed("n4_a")
    elements.delete({"n4_a": [Element(PUBLIC)], "n6_a": [Element(V6)]})
    assert "93.184" not in space.listed("n4_a")


def test_transaction_that_fails_changes_nothing(space: Space, netlink: socket.socket) -> None:
    elements = nft_sets.Elements("covenant", netlink)
    nine = [Element(bytes([93, 184, 216, n]), 60) for n in range(9)]
    attempts: tuple[tuple[int, Callable[[], None]], ...] = (
        (errno.ENFILE, lambda: elements.add({"n4_b": [Element(PUBLIC, 60)], "n4_a": nine})),
        (errno.ENOENT, lambda: elements.add({"n4_b": [Element(PUBLIC, 60)], "missing": [Element(PUBLIC, 60)]})),
        (errno.ENOENT, lambda: elements.add({"n4_b": [Element(PUBLIC, 60)]}, instead={"n4_a": [Element(PUBLIC)]})),
        (errno.ENOENT, lambda: elements.delete({"n4_a": [Element(PUBLIC)]})),
    )
    for number, attempt in attempts:
        with pytest.raises(OSError, match="nf_tables") as error:
            attempt()
        assert error.value.errno == number
    assert "elements" not in space.listed("n4_a") + space.listed("n4_b")
    elements.add({"n4_a": nine[:8]})


def test_element_ends_by_itself(space: Space, netlink: socket.socket) -> None:
    nft_sets.Elements("covenant", netlink).add({"n4_a": [Element(PUBLIC, 0.5), Element(OTHER, 600)]})
    until = time.monotonic() + 30
    while "93.184.216.34" in space.listed("n4_a"):
        assert time.monotonic() < until
        time.sleep(0.1)
    assert "93.184.216.35" in space.listed("n4_a")


class Asked:
    """A broker with the line that its gate would have."""

    def __init__(self, made: broker.SetBroker) -> None:
        self.broker = made
        self.line = socket.socket(fileno=os.dup(made.gate_end))
        self.line.setblocking(False)

    def ask(self, message: bytes) -> tuple[int, list[int]] | None:
        """The status and descriptors of the reply; None for an end of the run."""
        self.line.send(message)
        if isinstance(self.broker.serve(), errors.GateError):
            return None
        reply, fds, _, _ = socket.recv_fds(self.line, 64, 4)
        return broker_wire.REPLY.unpack(reply)[1], fds

    def add(self, ttl: int, patterns: list[int], *packed: bytes) -> int | None:
        """The status of an ADD."""
        answer = self.ask(broker_wire.add_request(1, ttl, patterns, packed))
        return None if answer is None else answer[0]


@pytest.fixture
def asked(netlink: socket.socket) -> Iterator[Asked]:
    made = broker.SetBroker(PLAN, netlink, lambda: ("127.0.0.1",))
    with contextlib.closing(made):
        one = Asked(made)
        with one.line:
            yield one


def test_broker_fills_sets_of_patterns_named(space: Space, asked: Asked) -> None:
    assert asked.add(60, [0, 1], PUBLIC, V6) == broker_wire.DONE
    assert asked.add(60, [1], OTHER) == broker_wire.DONE
    assert "93.184.216.34 timeout 1m10s" in space.listed("n4_a")
    assert "93.184.216.34" in space.listed("n4_b")
    assert "2606:4700::1111" in space.listed("n6_a")
    assert "93.184.216.35" in space.listed("n4_a")
    # Asked again at once, nothing changes; for longer, it is prolonged.
    assert asked.add(60, [0], PUBLIC) == broker_wire.DONE
    assert asked.add(600, [0], PUBLIC) == broker_wire.DONE
    assert "93.184.216.34 timeout 10m10s" in space.listed("n4_a")
    assert "93.184.216.34 timeout 1m10s" in space.listed("n4_b")


def test_element_that_has_ended_meanwhile_is_added_anew(space: Space, asked: Asked, netlink: socket.socket) -> None:
    assert asked.add(60, [0], PUBLIC, OTHER) == broker_wire.DONE
    nft_sets.Elements("covenant", netlink).delete({"n4_a": [Element(PUBLIC)]})
    assert asked.add(600, [0], PUBLIC, OTHER) == broker_wire.DONE
    for address in ("93.184.216.34", "93.184.216.35"):
        assert f"{address} timeout 10m10s" in space.listed("n4_a")


def test_full_set_is_said(space: Space, asked: Asked) -> None:
    for last in range(8):
        assert asked.add(60, [0], bytes([93, 0, 0, last])) == broker_wire.DONE
    assert asked.add(60, [0], bytes([93, 0, 0, 8])) == broker_wire.FULL
    assert asked.add(60, [0], V6) == broker_wire.DONE


@pytest.mark.parametrize(
    "message",
    [
        broker_wire.add_request(1, 60, [0], [bytes([10, 0, 0, 1])]),
        broker_wire.add_request(1, 60, [0], [PUBLIC, bytes([169, 254, 169, 254])]),
        broker_wire.add_request(1, 60, [0], [b"\0" * 10 + b"\xff\xff" + PUBLIC]),
        broker_wire.add_request(1, 60, [2], [PUBLIC]),
        broker_wire.add_request(1, 60, [65535], [PUBLIC]),
        broker_wire.add_request(1, 0, [0], [PUBLIC]),
        broker_wire.add_request(1, 3601, [0], [PUBLIC]),
        broker_wire.add_request(1, 60, [0], []),
        broker_wire.add_request(1, 60, [0], [PUBLIC[:3]]),
        broker_wire.add_request(1, 60, [0], [PUBLIC]) + b"\0",
        broker_wire.add_request(1, 60, [0], [PUBLIC])[:-1],
        broker_wire.add_request(1, 60, [0, 0], [PUBLIC]),
        broker_wire.add_request(1, 60, list(range(129)), [PUBLIC]),
        broker_wire.add_request(1, 60, [0], [PUBLIC] * 33),
        broker_wire.udp_request(1, broker_wire.RESOLVERS, b"query"),
        broker_wire.udp_request(1, 0, b""),
        broker_wire.udp_request(1, 0, b"x" * 513),
        broker_wire.tcp_request(1, broker_wire.RESOLVERS),
        broker_wire.tcp_request(1, 0) + b"\0",
        broker_wire.HEADER.pack(4, 1, 0, 0, 0),
        broker_wire.HEADER.pack(broker_wire.TCP, 1, 0, 1, 0),
        b"\1",
        b"x" * 5000,
    ],
)
def test_what_honest_gate_would_not_ask_ends_run(space: Space, asked: Asked, message: bytes) -> None:
    assert asked.add(60, [0], PUBLIC) == broker_wire.DONE  # the control
    assert asked.ask(message) is None
    assert space.listed("n4_a").count("timeout") == 2  # the flag, and the control


def test_questions_go_to_resolver_and_are_few(asked: Asked, empty: Namespaces) -> None:
    answers = empty.within("it", lambda: [asked.ask(broker_wire.udp_request(n, 0, b"question")) for n in range(16)])
    given = [fds[0] for status, fds in filter(None, answers) if status == broker_wire.DONE]
    for fd in given:
        os.close(fd)
    assert len(given) == 8


def test_socket_for_answer_can_say_nothing_to_anybody(empty: Namespaces, netlink: socket.socket, space: Space) -> None:
    """A connected UDP socket sends anywhere when sendto(2) names an address; the control shows it."""

    def work() -> None:
        with contextlib.ExitStack() as stack:
            resolver, other, control = (
                stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) for _ in range(3)
            )
            for one in (resolver, other):
                one.bind(("127.0.0.1", 0))
                one.settimeout(10)
            control.connect(resolver.getsockname())
            control.sendto(b"control", other.getsockname())
            assert other.recv(64) == b"control"
            port = resolver.getsockname()[1]
            made = stack.enter_context(
                contextlib.closing(broker.SetBroker(PLAN, netlink, lambda: ("127.0.0.1",), port=port))
            )
            line = Asked(made)
            stack.enter_context(line.line)
            answer = line.ask(broker_wire.udp_request(1, 0, b"question"))
            assert answer is not None
            given = stack.enter_context(socket.socket(fileno=answer[1][0]))
            said, peer = resolver.recvfrom(64)
            assert said == b"question"
            attempts: tuple[Callable[[], int], ...] = (
                lambda: given.send(b"x"),
                lambda: given.sendto(b"x", other.getsockname()),
                lambda: given.sendto(b"x", resolver.getsockname()),
                lambda: given.sendmsg([b"x"], [], 0, other.getsockname()),
                lambda: given.sendto(b"x", socket.MSG_MORE, other.getsockname()),
            )
            for attempt in attempts:
                with pytest.raises(BrokenPipeError):
                    attempt()
            resolver.sendto(b"answer", peer)
            assert select.select([given], [], [], 10)[0]
            assert given.recv(64) == b"answer"
            other.setblocking(False)
            with pytest.raises(BlockingIOError):
                other.recv(64)

    empty.within("it", work)


def test_gate_gone_ends_run(asked: Asked) -> None:
    asked.broker.started()
    asked.line.close()
    assert select.select([asked.broker], [], [], 10)[0]
    assert isinstance(asked.broker.serve(), errors.GateError)
