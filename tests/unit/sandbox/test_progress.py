"""What takes long is said once, on a terminal, by the process that was started there."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator

import pytest

from sandbox import checks, progress
from sandbox.config import Config


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The other side of a terminal on which this process says it."""
    far, near = os.openpty()
    monkeypatch.setattr(progress, "AFTER_SECONDS", 0.02)
    monkeypatch.setattr(progress, "_terminal", -1)
    progress.to_terminal(near)
    yield far
    os.close(far)
    os.close(near)


def said(far: int, seconds: float = 10.0) -> bytes:
    return os.read(far, 4096) if select.select((far,), (), (), seconds)[0] else b""


def test_what_takes_long_is_said_and_what_does_not_is_not(terminal: int) -> None:
    before = signal.getsignal(signal.SIGALRM)
    with progress.step("being quick"):
        pass
    until = time.monotonic() + 10
    with progress.step("copying a house"):
        while not select.select((terminal,), (), (), 0)[0]:
            assert time.monotonic() < until
    assert said(terminal) == b"covenant: copying a house ...\r\n"
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_nothing_is_said_off_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_terminal", -1)
    read, write = os.pipe()
    progress.to_terminal(write)
    with progress.step("anything"):
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    os.close(read)
    os.close(write)


def test_a_forked_process_says_nothing(terminal: int) -> None:
    pid = os.fork()
    if pid == 0:
        with progress.step("work of a keeper"):
            os._exit(0 if signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert said(terminal, 0) == b""


def test_a_check_of_this_host_that_takes_long_is_named(terminal: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(config: Config, deadline_seconds: float) -> checks.Finding:
        until = time.monotonic() + 10
        while not select.select((terminal,), (), (), 0)[0]:
            assert time.monotonic() < until
        return checks.Finding(checks.Status.OK, "at last")

    monkeypatch.setattr(checks, "_TABLE", (("runsc live", True, "calls", slow),))
    assert checks.examine(Config(), deadline_seconds=1).enforceable
    assert said(terminal) == b"covenant: checking runsc live ...\r\n"
