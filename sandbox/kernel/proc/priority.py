"""A turn on the processor before everybody else's, for who has to end what uses it up."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def ahead() -> Iterator[None]:
    """The calling thread, and those that it starts, run before all that have no real-time priority themselves.

    Agents that are to be ended may keep every processor busy: among sixty of them our own turn would come a second
    later, and once for every step. Where the kernel grants no such priority, the highest ordinary one it is.
    """
    before, niceness = os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)
    try:
        try:
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        except OSError:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, 0, -20)
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, before, os.sched_param(0))
            os.setpriority(os.PRIO_PROCESS, 0, niceness)
