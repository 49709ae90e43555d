"""Check the signals of a forked process: all have their defaults again, after any changes of the parent."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import pytest

from sandbox.kernel.proc import signals

_OURS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGRTMIN, signal.SIGRTMAX)


def _child(work: Callable[[], bool]) -> bool:
    pid = os.fork()
    if pid == 0:
        good = False
        try:
            for number in _OURS[::2]:
                signal.signal(number, lambda number, frame: None)
            for number in _OURS[1::2]:
                signal.signal(number, signal.SIG_IGN)
            good = work()
        finally:
            os._exit(0 if good else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _all_default(*, but: frozenset[int] = frozenset()) -> bool:
    every = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    return all(signal.getsignal(one) == (signal.SIG_IGN if one in but else signal.SIG_DFL) for one in every)


def test_whatever_was_caught_or_ignored_is_at_its_default_but_what_is_to_be_ignored() -> None:
    def work() -> bool:
        signals.reset(ignored=(signal.SIGPIPE, signal.SIGUSR1))
        return _all_default(but=frozenset((signal.SIGPIPE, signal.SIGUSR1)))

    assert _child(work)
    assert not _child(_all_default)  # the control


def test_where_kernel_does_not_say_all_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise FileNotFoundError

    def work() -> bool:
        signals.reset()
        return _all_default()

    monkeypatch.setattr(os, "open", refuse)
    assert _child(work)


def test_signal_that_arrives_late_is_seen() -> None:
    numbers = (signal.SIGUSR1, signal.SIGUSR2)
    with signals.on_descriptor(numbers) as wake:
        os.kill(os.getpid(), signal.SIGUSR2)
        assert not signals.arrives(wake, (signal.SIGUSR1,), 0.0), "the control: another one"
        later = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1))
        later.start()
        assert signals.arrives(wake, (signal.SIGUSR1,), 60.0)
        later.join()


@pytest.mark.parametrize(
    ("number", "wanted"),
    [
        *((1, "SIGHUP"), (6, "SIGABRT"), (9, "SIGKILL"), (11, "SIGSEGV"), (31, "SIGSYS"), (32, "signal 32")),
        *((33, "signal 33"), (34, "SIGRTMIN"), (35, "SIGRTMIN+1"), (63, "SIGRTMIN+29"), (64, "SIGRTMAX")),
        *((0, "signal 0"), (65, "signal 65")),
    ],
)
def test_signal_has_its_name(number: int, wanted: str) -> None:
    assert signals.name(number) == wanted


@pytest.mark.parametrize(
    ("status", "wanted"),
    [
        *((0, "exited with status 0"), (3, "exited with status 3"), (128, "exited with status 128")),
        (129, "was killed by SIGHUP, or exited with status 129 itself"),
        (139, "was killed by SIGSEGV, or exited with status 139 itself"),
        (163, "was killed by SIGRTMIN+1, or exited with status 163 itself"),
        (161, "was killed by signal 33, or exited with status 161 itself"),
        (192, "was killed by SIGRTMAX, or exited with status 192 itself"),
        *((193, "exited with status 193"), (255, "exited with status 255")),
    ],
)
def test_ending_names_only_what_status_says(status: int, wanted: str) -> None:
    assert signals.ending(status) == wanted
