"""A counter of credits that the gates of a run and of its children share: the position of an open file in memory.

The position belongs to the open file and not to a descriptor, so fork(2) and SCM_RIGHTS share it. The kernel adds to it
under a lock (lseek(2), SEEK_CUR). A gate's filter lets it add and never take away (sandbox.network.gate.process).
"""

from __future__ import annotations

import contextlib
import os
from typing import Final

# The greatest position of a file.
_MOST: Final = 2**63 - 1


def create(stack: contextlib.ExitStack) -> int:
    """Return the descriptor of a new counter at 0, which ``stack`` closes."""
    made = os.memfd_create("credits", os.MFD_CLOEXEC)
    stack.callback(os.close, made)
    return made


def spent(meter: int) -> int:
    """Return the credits that were spent so far."""
    return os.lseek(meter, 0, os.SEEK_CUR)


def add(meter: int, credits_: int) -> None:
    """Count credits. A sum that the counter cannot hold stays where it is, far above every limit."""
    os.lseek(meter, max(0, min(credits_, _MOST - spent(meter))), os.SEEK_CUR)
