"""The supervisor's end of an inject gate's line: a hijacked gate gets no secret that is not granted."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

import pytest

from policy.grants.credentials import InjectRule, InjectSet
from sandbox.network.inject import wire
from sandbox.network.inject.ledger import Injected, InjectLedger, Then

RULES = InjectSet.of([InjectRule("a.example", "s", "X", "{}", "", "GET", "/a/*")])
ASK = {"kind": "asked", "number": 1, "host": "a.example", "method": "GET", "path": "/a/b", "digest": ""}
END = {
    "kind": "ended", "number": 1, "status": 200, "out_bytes": 0, "in_bytes": 9, "whole": True, "duration_ms": 3,
}  # fmt: skip


class Gate:
    """The gate's end, what was asked of the vault, and the rows."""

    def __init__(self, secret: bytes | None = b"planted-secret") -> None:
        self.asked: list[tuple[str, str]] = []
        self.told: list[Injected] = []

        def ask(host: str, name: str, then: Then) -> None:
            self.asked.append((host, name))
            then(7, None if secret is None else memoryview(secret))

        self.looks: list[tuple[str, str, Callable[[bool | None], None]]] = []
        self.ledger = InjectLedger(RULES, ask, self.told.append, lambda *look: self.looks.append(look))
        self.line = socket.socket(fileno=socket.dup(self.ledger.gate_end))
        self.ledger.started()
        self.line.settimeout(60)

    def say(self, **row: Any) -> bool:
        """Send a row. Returns whether the run goes on."""
        self.line.send(json.dumps(row).encode())
        return self.ledger.serve() is None

    def heard(self) -> tuple[int, int, bytes]:
        message = self.line.recv(wire.ANSWER.size + wire.VALUE_BYTES)
        return (*wire.ANSWER.unpack_from(message), message[wire.ANSWER.size :])

    def close(self) -> None:
        self.line.close()
        self.ledger.close()


def test_granted_request_gets_secret_and_row() -> None:
    gate = Gate()
    assert gate.say(**ASK)
    assert gate.heard() == (1, wire.PRESENT, b"planted-secret")
    assert gate.say(**END)
    assert gate.asked == [("a.example", "s")]
    assert gate.told == [Injected("a.example", "s", "GET", "/a/b", 200, 0, 9, True, 3)]
    gate.close()


def test_missing_secret_is_said() -> None:
    gate = Gate(None)
    assert gate.say(**ASK)
    assert gate.heard() == (1, wire.ABSENT, b"")
    gate.close()


@pytest.mark.parametrize(
    "row",
    [
        {**ASK, "host": "b.example"}, {**ASK, "method": "POST"}, {**ASK, "path": "/b"}, {**ASK, "more": 1},
        {**ASK, "number": -1}, {**ASK, "number": True}, {**ASK, "number": "1"}, {"kind": "asked"}, {"kind": "other"},
        END,
    ],
)  # fmt: skip
def test_other_words_end_the_run(row: dict[str, Any]) -> None:
    gate = Gate()
    assert not gate.say(**row)
    assert (gate.asked, gate.told) == ([], [])
    gate.close()


def test_number_in_use_ends_the_run() -> None:
    gate = Gate()
    assert gate.say(**ASK)
    assert not gate.say(**ASK)
    gate.close()


def test_request_is_cut_when_its_secret_goes() -> None:
    gate = Gate()
    gate.ledger.look()
    assert gate.looks == []  # no request is under way
    for number in (1, 2):
        assert gate.say(**{**ASK, "number": number})
        gate.heard()
    gate.ledger.look()
    gate.ledger.look()
    ((host, name, then),) = gate.looks  # one question at a time
    assert (host, name) == ("a.example", "s")
    then(True)
    gate.ledger.look()
    gate.looks[1][2](False)
    assert [gate.heard(), gate.heard()] == [(1, wire.TAKEN, b""), (2, wire.TAKEN, b"")]
    gate.close()


def test_check_lasts_until_the_cut_request_ends() -> None:
    gate = Gate()
    assert gate.say(**ASK)
    gate.heard()
    gate.ledger.look()
    gate.ledger.look(anew=True)  # the answer to the first question may be older than the removal
    gate.looks[0][2](True)
    assert gate.ledger.is_checking
    gate.looks[1][2](False)
    gate.ledger.look()
    gate.looks[2][2](False)
    assert [gate.heard(), gate.heard()] == 2 * [(1, wire.TAKEN, b"")]  # again, for a gate that took the first too early
    checking = [gate.ledger.is_checking]
    assert gate.say(**END)
    assert [*checking, gate.ledger.is_checking] == [True, False]
    gate.close()


def test_vault_that_cannot_be_asked_confirms_nothing() -> None:
    gate = Gate()
    assert gate.say(**ASK)
    gate.heard()
    gate.ledger.look(anew=True)
    gate.looks[0][2](None)
    assert gate.ledger.is_checking
    gate.ledger.look()  # asked again
    gate.looks[1][2](True)
    checking = [gate.ledger.is_checking]
    gate.ledger.look()
    gate.looks[2][2](None)
    assert gate.say(**END)  # nothing uses it any more
    assert [*checking, gate.ledger.is_checking] == [False, False]
    gate.close()


def test_request_of_a_killed_gate_has_its_row() -> None:
    gate = Gate()
    assert gate.say(**ASK)
    gate.line.close()
    gate.ledger.finish()
    assert gate.told == [Injected("a.example", "s", "GET", "/a/b")]
    gate.ledger.close()
