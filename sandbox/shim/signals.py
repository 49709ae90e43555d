"""What the caller hands to a process with rights: signals that its terminal sends, descriptors, dispositions.

Under sudo an ordinary user holds the terminal. Ctrl-Z would stop the supervisor and with it every deadline of the
agent that it watches; closing the window or Ctrl-\\ would end it without clean-up and without its last audit row; a
closed stdout would give its number to the audit log. None of that is left to the caller.
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
def own() -> Iterator[None]:
    """Until the block ends: a signal that would end the process raises KeyboardInterrupt, once, so that everything
    acquired is released; one that would stop it is ignored; children can be waited for; 0 to 2 are open.

    Signals belong to the main thread: elsewhere only the descriptors are seen to.
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
            if before[number] != signal.SIG_IGN:  # nohup(1) and its like are meant
                signal.signal(number, _end)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextlib.contextmanager
def told_to_end() -> Iterator[int]:
    """Within ``own``, in the main thread of a process whose others do the work: a descriptor that is readable, for all
    of them and for good, once there was a signal that would have ended the process. None raises anything here."""
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


class HeldBack:
    """While a run is held and cleared away: signals that would raise KeyboardInterrupt (``own``) end it in order, and
    never in the middle of what takes it away or writes it down.

    They raise as ever until ``hold`` was called. ``told`` says whether there was one since; the first counts, as
    everywhere, and whoever acquired the run raises KeyboardInterrupt once its end is written down. May be entered again
    within itself: the outermost block is the one that lasts.
    """

    def __init__(self) -> None:
        self.told = False
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
        """From here on none raises; nothing outside the main thread, or where none would."""
        if self._tell is not None or threading.current_thread() is not threading.main_thread():
            return
        if ours := [number for number in _ENDING if signal.getsignal(number) is _end]:
            self._tell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._before = {number: signal.signal(number, self._note) for number in ours}

    def watches(
        self, kill: Callable[[], None] = lambda: None, over: Callable[[], bool] = lambda: False
    ) -> Mapping[int, Callable[[], errors.StoppedError | None]]:
        """``hold``; a descriptor that is readable once there was one, and what the run then ends with. Its agent is
        dead by then: ``kill`` waits for nobody who has the log, or whatever else the run is just about. ``over`` says
        whether it had ended by itself before that, and then ends with what it did."""
        self.hold()
        self._kill, self._over = kill, over

        def look() -> errors.StoppedError | None:
            self._kill()
            return None if self._late else errors.StoppedError("interrupted")

        return {} if self._tell is None else {self._tell: look}

    def check(self) -> None:
        """Where a step begins that looks at no descriptor.

        Raises:
            errors.StoppedError: there was one.
        """
        if self.told:
            raise errors.StoppedError("interrupted")

    def outcome(self, status: int) -> errors.StoppedError | None:
        """Why a run has ended with ``status`` whose exit was seen before the signal was; None where it was not that."""
        return errors.StoppedError("interrupted") if self.told and not self._late and status != 0 else None

    def __exit__(self, kind: object, *exc: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        self._kill, self._over = _nobody, _never
        before, self._before = self._before, {}
        for number, handler in before.items():
            # The way out is taken once, as in ``_end``; whoever goes on can be told again.
            signal.signal(number, signal.SIG_IGN if self.told and kind is not None else handler)
        if self._tell is not None:
            os.close(self._tell)
            self._tell = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.told:
            self.told = True
            # What cannot be killed from here is killed by whoever looks, and said there.
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
    # The way out is taken once: a second signal would cut the clean-up short.
    for other in _ENDING:
        signal.signal(other, signal.SIG_IGN)
    raise KeyboardInterrupt(signal.Signals(number).name)


def _open_stdio() -> None:
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)  # takes the lowest free number, which is this one
