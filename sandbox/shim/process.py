"""Fork the shim, the process that owns one run. It has one thread.

The shim holds all resources of the run (its directory's lock, gates, attestation, broker), so nothing must be handed
over when another process of the supervisor ends. If the shim is killed, its sandbox dies with it (the parent death
signal of ``kernel.proc.spawn``), and ``sandbox.runner.recovery`` finds the remains.

It is forked without an execve, so it shares the caller's imports and data page by page.
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
# The signals that Python ignores: EPIPE and EFBIG of a write are then errors and kill no process.
_IGNORED = (signal.SIGPIPE, signal.SIGXFSZ)


@dataclass
class Shim:
    """A forked shim. ``pidfd`` is readable once it has ended. The forking process reaps it and closes this object."""

    pid: int
    pidfd: int
    status: int | None = None
    _closed: bool = field(default=False, repr=False)

    def signal(self, number: int) -> None:
        """Send a signal through the pidfd, so never to a reused pid."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def reap(self, *, block: bool = True) -> int | None:
        """Return the exit status, 0 to 255 or 128 + signal. None while it lives and ``block`` is off."""
        if self.status is None:
            pid, raw = os.waitpid(self.pid, 0 if block else os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(raw)
                self.status = code if code >= 0 else 128 - code
        return self.status

    def close(self) -> None:
        """Close the pidfd. A live shim continues."""
        if not self._closed:
            self._closed = True
            os.close(self.pidfd)


def has_threads() -> None:
    """Declare that this process gets worker threads: ``fork`` is refused from now on."""
    global _threaded  # noqa: PLW0603 - one value for the process, like its threads
    _threaded = True


def fork(work: Callable[[], object], *, keep: Collection[int] = ()) -> Shim:
    """Fork a process that calls ``work`` and exits with 0, or with 1 if ``work`` raises.

    It has its own session, and signals as in ``signals.detach_from_terminal`` (SIGTERM raises KeyboardInterrupt in
    ``work``). It keeps the caller's descriptors in ``keep``, and those for reading filters (``kernel.seccomp.reader``).
    Unless they are named, 0 to 2 are /dev/null. All others are closed.

    INVARIANT: the caller has one thread; a lock that another thread held at the fork would never be released.
    INVARIANT: ``work`` closes no object of the caller whose descriptor is not in ``keep``: its number may be reused by
    then. A fork shares a ledger's lock (flock(2)), so ``work`` opens its own ledger.

    Raises:
        errors.KernelError: Raised when there is no process or no descriptor left.
        errors.InternalError: Raised when this process has declared threads (``has_threads``).
    """
    if _threaded:
        raise errors.InternalError("a process with threads was to fork one that goes on as it")
    # As in kernel.proc.spawn: no handler of the caller may run in the child.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        try:
            pid = os.fork()
        except OSError as e:
            raise errors.KernelError(f"fork: {e.strerror}") from e
        if pid == 0:
            _child(work, keep)
        try:
            return Shim(pid, os.pidfd_open(pid))
        except OSError as e:
            # It is our own child and not reaped yet, so its pid is not reused.
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
        # Keep memory shared: a garbage collection would write to every object of the caller.
        gc.freeze()
        # The caller's page announces the caller's own accesses.
        hanging.announce_on(None)
        signals.reset(ignored=_IGNORED)
        # The caller's wake-up descriptor is about to be closed, and its number reused here.
        signal.set_wakeup_fd(-1)
        os.setsid()
        _close_others({*keep, *reader.descriptors()})
        with shim_signals.detach_from_terminal():
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            work()
        status = 0
    except KeyboardInterrupt:
        pass  # it ended on request
    except BaseException:  # no exception may reach the caller's code
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
