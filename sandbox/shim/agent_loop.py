"""Wait for an agent: its start, its deadlines, the checks of its run, its end. Every wait has a limit.

Both runners use it. It knows nothing of namespaces: the caller passes descriptors, a way to notice that the agent has
started, and a way to kill it. A session (sandbox.shim.stdio, sandbox.shim.stream) moves the agent's bytes. The loop
never blocks on the agent. An agent that floods stdout, never reads stdin, closes stdout and lives on, or ignores
SIGTERM ends within its limit, with the error that names it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import selectors
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from policy import contract, errors
from sandbox.kernel.proc import pipes
from sandbox.run_io import (
    ContainerIO,
    DeferredIntent,
    IntentDelivery,
    Limits,
    Outcome,
    PeriodicCheck,
    RunOutcome,
    StreamTotals,
)

# How often the cgroup is asked for a kill by the kernel, which nothing announces (seconds).
_LOOK_SECONDS = 0.25
# How often it is checked whether an agent with a deferred intent waits already (seconds).
_SETTLE_SECONDS = 0.02
# No wait is without an end, also where nothing is due (seconds).
_LONGEST_WAIT = 3600.0
# The fix for each clock that an author or a caller sets. The others end with what they are of.
_LONGER = {
    "cpu_ms_per_task": "raise cpu_ms_per_task in [resources] of agent.toml, and sign again",
    "ttl_seconds": "raise ttl_seconds in [lifetime] of agent.toml, and sign again",
    "timeout": "give a longer --timeout",
}


class AgentSession(Protocol):
    """Moves the bytes of one agent: an intent and an answer, or a stream. No method may block."""

    @property
    def silent(self) -> bool:
        """Whether the agent must write nothing to stdout before it has its intent."""

    @property
    def answer(self) -> bytes:
        """Return what the agent wrote to stdout; empty for a stream, which keeps nothing."""

    @property
    def totals(self) -> StreamTotals | None:
        """Return the bytes of a stream in both directions; None for an answer."""

    def attach(self, loop: AgentLoop) -> None:
        """Prepare the agent's descriptors. The agent may not have started yet."""

    def begin(self, intent: bytes) -> None:
        """Give the intent: the agent has started, and no check refused it."""

    def read_early(self) -> None:
        """End the run if the agent wrote to stdout before its intent."""

    def stop_input(self) -> None:
        """Write nothing more to the agent: it is being ended."""

    def drained(self) -> Collection[int]:
        """Prepare the end, as the agent has exited. Returns the descriptors that still have bytes to move."""


@dataclass
class AgentLoop:
    """Wait for one agent. ``run`` returns when the child has exited; ``error`` says why we ended it.

    Times are seconds since ``run`` was called, or with ``later`` since a client brought the intent. ``started_at`` is
    None when the agent never started, or was never given an intent. With ``later`` the ``intent`` is empty, and the
    limits hold for the start alone. ``heard`` is called with each piece of stderr.
    """

    channel: ContainerIO
    session: AgentSession
    intent: bytes
    limits: Limits
    later: DeferredIntent | None = None
    error: errors.RunError | None = None
    started_at: float | None = None
    said_at: float | None = None
    ended_at: float = 0.0
    killed: bool = False
    forced: bool = False
    heard: Callable[[bytes], None] = lambda data: None

    def run(self) -> None:
        """Serve the agent until the child has exited and its output is read or cut."""
        self._begin = time.monotonic()
        self._stderr = pipes.BoundedTail(self.limits.stderr_bytes)
        self._deadline = self._begin + self.limits.start_seconds
        self._kill_at: float | None = None
        self._look_at((*self._own_checks(), *self.channel.rounds))
        with selectors.DefaultSelector() as selector:
            self._selector = selector
            ch = self.channel
            self._exited = False
            for fd in (ch.stdin, ch.stdout, ch.stderr):
                os.set_blocking(fd, False)
            self.session.attach(self)
            for fd, action in (
                (ch.stderr, self._read_stderr),
                (ch.started, self._on_started),
                (ch.pidfd, self._on_exit),
            ):
                self.listen(fd, action)
            self._listen(ch.watches)
            while not self._exited:
                self._turn()
            self._drain()
        self.ended_at = time.monotonic() - self._begin

    def finished(
        self,
        status: int,
        error: errors.RunError | None,
        *,
        oom_kills: int = 0,
        reported: tuple[str, ...] = (),
        cpu_ms: int | None = None,
        memory_peak_bytes: int | None = None,
        all_counted: bool = True,
    ) -> RunOutcome:
        """Return the outcome, with the fields that only the backend knows: status, error, kills for memory, use."""
        told = self.started_at is not None
        wall_ms = 0 if self.started_at is None else int((self.ended_at - self.started_at) * 1000)
        return RunOutcome(
            stdout=self.session.answer,
            stderr=self.stderr,
            stderr_total=self.stderr_total,
            exit_status=status,
            error=error,
            oom_kills=oom_kills,
            start_seconds=self.started_at,
            total_seconds=self.ended_at,
            reported=reported,
            said_seconds=self.said_at,
            usage=contract.Usage(cpu_ms, memory_peak_bytes, wall_ms) if told else contract.NOTHING_USED,
            totals=self.session.totals,
            all_counted=all_counted,
        )

    def listen(self, fd: int, action: Callable[[], None], *, writable: bool = False) -> None:
        """Call ``action`` when ``fd`` is readable, or writable. A descriptor has one action at a time."""
        self._selector.register(fd, selectors.EVENT_WRITE if writable else selectors.EVENT_READ, action)

    def forget(self, fd: int) -> None:
        """Stop waiting for ``fd``."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(fd)

    def spoke(self) -> None:
        """Note the time of the agent's first byte on stdout."""
        self.said_at = self.said_at or time.monotonic() - self._begin

    def keep_stderr(self, data: bytes) -> None:
        """Keep the next bytes of stderr, within their bound."""
        self._stderr.feed(data)
        self.heard(data)

    @property
    def stdout(self) -> bytes:
        """Return what the agent wrote to stdout, where the session keeps it."""
        return self.session.answer

    @property
    def stderr(self) -> bytes:
        """Return the bounded stderr of the agent and its runtime."""
        return self._stderr.value()

    def stderr_since(self, offset: int) -> tuple[int, bytes]:
        """``BoundedTail.since`` of stderr."""
        return self._stderr.since(offset)

    @property
    def over(self) -> bool:
        """Whether the child has exited, or is being ended: nothing more can be asked of it."""
        return self._exited or self.error is not None

    @property
    def stderr_total(self) -> int:
        """Return the number of bytes that stderr had in all."""
        return self._stderr.total

    def ended_by(self, error: errors.RunError) -> None:
        """Record a reason for the run's end that the exchange did not see."""
        if self.error is None:
            self.error = error
            self.channel.observer.ending(error)

    def _turn(self) -> None:
        now = time.monotonic()
        until = self._kill_at if self._kill_at is not None else self._deadline
        if now >= until:
            self._overdue()
            return
        due = self._due  # a look may put others in its place
        for index, (at, one) in enumerate(due):
            if now >= at:
                self._watch(one.look)
                due[index] = (now + (one.seconds if one.wait is None else one.wait()), one)
        until = min([until, now + _LONGEST_WAIT, *(at for at, _ in self._due)])
        watched = self._selector.get_map()
        for key, _ in self._selector.select(max(0, until - time.monotonic())):
            # What came before it in this very turn may have forgotten it: a supervisor's end is nothing any more to an
            # instance that was just given an intent, and a number that was let go of may be another's by now.
            if watched.get(key.fd) is not key:
                continue
            key.data()
            if self._exited:
                return

    def _look_at(self, rounds: Sequence[PeriodicCheck]) -> None:
        """Replace all periodic checks by these."""
        now = time.monotonic()
        self._due = [(now + one.seconds, one) for one in rounds]

    def _watch(self, look: Callable[[], Outcome]) -> None:
        error = look()
        gently = error is not None and bool(error.details.get("gently"))
        if error is not None and self.error is None:
            self.end(error, gently=gently)
        elif error is not None and not gently and not self.forced:
            self._kill()  # an immediate end overrides the grace of another reason

    def _own_checks(self) -> tuple[PeriodicCheck, ...]:
        return PeriodicCheck(_LOOK_SECONDS, self._out_of_memory), PeriodicCheck(_LOOK_SECONDS, self._outlived)

    def _outlived(self) -> Outcome:
        """End the run if its ttl or its package ended while the machine slept, or while its clock was behind.

        The deadline rests on CLOCK_MONOTONIC, which stands still in a sleep.
        """
        if self.started_at is None or self.error is not None:
            return None
        limits = self.limits
        if time.time() >= limits.expires_at:
            return errors.DeadlineError("its package has ended (clock: expires_at)", clock="expires_at", gently=True)
        if boot_seconds() - self._given_at >= limits.ttl_seconds:
            words = f"still running after {limits.ttl_seconds:g} s (clock: ttl_seconds)"
            return errors.DeadlineError(words, hint=_LONGER["ttl_seconds"], clock="ttl_seconds", gently=True)
        return None

    def _out_of_memory(self) -> Outcome:
        # The kernel may choose a process without which the sandbox hangs instead of ending (seen with node).
        return out_of_memory() if self.error is None and self.channel.handle.out_of_memory() else None

    def _overdue(self) -> None:
        if self._kill_at is not None:
            self._kill()
        elif self.started_at is None:
            self.end(
                errors.StartTimeoutError(
                    f"the sandbox did not start within {self.limits.start_seconds:g} s",
                    hint="see `covenant doctor`; raise start_deadline_seconds in the configuration on a slow machine",
                ),
                gently=False,
            )
        else:
            self.end(
                errors.DeadlineError(
                    f"still running after {self.limits.task_seconds:g} s (clock: {self.limits.task_clock})",
                    hint=_LONGER.get(self.limits.task_clock, ""),
                    clock=self.limits.task_clock,
                ),
                gently=True,
            )

    def end(self, error: errors.RunError, *, gently: bool) -> None:
        """Stop the child for a reason of ours; the first reason is the one that is reported."""
        self.ended_by(error)
        self.killed = True
        self.session.stop_input()
        if gently and self._kill_at is None:
            # The grace counts from here: an agent that keeps its sandbox too busy to be asked gains no time by it.
            grace_seconds: float = error.details.get("grace_seconds", self.limits.grace_seconds)
            self._kill_at = time.monotonic() + grace_seconds
            if not isinstance(error, errors.DeadlineError):
                # The run's own deadline also bounds a grace that a caller asked for.
                self._kill_at = min(self._kill_at, self._deadline + self.limits.grace_seconds)
            self.channel.handle.terminate()
        else:
            self._kill()

    def _kill(self) -> None:
        self.forced = True
        self.channel.handle.kill()
        # The exit is read through pidfd; SIGKILL cannot be refused, so this bound only guards the kernel.
        self._kill_at = time.monotonic() + 10.0
        if not pipes.readable(self.channel.pidfd, 10.0):
            raise errors.KernelError("the sandbox survives SIGKILL")

    def _on_started(self) -> None:
        if not self.channel.has_started():
            return
        self._selector.unregister(self.channel.started)
        if self._spoke_early():
            return
        for one in self.channel.rounds:
            if one.at_start and self.error is None:
                self._watch(one.look)
        if self.error is not None:
            return
        if self.later is None:
            self._give()
        else:
            self._due.append((0.0, PeriodicCheck(_SETTLE_SECONDS, functools.partial(self._settle, self.later))))

    def _settle(self, later: DeferredIntent) -> Outcome:
        """Wait until the agent is held. Until then the start's deadline holds; afterwards only watches end the run."""
        if later.settled():
            self._look_at(later.rounds)
            self._deadline = math.inf
            self._selector.register(later.fileno(), selectors.EVENT_READ, functools.partial(self._take, later))
            self._held = dict(later.watches)
            self._listen(self._held)
        return None

    def _listen(self, watches: Mapping[int, Callable[[], Outcome]]) -> None:
        for fd, act in watches.items():
            self._selector.register(fd, selectors.EVENT_READ, functools.partial(self._watch, act))

    def _take(self, later: DeferredIntent) -> None:
        came = time.monotonic()
        taken = later.take()
        if isinstance(taken, IntentDelivery) and self.error is None:
            self._begin, self.intent, self.limits = came, taken.intent, taken.limits
            # What it said on its way to being held it said before its intent.
            if not self._spoke_early():
                self._give()
                taken.release()
            # Nothing is looked at before the next turn, so that the agent has its line before this is done.
            for fd in (later.fileno(), *self._held):
                self.forget(fd)
            self._listen(taken.watches)
            self._look_at((*self._own_checks(), *self.channel.rounds))
        elif isinstance(taken, errors.RunError):
            self._watch(lambda: taken)

    def _give(self) -> None:
        self.channel.observer.starting()
        now = time.monotonic()
        self.started_at = now - self._begin
        self._given_at = boot_seconds()
        self._deadline = now + self.limits.task_seconds
        self.session.begin(self.intent)

    def _spoke_early(self) -> bool:
        if self.session.silent and pipes.readable(self.channel.stdout, 0):
            self.session.read_early()
        return self.error is not None

    def _read_stderr(self) -> None:
        data = pipes.read(self.channel.stderr)
        if data is None:
            return
        if not data:
            self.forget(self.channel.stderr)
            return
        self.keep_stderr(data)

    def _on_exit(self) -> None:
        unseen = not self.session.silent and self.error is None and self.started_at is None
        if unseen and pipes.readable(self.channel.started, 0):
            self._on_started()  # an agent that needs no input may exit before the event of its start is taken
        self._exited = True

    def _drain(self, seconds: float = 2.0) -> None:
        """Read the rest of the pipes, for a limited time: a stray holder of the write end cannot keep us here."""
        until = time.monotonic() + seconds
        self.forget(self.channel.pidfd)
        self.forget(self.channel.started)
        moving = self.session.drained()
        for fd, look in self.channel.watches.items():
            # Report what was refused just before the end. Its outcome is ignored: the run's end is known already.
            if pipes.readable(fd, 0):
                look()
            self.forget(fd)
        for fd in [key.fd for key in self._selector.get_map().values()]:
            if fd not in (*moving, self.channel.stderr):
                self.forget(fd)  # clients that have come, or may come, with the intent
        while self._selector.get_map() and time.monotonic() < until:
            ready = self._selector.select(until - time.monotonic())
            for key, _ in ready:
                key.data()


def boot_seconds() -> float:
    """Return the seconds since boot, with those in which the machine slept (clock_gettime(2), CLOCK_BOOTTIME)."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def out_of_memory() -> errors.OutOfMemoryError:
    """Return the error of a run from which the kernel killed a process for memory."""
    return errors.OutOfMemoryError("the agent used more memory than memory_mb")
