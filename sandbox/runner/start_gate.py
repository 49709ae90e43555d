"""Hold an agent's first instruction until its policy is proved in force."""

from __future__ import annotations

import select
import signal
from collections.abc import Sequence
from typing import Final, Protocol

from policy import errors
from sandbox.kernel.runsc import debug_log, start_trace
from sandbox.probes import preload_object
from sandbox.probes.preload import ProbeReports

# The exit status after a kill of runsc or of the sandbox that it waits for; and that of runsc when the sandbox was gone
# before runsc could wait for it.
_KILLED: Final = frozenset((128 + signal.SIGKILL, 128))


class Watching(Protocol):
    """A periodic check that begins with a run's first process."""

    def started(self) -> None:
        """Begin: the first process runs."""


class StartGate:
    """Hold an agent's intent back until its first process runs and all reports of its probes, if any, have come.

    ``fileno`` is readable whenever ``poll`` has something to do. ``watching`` are called when the first process runs.
    """

    def __init__(
        self,
        started: start_trace.StartTrace,
        watching: Sequence[Watching],
        *,
        heard: ProbeReports | None = None,
        calls: debug_log.RefusedCalls | None = None,
    ) -> None:
        self._started, self._watching, self._heard, self._calls = started, watching, heard, calls
        self.running = False
        self._epoll = select.epoll()
        self._epoll.register(started.fileno(), select.EPOLLIN)

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._epoll.fileno()

    def poll(self) -> bool:
        """Take what has arrived; never blocks. True once, when there is nothing to wait for any more."""
        if not self.running and not self._first_runs():
            return False
        if self._calls is not None and self._heard is not None:
            self._calls.ready()
        return self._heard is None or not self._heard.missing

    def _first_runs(self) -> bool:
        if not self._started.poll():
            return False
        self.running = True
        for one in self._watching:
            one.started()
        self._epoll.unregister(self._started.fileno())
        if self._heard is not None and self._calls is not None:
            self._epoll.register(self._calls.fileno(), select.EPOLLIN)
            self._epoll.register(self._heard.fileno(), select.EPOLLIN | select.EPOLLET)
        return True

    def fault(self, status: int, *, by_us: bool) -> errors.SelfTestError | None:
        """Return the error of a run that ended, or was ended ``by_us``, before all of its probes reported.

        None: another process killed it. A dead process reports nothing, so that its policy is neither proved nor
        refuted. It had no intent and is no run that succeeded.
        """
        if not self.running or self._heard is None or not self._heard.missing:
            return None
        if not by_us and status in _KILLED:
            return None
        first = self._heard.missing[0]
        if status == preload_object.STATUS:
            message = f"what the policy forbids is not refused inside this run; not heard of: {first}"
        else:
            message = f"what the policy forbids was tried inside this run, and nobody has told of {first}"
        return errors.SelfTestError(
            message,
            hint="run `covenant doctor`; with self_test = false in the configuration runs go without it and say so",
            faults=list(self._heard.missing),
        )

    def close(self) -> None:
        """Give the descriptor back."""
        self._epoll.close()
