"""A line to a gate: it waits for room, sends what the gate reads late, and ends once for any cause."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from sandbox.broker.gate_line import GateLine
from sandbox.broker.server import Broker


class Line:
    """A line whose other end the test has."""

    def __init__(self, broker: Broker) -> None:
        self.broker, self.has_room, self.ends = broker, True, 0
        self.came = bytearray()
        self.line = GateLine(broker, self.came.extend, self._gone, room=lambda: self.has_room)
        self.gate = socket.socket(fileno=os.dup(self.line.gate_end))
        self.gate.settimeout(30)
        self.line.started()

    def _gone(self) -> None:
        self.ends += 1


@pytest.fixture
def line() -> Iterator[Line]:
    with Broker() as broker:
        made = Line(broker)
        yield made
        made.gate.close()
        made.line.close()
    assert made.ends == 1


def test_bytes_are_taken_from_the_beginning_on(line: Line) -> None:
    line.gate.sendall(b"early")
    line.broker.serve()
    line.line.look()
    assert line.came == b""
    line.line.begin()
    line.broker.serve()
    assert line.came == b"early"


def test_gate_waits_while_there_is_no_room(line: Line) -> None:
    line.line.begin()
    line.has_room = False
    line.gate.sendall(b"later")
    for _ in range(3):
        line.broker.serve()
        line.line.look()
    assert line.came == b""
    line.has_room = True
    line.line.look()
    line.broker.serve()
    assert line.came == b"later"


def test_gate_that_reads_late_gets_all(line: Line) -> None:
    whole = os.urandom(4 << 20)
    line.line.send(whole)
    assert line.line.waiting
    found = bytearray()
    while len(found) < len(whole):
        found += line.gate.recv(1 << 20)
        line.line.look()
    assert (bytes(found), line.line.waiting) == (whole, 0)


@pytest.mark.parametrize("how", ["read", "write", "close"])
def test_line_ends_once_for_any_cause(line: Line, how: str) -> None:
    line.line.begin()
    line.gate.close()
    if how == "read":
        line.broker.serve()
    elif how == "write":
        line.line.send(b"x")
    else:
        line.line.close()
    assert (line.line.is_open, line.ends) == (False, 1)
    line.line.send(b"x")
    line.line.look()
    line.line.hang_up()
