"""Requests with a secret that wait for an operator: neither a gate nor a lease for another request gets the secret."""

from __future__ import annotations

import asyncio
import functools
import json
import socket
from collections.abc import Callable
from typing import Any

import pytest

from policy.grants.credentials import InjectRule, InjectSet
from policy.leases import targets
from policy.leases.book import LeaseBook, RunOfLeases
from policy.signing.lease import LeaseStatement, SignedLease
from sandbox.network.gate.lease_desk import LeaseDesk
from sandbox.network.inject import question, scrub, wire
from sandbox.network.inject.holds import HeldRequestTerms
from sandbox.network.inject.judge import RequestRefusedError
from sandbox.network.inject.ledger import Injected, InjectLedger
from sandbox.network.inject.line import HeldQuestion, InjectEntry, NoLeaseError
from tests.inject_kit import get, post, statuses
from tests.unit.sandbox.network.inject.test_server import SECRET, Gate, Told

OTHERS = InjectRule("a.example", "s", "X", "{}", "", "*", "/*")
RULES = InjectSet.of([OTHERS._replace(method="GET", path="/free")], [OTHERS])
DIGEST = "d" * 64
RUN = "0b5c"
HELD = {
    "kind": "held", "number": 1, "host": "a.example", "method": "POST", "path": "/x", "digest": DIGEST,
    "arguments": '{"body": "b"}',
}  # fmt: skip
ASK = {"kind": "asked", "number": 1, "host": "a.example", "method": "POST", "path": "/x", "digest": DIGEST}
END = {
    "kind": "ended", "number": 1, "status": 200, "out_bytes": 0, "in_bytes": 0, "whole": True, "duration_ms": 3,
}  # fmt: skip
TARGET = targets.call("POST https://a.example/x", DIGEST)


class Run:
    """A gate's end, and the desk of its run by a clock of the test."""

    def __init__(self, *, attended: bool = True) -> None:
        self.now = 1.0
        self.rows: list[str] = []
        self.told: list[Injected] = []
        book = LeaseBook(RunOfLeases(RUN, "hello", "1" * 64), lambda kind, target: kind == "inject")
        self.desk = LeaseDesk(
            book, attended=attended, tell=lambda kind, row: self.rows.append(kind), clock=lambda: self.now
        )
        self.ledger = InjectLedger(
            RULES,
            lambda host, name, then: then(1, memoryview(b"planted-secret")),
            self.told.append,
            lambda *look: None,
            HeldRequestTerms(self.desk, lambda host: 60),
        )
        self.line = socket.socket(fileno=socket.dup(self.ledger.gate_end))
        self.ledger.started()
        self.line.settimeout(60)

    def say(self, *rows: dict[str, Any]) -> bool:
        """Send rows. Returns whether the run goes on."""
        for row in rows:
            self.line.send(json.dumps(row).encode())
        return self.ledger.serve() is None

    def heard(self) -> tuple[int, int, bytes]:
        message = self.line.recv(wire.ANSWER.size + wire.VALUE_BYTES)
        return (*wire.ANSWER.unpack_from(message), message[wire.ANSWER.size :])

    def grant(self, duration: Any = "until", target: str = TARGET, ends_ms: int = 9_000) -> None:
        (held,) = self.desk.book.open
        statement = LeaseStatement(
            agent_id="hello", run_id=RUN, policy_digest="1" * 64, request_id=held.id, kind="inject", target=target,
            duration=duration, nonce=held.id * 2, not_before=0, expires_at=ends_ms,
        )  # fmt: skip
        self.desk.grant(SignedLease(statement, ("op1",), held.id * 4))

    def close(self) -> None:
        self.line.close()
        self.ledger.close()


@pytest.fixture
def run() -> Any:
    made = Run()
    yield made
    made.close()


def test_secret_comes_under_the_lease_alone(run: Run) -> None:
    assert run.say(HELD)
    (held,) = run.desk.book.open
    assert (held.kind, held.target, held.arguments) == ("inject", TARGET, '{"body": "b"}')
    assert run.say({**ASK, "number": 9})
    assert run.heard() == (9, wire.UNAPPROVED, b""), "before the grant there is no secret"
    run.grant("once")
    assert run.heard() == (1, wire.GRANTED, b"")
    for other in ({"digest": "e" * 64}, {"path": "/y"}, {"method": "PUT"}):
        assert run.say({**ASK, **other, "number": 2})
        assert run.heard() == (2, wire.UNAPPROVED, b"")
        assert run.say({**END, "number": 2})
    assert run.say(ASK)
    assert run.heard() == (1, wire.PRESENT, b"planted-secret")
    assert run.say({**ASK, "number": 3})
    assert run.heard() == (3, wire.UNAPPROVED, b""), "one use is used up"
    assert run.say(END, {**END, "number": 3}, {**END, "number": 9})
    assert [(one.path, one.status) for one in run.told] == [("/x", 200)], "what was not sent has no row"
    assert run.rows == ["approval_asked", "approval_granted", "lease_ended"]


def test_granted_request_asks_nothing(run: Run) -> None:
    assert run.say({**ASK, "method": "GET", "path": "/free", "digest": ""})
    assert run.heard() == (1, wire.PRESENT, b"planted-secret")
    assert run.rows == []


@pytest.mark.parametrize(
    "row",
    [
        {**ASK, "digest": ""},
        {**ASK, "digest": "d" * 63},
        {**ASK, "host": "b.example"},
        {**HELD, "host": "b.example"},
        {**HELD, "digest": "x" * 64},
        {**HELD, "method": "GET", "path": "/free"},
        {**HELD, "path": "/" + "x" * 500},
        {**HELD, "path": "x"},
        {**HELD, "path": "/a b"},
        {**HELD, "method": "po st"},
        {**HELD, "arguments": 1},
        {**HELD, "more": ""},
    ],
)
def test_hijacked_gate_ends_the_run(run: Run, row: dict[str, Any]) -> None:
    assert not run.say(row)
    assert run.rows == []


def test_without_an_operator_it_is_denied_at_once() -> None:
    run = Run(attended=False)
    assert run.say(HELD)
    assert run.heard() == (1, wire.REFUSED, b"")
    assert run.rows == []
    run.close()


@pytest.mark.parametrize("how", ["expired", "revoked", "spent", "whole"])
def test_request_is_cut_with_its_lease(run: Run, how: str) -> None:
    run.say(HELD)
    whole = "POST https://a.example/x"
    run.grant("once" if how == "spent" else "until", whole if how == "whole" else TARGET)
    run.heard()
    run.say(ASK, {**ASK, "number": 2, "method": "GET", "path": "/free", "digest": ""})
    assert {run.heard()[0], run.heard()[0]} == {1, 2}
    if how == "revoked":
        run.desk.withdraw(run.desk.book.leases[0].sha256)
    else:
        run.now = 9.0
        run.desk.tick()
    assert run.heard() == (1, wire.OVER, b""), "and the other goes on"
    assert run.say(END, {**END, "number": 2})


def test_ended_request_is_not_cut(run: Run) -> None:
    run.say(HELD)
    run.grant()
    run.heard()
    run.say(ASK, END)
    run.heard()
    run.now = 9.0
    run.desk.tick()
    run.line.setblocking(False)
    with pytest.raises(BlockingIOError):
        run.heard()


class Asked(Told):
    """A line whose operator says ``granted`` to each question."""

    def __init__(self, *, granted: bool, leased: bool = True) -> None:
        super().__init__()
        self._granted, self._leased = granted, leased
        self.questions: list[HeldQuestion] = []
        self.on_hold: Callable[[], object] = lambda: None

    async def hold(self, question: HeldQuestion) -> bool:
        self.questions.append(question)
        self.on_hold()
        return self._granted

    async def ask(self, host: str, method: str, path: str, digest: str = "") -> tuple[InjectEntry, bytes | None]:
        if digest and not self._leased:
            raise NoLeaseError
        return await super().ask(host, method, path, digest)


def asking(line: Asked) -> Gate:
    gate = Gate(line)
    rule = gate.injected.rules[0]
    gate.injected = InjectSet.of(gate.injected.rules, [rule._replace(method="*", path="/*")])
    return gate


@pytest.mark.parametrize(("granted", "leased"), [(True, True), (False, True), (True, False)])
def test_gate_sends_what_was_asked_about(*, granted: bool, leased: bool) -> None:
    line = Asked(granted=granted, leased=leased)
    gate = asking(line)
    body = post("Content-Length: 2\r\nX-Target: Pay\r\n", "hi", "/pay?to=ann").encode()
    said = asyncio.run(gate.send(body))
    sent = granted and leased
    assert statuses(said.decode()) == [200 if sent else 403]
    assert gate.denied == ([] if sent else ["not_approved"])
    assert [SECRET in one and one.endswith(b"hi") for one in gate.heard] == ([True] if sent else [])
    (asked,) = line.questions
    assert (asked.method, asked.path) == ("POST", "/pay")
    shown = json.loads(asked.arguments)
    assert (shown["query"], shown["body"], shown["headers"]["x-target"]) == ("to=ann", "hi", "Pay")


def test_granted_and_odd_requests_are_not_asked_about() -> None:
    line = Asked(granted=True)
    for data, status, code in (
        (get(), 200, []),
        (get("/repos/../admin"), 403, ["path_refused"]),
        (get("/admin", method="TRACE"), 403, ["request_not_granted"]),
        (post("Transfer-Encoding: chunked\r\n", "2\r\nhi\r\n0\r\n\r\n", "/pay"), 413, ["not_held"]),
        (get("/" + "x" * 600), 414, ["not_held"]),
    ):
        gate = asking(line)
        said = asyncio.run(gate.send(data.encode()))
        assert (statuses(said.decode()), gate.denied) == ([status], code), data
    assert line.questions == []


def test_digest_is_of_all_that_is_sent() -> None:
    base = ("POST", "a.example", 443, "/x?q=1", [("X-A", "1")], b"body")
    whole = question.of(*base)
    assert question.of(*base).digest == whole.digest
    others = (("/x?q=2", base[4], b"body"), ("/x?q=1", [("X-A", "2")], b"body"), ("/x?q=1", base[4], b"bodx"))
    for path, headers, body in others:
        assert question.of("POST", "a.example", 443, path, headers, body).digest != whole.digest
    other_port = question.of("POST", "a.example", 8443, *base[3:])
    assert other_port.digest != whole.digest
    assert (json.loads(whole.arguments).get("port"), json.loads(other_port.arguments)["port"]) == (None, 8443)
    long = question.of("POST", "a.example", 443, "/x", [], b"\xff\x00" * 4_000)
    assert len(long.arguments) <= targets.SHOWN_CHARACTERS
    assert "8000 bytes in all" in long.arguments
    with pytest.raises(RequestRefusedError):
        question.of("POST", "a.example", 443, "/" + "x" * 600, [], b"")


def test_header_written_twice_is_shown_whole() -> None:
    twice = [("X-To", "eve"), ("X-B", "b"), ("x-to", "ann")]
    whole = question.of("POST", "a.example", 443, "/x", twice, b"")
    assert json.loads(whole.arguments)["headers"] == {"x-b": "b", "x-to": ["eve", "ann"]}
    # A host may take the first value, or the last.
    assert question.of("POST", "a.example", 443, "/x", twice[::-1], b"").digest != whole.digest
    assert question.of("POST", "a.example", 443, "/x", [twice[1], twice[0], twice[2]], b"").digest == whole.digest


@pytest.mark.parametrize("forgotten", [False, True])
def test_token_for_the_secret_is_asked_about(*, forgotten: bool) -> None:
    line = Asked(granted=True)
    gate = asking(line)

    async def sent() -> tuple[bytes, str]:
        server = gate.made()
        placeholder = server.tokens.hide("s", "a-token-of-another-account", 32)
        if forgotten:
            line.on_hold = functools.partial(setattr, server, "tokens", scrub.TokenPlaceholders())
        return await gate.send(get("/pay", f"Authorization: Bearer {placeholder}\r\n").encode(), server), placeholder

    said, placeholder = asyncio.run(sent())
    (asked,) = line.questions
    assert json.loads(asked.arguments)["headers"]["authorization"] == f"Bearer {placeholder}"
    assert statuses(said.decode()) == [503 if forgotten else 200]
    assert [b"a-token-of-another-account" in one for one in gate.heard] == ([] if forgotten else [True])
    # One that means nothing is not sent, and not asked about.
    asyncio.run(gate.send(get("/pay", "Authorization: Bearer x\r\n").encode()))
    assert "authorization" not in json.loads(line.questions[-1].arguments).get("headers", {})
