"""A worker after its request: one answer was sent, and no descriptor is left."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from policy import errors
from sandbox import unix_wire
from sandbox.serve import connection
from sandbox.serve.api import routes, run
from sandbox.serve.api.session import Caller, Session
from sandbox.serve.connection import Opening

_PS = unix_wire.encode({"kind": "ps"})


def served(
    monkeypatch: pytest.MonkeyPatch,
    sent: bytes,
    act: Callable[[Session], None],
    *,
    fds: tuple[int, ...] = (),
    seconds: float = 60.0,
    stays: bool = True,
) -> bytes:
    """Serve one request. Returns the bytes that its client reads; no descriptor of it stays open."""

    def handle(session: Session, asked: object) -> None:
        act(session)

    monkeypatch.setattr(routes, "HANDLERS", {"ps": handle})
    before = set(os.listdir("/proc/self/fd"))
    ours, theirs = socket.socketpair()
    with ours:
        socket.send_fds(ours, [sent], list(fds))
        if not stays:
            ours.close()
        theirs.setblocking(False)
        config = SimpleNamespace(on_supervisor_exit="continue")
        supervisor = cast("Any", SimpleNamespace(below={}, path=Path("/state"), config=config))
        opening = Opening(theirs, Caller(os.getpid(), os.getuid(), os.getgid()), time.monotonic() + seconds, -1, -1)
        connection.serve(opening, supervisor)
        said = _read(ours) if stays else b""
    assert set(os.listdir("/proc/self/fd")) == before
    return said


def _read(sock: socket.socket) -> bytes:
    """All that comes. Where the worker left bytes unread, a reset follows its answer (unix(7))."""
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while more := sock.recv(4096):
            said += more
    return said


def well(session: Session) -> None:
    session.answer({"kind": "runs", "runs": []})


def fails(session: Session) -> None:
    raise errors.NoRunError("none")


def is_ended(session: Session) -> None:
    raise KeyboardInterrupt


def _code(said: bytes) -> str:
    """The code of the error that a client was sent."""
    document = json.loads(said[said.index(b"{") :])
    assert document["kind"] == "error"
    return str(document["code"])


def test_request_served_answers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert served(monkeypatch, _PS, well) == unix_wire.encode({"kind": "runs", "runs": []})


@pytest.mark.parametrize(("act", "code"), [(fails, "no_such_run"), (is_ended, "stopped")])
def test_request_failed_answers_its_error(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[Session], None], code: str
) -> None:
    assert _code(served(monkeypatch, _PS, act)) == code


def test_fault_of_ours_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(session: Session) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        served(monkeypatch, _PS, breaks)


def test_client_gone_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert served(monkeypatch, _PS, well, stays=False) == b""
    assert served(monkeypatch, b"", well, stays=False) == b""


def test_client_sends_half_or_floods_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _code(served(monkeypatch, _PS[:-1], well, seconds=0.05)) == "bad_request"
    assert _code(served(monkeypatch, _PS, well, fds=(0,) * 40)) == "bad_request"
    assert _code(served(monkeypatch, _PS, well, fds=(0,))) == "bad_request"
    assert _code(served(monkeypatch, unix_wire.encode({"kind": "nothing"}), well)) == "bad_request"


def test_cleanup_fails_after_answer_tells_operator(capfd: pytest.CaptureFixture[str]) -> None:
    done: list[str] = []

    def fails_too() -> None:
        raise errors.KernelError("cannot delete `cv-1`")

    with contextlib.ExitStack() as after:
        after.callback(done.append, "the rest all the same")
        after.callback(fails_too)
        run.take_away(after)
    assert done == ["the rest all the same"]
    assert "covenant-supervisor: cannot delete `cv-1`" in capfd.readouterr().err


def test_client_answered_gets_no_second_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the supervisor is stopped while the rest of a run is removed."""

    def answered_and_interrupted(session: Session) -> None:
        well(session)
        raise KeyboardInterrupt

    assert served(monkeypatch, _PS, answered_and_interrupted) == unix_wire.encode({"kind": "runs", "runs": []})
