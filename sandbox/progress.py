"""Says on a terminal what takes long, once it has taken a second: nothing that works should look stuck.

Whoever has a terminal shows it there, on one line that counts the seconds and of which nothing stays. Nothing is said
otherwise, and nothing by a process that was forked. A terminal that takes nothing just now (Ctrl-S), or that is
another job's (``covenant run ... &``), is let be.

A thread says it: a signal's handler would have to wait until OpenSSL has come back from Argon2id.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

AFTER_SECONDS = 1.0
_EVERY_SECONDS = 0.25
_FRAMES = "|/-\\"


@dataclass(slots=True, eq=False)
class _Step:
    what: str
    began: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class _Screen:
    """The terminal of this process. ``lock`` is held by whoever writes to it."""

    fd: int
    owner: int = field(default_factory=os.getpid)
    quiet_since: float = field(default_factory=time.monotonic)
    told: int = 0
    stands: bool = False
    lock: Any = field(default_factory=threading.RLock)

    def tell(self, step: _Step) -> None:
        """Say it now, unless somebody else writes or has just written."""
        now = time.monotonic()
        if now - max(step.began, self.quiet_since) < AFTER_SECONDS:
            return
        room = self._columns() - 1
        line = f"{_FRAMES[self.told % len(_FRAMES)]} {step.what} ({now - step.began:.0f} s)"
        self._write(f"\r{line if len(line) <= room else line[: room - 1] + '…'}\x1b[K")
        self.told, self.stands = self.told + 1, True

    def clear(self) -> None:
        """Take away what stands there."""
        if self.stands:
            self._write("\r\x1b[K")
        self.stands = False
        self.hush()

    def hush(self) -> None:
        """Say nothing for a while: somebody has written."""
        self.quiet_since = time.monotonic()

    def _write(self, text: str) -> None:
        # It may have been hung up; nobody who works is stopped for that, nor for being in the background.
        with contextlib.suppress(OSError):
            if select.select((), (self.fd,), (), 0)[1] and not self._anothers():
                os.write(self.fd, text.encode())

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self.fd).columns or 80
        except OSError:
            return 80

    def _anothers(self) -> bool:
        try:
            return os.tcgetpgrp(self.fd) != os.getpgrp()
        except OSError:  # not the terminal that this process is controlled by: it has no jobs
            return False


_steps: list[_Step] = []
_screens: list[_Screen] = []


@contextlib.contextmanager
def shown(fd: int, what: str) -> Iterator[None]:
    """While the block lasts, say there what goes on, where that is a terminal that can take a line back.

    ``what`` is said where no step has better words.
    """
    if _screens or not os.isatty(fd) or os.environ.get("TERM", "dumb") == "dumb":
        yield
        return
    # Not an Event, whose own lock the teller could hold at a fork.
    over, end = os.pipe2(os.O_CLOEXEC)
    screen = _Screen(fd)
    _screens.append(screen)
    teller = threading.Thread(target=_tell, args=(screen, over), name="progress", daemon=True)
    try:
        with step(what):
            # A machine that has no thread left is one on which somebody wants to end what took them.
            with contextlib.suppress(RuntimeError):
                teller.start()
            yield
    finally:
        _screens.clear()
        os.close(end)
        if screen.owner == os.getpid() and teller.ident is not None:
            teller.join()
        os.close(over)


def _tell(screen: _Screen, over: int) -> None:
    # Whoever is told to end is the main thread.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while not select.select((over,), (), (), _EVERY_SECONDS)[0]:
        with screen.lock:
            for innermost in _steps[-1:]:
                screen.tell(innermost)
    with screen.lock:
        screen.clear()


def _hold() -> None:
    # INVARIANT: where a process is forked that goes on as Python (keeper.fork), the teller holds nothing.
    for screen in _screens:
        screen.lock.acquire()


def _let_go() -> None:
    for screen in _screens:
        screen.lock.release()


os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_let_go)


@contextlib.contextmanager
def step(what: str) -> Iterator[Callable[[str], None]]:
    """Around something that may take long; ``what`` is a word of ours, never of an agent's.

    What it gives says it in other words from then on: how far it has come.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda words: None
        return
    one = _Step(what)

    def further(words: str) -> None:
        one.what = words

    _steps.append(one)
    try:
        yield further
    finally:
        # A generator that is closed late may end a step below another.
        _steps.remove(one)


@contextlib.contextmanager
def hushed() -> Iterator[None]:
    """Around what writes to the terminal, or asks there: nothing of this stands in between."""
    with contextlib.ExitStack() as stack:
        for screen in _screens:
            if screen.owner == os.getpid():
                stack.enter_context(screen.lock)
                screen.clear()
                stack.callback(screen.hush)
        yield
