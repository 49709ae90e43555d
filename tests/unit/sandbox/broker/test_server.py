"""Check the agent's broker: every line has one answer, also a hostile one, unless the agent does not read."""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from policy import errors
from sandbox.broker import server
from sandbox.broker.server import Broker, BrokerCall


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Agent:
    """The agent's end of the socket, and the turns of an exchange."""

    def __init__(self, made: Broker, clock: Clock) -> None:
        self.made, self.clock = made, clock
        self.sock = socket.socket(fileno=os.dup(made.guest))
        self.sock.setblocking(False)
        made.started()
        self._heard = b""

    def write(self, data: bytes) -> int:
        """Write as much as the socket accepts, with a turn of the exchange after each write."""
        sent = 0
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while sent < len(data):
                sent += self.sock.send(data[sent:])
                self.turn()
        return sent

    def ask(self, **request: Any) -> None:
        self.write(json.dumps(request).encode() + b"\n")

    def turn(self) -> None:
        assert self.made.serve() is None

    def later(self, seconds: float = 1.0) -> None:
        self.clock.now += seconds
        self.made.round().look()
        self.turn()

    def heard(self) -> list[dict[str, Any]]:
        """Return all answers since the last call, with None for the end."""
        with contextlib.suppress(BlockingIOError):
            while data := self.sock.recv(1 << 20):
                self._heard += data
                self.turn()
        *lines, self._heard = self._heard.split(b"\n")
        return [json.loads(line) for line in lines]

    def over(self) -> bool:
        """Whether the broker has closed the connection."""
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            while self.sock.recv(1 << 20):
                pass
            return True
        return not self.made._alive


HELD: list[BrokerCall] = []


def refuse(call: BrokerCall) -> None:
    raise errors.PackageError("no", hint="h")


TABLE = {
    "echo": lambda call: call.answer(call.fields),
    "hold": HELD.append,
    "refuse": refuse,
    "large": lambda call: call.answer({"text": "x" * 500_000}),
}


@pytest.fixture
def agent() -> Iterator[Agent]:
    HELD.clear()
    clock = Clock()
    with Broker(TABLE, clock=clock) as made:
        one = Agent(made, clock)
        yield one
        one.sock.close()


def test_each_request_has_its_answer_in_any_order(agent: Agent) -> None:
    agent.ask(id=1, kind="hold", a=1)
    agent.ask(id=2, kind="echo", text="\u00e9\u2028", deep={"x": [1, None]})
    agent.ask(id=3, kind="refuse")
    agent.ask(id=4, kind="none")
    HELD[0].answer({"late": True})
    HELD[0].answer({"twice": True})
    assert HELD[0].fields == {"a": 1}
    assert agent.heard() == [
        {"id": 2, "ok": {"text": "\u00e9\u2028", "deep": {"x": [1, None]}}},
        {"id": 3, "error": {"code": "package_invalid", "message": "no", "hint": "h"}},
        {"id": 4, "error": {"code": "unknown_kind", "message": "there is no request of kind `none` here"}},
        {"id": 1, "ok": {"late": True}},
    ]


NO_REQUESTS = (
    *(b"", b"nonsense", b"[]", b"null", b"{}", b'{"id":1}', b'{"kind":"echo"}', b'{"id":"1","kind":"echo"}'),
    *(b'{"id":true,"kind":"echo"}', b'{"id":-1,"kind":"echo"}', b'{"id":1.5,"kind":"echo"}'),
    b'{"id":1,"kind":["echo"]}',
    *(b'{"id":1,"id":2,"kind":"echo"}', b"\xff\xfe", b"[" * 100_000),
    b'{"id":1,"kind":"echo","n":' + b"9" * 5000 + b"}",
)


@pytest.mark.parametrize("line", NO_REQUESTS, ids=range(len(NO_REQUESTS)))
def test_what_is_no_request_is_said_to_be_none(agent: Agent, line: bytes) -> None:
    agent.write(line + b"\n")
    agent.ask(id=7, kind="echo")
    first, second = agent.heard()
    assert (first["id"], first["error"]["code"]) == (None, "malformed_request")
    assert second == {"id": 7, "ok": {}}


def test_after_many_lines_none_nobody_listens(agent: Agent) -> None:
    agent.write(b"x\n" * (server.MALFORMED - 1))
    assert not agent.over()
    agent.write(b"x\n")
    assert agent.over()


def test_line_without_end_ends_conversation(agent: Agent) -> None:
    chunk = b"x" * 65536
    for _ in range(server.LINE_BYTES // len(chunk)):
        agent.write(chunk)
    assert not agent.over()
    agent.write(chunk * 2)
    assert agent.over()


class Searched(bytearray):
    """The received bytes, with a count of the bytes that were searched."""

    bytes = 0

    def find(self, what: Any, start: Any = 0, end: Any = None) -> int:
        found = super().find(what, start)
        self.bytes += (len(self) if found < 0 else found + 1) - start
        return found

    def __contains__(self, what: object) -> bool:
        raise AssertionError("looked through from its start")


def test_long_line_that_comes_byte_by_byte_is_looked_through_once(agent: Agent) -> None:
    searched = Searched()
    agent.made._in = searched
    line = b'{"id":1,"kind":"echo","text":"' + b"x" * 2000 + b'"}'
    for byte in line + b"\n":
        agent.write(bytes([byte]))
    assert agent.heard() == [{"id": 1, "ok": {"text": "x" * 2000}}]
    assert searched.bytes <= 4 * len(line)
    agent.write(b'{"id":2,"kind":"echo"}\n{"id":3,"kind":"echo"}\n{"id":4,')
    agent.write(b'"kind":"echo"}\n')
    assert [one["id"] for one in agent.heard()] == [2, 3, 4]


def test_who_asks_too_fast_waits(agent: Agent) -> None:
    """The agent gets its burst, then a rate per second; no request is lost, and waiting ones fill no buffer of ours."""
    line = b'{"id":1,"kind":"echo"}\n'
    taken = agent.write(line * 40_000)
    assert taken < len(line) * 40_000
    assert len(agent.made._in) <= 2 * 65536
    for _ in range(100):
        agent.made.round().look()
    assert len(agent.heard()) == server.BURST
    agent.later(2.0)
    for _ in range(20):
        agent.made.round().look()
    assert len(agent.heard()) == 2 * server.PER_SECOND


def test_long_line_counts_for_many(agent: Agent) -> None:
    for n in range(8):
        agent.write(json.dumps({"id": n, "kind": "hold", "x": "x" * 1_000_000}).encode() + b"\n")
    for _ in range(20):
        agent.made.round().look()
    assert len(HELD) == 1 + server.BURST // (15 * 4 + 1)


def test_so_many_may_be_without_answer(agent: Agent) -> None:
    for n in range(server.OUTSTANDING + 2):
        agent.later()
        agent.ask(id=n, kind="hold")
    refused = agent.heard()
    assert len(HELD) == server.OUTSTANDING
    assert {one["error"]["code"] for one in refused} == {"too_many_requests"}
    assert len(refused) == 2
    HELD.pop().answer({})
    agent.later()
    agent.ask(id=9, kind="hold")
    assert [one["id"] for one in agent.heard()] == [server.OUTSTANDING - 1]


def test_who_does_not_read_is_not_listened_to_and_loses_nothing(agent: Agent) -> None:
    for n in range(12):
        agent.later()
        agent.ask(id=n, kind="large")
    assert agent.made._unread < (1 << 20) + 600_000
    assert not agent.made.room
    answers = agent.heard()
    for _ in range(20):
        agent.later()
        answers += agent.heard()
    assert [one["id"] for one in answers] == list(range(12))
    assert agent.made.room


def test_descriptors_sent_along_do_not_arrive(agent: Agent) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with contextlib.ExitStack() as stack:
        pipe = os.pipe()
        for fd in pipe:
            stack.callback(os.close, fd)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", pipe))]
        agent.sock.sendmsg([b'{"id":1,"kind":"echo"}\n'], ancillary)
        agent.turn()
    assert agent.heard() == [{"id": 1, "ok": {}}]
    assert set(os.listdir("/proc/self/fd")) == before


def test_agent_that_hangs_up_is_answered_no_more(agent: Agent) -> None:
    agent.ask(id=1, kind="hold")
    agent.sock.close()
    agent.turn()
    HELD[0].answer({"late": True})
    agent.later()
    assert not agent.made._alive


def test_others_are_looked_at_in_same_turn_and_everything_is_closed() -> None:
    before = set(os.listdir("/proc/self/fd"))
    said: list[str] = []
    with Broker() as made:
        made.add({}, begin=lambda: said.append("begin"), close=lambda: said.append("close"))
        read, write = os.pipe()
        made.watch(read, lambda: said.append(os.read(read, 9).decode()))
        os.write(write, b"hello")
        made.begin()
        made.serve()
        made.forget(read)
        os.write(write, b"unheard")
        made.serve()
        for fd in (read, write):
            os.close(fd)
    assert said == ["begin", "hello", "close"]
    assert set(os.listdir("/proc/self/fd")) == before
