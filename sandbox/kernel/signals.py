"""The dispositions of signals in a process that was just forked."""

from __future__ import annotations

import signal
from collections.abc import Collection


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
    mask = 0
    try:
        with open("/proc/thread-self/status", "rb") as stream:
            for line in stream:
                if line.startswith((b"SigIgn:", b"SigCgt:")):
                    mask |= int(line.split()[1], 16)
    except (OSError, ValueError):
        return -1
    return mask
