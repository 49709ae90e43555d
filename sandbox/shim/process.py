"""The process that owns one run: forked, with one thread, from whoever may start runs.

It holds everything of the run (its directory's lock, gates, attestation, broker), so that nothing has to be handed over
when another process of the supervisor ends. A killed keeper takes its sandbox along (the parent death signal of
``kernel.process``) and leaves what ``sandbox.runner.recovery`` finds.

It is forked and not executed: what the caller has imported and read is shared with it, page by page.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import NoReturn

from policy import errors
from sandbox.kernel import libc
from sandbox.kernel.fs import hanging
from sandbox.kernel.proc import pipes, signals
from sandbox.kernel.seccomp import reader
from sandbox.shim import signals as shim_signals

_threaded = False
# What Python ignores, as it does for its own writes: EPIPE and EFBIG are errors there, and end nobody.
_IGNORED = (signal.SIGPIPE, signal.SIGXFSZ)


@dataclass
class Keeper:
    """A forked keeper. ``pidfd`` is readable once it has ended; whoever forked it reaps it and closes this."""

    pid: int
    pidfd: int
    status: int | None = None
    _closed: bool = field(default=False, repr=False)

    def signal(self, number: int) -> None:
        """Send a signal through the pidfd: never to a reused pid."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def reap(self, *, block: bool = True) -> int | None:
        """The exit status, 0 to 255 or 128 + signal; None while it lives and ``block`` is off."""
        if self.status is None:
            pid, raw = os.waitpid(self.pid, 0 if block else os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(raw)
                self.status = code if code >= 0 else 128 - code
        return self.status

    def close(self) -> None:
        """Close the pidfd; the keeper goes on if it has not ended."""
        if not self._closed:
            self._closed = True
            os.close(self.pidfd)


def has_threads() -> None:
    """This process is about to have threads that work, for good: nothing is forked here that goes on as Python."""
    global _threaded  # noqa: PLW0603 - of the process, as its threads are
    _threaded = True


def fork(work: Callable[[], object], *, keep: Collection[int] = ()) -> Keeper:
    """Fork a process that does ``work`` and ends: with 0, or with 1 when it raised.

    It has a session of its own, and signals as ``signals.own`` says (SIGTERM raises KeyboardInterrupt in
    ``work``). Of the caller's descriptors it has those in ``keep``, and what it asks for filters over where it is under
    one (``kernel.filter_reader``): 0 to 2 are /dev/null unless they are named, and the rest is closed.

    INVARIANT: the caller has one thread; a lock that another thread held at the fork is held for good.
    INVARIANT: ``work`` lets go of no object of the caller's that owns a descriptor which is not in ``keep``: the number
    may be another's by then. A ledger's lock is shared by a fork (flock(2)), so ``work`` opens one of its own.

    Raises:
        errors.KernelError: there is no process or no descriptor left.
        errors.InternalError: this process said that it has threads (``has_threads``).
    """
    if _threaded:
        raise errors.InternalError("a process with threads was to fork one that goes on as it")
    # As in kernel.process: no handler of the caller's may run in the child.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        try:
            pid = os.fork()
        except OSError as e:
            raise errors.KernelError(f"fork: {e.strerror}") from e
        if pid == 0:
            _child(work, keep)
        try:
            return Keeper(pid, os.pidfd_open(pid))
        except OSError as e:
            # Our own child, not waited for yet, so that the number is still its.
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise errors.KernelError(f"pidfd_open: {e.strerror}") from e
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def wait(pidfd: int, seconds: float) -> bool:
    """Whether the process of a pidfd has ended, or does so within ``seconds``."""
    return pipes.readable(pidfd, seconds)


def _child(work: Callable[[], object], keep: Collection[int]) -> NoReturn:
    status = 1
    try:
        # What is shared stays shared: a collection would write to every object that the caller made.
        gc.freeze()
        # The page of the caller is about the caller's own accesses.
        hanging.announce_on(None)
        signals.reset(ignored=_IGNORED)
        # The caller's loop is told of its signals over a descriptor that is about to be another's here.
        signal.set_wakeup_fd(-1)
        os.setsid()
        _close_others({*keep, *reader.descriptors()})
        with shim_signals.own():
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            work()
        status = 0
    except KeyboardInterrupt:
        pass  # it was asked to end, and did
    except BaseException:  # nothing may escape into the caller's code
        with contextlib.suppress(BaseException):
            os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)


def _close_others(keep: Collection[int]) -> None:
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for fd in {0, 1, 2} - set(keep):
        os.dup2(null, fd, inheritable=True)
    first = 3
    for fd in sorted(fd for fd in keep if fd > 2):
        if fd > first:
            libc.close_range(first, fd - 1)
        first = fd + 1
    libc.close_range(first)
