"""The supervisor's end of a tool gate: rows that it may send, and those that end the run."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from msgspec import structs

from policy import errors
from sandbox.kernel.proc import pipes
from sandbox.network.tools import wire
from sandbox.network.tools.ledger import StartedServer, ToolLedger, ToolTerms

CALLED = {"uri": "u", "side_effect_class": "read", "arguments_hash_hex": "00", "argument_bytes": 2}
ANSWERED = {
    "uri": "u", "call": "c", "status": "ok", "code": None, "answer_hash_hex": None, "answer_bytes": 1, "duration_ms": 2,
}  # fmt: skip


class Gate:
    """The gate's ends of a ledger, and the rows that it wrote."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, Mapping[str, Any]]] = []
        # Whether a call was acknowledged when the log was synced, and when it was settled.
        self.acknowledged: list[tuple[str, bool]] = []
        self.pipes: list[int] = []
        terms = ToolTerms({}, "", "hello", lambda kind, row: self.rows.append((kind, row)), self.start)
        terms = structs.replace(terms, sync=lambda: self.note("sync"), settle=lambda: self.note("settle"))
        self.ledger = ToolLedger(terms)
        ends = {name: os.dup(fd) for name, fd in self.ledger.gate_ends.items()}
        self.log, self.control = (socket.socket(fileno=ends[name]) for name in ("log", "control"))
        self.ledger.started()
        for end in (self.log, self.control):
            end.settimeout(60)

    def start(self, alias: str) -> StartedServer | None:
        if alias != "fs":
            return None
        ((a, b), (c, d), (e, f)) = (os.pipe() for _ in range(3))
        self.pipes = [a, d, f]
        return StartedServer(b, c, e)

    def note(self, act: str) -> None:
        self.acknowledged.append((act, pipes.readable(self.log.fileno(), 0)))

    def tell(self, kind: str, fields: Mapping[str, Any]) -> errors.RunError | None:
        self.log.send(json.dumps({"kind": kind, "fields": fields}).encode())
        return self.ledger.serve()

    def close(self) -> None:
        self.log.close()
        self.control.close()
        self.ledger.close()
        for fd in self.pipes:
            os.close(fd)


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.close()


def test_call_is_acknowledged_when_it_is_written(gate: Gate) -> None:
    assert gate.tell("tool_called", {**CALLED, "call": "c", "agent_id": "another"}) is None
    assert gate.acknowledged == [("sync", False), ("settle", True)]
    assert gate.log.recv(8) == wire.ACK
    assert gate.rows == [("tool_called", {**CALLED, "call": "c", "agent_id": "hello"})]
    assert gate.tell("tool_answered", ANSWERED) is None
    assert gate.rows[1][0] == "tool_answered"
    gate.ledger.finish()
    assert len(gate.rows) == 2


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("tool_answered", ANSWERED),
        ("run_ended", {}),
        ("tool_called", CALLED),
        ("tool_called", {**CALLED, "call": "c", "extra": 1}),
        ("tool_called", {**CALLED, "call": "c", "argument_bytes": -1}),
        ("tool_called", {**CALLED, "call": "c", "argument_bytes": True}),
        ("tool_called", {**CALLED, "call": 7}),
    ],
)
def test_row_that_no_honest_gate_sends_ends_the_run(gate: Gate, kind: str, fields: Mapping[str, Any]) -> None:
    found = gate.tell(kind, fields)
    assert isinstance(found, errors.GateError)
    assert gate.rows == []


def test_call_of_gate_that_died_has_its_end(gate: Gate) -> None:
    gate.tell("tool_called", {**CALLED, "call": "c"})
    gate.log.close()
    assert isinstance(gate.ledger.serve(), errors.GateError)
    gate.ledger.finish()
    assert [row["code"] for kind, row in gate.rows if kind == "tool_answered"] == ["run_ended"]


def test_started_server_gives_its_pipes_and_drains_stderr(gate: Gate) -> None:
    gate.control.send(b"fs")
    assert gate.ledger.serve() is None
    message, fds, _, _ = socket.recv_fds(gate.control, 64, 4)
    assert (message, len(fds)) == (b"fs", 2)
    os.write(fds[0], b"in")
    assert os.read(gate.pipes[0], 8) == b"in"
    for fd in fds:
        assert not os.get_blocking(fd)
        os.close(fd)
    for _ in range(4):
        os.write(gate.pipes[2], b"x" * 60_000)
        assert gate.ledger.serve() is None


def test_unknown_server_is_refused_without_descriptors(gate: Gate) -> None:
    gate.control.send(b"no")
    assert gate.ledger.serve() is None
    message, fds, _, _ = socket.recv_fds(gate.control, 64, 4)
    assert (message, fds) == (b"no", [])
    gate.control.send(b"\xff")
    assert isinstance(gate.ledger.serve(), errors.GateError)
