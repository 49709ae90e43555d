"""Calls that wait for an operator: the gate's desk, the supervisor's end of its line, and the desk of leases."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from policy import errors
from policy.leases import targets
from policy.leases.book import LeaseBook, RunOfLeases
from policy.signing.lease import LeaseStatement, SignedLease
from sandbox.network.gate.lease_desk import LeaseDesk
from sandbox.network.tools import wire
from sandbox.network.tools.desk import Effects, ToolDesk
from sandbox.network.tools.ledger import ToolLedger, ToolTerms
from sandbox.network.tools.questions import HoldTerms
from tests import tool_call_kit as kit

RUN = RunOfLeases("0b5c", "hello", "1" * 64)
URI, COMMAND = kit.uri("open"), "matrix://tool/command/gh@1:gh-tool"
MANIFEST = kit.MANIFEST.replace("side_effects", f"ask = [{json.dumps(URI)}]\nside_effects", 1)


class Held:
    """Both ends of a tool gate's lines, in one process."""

    def __init__(self, *, attended: bool = True) -> None:
        self.rows: list[tuple[str, Mapping[str, Any]]] = []
        self.now = 1.0
        book = LeaseBook(RUN, lambda kind, target: targets.tool(target) == URI)
        self.desk = LeaseDesk(book, attended=attended, tell=self.tell, clock=lambda: self.now)
        hold = HoldTerms(self.desk, frozenset({URI, COMMAND}), 5)
        self.ledger = ToolLedger(ToolTerms({}, "", "hello", self.tell, lambda alias: None, hold=hold))
        ends = {name: os.dup(fd) for name, fd in self.ledger.gate_ends.items()}
        self.lines = {name: socket.socket(fileno=fd) for name, fd in ends.items()}
        for line in self.lines.values():
            line.settimeout(60)
        self.ledger.started()
        self.guarded = kit.Guarded(MANIFEST)
        self.gate = ToolDesk(self.guarded.guard, self.guarded.tools, clock=self.guarded.clock)
        self.number = 0

    def tell(self, kind: str, fields: Mapping[str, Any]) -> None:
        self.rows.append((kind, fields))

    def close(self) -> None:
        for line in self.lines.values():
            line.close()
        self.ledger.close()

    def call(self, **arguments: Any) -> Effects:
        """Make a call, and send the question that comes of it."""
        self.number += 1
        params = {"name": "open", "arguments": arguments}
        message = {"jsonrpc": "2.0", "id": self.number, "method": "tools/call", "params": params}
        return self.sent(self.gate.take(self.number, "fs", json.dumps(message).encode()))

    def sent(self, effects: Effects) -> Effects:
        for question in effects.questions:
            self.ask(question)
        return effects

    def ask(self, question: Mapping[str, Any] | bytes) -> bool:
        """Send a question. Returns whether it is one of an honest gate."""
        raw = question if isinstance(question, bytes) else json.dumps(question).encode()
        self.lines["questions"].send(raw)
        return self.ledger.serve() is None

    def verdict(self) -> tuple[int, bool]:
        number, granted = wire.VERDICT.unpack(self.lines["questions"].recv(wire.VERDICT.size))
        return number, granted

    def answered(self) -> Effects:
        number, granted = self.verdict()
        return self.gate.answered(number, granted=granted)

    def grant(self, duration: Any = "once", *, whole: bool = False, ends_ms: int = 9_000) -> None:
        held = self.desk.book.open[0]
        nonce = f"{len(self.rows):032x}"
        statement = LeaseStatement(
            agent_id="hello", run_id="0b5c", policy_digest="1" * 64, request_id=held.id, kind="tool",
            target=URI if whole else held.target, duration=duration, nonce=nonce, not_before=0, expires_at=ends_ms,
        )  # fmt: skip
        self.desk.grant(SignedLease(statement, ("op1",), nonce * 2))

    def called(self, digest: str, call: str = "c") -> bool:
        """Send the row of a call. Returns whether it is taken."""
        fields = {"uri": URI, "side_effect_class": "read", "arguments_hash_hex": digest, "argument_bytes": 2}
        row = {"kind": "tool_called", "fields": {**fields, "call": call}}
        self.lines["log"].send(json.dumps(row).encode())
        return self.ledger.serve() is None


@pytest.fixture
def run() -> Iterator[Held]:
    made = Held()
    yield made
    made.close()


def said(effects: Effects) -> str:
    ((_, _, message),) = effects.replies
    text: str = json.loads(message)["result"]["content"][0]["text"]
    return text


def digest_of(run: Held) -> str:
    digest: str = run.desk.book.open[0].target.rpartition(":")[2]
    return digest


def test_granted_call_is_made_once(run: Held) -> None:
    assert run.call(path="/tmp/a").replies == []
    (held,) = run.desk.book.open
    assert (held.side_effect, held.arguments) == ("read", '{"path":"/tmp/a"}')
    digest = digest_of(run)
    run.grant()
    effects = run.answered()
    assert (effects.starts, effects.replies) == (["fs"], [])
    assert run.called(digest)
    # The lease is used up: the same call waits again.
    assert run.call(path="/tmp/a").starts == []
    assert len(run.desk.book.open) == 1


def test_row_of_a_call_without_a_lease_ends_the_run(run: Held) -> None:
    """The pass of a call is for its tool and its arguments, once."""
    run.call(path="/tmp/a")
    digest = digest_of(run)
    run.grant()
    assert run.verdict() == (1, True)
    assert not run.called("0" * 64)
    assert run.called(digest)
    assert not run.called(digest, "d")


def test_two_calls_and_a_lease_for_one(run: Held) -> None:
    run.call(path="/tmp/a")
    run.call(path="/tmp/a")
    run.grant()
    assert run.answered().starts == ["fs"]
    assert "needs an operator" in said(run.answered())


def test_lease_for_the_run_is_for_the_same_arguments(run: Held) -> None:
    run.call(path="/tmp/a")
    run.grant("run")
    run.answered()
    run.call(path="/tmp/a")
    assert run.verdict() == (2, True)
    run.call(path="/tmp/b")
    assert [one.arguments for one in run.desk.book.open] == ['{"path":"/tmp/b"}']
    # The whole tool, for a time: calls with other arguments, until it is over.
    run.grant("until", whole=True)
    assert run.verdict() == (3, True)
    run.call(path="/tmp/c")
    assert run.verdict() == (4, True)
    run.now = 9.0
    run.desk.tick()
    run.call(path="/tmp/c")
    assert len(run.desk.book.open) == 1


def test_unanswered_call_is_refused_when_its_time_is_over(run: Held) -> None:
    run.call(path="/tmp/a")
    run.now = 6.0
    run.desk.tick()
    assert "needs an operator" in said(run.answered())
    refused = [fields["code"] for kind, fields in run.guarded.rows if kind == "tool_refused"]
    assert refused == ["not_approved"]
    # And for a minute without a question.
    run.call(path="/tmp/a")
    assert run.verdict() == (2, False)


def test_refused_call_asks_no_operator(run: Held) -> None:
    assert "not" in said(run.call(path=5))
    assert "bytes" in said(run.call(path="x" * 1000))
    assert run.desk.book.open == ()


def test_client_that_is_gone_uses_no_lease(run: Held) -> None:
    run.call(path="/tmp/a")
    run.sent(run.gate.cancel(1))
    run.grant()
    assert run.verdict() == (1, False)
    # Its next try finds the lease.
    run.call(path="/tmp/a")
    assert run.verdict() == (2, True)


def test_unattended_call_is_refused_at_once() -> None:
    run = Held(attended=False)
    run.call(path="/tmp/a")
    assert "needs an operator" in said(run.answered())
    assert [kind for kind, _ in run.rows] == []
    run.close()


def test_view_of_arguments_is_bounded_and_escaped(run: Held) -> None:
    guard = kit.Guarded(MANIFEST.replace("argument_bytes = 400", "argument_bytes = 4000")).guard
    question = guard.question(URI, {"path": "\x1b[2J\u202e`" + "`" * 3000})
    assert question["arguments"].startswith('{"path":"\\u001b[2J\\u202e\\u0060')
    assert question["arguments"].endswith("bytes in all")
    assert len(question["arguments"]) == targets.SHOWN_CHARACTERS
    assert run.ask({"number": 1, **question, "arguments": "\x1b\u202e\x7f`" * 400})
    (held,) = run.desk.book.open
    assert held.arguments.isprintable()
    assert "`" not in held.arguments
    assert len(held.arguments) <= targets.SHOWN_CHARACTERS


QUESTION = {
    "number": 1, "uri": URI, "side_effect_class": "read", "arguments_hash_hex": "0" * 64, "arguments": "{}",
}  # fmt: skip


@pytest.mark.parametrize(
    "question",
    [
        b"no JSON",
        {**QUESTION, "uri": kit.uri("ruled")},
        {**QUESTION, "uri": COMMAND},
        {**QUESTION, "side_effect_class": "all"},
        {**QUESTION, "arguments_hash_hex": "0" * 63},
        {**QUESTION, "arguments": 1},
        {**QUESTION, "number": -1},
        {**QUESTION, "number": True},
        {**QUESTION, "number": 1 << 32},
        {**QUESTION, "more": ""},
        {"number": 2, "gone": False},
    ],
)
def test_question_of_no_honest_gate_ends_the_run(run: Held, question: Any) -> None:
    assert run.ask({**QUESTION, "number": 2})
    assert not run.ask(question)


def test_number_that_waits_is_not_asked_twice(run: Held) -> None:
    assert run.ask(QUESTION)
    assert not run.ask(QUESTION)


def test_direct_call_of_an_asked_tool_is_refused(run: Held) -> None:
    """As by `covenant tools call`, which asks no operator."""
    with pytest.raises(errors.ToolDeniedError, match="needs an operator"):
        run.guarded.guard.check(URI, {"path": "/tmp/a"})
