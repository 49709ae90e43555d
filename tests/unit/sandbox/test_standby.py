"""What an instance says to an intent before anything is begun. Nothing runs here."""

from __future__ import annotations

import dataclasses
import socket
from typing import Any

import pytest

from policy import errors
from sandbox import standby, standby_wire
from sandbox.request import Request
from tests import signing_kit as kit

op = kit.operator
ROOT = kit.root(op(1))


def test_a_root_that_came_since_the_look_at_it_sends_the_intent_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signature would hold under both; who may sign for the role was asked under the first alone."""
    trusted = kit.verify(kit.signed(1), ROOT)
    one: Any = object.__new__(standby.Instance)
    one._trusted, one.run_id, one.intent_id, one._mark = trusted, "run", "intent", (1, 2, 3)
    later = object.__new__(type(trusted))
    for field in dataclasses.fields(trusted):
        object.__setattr__(later, field.name, getattr(trusted, field.name))
    object.__setattr__(later, "root_version", trusted.root_version + 1)
    monkeypatch.setattr(one, "_changed", lambda started, *, every_file: None, raising=False)
    monkeypatch.setattr(one, "_verify", lambda: later, raising=False)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for end in (ours, theirs):
            end.settimeout(10)
        ours.shutdown(socket.SHUT_WR)
        said = one._dispatch(None, Request(kit.signed(1), "text", {"display": "d", "pubkey": "p"}), theirs)
        assert standby_wire.receive(ours) == {"offer": "run", "since": [1, 2, 3]}
        assert "cold" in standby_wire.receive(ours)
    assert isinstance(said, errors.KilledError)
