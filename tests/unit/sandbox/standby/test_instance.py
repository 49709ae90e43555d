"""The answers of a warm sandbox to an intent before it begins. No sandbox runs here."""

from __future__ import annotations

import contextlib
import gc
import socket
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from policy import errors
from sandbox.config import Config
from sandbox.lifecycle.types import Request
from sandbox.run_io import IntentDelivery
from sandbox.rundir import directory as rundir_directory
from sandbox.rundir import label
from sandbox.standby import dispatch, instance
from sandbox.storage.trust_state import State
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
        one: Any = object.__new__(instance.WarmSandbox)
        one._root = state.trust_root(kit.NOW)
        one._trusted = kit.verify(kit.signed(1), one._root)
        one.run_id, one.intent_id, one._mark = "run", "intent", (1, 2, 3)

        class Dependencies:
            config = Config()

        one._dependencies = Dependencies
        Dependencies.state = state  # type: ignore[attr-defined]
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
            assert dispatch.receive(ours) == {"offer": "run", "since": [1, 2, 3]}
            cold = dispatch.receive(ours)["cold"]
    assert "trust root version 2 was installed after 1" in cold
    assert isinstance(said, errors.KilledError)


@pytest.mark.parametrize("when", ["before the offer", "behind the gate"])
def test_one_that_is_of_no_use_ends_though_whoever_asked_is_gone(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Its label is gone behind the gate, so that no process would see it or the place that it holds."""
    one: Any = object.__new__(instance.WarmSandbox)
    one.run_id, one.intent_id, one._mark, one._settings = "run", "intent", (1, 2, 3), "s"
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
        said = one._handle_order(None, theirs, dispatch.order(request, "s"))
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
    one: Any = object.__new__(instance.WarmSandbox)
    made = Request(kit.signed(1), "-", {"display": "standby@local", "pubkey": "p"})
    one.run_id, one.intent_id, one._mark, one._line, one._request = "run", "intent", (1, 2, 3), b"line", made
    one._rows, one._decision, one._place = SimpleNamespace(started=False), SimpleNamespace(manifest=None), Place()
    one._settings = "s"

    def refused() -> None:
        raise errors.BusyError("as many live as may")

    for name, value in {
        "_changed": lambda started, *, every_file: None,
        "_verify_again": lambda: kit.verify(kit.signed(1)),
        "_deadline": lambda trusted, manifest: None,
        "_dependencies": SimpleNamespace(state=SimpleNamespace(accepted=lambda agent_id: None)),
        "_claim": lambda place: ({"agent_id": "a"}, refused),
    }.items():
        monkeypatch.setattr(one, name, value, raising=False)
    ours, theirs = socket.socketpair()
    with rundir_directory.RunDirectory(tmp_path / "run", {label.STANDBY: "yes"}) as directory, ours, theirs:
        started: Any = SimpleNamespace(directory=directory.path)
        for end in (ours, theirs):
            end.settimeout(30)
        dispatch.send(ours, {"go": "run"})
        assert (
            one._handle_order(started, theirs, {**dispatch.order(made, "s"), "text": "another", "intent_id": "i"})
            is None
        )
        assert dispatch.receive(ours)["offer"] == "run"
        assert dispatch.receive(ours) == {"cold": "as many live as may"}
        assert label.label_of(directory.path) == {label.STANDBY: "yes"}
    assert (one._request, one._line, one.intent_id) == (made, b"line", "intent")


def _waiting(**held: Any) -> Any:
    """An instance that waits, as far as those see it who come and are sent elsewhere."""
    one: Any = object.__new__(instance.WarmSandbox)
    one.run_id, one._rows, one._settings = "run", SimpleNamespace(started=False), "s"
    one._request = Request(kit.signed(1), "-", {"display": "standby@local", "pubkey": "p"})
    one._stack, one._client = contextlib.ExitStack(), None
    for name, value in held.items():
        setattr(one, name, value)
    return one


def test_one_that_was_made_under_another_configuration_is_given_no_intent_and_tells_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A file that was written before it was made, and read by the supervisor after, is no change that it could see."""
    one = _waiting()
    given = IntentDelivery(b"line", cast("Any", None))
    monkeypatch.setattr(one, "_dispatch", lambda started, request, connection: given, raising=False)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(30)
        assert one._handle_order(None, theirs, dispatch.order(one._request, "another")) is None
        assert dispatch.receive(ours) == {"cold": "another configuration"}
        # It is not known here which of the two is old, so that it goes on waiting; the control is one that fits.
        assert one._handle_order(None, theirs, dispatch.order(one._request, "s")) is given


def test_whoever_is_sent_elsewhere_leaves_nothing_with_an_instance_that_may_wait_for_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = _waiting()
    tmp_path.chmod(0o700)
    given = IntentDelivery(b"line", cast("Any", None))
    monkeypatch.setattr(one, "_dispatch", lambda started, request, connection: given, raising=False)
    with dispatch.listening(tmp_path, one._request.package) as listener:

        def asks(settings: str) -> tuple[socket.socket, object]:
            (name,) = dispatch._sockets(tmp_path)
            connection = dispatch._connected(tmp_path, name)
            dispatch.send(connection, dispatch.order(one._request, settings))
            return connection, one.accept(None, listener)

        def held() -> int:
            gc.collect()
            return sum(isinstance(each, socket.socket) for each in gc.get_objects())

        before = held()
        for _ in range(8):
            said = asks("another")
            with said[0]:
                assert said[1] is None
                assert dispatch.receive(said[0]) == {"cold": "another configuration"}
            del said
        assert held() == before
        # Control: the connection of its present client stays until it is closed with the warm sandbox.
        connection, taken = asks("s")
        with connection:
            assert taken is given
            connection.setblocking(False)
            with pytest.raises(BlockingIOError):
                connection.recv(1)
            one._stack.close()
            assert connection.recv(1) == b""
