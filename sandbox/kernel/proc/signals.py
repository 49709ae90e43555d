"""Set dispositions of signals, after a fork and in a process whose event loop reads them, and name signals."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Collection, Iterator

# As much as the kernel writes of a process at once, and more.
_STATUS_BYTES = 8192


# Exit statuses above it are 128 + n for signal n, as runsc and shells have it.
_SIGNALLED = 128


def name(number: int) -> str:
    """Return the name of a signal: `SIGSEGV`, `SIGRTMIN+3` for a real-time signal, else `signal 33`.

    The C library keeps 32 and 33 for itself, so they have no name (signal(7)).
    """
    if signal.SIGRTMIN < number < signal.SIGRTMAX:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def ending(status: int) -> str:
    """Return how a process with this exit status ended, as the predicate of a message.

    The status of a signal is also one that a process can exit with. No reader of the status can tell the two apart.
    """
    if 0 < status - _SIGNALLED < signal.NSIG:
        return f"was killed by {name(status - _SIGNALLED)}, or exited with status {status} itself"
    return f"exited with status {status}"


def reset(*, ignored: Collection[int] = ()) -> None:
    """Reset every signal to its default, except those in ``ignored``, which are ignored.

    Only signals that /proc shows as changed are set (proc_pid_status(5)): a handful of 62. Each call costs two
    conversions in Python while a client waits for the process.
    """
    valid = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    changed = _changed()
    for number in valid:
        if number in ignored:
            signal.signal(number, signal.SIG_IGN)
        elif changed >> (number - 1) & 1:
            signal.signal(number, signal.SIG_DFL)


def _changed() -> int:
    """Return the ignored and caught signals, one bit each. All bits are set if they cannot be read."""
    try:
        fd = os.open("/proc/thread-self/status", os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.read(fd, _STATUS_BYTES)
        finally:
            os.close(fd)
        # The mask of the ignored signals, then that of the caught ones, 16 digits each.
        at = status.index(b"\nSigIgn:\t")
        ignored, caught = status[at:].split(maxsplit=4)[1:4:2]
        return int(ignored, 16) | int(caught, 16)
    except (OSError, ValueError):
        return -1


@contextlib.contextmanager
def on_descriptor(numbers: Collection[signal.Signals]) -> Iterator[int]:
    """Deliver these signals only as bytes on the yielded descriptor, each with its number, until the block ends.

    Main thread only.
    """
    wake, written = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    before = {number: signal.signal(number, lambda number, frame: None) for number in numbers}
    old = signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    try:
        yield wake
    finally:
        signal.set_wakeup_fd(old, warn_on_full_buffer=False)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(wake)
        os.close(written)


def arrives(wake: int, numbers: Collection[int], seconds: float) -> bool:
    """Whether one of these signals arrives on the descriptor of ``on_descriptor`` within so many seconds.

    Others that arrive meanwhile are lost.
    """
    until = time.monotonic() + seconds
    while select.select([wake], [], [], max(0.0, until - time.monotonic()))[0]:
        if any(number in numbers for number in os.read(wake, _STATUS_BYTES)):
            return True
    return False
