"""Says on a terminal what takes long, once it has taken a second: a run that copies a runtime should not look stuck.

Whoever has a terminal turns it on. Nothing is said otherwise, nothing is said in a process that was forked, and a
terminal that takes nothing just now (Ctrl-S) is not waited for.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Iterator
from types import FrameType

AFTER_SECONDS = 1.0
_terminal = -1
_owner = 0


def to_terminal(fd: int) -> None:
    """From here on this process says it there, where that is a terminal."""
    global _terminal, _owner
    if os.isatty(fd):
        _terminal, _owner = fd, os.getpid()


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    """Around something that may take long; ``what`` is a word of ours, never of an agent's.

    The alarm clock of the process is used (setitimer(2)), which no child inherits.
    """
    if _terminal < 0 or os.getpid() != _owner or threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(number: int, frame: FrameType | None) -> None:
        if select.select((), (_terminal,), (), 0)[1]:
            os.write(_terminal, f"covenant: {what} ...\n".encode())

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, AFTER_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if before is None else before)
