"""What a keeper says of the request that it has served: whether it came to the end that most come to."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from policy import errors
from sandbox.serve import connection
from sandbox.serve.api import frames, protocol, routes, run
from sandbox.serve.api.session import Caller, Conversation
from sandbox.serve.connection import Opening

_PS = frames.encode({"kind": "ps"})


def ends(
    monkeypatch: pytest.MonkeyPatch,
    sent: bytes,
    act: Callable[[Conversation], None],
    *,
    fds: tuple[int, ...] = (),
    seconds: float = 60.0,
    stays: bool = True,
) -> bool:
    """What ``serve`` says of one request, and that nothing of it is left open."""

    def handle(talk: Conversation, asked: object) -> None:
        act(talk)

    monkeypatch.setattr(routes, "HANDLERS", {"ps": handle})
    before = set(os.listdir("/proc/self/fd"))
    ours, theirs = socket.socketpair()
    with ours:
        socket.send_fds(ours, [sent], list(fds))
        if not stays:
            ours.close()
        theirs.setblocking(False)
        supervisor = cast("Any", SimpleNamespace(below={}, config=SimpleNamespace(on_supervisor_exit="continue")))
        opening = Opening(theirs, Caller(os.getpid(), os.getuid(), os.getgid()), time.monotonic() + seconds, -1, -1)
        said = connection.serve(opening, supervisor)
    assert set(os.listdir("/proc/self/fd")) == before
    return said


def well(talk: Conversation) -> None:
    talk.answer({"kind": "runs", "runs": []})
    talk.again = True


def fails(talk: Conversation) -> None:
    talk.again = True
    raise errors.NoRunError("none")


def is_ended(talk: Conversation) -> None:
    talk.again = True
    raise KeyboardInterrupt


def test_one_that_was_answered_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ends(monkeypatch, _PS, well)
    assert not ends(monkeypatch, _PS, lambda talk: talk.answer({"kind": "runs", "runs": []}))


@pytest.mark.parametrize("act", [fails, is_ended])
def test_one_that_failed(monkeypatch: pytest.MonkeyPatch, act: Callable[[Conversation], None]) -> None:
    assert not ends(monkeypatch, _PS, act)


def test_a_fault_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(talk: Conversation) -> None:
        talk.again = True
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ends(monkeypatch, _PS, breaks)


def test_a_client_that_is_gone_sends_half_or_floods(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not ends(monkeypatch, _PS, well, stays=False)
    assert not ends(monkeypatch, b"", well, stays=False)
    assert not ends(monkeypatch, _PS[:-1], well, seconds=0.05)
    assert not ends(monkeypatch, _PS, well, fds=(0,) * 40)
    assert not ends(monkeypatch, _PS, well, fds=(0,))
    assert not ends(monkeypatch, frames.encode({"kind": "nothing"}), well)


@pytest.mark.parametrize(
    ("asked", "answer", "plain"),
    [
        ({}, {}, True),
        ({"detach": True}, {}, False),
        ({"user": "somebody"}, {}, False),
        ({}, {"policy_digest": None}, False),  # trusted-local
        ({}, {"error": errors.KilledError("it was ended")}, False),
    ],
)
def test_a_run_that_is_as_most_are(asked: dict[str, Any], answer: dict[str, Any], *, plain: bool) -> None:
    request = protocol.Run(kind="run", text="hi", **asked)
    ended = cast("Any", SimpleNamespace(**{"policy_digest": "0" * 64, "error": None, **answer}))
    assert run._is_plain(request, ended) is plain


def test_what_cannot_be_taken_away_once_the_answer_was_given_is_told_to_the_operator(
    capfd: pytest.CaptureFixture[str],
) -> None:
    done: list[str] = []

    def fails_too() -> None:
        raise errors.KernelError("cannot delete `cv-1`")

    with contextlib.ExitStack() as after:
        after.callback(done.append, "the rest all the same")
        after.callback(fails_too)
        assert not run._taken_away(after)
    assert done == ["the rest all the same"]
    assert "covenant-supervisor: cannot delete `cv-1`" in capfd.readouterr().err
    assert run._taken_away(contextlib.ExitStack())


def test_who_has_an_answer_is_given_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the supervisor is stopped while what is left of a run is taken away."""
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def answered_and_interrupted(talk: Conversation) -> None:
            talk.sock, given = theirs, talk.sock
            talk.answer({"kind": "runs", "runs": []})
            assert given is not theirs
            raise KeyboardInterrupt

        assert not ends(monkeypatch, _PS, answered_and_interrupted)
        theirs.shutdown(socket.SHUT_WR)
        said = b"".join(iter(lambda: ours.recv(4096), b""))
    assert said == frames.encode({"kind": "runs", "runs": []})
