"""The exchange with an agent over three pipes: start, one line in, one line out, every wait with a limit.

Both runners use it. It knows nothing of namespaces: it is given descriptors, a way to tell that the agent has
started, and a way to end it. It never blocks on the agent: an agent that floods stdout, never reads stdin,
closes stdout and lives on, or ignores SIGTERM ends within its cap with the error that says which.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import select
import selectors
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from policy import contract, errors

_CHUNK = 65536
# How often the cgroup is asked for a kill by the kernel, which nothing announces (seconds).
_LOOK_SECONDS = 0.25
# How often it is looked whether an agent that is told later waits already (seconds).
_SETTLE_SECONDS = 0.02
# No wait is without an end, also where nothing is due (seconds).
_LONGEST_WAIT = 3600.0


@dataclass(frozen=True, slots=True)
class Limits:
    """The clocks of one exchange, in seconds, and the name of the one that bounds the task.

    ``task_seconds`` runs from the moment the intent line is written to an agent that has started.
    """

    start_seconds: float
    task_seconds: float
    task_clock: str
    grace_seconds: float = 2.0
    stdout_bytes: int = contract.STDOUT_BYTES
    stderr_bytes: int = contract.STDERR_BYTES


# What a watch or a round came to: an error ends the run with it.
Outcome = errors.RunError | None


@dataclass(frozen=True, slots=True)
class Round:
    """Something that is looked at every so many seconds while the run lasts.

    ``wait`` says after each look when the next is due, in seconds, where that is not always the same. ``at_start`` has
    it looked at once more when the agent has started and before it is given its intent.
    """

    seconds: float
    look: Callable[[], Outcome]
    wait: Callable[[], float] | None = None
    at_start: bool = False


@dataclass(frozen=True, slots=True)
class Given:
    """What an agent that waited is told at last, the clocks that count from then on, and who else may end it.

    ``release`` lets it go on. That comes last: until its intent lies in the pipe it can say nothing.
    """

    intent: bytes
    limits: Limits
    watches: Mapping[int, Callable[[], Outcome]] = field(default_factory=dict)
    release: Callable[[], None] = lambda: None


class Later(Protocol):
    """An intent that is not known yet when the agent starts (sandbox.standby). No method may block for long.

    ``rounds`` are looked at while the agent is held, in the place of the channel's; ``watches`` beside the channel's,
    for so long. Until the intent is given the agent may say nothing on stdout, as ever.
    """

    @property
    def rounds(self) -> Sequence[Round]:
        """Asked for when it is held."""

    @property
    def watches(self) -> Mapping[int, Callable[[], Outcome]]:
        """Asked for when it is held."""

    def settled(self) -> bool:
        """Asked again and again once the agent has started: whether it waits for its intent, and is held now."""

    def fileno(self) -> int:
        """Readable when somebody comes with an intent."""

    def take(self) -> Given | errors.RunError | None:
        """The intent; an error ends the child; None goes on waiting."""


@dataclass(frozen=True, slots=True)
class Channel:
    """A started child as the exchange sees it. Descriptors stay owned by the caller, who closes them.

    ``stdin``, ``stdout``, ``stderr`` are the supervisor's ends; ``pidfd`` becomes readable at the exit;
    ``started`` becomes readable when the agent's first process runs, and ``has_started()`` then consumes the
    event and says whether it was the right one. ``terminate`` asks (SIGTERM), ``kill`` ends everything.
    ``out_of_memory`` says whether the kernel has killed something of the child's for memory. ``watches`` are
    descriptors of what serves the run (its gateway, its denials), each with what to do when it is readable;
    ``rounds`` are looked at by the clock. Neither may block. ``giving`` is called when the agent is about to be given
    its intent, ``ending`` before the run is ended for a reason of ours: what either cannot write down does not happen.
    """

    stdin: int
    stdout: int
    stderr: int
    pidfd: int
    started: int
    has_started: Callable[[], bool]
    terminate: Callable[[], None]
    kill: Callable[[], None]
    out_of_memory: Callable[[], bool] = lambda: False
    watches: Mapping[int, Callable[[], Outcome]] = field(default_factory=dict)
    rounds: Sequence[Round] = ()
    giving: Callable[[], None] = lambda: None
    ending: Callable[[errors.RunError], None] = lambda error: None


@dataclass(frozen=True, slots=True)
class Finished:
    """How a run ended. ``error`` is None when the agent exited with 0 by itself; times in seconds: ``said_seconds`` is
    when its first word on stdout was read, None when it said nothing."""

    stdout: bytes
    stderr: bytes
    stderr_total: int
    exit_status: int
    error: errors.RunError | None
    oom_kills: int
    start_seconds: float | None
    total_seconds: float
    reported: tuple[str, ...]
    said_seconds: float | None = None
    usage: contract.Usage = contract.NOTHING_USED


class BoundedTail:
    """The first and the last half of a stream that may be endless; says how much fell out between."""

    def __init__(self, limit: int) -> None:
        self._half = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        self.total += len(data)
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        del self._tail[: max(0, len(self._tail) - self._half)]

    def value(self) -> bytes:
        """What was kept, with a mark where bytes were dropped."""
        dropped = self.total - len(self._head) - len(self._tail)
        mark = f"\n[{dropped} bytes dropped]\n".encode() if dropped else b""
        return bytes(self._head) + mark + bytes(self._tail)

    def since(self, offset: int) -> tuple[int, bytes]:
        """What is kept from ``offset`` of the whole stream on, without a gap, and where that begins."""
        held, begin = bytes(self._head), self.total - len(self._tail)
        if begin == len(held):
            return offset, (held + self._tail)[offset:]
        if offset < len(held):
            return offset, held[offset:]
        begins = max(offset, begin)
        return begins, bytes(self._tail[begins - begin :])


@dataclass
class Exchange:
    """One conversation. ``run`` returns when the child has exited; ``error`` says why it was ended, if it was.

    Times are seconds since ``run`` was called, or since somebody came with the intent where it is ``later``:
    ``started_at`` None when the agent never started, or was never told anything. ``intent`` is then empty, and the
    limits hold for the start alone.
    """

    channel: Channel
    intent: bytes
    limits: Limits
    later: Later | None = None
    stdout: bytearray = field(default_factory=bytearray)
    error: errors.RunError | None = None
    started_at: float | None = None
    said_at: float | None = None
    ended_at: float = 0.0
    killed: bool = False
    forced: bool = False

    def run(self) -> None:
        """Hold the conversation until the child has exited and its output is read or cut."""
        self._begin = time.monotonic()
        self._stderr = BoundedTail(self.limits.stderr_bytes)
        self._pending = memoryview(self.intent)
        self._deadline = self._begin + self.limits.start_seconds
        self._kill_at: float | None = None
        self._look_at((Round(_LOOK_SECONDS, self._out_of_memory), *self.channel.rounds))
        with selectors.DefaultSelector() as selector:
            self._selector = selector
            ch = self.channel
            for fd in (ch.stdin, ch.stdout, ch.stderr):
                os.set_blocking(fd, False)
            for fd, action in (
                (ch.stdout, self._read_stdout),
                (ch.stderr, self._read_stderr),
                (ch.started, self._on_started),
                (ch.pidfd, self._on_exit),
            ):
                selector.register(fd, selectors.EVENT_READ, action)
            self._listen(ch.watches)
            self._exited = False
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
    ) -> Finished:
        """What the conversation came to, with what the backend alone knows: status, error, kills for memory, use."""
        told = self.started_at is not None
        wall_ms = 0 if self.started_at is None else int((self.ended_at - self.started_at) * 1000)
        return Finished(
            stdout=bytes(self.stdout),
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
        )

    @property
    def stderr(self) -> bytes:
        """What the agent and its runtime wrote to stderr, bounded."""
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
        """How many bytes stderr had in all."""
        return self._stderr.total

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
        for key, _ in self._selector.select(max(0, until - time.monotonic())):
            key.data()
            if self._exited:
                return

    def _look_at(self, rounds: Sequence[Round]) -> None:
        """From now on these are looked at by the clock, and no others."""
        now = time.monotonic()
        self._due = [(now + one.seconds, one) for one in rounds]

    def _watch(self, look: Callable[[], Outcome]) -> None:
        error = look()
        gently = error is not None and bool(error.details.get("gently"))
        if error is not None and self.error is None:
            self._end(error, gently=gently)
        elif error is not None and not gently and not self.forced:
            self._kill()  # what ends a run at once leaves it no grace that another reason gave it

    def _out_of_memory(self) -> Outcome:
        # The kernel may choose a process without which the sandbox hangs instead of ending (seen with node).
        return out_of_memory() if self.error is None and self.channel.out_of_memory() else None

    def _overdue(self) -> None:
        if self._kill_at is not None:
            self._kill()
        elif self.started_at is None:
            self._end(
                errors.StartTimeoutError(
                    f"the sandbox did not start within {self.limits.start_seconds:g} s",
                    hint="see `covenant doctor`; raise start_seconds in the configuration on a slow machine",
                ),
                gently=False,
            )
        else:
            self._end(
                errors.DeadlineError(
                    f"still running after {self.limits.task_seconds:g} s (clock: {self.limits.task_clock})",
                    clock=self.limits.task_clock,
                ),
                gently=True,
            )

    def _end(self, error: errors.RunError, *, gently: bool) -> None:
        """Stop the child for a reason of ours; the first reason is the one that is reported."""
        if self.error is None:
            self.error = error
            self.channel.ending(error)
        self.killed = True
        self._forget(self.channel.stdin)
        if gently and self._kill_at is None:
            # The grace counts from here: an agent that keeps its sandbox too busy to be asked gains no time by it.
            grace_seconds: float = error.details.get("grace_seconds", self.limits.grace_seconds)
            self._kill_at = time.monotonic() + grace_seconds
            self.channel.terminate()
        else:
            self._kill()

    def _kill(self) -> None:
        self.forced = True
        self.channel.kill()
        # The exit is read through pidfd; SIGKILL cannot be refused, so this bound only guards the kernel.
        self._kill_at = time.monotonic() + 10.0
        if not _readable(self.channel.pidfd, 10.0):
            raise errors.KernelError("the sandbox survives SIGKILL")

    def _on_started(self) -> None:
        if not self.channel.has_started():
            return
        self._selector.unregister(self.channel.started)
        if _readable(self.channel.stdout, 0) and self._peek_early():
            return
        for one in self.channel.rounds:
            if one.at_start:
                self._watch(one.look)
        if self.error is not None:
            return
        if self.later is None:
            self._give()
        else:
            self._due.append((0.0, Round(_SETTLE_SECONDS, functools.partial(self._settle, self.later))))

    def _settle(self, later: Later) -> Outcome:
        """The start's own deadline holds until the agent waits; from then on nothing ends it but what is watched."""
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

    def _take(self, later: Later) -> None:
        came = time.monotonic()
        taken = later.take()
        if isinstance(taken, Given) and self.error is None:
            for fd in (later.fileno(), *self._held):
                self._forget(fd)
            self._listen(taken.watches)
            self._begin, self._pending, self.limits = came, memoryview(taken.intent), taken.limits
            self._look_at((Round(_LOOK_SECONDS, self._out_of_memory), *self.channel.rounds))
            # What it said on its way to being held it said before its intent.
            if not (_readable(self.channel.stdout, 0) and self._peek_early()):
                self._give()
                taken.release()
        elif isinstance(taken, errors.RunError):
            self._watch(lambda: taken)

    def _give(self) -> None:
        self.channel.giving()
        now = time.monotonic()
        self.started_at = now - self._begin
        self._deadline = now + self.limits.task_seconds
        self._selector.register(self.channel.stdin, selectors.EVENT_WRITE, self._write_stdin)
        self._write_stdin()

    def _peek_early(self) -> bool:
        self._read_stdout()
        return self.error is not None

    def _write_stdin(self) -> None:
        try:
            while self._pending:
                self._pending = self._pending[os.write(self.channel.stdin, self._pending) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            pass
        # One line and no more: the end of file tells an agent that reads to the end that it has all.
        self._forget(self.channel.stdin)
        with contextlib.suppress(OSError):
            _shut(self.channel.stdin)

    def _read_stdout(self) -> None:
        data = _read(self.channel.stdout)
        if data is None:
            return
        if not data:
            self._forget(self.channel.stdout)
            return
        self.stdout += data
        self.said_at = self.said_at or time.monotonic() - self._begin
        if self.started_at is None:
            self._end(errors.EarlyOutputError("stdout was written before the intent was given"), gently=False)
        elif len(self.stdout) > self.limits.stdout_bytes:
            self._forget(self.channel.stdout)
            self._end(errors.OutputTooLargeError(f"stdout is over {self.limits.stdout_bytes} bytes"), gently=False)

    def _read_stderr(self) -> None:
        data = _read(self.channel.stderr)
        if data is None:
            return
        if not data:
            self._forget(self.channel.stderr)
            return
        self._stderr.feed(data)

    def _on_exit(self) -> None:
        self._exited = True

    def _forget(self, fd: int) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(fd)

    def _drain(self, seconds: float = 2.0) -> None:
        """Read what is left in the pipes; a stray holder of the write end cannot keep us here."""
        until = time.monotonic() + seconds
        self._forget(self.channel.pidfd)
        self._forget(self.channel.started)
        self._forget(self.channel.stdin)
        for fd, look in self.channel.watches.items():
            # What was refused just before the end is still to be told; whatever ended the run is known already.
            if _readable(fd, 0):
                look()
            self._forget(fd)
        for fd in [key.fd for key in self._selector.get_map().values()]:
            if fd not in (self.channel.stdout, self.channel.stderr):
                self._forget(fd)  # who came, or might still come, with the intent
        while self._selector.get_map() and time.monotonic() < until:
            ready = self._selector.select(until - time.monotonic())
            for key, _ in ready:
                key.data()


def out_of_memory() -> errors.OutOfMemoryError:
    """The error of a run from which the kernel took a process for memory."""
    return errors.OutOfMemoryError("the agent used more memory than memory_mb")


def _read(fd: int) -> bytes | None:
    try:
        return os.read(fd, _CHUNK)
    except BlockingIOError:
        return None


def _readable(fd: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _shut(fd: int) -> None:
    """Give the reader its end of file while the number stays ours: the caller closes it later."""
    null = os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.dup2(null, fd, inheritable=False)
    finally:
        os.close(null)
