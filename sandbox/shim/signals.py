"""Protect a privileged process from its caller: signals of the terminal, descriptors, dispositions.

Under sudo an ordinary user controls the terminal. Ctrl-Z would stop the supervisor, and with it every deadline that it
watches. Closing the window or Ctrl-\\ would end it without clean-up and without its last audit row. A closed stdout
would give its number to the audit log. This module prevents all of that.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, Self

from policy import errors

_ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGALRM, signal.SIGXCPU)
_STOPPING = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)


@contextlib.contextmanager
def detach_from_terminal() -> Iterator[None]:
    """Own the signals until the block ends, and open descriptors 0 to 2.

    A signal that would end the process raises KeyboardInterrupt, once, so that all resources are released. A signal
    that would stop it is ignored. SIGCHLD has its default, so children can be waited for. Outside the main thread only
    the descriptors are opened.
    """
    _open_stdio()
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (*_ENDING, *_STOPPING, signal.SIGCHLD)}
    try:
        for number in _STOPPING:
            signal.signal(number, signal.SIG_IGN)
        for number in _ENDING:
            if before[number] != signal.SIG_IGN:  # nohup(1) and the like must stay effective
                signal.signal(number, _end)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextlib.contextmanager
def told_to_end() -> Iterator[int]:
    """Yield a descriptor that becomes and stays readable after a signal that would end the process.

    For the main thread of a process whose other threads do the work, inside ``detach_from_terminal``. No signal raises
    here.
    """
    told, tell = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    before = {number: signal.getsignal(number) for number in _ENDING}
    old = signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    try:
        for number, handler in before.items():
            if handler != signal.SIG_IGN:
                signal.signal(number, _nothing)
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(old, warn_on_full_buffer=False)
        os.close(told)
        os.close(tell)


class DeferredSignals:
    """Defers the signals of ``detach_from_terminal`` while a run is live or being cleaned up.

    Before ``hold`` they raise KeyboardInterrupt. After it the first signal kills the agent and sets ``pending``. The
    owner of the run raises KeyboardInterrupt only after the run's last audit row is written. Blocks may be nested: the
    outermost one counts.
    """

    def __init__(self) -> None:
        self.pending = False
        self._before: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}
        self._tell: int | None = None
        self._kill: Callable[[], None] = _nobody
        self._over: Callable[[], bool] = _never
        self._late = False
        self._depth = 0

    def __enter__(self) -> Self:
        self._depth += 1
        return self

    def hold(self) -> None:
        """Defer signals from here on.

        No effect outside the main thread, or if ``detach_from_terminal`` has no handlers set.
        """
        if self._tell is not None or threading.current_thread() is not threading.main_thread():
            return
        if ours := [number for number in _ENDING if signal.getsignal(number) is _end]:
            self._tell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._before = {number: signal.signal(number, self._note) for number in ours}

    def handlers(
        self, kill: Callable[[], None] = lambda: None, over: Callable[[], bool] = lambda: False
    ) -> Mapping[int, Callable[[], errors.StoppedError | None]]:
        """Call ``hold``, and return a descriptor that is readable after a signal, with the run's error.

        The signal handler calls ``kill`` itself, so the agent dies even while the run blocks on a lock. ``over``
        says whether the run had ended by itself before the signal; its own outcome is kept then.
        """
        self.hold()
        self._kill, self._over = kill, over

        def look() -> errors.StoppedError | None:
            self._kill()
            return None if self._late else errors.StoppedError("interrupted")

        return {} if self._tell is None else {self._tell: look}

    def check(self) -> None:
        """Check for a signal before a step that watches no descriptor.

        Raises:
            errors.StoppedError: Raised when there was a signal.
        """
        if self.pending:
            raise errors.StoppedError("interrupted")

    def outcome(self, status: int) -> errors.StoppedError | None:
        """Return the error if the signal caused the exit with ``status`` that was noticed first, else None."""
        return errors.StoppedError("interrupted") if self.pending and not self._late and status != 0 else None

    def __exit__(self, kind: object, *exc: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        self._kill, self._over = _nobody, _never
        before, self._before = self._before, {}
        for number, handler in before.items():
            # Ignore further signals during the clean-up, as in ``_end``. A process that continues gets its handlers
            # back.
            signal.signal(number, signal.SIG_IGN if self.pending and kind is not None else handler)
        if self._tell is not None:
            os.close(self._tell)
            self._tell = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.pending:
            self.pending = True
            # On a failure the watch's handler kills again, and raises the error there.
            with contextlib.suppress(Exception):
                self._late = self._over()
                self._kill()
        if self._tell is not None:
            os.eventfd_write(self._tell, 1)


def _nobody() -> None:
    pass


def _never() -> bool:
    return False


def _nothing(number: int, frame: FrameType | None) -> None:
    # The number was written to the descriptor before this is called (signal.set_wakeup_fd).
    pass


def _end(number: int, frame: FrameType | None) -> None:
    # Ignore further signals: a second one would cut the clean-up short.
    for other in _ENDING:
        signal.signal(other, signal.SIG_IGN)
    raise KeyboardInterrupt(signal.Signals(number).name)


def _open_stdio() -> None:
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)  # open(2) returns the lowest free number, which is this one
