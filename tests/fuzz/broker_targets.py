"""The request ``mcp`` of the broker: an agent's bytes on their way to the tool gate, and a gate's bytes on theirs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from collections.abc import Iterator, Sequence
from typing import Any

from policy import errors
from sandbox.broker.mcp_calls import KIND, McpCalls
from sandbox.broker.server import Broker
from sandbox.network.tools import wire
from tests.fuzz.drive import Target

_ALIAS = re.compile(r"(?:[a-z0-9_-]{1,64})?")
_WORDS = (
    b'"kind":"mcp"', b'"id":1', b'"message":"{}"', b'"message":1', b'"server":"fs"', b'"server":"../x"',
    b'"server":""', b'"message":"\\ud800"', b'"message":"\\u0000"', b'"more":1', b"\n", b"\xff", b'"id":-1',
    b'"id":9007199254740992', b'"kind":"spawn"',
)  # fmt: skip
_STATES = tuple(wire.REPLY.pack(1, said, 2) + b"{}" for said in (*range(5), 255))
_REPLIES = (*_STATES, wire.REPLY.pack(1, 0, wire.REPLY_BYTES + 1), wire.REPLY.pack(2, 0, 0), b"\xff\xff\xff\xff", b"\0")


class _Ends:
    """A broker with the two ends that others have: the agent's and the tool gate's."""

    def __init__(self, broker: Broker) -> None:
        self._broker, calls = broker, McpCalls(broker)
        self.agent = socket.socket(fileno=os.dup(broker.guest))
        self.gate = socket.socket(fileno=os.dup(calls.line.gate_end))
        for end in (self.agent, self.gate):
            end.setblocking(False)
        broker.started()
        calls.line.started()
        broker.begin()

    def turn(self) -> None:
        """Let the broker do all that it can."""
        again = self._broker.round()
        for _ in range(12):
            self._broker.serve()
            again.look()

    def answers(self) -> list[dict[str, Any]]:
        """Return the answers to the agent, each a line."""
        raw = _read(self.agent)
        assert raw.endswith(b"\n") or not raw
        return [json.loads(line) for line in raw.splitlines()]

    def messages(self) -> Iterator[tuple[int, str, bytes]]:
        """Yield number, alias and message of each request that reached the gate."""
        raw = _read(self.gate)
        while raw:
            number, kind, name, headers, size = wire.REQUEST.unpack_from(raw)
            whole = wire.REQUEST.size + name + size
            assert (kind, headers, len(raw) >= whole) == (wire.MESSAGE, 0, True)
            yield number, raw[wire.REQUEST.size : wire.REQUEST.size + name].decode(), raw[whole - size : whole]
            raw = raw[whole:]


@contextlib.contextmanager
def _opened() -> Iterator[_Ends]:
    with Broker() as broker:
        ends = _Ends(broker)
        with ends.agent, ends.gate:
            yield ends


def _read(end: socket.socket) -> bytes:
    found = bytearray()
    with contextlib.suppress(BlockingIOError, ConnectionResetError):
        while data := end.recv(1 << 20):
            found += data
    return bytes(found)


def agent(raw: bytes) -> str:
    """An agent's lines: a message that reaches the gate is a text for one alias, and each has one answer."""
    with _opened() as ends:
        ends.agent.sendall(raw + b"\n")
        ends.turn()
        sent = list(ends.messages())
        refused = ends.answers()
        assert all("error" in one for one in refused)
        assert len({number for number, _, _ in sent}) == len(sent)
        for number, alias, message in sent:
            assert _ALIAS.fullmatch(alias)
            text = message.decode()
            with contextlib.suppress(ConnectionError):
                ends.gate.sendall(wire.REPLY.pack(number, wire.ANSWER, len(message)) + message)
            ends.turn()
            answered = ends.answers()
            assert [one["ok"] for one in answered] in ([{"message": text}], []), "a closed agent alone has no answer"
    if not sent:
        raise errors.RequestError(str(sorted({one["error"]["code"] for one in refused})))
    return f"{min(len(sent), 3)} {sorted({one['error']['code'] for one in refused})}"


def gate(raw: bytes) -> str:
    """A gate's bytes: the one call that waits has one answer at most, and an end of the line gives it one."""
    with _opened() as ends:
        ends.agent.sendall(json.dumps({"id": 7, "kind": KIND, "message": "{}"}).encode() + b"\n")
        ends.turn()
        assert [number for number, _, _ in ends.messages()] == [1]
        with contextlib.suppress(ConnectionError):
            ends.gate.sendall(raw)
        ends.turn()
        found = ends.answers()
        ends.gate.close()
        ends.turn()
        after = ends.answers()
        (answer,) = found + after
        assert answer["id"] == 7
    if after or "error" in answer:
        raise errors.RequestError(answer["error"]["code"])
    assert answer["ok"].keys() <= {"message"}
    return str(sorted(answer["ok"]))


def _agents() -> Sequence[bytes]:
    calls = [
        {"id": 1, "kind": KIND, "message": '{"jsonrpc":"2.0","id":1,"method":"tools/list"}'},
        {"id": 2, "kind": KIND, "message": "{}", "server": "fs"},
        {"id": 3, "kind": KIND, "message": "no JSON \u202e\ud800", "server": ""},
    ]
    return [*(json.dumps(one).encode() for one in calls), b"\n".join(json.dumps(one).encode() for one in calls)]


TARGETS = (
    Target("broker mcp", agent, _agents, _WORDS, refusals=(errors.RequestError,), share=3),
    Target("broker mcp tree", agent, _agents, _WORDS, refusals=(errors.RequestError,), share=3, json=True),
    Target("broker mcp gate", gate, lambda: _STATES, _REPLIES, refusals=(errors.RequestError,), share=3),
)
