"""The dispositions of signals: in a process that was just forked, and in one whose loop is told of them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection, Iterator

# As much as the kernel writes of a process at once, and more.
_STATUS_BYTES = 8192


def reset(*, ignored: Collection[int] = ()) -> None:
    """Every signal as a new process has it, but those in ``ignored``, which are ignored from now on.

    The kernel says which are not at their default (proc_pid_status(5)): a handful of 62, each of which costs two
    conversions in Python while somebody waits for the process.
    """
    valid = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    changed = _changed()
    for number in valid:
        if number in ignored:
            signal.signal(number, signal.SIG_IGN)
        elif changed >> (number - 1) & 1:
            signal.signal(number, signal.SIG_DFL)


def _changed() -> int:
    """The signals that are ignored or caught, each a bit; all of them where the kernel does not say."""
    try:
        fd = os.open("/proc/thread-self/status", os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.read(fd, _STATUS_BYTES)
        finally:
            os.close(fd)
        # The mask of what is ignored, and behind it that of what is caught, each of 16 digits.
        at = status.index(b"\nSigIgn:\t")
        ignored, caught = status[at:].split(maxsplit=4)[1:4:2]
        return int(ignored, 16) | int(caught, 16)
    except (OSError, ValueError):
        return -1


@contextlib.contextmanager
def on_descriptor(numbers: Collection[signal.Signals]) -> Iterator[int]:
    """Until the block ends, in the main thread: each of these signals does nothing but to be a byte of its number on
    the descriptor that is handed out."""
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
