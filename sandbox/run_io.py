"""Types of the exchange with an agent over three pipes: the child, its limits, its watches and its outcome.

The runners, the watchers of a run and the writers of its end share these names.
"""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
from msgspec import Struct

from policy import clocks, contract, denials, errors

if TYPE_CHECKING:
    from policy.prove import live  # heavy, and only a type here: a client of the supervisor imports this module

# A new size of a terminal: rows and columns.
RESIZE: Final = struct.Struct(">HH")
# What a caller sends over ``CallerStreams.line`` before it leaves a terminal that is to go on.
DETACH: Final = b"d"
# What the peer of a run that may rest says: something is asked of it, or nothing was for some seconds (shim.idleness).
BUSY, IDLE = b"b", b"i"


class Limits(Struct, frozen=True):
    """Limits of one exchange in seconds, and the name of the one that bounds the task.

    ``task_seconds`` runs from the moment the intent line is written to an agent that has started. It stands still while
    the machine sleeps; ``ttl_seconds`` and ``expires_at`` (Unix time) do not.
    """

    start_seconds: float
    task_seconds: float
    task_clock: str
    grace_seconds: float = 2.0
    stdout_bytes: int = contract.STDOUT_BYTES
    stderr_bytes: int = contract.STDERR_BYTES
    ttl_seconds: float = math.inf
    expires_at: float = math.inf

    @classmethod
    def until(cls, deadline: clocks.Deadline, *, start_seconds: float, grace_seconds: float) -> Limits:
        """Return the limits of a task with this deadline."""
        ttl_ms, expires_at_ms = deadline.ttl_ms, deadline.expires_at_ms
        return cls(
            start_seconds=start_seconds,
            task_seconds=deadline.milliseconds / 1000,
            task_clock=deadline.clock,
            grace_seconds=grace_seconds,
            ttl_seconds=math.inf if ttl_ms is None else ttl_ms / 1000,
            expires_at=math.inf if expires_at_ms is None else expires_at_ms / 1000,
        )


# What a watch or a round came to: an error ends the run with it.
Outcome = errors.RunError | None
# Descriptors, each with the handler for when it is readable.
Watches = Mapping[int, Callable[[], Outcome]]


class PeriodicCheck(Struct, frozen=True):
    """A check that runs periodically while the run lasts.

    ``wait`` returns after each look the seconds until the next, where they vary. ``at_start`` adds one look after the
    agent's start and before its intent.
    """

    seconds: float
    look: Callable[[], Outcome]
    wait: Callable[[], float] | None = None
    at_start: bool = False


class IntentDelivery(Struct, frozen=True):
    """Deliver an intent to an agent that waited: the line, its limits, and the descriptors that may end it.

    ``release`` thaws the agent. It is called last: until its intent is in the pipe the agent must stay silent.
    """

    intent: bytes
    limits: Limits
    watches: Mapping[int, Callable[[], Outcome]] = msgspec.field(default_factory=dict)
    release: Callable[[], None] = lambda: None


class DeferredIntent(Protocol):
    """An intent that is not known yet when the agent starts (sandbox.standby). No method may block for long.

    While the agent is held, ``rounds`` replace those of the child's ContainerIO, and ``watches`` are added to its own.
    The agent must stay silent on stdout until it has its intent.
    """

    @property
    def rounds(self) -> Sequence[PeriodicCheck]:
        """Return the checks; called when the agent is held."""

    @property
    def watches(self) -> Mapping[int, Callable[[], Outcome]]:
        """Return the watches; called when the agent is held."""

    def settled(self) -> bool:
        """Whether the agent waits for its intent and is held now. Called repeatedly once the agent has started."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when a client brings an intent."""

    def take(self) -> IntentDelivery | errors.RunError | None:
        """Return the intent. An error ends the child; None continues the wait."""


class RunObserver(Protocol):
    """Takes the events of one run. An event that cannot be written raises, and then the act does not happen."""

    def denied(self, denial: denials.Denial, *, count: int = 1) -> None:
        """Record that something was refused to the agent ``count`` times."""

    def drifted(self, layer: live.Layer) -> None:
        """Record that a layer of the confinement was changed."""

    def starting(self) -> None:
        """Record that the agent is about to be given its intent."""

    def ending(self, error: errors.RunError) -> None:
        """Record that the run is about to be ended with ``error``."""


class Freezer(Protocol):
    """The processes of a sandbox that can be frozen (kernel.cgroup.cgroup.Leaf)."""

    @property
    def freezable(self) -> bool:
        """Whether this machine can freeze them."""

    def pids(self) -> Sequence[int]:
        """Return the processes that are left."""

    def freeze(self, *, allow_thaw: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        """Freeze them. Where that fails they go on, inside ``allow_thaw``."""

    def frozen(self) -> bool:
        """Whether every thread is frozen."""

    def thaw(self) -> None:
        """Let them go on."""


class SandboxHandle(Protocol):
    """Control a started sandbox from outside."""

    @property
    def freezer(self) -> Freezer | None:
        """Return the freezer, None for a sandbox without a cgroup."""

    def terminate(self) -> None:
        """Send SIGTERM to the agent."""

    def kill(self) -> None:
        """Kill every process."""

    def out_of_memory(self) -> bool:
        """Whether the kernel killed a process for memory."""


class ContainerIO(Struct, frozen=True):
    """A started child as the exchange uses it. The caller owns the descriptors and closes them.

    - ``stdin``, ``stdout`` and ``stderr`` are the supervisor's ends. ``pidfd`` becomes readable at the exit.
    - ``started`` becomes readable when the agent's first process runs; ``has_started()`` then consumes the event and
      says whether it was the right one.
    - ``watches`` maps descriptors of the run's helpers (gateway, denials) to handlers, and ``rounds`` are periodic
      checks. Neither may block.
    """

    stdin: int
    stdout: int
    stderr: int
    pidfd: int
    started: int
    has_started: Callable[[], bool]
    handle: SandboxHandle
    observer: RunObserver
    watches: Mapping[int, Callable[[], Outcome]] = msgspec.field(default_factory=dict)
    rounds: Sequence[PeriodicCheck] = ()


class CallerStreams(Struct, frozen=True):
    """The caller's ends of a stream session: pipes that the shim may make non-blocking. Their owner closes them.

    With a terminal, ``size`` is its size (rows, columns), and ``resizes`` brings each new size as RESIZE. There is no
    ``stderr`` then (-1), and no ``resizes`` otherwise. ``recording`` takes an asciicast of a terminal; -1 without one.

    A session with a terminal may outlive its caller. It ``stays`` when the caller leaves, and without ``stdin`` (-1) it
    begins with none. ``line`` is a socket of the caller: its end of file is the caller's leaving, and DETACH before it
    lets the session stay. ``told`` is called once the agent runs.
    """

    stdin: int
    stdout: int
    stderr: int = -1
    size: tuple[int, int] | None = None
    resizes: int = -1
    recording: int = -1
    stays: bool = False
    line: int = -1
    told: Callable[[], None] = lambda: None


class StreamTotals(Struct, frozen=True):
    """The bytes that a stream session moved, with SHA-256: the caller's input, the agent's output, the recording."""

    in_bytes: int
    in_sha256: str
    out_bytes: int
    out_sha256: str
    recording_sha256: str | None = None


class RunOutcome(Struct, frozen=True):
    """The outcome of a run. ``error`` is None when the agent exited with 0 by itself. Times are in seconds.

    ``said_seconds`` is the time of the first byte on stdout, None when there was none. ``totals`` are those of a stream
    session, None for an answer. ``all_counted`` is False where destinations that the agent reached may not be counted.
    """

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
    totals: StreamTotals | None = None
    all_counted: bool = True
