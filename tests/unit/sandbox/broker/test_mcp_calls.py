"""Messages of MCP over the broker: texts to the tool gate and back, bounded, and a gate that is not honest."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from sandbox.broker.mcp_calls import McpCalls
from sandbox.broker.server import Broker, BrokerCall
from sandbox.network.tools import wire


class Gate:
    """The gate's end of the line, and the agent's end of the broker."""

    def __init__(self, broker: Broker) -> None:
        self.broker, self.calls = broker, McpCalls(broker)
        self.line = socket.socket(fileno=socket.dup(self.calls.line.gate_end))
        self.calls.line.started()
        self.agent = socket.socket(fileno=socket.dup(broker.guest))
        for end in (self.line, self.agent):
            end.settimeout(60)
        broker.begin()

    def ask(self, ident: int = 1, **fields: Any) -> None:
        self.agent.sendall(json.dumps({"id": ident, "kind": "mcp", **fields}).encode() + b"\n")
        self.broker.serve()

    def asked(self) -> tuple[int, str, str]:
        number, kind, name, headers, size = wire.REQUEST.unpack(self.line.recv(wire.REQUEST.size, socket.MSG_WAITALL))
        assert (kind, headers) == (wire.MESSAGE, 0)
        alias = self.line.recv(name).decode() if name else ""
        return number, alias, self.line.recv(size, socket.MSG_WAITALL).decode()

    def reply(self, number: int, said: int, raw: bytes) -> None:
        self.line.sendall(wire.REPLY.pack(number, said, len(raw)) + raw)
        self.broker.serve()

    def told(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.agent.makefile().readline())
        return found


@pytest.fixture
def gate() -> Iterator[Gate]:
    with Broker() as broker:
        made = Gate(broker)
        yield made
        made.agent.close()
        made.line.close()


def test_texts_go_to_the_gate_and_back(gate: Gate) -> None:
    gate.ask(7, message='{"id": 1}', server="fs")
    gate.ask(8, message="no JSON \u202e")
    first, second = gate.asked(), gate.asked()
    assert (first[1:], second[1:]) == (("fs", '{"id": 1}'), ("", "no JSON \u202e"))
    gate.reply(second[0], wire.NOTHING, b"")
    assert gate.told() == {"id": 8, "ok": {}}
    gate.reply(first[0], wire.ANSWER, '{"é": 1}'.encode())
    assert gate.told() == {"id": 7, "ok": {"message": '{"é": 1}'}}


def test_alias_that_is_unknown_is_refused(gate: Gate) -> None:
    gate.ask(message="{}", server="none")
    gate.reply(gate.asked()[0], wire.UNKNOWN, b"")
    assert gate.told()["error"]["code"] == "malformed_request"


@pytest.mark.parametrize(
    "fields",
    [{}, {"message": 1}, {"message": {}}, {"message": "", "server": 1}, {"message": "", "server": "../x"},
     {"message": "", "server": "x" * 65}, {"message": "", "number": 1}],
)  # fmt: skip
def test_what_is_no_message_is_refused(gate: Gate, fields: dict[str, Any]) -> None:
    gate.ask(**fields)
    assert gate.told()["error"]["code"] == "malformed_request"
    gate.ask(message="control")
    assert gate.asked()[2] == "control"


def test_gate_that_reads_nothing_is_not_waited_for(gate: Gate) -> None:
    told: list[str] = []
    for _ in range(20):
        said = {"message": "x" * 900_000}
        gate.calls.take(BrokerCall(said, lambda what, secret: told.append(what["error"]["code"])))
    assert len(told) > 5
    assert set(told) == {"too_many_requests"}


@pytest.mark.parametrize("frame", [(99, wire.ANSWER, 0), (1, wire.ANSWER, (1 << 32) - 1)])
def test_dishonest_gate_ends_the_line(gate: Gate, frame: tuple[int, int, int]) -> None:
    gate.ask(message="{}")
    gate.line.sendall(wire.REPLY.pack(*frame))
    gate.broker.serve()
    assert gate.told()["error"]["message"] == "the tool gate is gone"
    gate.ask(2, message="{}")
    assert gate.told()["error"]["message"] == "the tool gate is gone"


def test_end_of_gate_answers_what_is_open(gate: Gate) -> None:
    gate.ask(message="{}")
    gate.line.close()
    gate.broker.serve()
    assert gate.told()["error"]["message"] == "the tool gate is gone"


def test_agent_that_reads_nothing_holds_the_gate_up(gate: Gate) -> None:
    """The shim does not gather replies that the agent leaves unread."""
    gate.agent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    for ident in range(8):
        gate.ask(ident, message="{}")
    numbers = [gate.asked()[0] for _ in range(8)]
    gate.line.setblocking(False)
    frames = b"".join(wire.REPLY.pack(one, wire.ANSWER, 2 << 20) + b"x" * (2 << 20) for one in numbers)
    sent = stuck = 0
    while stuck < 20 and sent < len(frames):
        try:
            sent += gate.line.send(frames[sent : sent + (1 << 18)])
        except BlockingIOError:
            stuck += 1
        gate.broker.serve()
        gate.broker.round().look()
    assert sent < len(frames) / 2
    told = b""
    while told.count(b"\n") < 8:
        with contextlib.suppress(BlockingIOError):
            sent += gate.line.send(frames[sent : sent + (1 << 18)])
        gate.agent.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            told += gate.agent.recv(1 << 20)
        gate.broker.serve()
        gate.broker.round().look()
    assert {json.loads(line)["id"] for line in told.splitlines()} == set(range(8))


def test_agent_that_closed_holds_nothing_up(gate: Gate) -> None:
    """The gate's other clients have answers, though the line of one that is gone was full."""
    gate.agent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    for ident in range(8):
        gate.ask(ident, message="{}")
    numbers = [gate.asked()[0] for _ in range(8)]
    gate.line.setblocking(False)
    frames = b"".join(wire.REPLY.pack(one, wire.ANSWER, 2 << 20) + b"x" * (2 << 20) for one in numbers)

    def carry(sent: int) -> int:
        """Send until nothing is taken in 20 turns. Returns how much was."""
        stuck = 0
        while stuck < 20 and sent < len(frames):
            try:
                sent += gate.line.send(frames[sent : sent + (1 << 18)])
                stuck = 0
            except BlockingIOError:
                stuck += 1
            gate.broker.serve()
            gate.broker.round().look()
        return sent

    sent = carry(0)
    assert sent < len(frames) / 2
    gate.agent.close()
    gate.broker.serve()
    gate.broker.started()
    gate.broker.serve()
    assert carry(sent) == len(frames)


def test_longest_reply_is_passed_on(gate: Gate) -> None:
    # The desk writes two bytes of a server's line as six.
    raw = json.dumps("é" * ((2 << 20) - 100)).encode()
    assert len(raw) > 2 * wire.MESSAGE_BYTES
    gate.ask(message="{}")
    frame = memoryview(wire.REPLY.pack(gate.asked()[0], wire.ANSWER, len(raw)) + raw)
    gate.line.setblocking(False)
    gate.agent.setblocking(False)
    told = bytearray()
    while not told.endswith(b"\n"):
        with contextlib.suppress(BlockingIOError):
            frame = frame[gate.line.send(frame[: 1 << 18]) :]
        gate.broker.serve()
        with contextlib.suppress(BlockingIOError):
            told += gate.agent.recv(1 << 20)
    assert json.loads(told)["ok"]["message"].encode() == raw
