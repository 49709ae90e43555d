"""What a run is asked and what comes of it, whoever holds it: the supervisor, or a Hermes API."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import anyio

from covenant.runtime import supervisor_report
from covenant.runtime.packages import Card
from covenant.wire.parts import Approval
from covenant.wire.types import AgentId, Priority
from policy import contract, denials, errors
from policy.contract import Usage

__all__ = ["Approving", "Intent", "Live", "RunResult", "Runner", "Runners", "Spent", "Usage", "spent", "with_spent"]

_SPENT: Final = "spent"
Lacks = Callable[[], str | None]


@dataclass(frozen=True, slots=True)
class Intent:
    """What an agent is asked. ``issued_at`` in Unix milliseconds."""

    id: str
    text: str
    issued_at: int
    priority: Priority = Priority.NORMAL


@dataclass(frozen=True, slots=True)
class RunResult:
    """What an agent answered, and what that took."""

    text: str
    sources: tuple[str, ...] = ()
    runtime_events: tuple[Any, ...] = ()
    files: tuple[Any, ...] = ()
    usage: Usage = contract.NOTHING_USED
    run_id: str | None = None
    policy_digest: str | None = None
    denials: tuple[denials.Row, ...] = ()
    told: supervisor_report.Told | None = None


@dataclass(frozen=True, slots=True)
class Spent:
    """What a run that failed took all the same, and what was denied to it."""

    usage: Usage
    run_id: str | None = None
    policy_digest: str | None = None
    denials: tuple[denials.Row, ...] = ()
    told: supervisor_report.Told | None = None


class Runner(Protocol):
    """Runs an intent by an agent."""

    async def run(self, card: Card, intent: Intent, *, caller: AgentId, deadline: int | None) -> RunResult:
        """Run it; ``deadline`` is when whoever asks stops waiting, in Unix milliseconds.

        Cancelling the call ends the run.

        Raises:
            errors.CovenantError: it did not start, or brought no answer; ``spent`` says what it took.
        """

    async def end(self, intent_id: str, *, reason: str, whole: bool = False) -> bool:
        """End the run of this intent, which gets its grace to end by itself; False where there is none. ``whole``: at
        once, with all that it started.

        Raises:
            errors.CovenantError: it could not be ended.
        """


class Approving(Protocol):
    """Whose runs may wait for an operator's word."""

    def approvals(self) -> tuple[Approval, ...]:
        """What waits, the oldest first."""

    async def resolve(self, approval_id: str, choice: str, *, by: AgentId) -> int:
        """Answer one; how many waiting requests that resolved.

        Raises:
            errors.NoApprovalError: none waits under this id, or it does not offer this choice.
            errors.CovenantError: the answer could not be written down, or not be given.
        """


def with_spent(error: errors.CovenantError, took: Spent) -> errors.CovenantError:
    """The error of a run that took ``took``."""
    error.details[_SPENT] = took
    return error


def spent(error: BaseException) -> Spent | None:
    """What the run took that ended with this error; None where nothing was started."""
    found = error.details.get(_SPENT) if isinstance(error, errors.CovenantError) else None
    return found if isinstance(found, Spent) else None


@dataclass
class Live:
    """An intent that an agent works on now, for ``caller``. ``preempted`` says why its budget ended it, ``withdrawn``
    which grant that it rested on was taken back; each is empty while it was not. ``lacks`` is the action of a grant
    that it needs beside what every intent to its agent does, and that is held no more."""

    card: Card
    intent_id: str
    caller: AgentId
    lacks: Lacks = lambda: None
    preempted: str = ""
    withdrawn: str = ""
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)


class Runners:
    """Each runtime's runner by its name in the manifest, and what they run now, the oldest first."""

    def __init__(self, runners: Mapping[str, Runner], approving: Approving | None = None) -> None:
        self._runners = dict(runners)
        self.approving = approving
        self.live: dict[str, Live] = {}
        # Intents that somebody may ask for a second time while they are on their way (respond.intent).
        self.on_their_way: dict[str, anyio.Event] = {}

    async def run(
        self,
        card: Card,
        intent: Intent,
        *,
        caller: AgentId,
        deadline: int | None = None,
        lacks: Lacks = lambda: None,
    ) -> RunResult:
        """As ``Runner.run``, by the runner of the card's runtime; ``lacks`` as in ``Live``.

        Raises:
            errors.PreemptedError: its budget ended it, in the place of what the runner says of that.
            errors.RunRevokedError: likewise, a grant that it rested on was taken back.
            errors.CovenantError: as ``Runner.run``.
        """
        live = self.live[intent.id] = Live(card, intent.id, caller, lacks)
        try:
            with live.scope:
                ran = await self._of(card).run(card, intent, caller=caller, deadline=deadline)
                # An answer that came with the end of what it rested on is nobody's.
                if not live.withdrawn:
                    return ran
                raise with_spent(_ended(live), _of_answer(ran))
            # Only whoever takes its grant back cancels it here.
            raise _ended(live)
        except errors.CovenantError as e:
            if not (live.preempted or live.withdrawn) or isinstance(e, errors.RunRevokedError):
                raise
            ended, took = _ended(live), spent(e)
            supervisor_report.with_told(ended, supervisor_report.of(e))
            raise ended if took is None else with_spent(ended, took) from e
        finally:
            del self.live[intent.id]

    async def end(self, live: Live, *, reason: str) -> bool:
        """As ``Runner.end``."""
        return await self._of(live.card).end(live.intent_id, reason=reason)

    async def withdraw(self, live: Live) -> None:
        """End a run that is marked so (``Live.withdrawn``), at once and with all that it started. One that is not to be
        found is only on its way, and one that cannot be asked for ends with the call."""
        there = False
        try:
            there = await self._of(live.card).end(live.intent_id, reason=f"revoked: {live.withdrawn}", whole=True)
        finally:
            if not there:
                live.scope.cancel()

    def _of(self, card: Card) -> Runner:
        return self._runners[card.manifest.agent.runtime]


def _ended(live: Live) -> errors.CovenantError:
    if live.withdrawn:
        return errors.RunRevokedError(f"what the intent rested on was taken back: {live.withdrawn}")
    return errors.PreemptedError(f"the budget of agent `{live.card.id}` was used up: {live.preempted}")


def _of_answer(ran: RunResult) -> Spent:
    return Spent(ran.usage, ran.run_id, ran.policy_digest, ran.denials, ran.told)
