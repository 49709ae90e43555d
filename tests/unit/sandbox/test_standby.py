"""What an instance says to an intent before anything is begun. Nothing runs here."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from policy import errors
from sandbox import bundle, standby, standby_wire
from sandbox.config import Config
from sandbox.request import Request
from sandbox.state import State
from tests import signing_kit as kit

ROOT = kit.root_bytes(kit.root_document())


@pytest.mark.parametrize("taken_away", [False, True])
def test_a_root_that_came_since_the_look_at_it_sends_the_intent_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken_away: bool
) -> None:
    """The signature would hold under both; who may sign for the role was asked under the first alone."""
    tmp_path.chmod(0o700)
    with State(tmp_path) as state:
        state.init_root(ROOT, kit.NOW)
        one: Any = object.__new__(standby.Instance)
        one._root = state.trust_root(kit.NOW)
        one._trusted = kit.verify(kit.signed(1), one._root)
        one.run_id, one.intent_id, one._mark = "run", "intent", (1, 2, 3)

        class Means:
            config = Config()

        one._means = Means
        Means.state = state  # type: ignore[attr-defined]
        monkeypatch.setattr(one, "_changed", lambda started, *, every_file: None, raising=False)
        state.replace_root(kit.root_bytes(kit.root_document(version=2)), kit.NOW)
        if taken_away:
            state.root_place(2).unlink()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            for end in (ours, theirs):
                end.settimeout(10)
            ours.shutdown(socket.SHUT_WR)
            said = one._dispatch(None, Request(kit.signed(1), "text", {"display": "d", "pubkey": "p"}), theirs)
            assert standby_wire.receive(ours) == {"offer": "run", "since": [1, 2, 3]}
            cold = standby_wire.receive(ours)["cold"]
    assert ("version 2 was installed and is gone" if taken_away else "version 2 holds now") in cold
    assert isinstance(said, errors.KilledError)


@pytest.mark.parametrize("when", ["before the offer", "behind the gate"])
def test_one_that_is_of_no_use_ends_though_whoever_asked_is_gone(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Behind the gate it lost its label already: nobody would see it, or what it holds."""
    one: Any = object.__new__(standby.Instance)
    one.run_id, one.intent_id, one._mark = "run", "intent", (1, 2, 3)
    one._rows = SimpleNamespace(started=False)
    one._decision = SimpleNamespace(manifest=None)
    one._request = request = Request(kit.signed(1), "text", {"display": "d", "pubkey": "p"})
    ours, theirs = socket.socketpair()

    def refused() -> Any:
        ours.close()
        raise errors.TrustError("another root holds now")

    def changed(started: Any, *, every_file: bool) -> str | None:
        if when == "before the offer":
            ours.close()
            return "something was changed"
        return None

    monkeypatch.setattr(one, "_changed", changed, raising=False)
    monkeypatch.setattr(one, "_verify_again", refused, raising=False)
    with ours, theirs:
        said = one._heard(None, theirs, standby_wire.order(request))
    assert isinstance(said, errors.KilledError)
    assert said.message.startswith("standby: ")


@dataclass
class Place:
    """Stands for a claim: what of it is another's at each dispatch."""

    trusted: Any = None
    package_name: str = ""
    caller: str = ""
    itself: str = ""


def test_whoever_may_not_have_it_takes_it_from_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller with as many runs as it may have asks again and again: what is kept ready for others stays."""
    one: Any = object.__new__(standby.Instance)
    made = Request(kit.signed(1), "-", {"display": "standby@local", "pubkey": "p"})
    one.run_id, one.intent_id, one._mark, one._line, one._request = "run", "intent", (1, 2, 3), b"line", made
    one._rows, one._decision, one._place = SimpleNamespace(started=False), SimpleNamespace(manifest=None), Place()

    def refused() -> None:
        raise errors.BusyError("as many live as may")

    for name, value in {
        "_changed": lambda started, *, every_file: None,
        "_verify_again": lambda: None,
        "_deadline": lambda trusted, manifest: None,
        "_claim": lambda place: ({"agent_id": "a"}, refused),
    }.items():
        monkeypatch.setattr(one, name, value, raising=False)
    ours, theirs = socket.socketpair()
    with bundle.RunDirectory(tmp_path / "run", {bundle.STANDBY: "yes"}) as directory, ours, theirs:
        started: Any = SimpleNamespace(directory=directory.path)
        for end in (ours, theirs):
            end.settimeout(30)
        standby_wire.send(ours, {"go": "run"})
        assert one._heard(started, theirs, {**standby_wire.order(made), "text": "another", "intent_id": "i"}) is None
        assert standby_wire.receive(ours)["offer"] == "run"
        assert standby_wire.receive(ours) == {"cold": "as many live as may"}
        assert bundle.label_of(directory.path) == {bundle.STANDBY: "yes"}
    assert (one._request, one._line, one.intent_id) == (made, b"line", "intent")
