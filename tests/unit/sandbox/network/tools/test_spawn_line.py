"""The line for children between the tool gate and the supervisor, and the tool `spawn` on both ends of it."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from policy import errors
from sandbox.network.tools import spawn_line, spawn_tool, wire
from sandbox.network.tools.desk import CHILDREN, Effects, ToolDesk
from sandbox.network.tools.spawn_line import SpawnLine
from tests import tool_call_kit as kit

DONE = {"ok": {"run": "r", "text": "answer", "sources": []}}
ASKED = {"agent": "worker", "text": "hi"}


class Line:
    """The gate's end of a line, and the children that were asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[Mapping[str, Any], Callable[[Mapping[str, Any]], None]]] = []
        self.stopped: list[int] = []
        self.waits: list[bool] = []
        self.line = SpawnLine(self._spawn, self.waits.append)
        self.gate = socket.socket(fileno=socket.dup(self.line.gates_end.fileno()))
        self.line.gates_end.close()
        self.gate.settimeout(60)

    def _spawn(self, fields: Mapping[str, Any], done: Callable[[Mapping[str, Any]], None]) -> Callable[[], None]:
        self.asked.append((fields, done))
        if fields["text"] == "refused":
            done({"error": {"code": "c", "message": "m"}})
        place = len(self.asked)
        return lambda: self.stopped.append(place)

    def put(self, number: int, raw: bytes) -> errors.RunError | None:
        self.gate.sendall(wire.SPAWN.pack(number, len(raw)) + raw)
        return self.line.serve()

    def get(self) -> tuple[int, Any]:
        number, size = wire.SPAWN.unpack(self.gate.recv(wire.SPAWN.size, socket.MSG_WAITALL))
        return number, json.loads(self.gate.recv(size, socket.MSG_WAITALL))


@pytest.fixture
def line() -> Iterator[Line]:
    made = Line()
    yield made
    made.gate.close()
    made.line.close()


def test_outcomes_come_back_by_number(line: Line) -> None:
    for number in (1, 2):
        assert line.put(number, json.dumps(ASKED).encode()) is None
    line.asked[1][1](DONE)
    line.asked[0][1]({"error": {"code": "c", "message": "m"}})
    assert line.get() == (2, DONE)
    assert line.get() == (1, {"error": {"code": "c", "message": "m"}})
    assert [fields for fields, _ in line.asked] == [ASKED, ASKED]


@pytest.mark.parametrize(
    "raw",
    [b" ", b"{", b"[]", b"{}", b'{"agent":"a"}', b'{"agent":1,"text":"t"}', b'{"agent":"a","text":"t","only":{}}',
     b"[" * 100_000],
)  # fmt: skip
def test_request_of_no_honest_gate_ends_run(line: Line, raw: bytes) -> None:
    assert isinstance(line.put(1, raw), errors.GateError)
    assert line.asked == []


def test_number_under_way_and_long_frame_end_run(line: Line) -> None:
    assert line.put(1, json.dumps(ASKED).encode()) is None
    assert isinstance(line.put(1, json.dumps(ASKED).encode()), errors.GateError)
    line.gate.sendall(wire.SPAWN.pack(2, wire.SPAWN_BYTES + 1))
    assert isinstance(line.line.serve(), errors.GateError)


def test_children_under_way_are_bounded(line: Line) -> None:
    for number in range(spawn_line.UNDER_WAY):
        assert line.put(number, json.dumps(ASKED).encode()) is None
    assert line.put(9999, json.dumps(ASKED).encode()) is None
    assert line.get()[1]["error"]["code"] == "too_many_requests"
    line.asked[0][1](DONE)
    assert line.put(9999, json.dumps(ASKED).encode()) is None
    assert len(line.asked) == spawn_line.UNDER_WAY + 1


def test_outcome_that_gate_does_not_read_waits(line: Line) -> None:
    assert line.put(1, json.dumps(ASKED).encode()) is None
    long = {"ok": {**DONE["ok"], "text": "x" * 3_000_000}}
    line.asked[0][1](long)
    assert line.waits.count(True) == 1
    line.gate.setblocking(False)
    found = bytearray()
    while line.waits[-1]:
        found += line.gate.recv(1 << 20)
        assert line.line.serve() is None
    line.gate.settimeout(60)
    while len(found) < wire.SPAWN.size + len(json.dumps(long, separators=(",", ":"))):
        found += line.gate.recv(1 << 20)
    assert json.loads(found[wire.SPAWN.size :]) == long


def test_end_of_gate_is_error(line: Line) -> None:
    assert line.put(1, json.dumps(ASKED).encode()) is None
    line.gate.close()
    assert isinstance(line.line.serve(), errors.GateError)
    assert line.line.hung_up
    line.line.close()
    line.asked[0][1](DONE)  # a child that ends after the gate is none of its business


# --- the desk -----------------------------------------------------------------------------------------


def desk(*, spawns: bool = True) -> ToolDesk:
    guarded = kit.Guarded()
    return ToolDesk(guarded.guard, guarded.tools, clock=guarded.clock, spawns=spawns)


def call(one: ToolDesk, number: int, alias: str = "", **arguments: Any) -> Effects:
    params = {"name": spawn_tool.NAME, "arguments": arguments}
    message = {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params}
    return one.take(number, alias, json.dumps(message).encode())


def test_call_waits_for_its_child() -> None:
    one = desk()
    asked = call(one, 7, agent="worker", text="hi")
    assert (asked.replies, [(number, json.loads(raw)) for number, raw in asked.children]) == ([], [(7, ASKED)])
    ((number, said, reply),) = one.child_ended(7, json.dumps(DONE).encode()).replies
    assert (number, said, json.loads(reply)["result"]["content"][0]["text"]) == (7, wire.ANSWER, "answer")
    assert one.child_ended(7, json.dumps(DONE).encode()).replies == [], "once"


def test_error_of_child_is_result_with_hint() -> None:
    found = spawn_tool.result({"error": {"code": "rule_4_parent", "message": "no", "hint": "less"}})
    assert (found["isError"], found["content"][0]["text"]) == (True, "rule_4_parent: no\nless")


@pytest.mark.parametrize(
    "arguments",
    [{}, {"agent": "a"}, {"agent": "a", "text": 1}, {"agent": "a" * 129, "text": ""}, {**ASKED, "only": {}},
     {"agent": "a", "text": "x" * (spawn_tool.TEXT_BYTES + 1)}],
)  # fmt: skip
def test_call_with_other_arguments_starts_nothing(arguments: dict[str, Any]) -> None:
    found = call(desk(), 1, **arguments)
    assert found.children == []
    assert json.loads(found.replies[0][2])["result"]["isError"]


def test_run_without_children_has_no_tool_for_them() -> None:
    found = call(desk(spawns=False), 1, **ASKED)
    assert (found.children, json.loads(found.replies[0][2])["error"]["code"]) == ([], -32602)
    listed = desk(spawns=False).take(1, "", b'{"jsonrpc":"2.0","id":1,"method":"tools/list"}')
    assert b'"spawn"' not in listed.replies[0][2]
    other = call(desk(), 1, "fs", **ASKED)
    assert other.children == []


def test_children_that_are_waited_for_are_bounded() -> None:
    one = desk()
    for number in range(CHILDREN):
        assert call(one, number, **ASKED).children
    assert call(one, 999, **ASKED).children == []
    one.cancel(0)
    assert call(one, 1000, **ASKED).children
    assert one.child_ended(0, json.dumps(DONE).encode()).replies == [], "its client gave up"


def test_child_of_client_that_gave_up_is_stopped(line: Line) -> None:
    for number, text in ((1, "hi"), (2, "hi"), (3, "refused")):
        assert line.put(number, json.dumps({**ASKED, "text": text}).encode()) is None
    line.asked[0][1](DONE)
    for number in (1, 2, 3, 9):
        assert line.put(number, b"") is None
    assert line.stopped == [2]
    line.asked[1][1](DONE)
    assert [line.get()[0] for _ in range(3)] == [3, 1, 2]
