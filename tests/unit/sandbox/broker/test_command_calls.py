"""The desk of commands with a gate that sends anything: limits, cancellation, and what no honest gate sends."""

from __future__ import annotations

import base64
import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import pytest

from policy.grants import skill_rules
from policy.grants.skills import SkillSet
from policy.leases import targets
from policy.leases.book import LeaseBook, RunOfLeases
from policy.manifest.tools import command
from policy.signing.lease import LeaseStatement, SignedLease
from sandbox.broker.children import ChildManager, CommandStreams, Say
from sandbox.broker.command_calls import CommandDesk, CommandTerms
from sandbox.broker.server import Broker
from sandbox.network.gate.lease_desk import LeaseDesk
from sandbox.network.tools.questions import HoldTerms

URI = command.uri("gh", "gh-tool")
RULES = skill_rules.of([(URI, "line", skill_rules.alternatives(matches="issue.*"))])
LIMITS = {"calls_per_minute": 3, "call_ms": 1000, "argument_bytes": 100, "answer_bytes": 10}


class Children:
    """Children that a test plays: it writes to their streams and ends them."""

    def __init__(self) -> None:
        self.started: list[tuple[str, CommandStreams, Say]] = []
        self.ended: list[str] = []

    def run_command(self, agent_id: str, streams: CommandStreams, *, timeout_ms: int | None, done: Say) -> str:
        kept = CommandStreams(streams.argv, *(os.dup(fd) for fd in (streams.stdin, streams.stdout, streams.stderr)))
        self.started.append((agent_id, kept, done))
        return f"run{len(self.started)}"

    def end_command(self, run_id: str, number: int) -> None:
        self.ended.append(run_id)

    def exit(self, said: Mapping[str, Any], stdout: bytes = b"") -> None:
        _, streams, done = self.started[-1]
        os.write(streams.stdout, stdout)
        for fd in streams.fds:
            os.close(fd)
        done(said)


class Gate:
    """The gate's end of a desk's line."""

    def __init__(self, broker: Broker, asked: Sequence[str] = (), limits: Mapping[str, int] = LIMITS) -> None:
        self.children, self.rows = Children(), list[tuple[str, Mapping[str, Any]]]()
        terms = CommandTerms(
            SkillSet.of([URI], ["shell"], RULES, limits, asked),
            "top",
            lambda kind, fields: self.rows.append((kind, fields)),
            lambda: None,
            lambda denial, count=1: None,
        )
        self.broker, self.desk = broker, CommandDesk(terms, cast("ChildManager", self.children), broker)
        self.line = socket.socket(fileno=os.dup(self.desk.gate_end))
        self.line.settimeout(60)
        self.desk.started()
        broker.begin()

    def send(self, **message: Any) -> None:
        self.line.sendall(json.dumps(message).encode() + b"\n")
        self.serve()

    def call(self, number: int, *argv: str, name: str = "gh", stdin: bytes = b"") -> None:
        self.send(id=number, name=name, argv=list(argv), stdin=base64.b64encode(stdin).decode())

    def serve(self) -> None:
        for _ in range(4):
            self.broker.serve()

    def heard(self) -> dict[str, Any]:
        self.serve()
        return cast("dict[str, Any]", json.loads(self.line.recv(1 << 16)))


@pytest.fixture
def gate() -> Iterator[Gate]:
    with Broker() as broker:
        made = Gate(broker)
        yield made
        made.line.close()


def test_call_gives_streams_and_status(gate: Gate) -> None:
    gate.call(1, "issue", "list", stdin=b"given")
    agent, streams, _ = gate.children.started[0]
    assert (agent, streams.argv, os.read(streams.stdin, 99)) == ("gh-tool", ("issue", "list"), b"given")
    gate.children.exit({"ok": {"status": 3}}, b"out")
    assert gate.heard() == {"id": 1, "ok": {"status": 3, "stdout": base64.b64encode(b"out").decode(), "stderr": ""}}
    assert [kind for kind, _ in gate.rows] == ["tool_called", "tool_answered"]
    assert "given" not in json.dumps(gate.rows)


def test_output_over_limit_ends_the_call(gate: Gate) -> None:
    gate.call(1, "issue")
    os.write(gate.children.started[0][1].stdout, b"x" * 11)
    gate.serve()
    assert gate.children.ended == ["run1"]
    gate.children.exit({"error": {"code": "terminated", "message": "it was ended"}}, b"y" * 5000)
    said = gate.heard()["error"]
    assert said["code"] == "answer_bytes"
    assert "answer_bytes = 11" in said["hint"]


def test_refusals_start_nothing_and_rate_ends(gate: Gate) -> None:
    for number, (name, argv) in enumerate([("gh", ["delete"]), ("rm", []), ("gh", ["issue", "\0"])], 1):
        gate.call(number, *argv, name=name)
        assert gate.heard()["error"]["code"] in ("arguments", "not_granted")
    codes = []
    for number in range(10, 14):
        gate.call(number, "issue")
        if len(gate.children.started) == number - 9:
            gate.children.exit({"ok": {"status": 0}})
        codes.append(gate.heard().get("error", {}).get("code"))
    assert codes == [None, None, None, "calls_per_minute"]
    assert len(gate.children.started) == 3


def test_client_that_leaves_ends_its_call(gate: Gate) -> None:
    gate.call(1, "issue")
    gate.send(id=1, cancel=True)
    assert gate.children.ended == ["run1"]
    gate.children.exit({"error": {"code": "terminated", "message": "it was ended"}})
    gate.heard()
    assert gate.rows[-1][1]["code"] == "cancelled"


@pytest.mark.parametrize(
    "line",
    [b"x\n", b'{"id":1}\n', b'{"id":1,"name":"gh","argv":["\\ud800"],"stdin":""}\n', b'{"id":-1,"cancel":true}\n'],
)
def test_line_of_no_gate_ends_the_line(gate: Gate, line: bytes) -> None:
    gate.line.sendall(line)
    gate.serve()
    assert gate.line.recv(99) == b""
    assert not gate.children.started


class AskedGate(Gate):
    """A gate whose command is asked about."""

    def __init__(self, broker: Broker, *, held: bool = True, limits: Mapping[str, int] = LIMITS) -> None:
        super().__init__(broker, [URI], limits)
        book = LeaseBook(RunOfLeases("0b5c", "top", "1" * 64), lambda kind, target: targets.tool(target) == URI)
        tell = lambda kind, fields: self.rows.append((kind, fields))  # noqa: E731 - one line
        self.leases = LeaseDesk(book, attended=True, tell=tell, clock=lambda: 1.0)
        if held:
            self.desk.hold_by(HoldTerms(self.leases, frozenset([URI]), 60))

    def grant(self, duration: Any = "once") -> None:
        held = self.leases.book.open[0]
        statement = LeaseStatement(
            agent_id="top", run_id="0b5c", policy_digest="1" * 64, request_id=held.id, kind="tool",
            target=held.target, duration=duration, nonce=held.id * 2, not_before=0, expires_at=9_000,
        )  # fmt: skip
        self.leases.grant(SignedLease(statement, ("op1",), "f" * 64))


def test_held_call_runs_once_it_is_granted() -> None:
    with Broker() as broker:
        gate = AskedGate(broker)
        gate.call(1, "issue", "a", stdin=b"x")
        (held,) = gate.leases.book.open
        assert (held.side_effect, held.arguments) == ("shell", '{"argv": ["issue", "a"], "stdin": "x"}')
        assert gate.children.started == []
        gate.grant()
        assert [(agent, streams.argv) for agent, streams, _ in gate.children.started] == [("gh-tool", ("issue", "a"))]
        gate.children.exit({"ok": {"status": 0}})
        assert "ok" in gate.heard()
        # The same arguments with another stdin are another call; and one that is denied runs nothing.
        gate.call(2, "issue", "a", stdin=b"y")
        gate.leases.deny(gate.leases.book.open[0].id, "ann")
        assert gate.heard()["error"]["code"] == "not_approved"
        assert len(gate.children.started) == 1
        kinds = [kind for kind, _ in gate.rows if kind.startswith("tool")]
        assert kinds == ["tool_called", "tool_answered", "tool_refused"]
        # A client that is gone uses no lease.
        gate.call(3, "issue", "b")
        gate.send(id=3, cancel=True)
        gate.grant()
        assert len(gate.children.started) == 1
        gate.call(4, "issue", "b")
        assert len(gate.children.started) == 2
        gate.children.exit({"ok": {"status": 0}})
        gate.line.close()


def test_refused_command_is_not_asked_about() -> None:
    with Broker() as broker:
        gate = AskedGate(broker)
        gate.call(1, "delete")
        assert gate.heard()["error"]["code"] == "arguments"
        assert gate.leases.book.open == ()
        gate.line.close()


def test_command_beyond_budget_is_not_asked_about() -> None:
    with Broker() as broker:
        gate = AskedGate(broker, limits={**LIMITS, "calls": 1})
        gate.call(1, "issue")
        gate.grant()
        gate.children.exit({"ok": {"status": 0}})
        assert "ok" in gate.heard()
        gate.call(2, "issue", "b")
        assert gate.heard()["error"]["code"] == "calls"
        assert gate.leases.book.open == ()
        gate.line.close()


def test_asked_command_without_a_desk_is_refused() -> None:
    with Broker() as broker:
        gate = AskedGate(broker, held=False)
        gate.call(1, "issue")
        assert gate.heard()["error"]["code"] == "not_approved"
        assert gate.children.started == []
        gate.line.close()
