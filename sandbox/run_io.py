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
# Descriptors, each with what to do when it is readable.
Watches = Mapping[int, Callable[[], Outcome]]


@dataclass(frozen=True, slots=True)
class PeriodicCheck:
    """Something that is looked at every so many seconds while the run lasts.

    ``wait`` says after each look when the next is due, in seconds, where that is not always the same. ``at_start`` has
    it looked at once more when the agent has started and before it is given its intent.
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

    ``rounds`` are looked at while the agent is held, in the place of the channel's; ``watches`` beside the channel's,
    for so long. Until the intent is given the agent may say nothing on stdout, as ever.
    """

    @property
    def rounds(self) -> Sequence[PeriodicCheck]:
        """Asked for when it is held."""

    @property
    def watches(self) -> Mapping[int, Callable[[], Outcome]]:
        """Asked for when it is held."""

    def settled(self) -> bool:
        """Asked again and again once the agent has started: whether it waits for its intent, and is held now."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when a client brings an intent."""

    def take(self) -> IntentDelivery | errors.RunError | None:
        """The intent; an error ends the child; None goes on waiting."""


@dataclass(frozen=True, slots=True)
class ContainerIO:
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
    rounds: Sequence[PeriodicCheck] = ()
    giving: Callable[[], None] = lambda: None
    ending: Callable[[errors.RunError], None] = lambda error: None


@dataclass(frozen=True, slots=True)
class RunOutcome:
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
