"""Types of the exchange with an agent over three pipes: the child, its limits, its watches and its outcome.

The runners, the watchers of a run and the writers of its end share these names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from policy import contract, errors


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one exchange in seconds, and the name of the one that bounds the task.

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
# Descriptors, each with the handler for when it is readable.
Watches = Mapping[int, Callable[[], Outcome]]


@dataclass(frozen=True, slots=True)
class PeriodicCheck:
    """A check that runs periodically while the run lasts.

    ``wait`` returns after each look the seconds until the next, where they vary. ``at_start`` adds one look after the
    agent's start and before its intent.
    """

    seconds: float
    look: Callable[[], Outcome]
    wait: Callable[[], float] | None = None
    at_start: bool = False


@dataclass(frozen=True, slots=True)
class IntentDelivery:
    """Deliver an intent to an agent that waited: the line, its limits, and the descriptors that may end it.

    ``release`` thaws the agent. It is called last: until its intent is in the pipe the agent must stay silent.
    """

    intent: bytes
    limits: Limits
    watches: Mapping[int, Callable[[], Outcome]] = field(default_factory=dict)
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


@dataclass(frozen=True, slots=True)
class ContainerIO:
    """A started child as the exchange uses it. The caller owns the descriptors and closes them.

    ``stdin``, ``stdout`` and ``stderr`` are the supervisor's ends. ``pidfd`` becomes readable at the exit. ``started``
    becomes readable when the agent's first process runs; ``has_started()`` then consumes the event and says whether it
    was the right one. ``terminate`` sends SIGTERM, and ``kill`` kills everything. ``out_of_memory`` says whether the
    kernel killed a process of the child for memory. ``watches`` maps descriptors of the run's helpers (gateway,
    denials) to handlers, and ``rounds`` are periodic checks. Neither may block. ``giving`` is called before the agent
    is given its intent, and ``ending`` before we end the run. If either cannot write its event, the act does not
    happen.
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
    rounds: Sequence[PeriodicCheck] = ()
    giving: Callable[[], None] = lambda: None
    ending: Callable[[errors.RunError], None] = lambda error: None


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The outcome of a run. ``error`` is None when the agent exited with 0 by itself. Times are in seconds.

    ``said_seconds`` is the time of the first byte on stdout, None when there was none.
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
