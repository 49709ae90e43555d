"""The request and the result of a run, for every runner: the supervisor, or a Hermes API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import anyio

from covenant.runtime import supervisor_report
from covenant.runtime.packages import Card
from covenant.wire.parts import Approval
from covenant.wire.types import AgentId, Priority
from policy import contract, denials, errors
from policy.contract import Usage

__all__ = [
    "Approving",
    "Intent",
    "LiveIntent",
    "RunResult",
    "Runner",
    "Runners",
    "Spent",
    "Usage",
    "spent",
    "with_spent",
]

_SPENT: Final = "spent"
Lacks = Callable[[], str | None]


@dataclass(frozen=True, slots=True)
class Intent:
    """A request to an agent. ``issued_at`` in Unix milliseconds."""

    id: str
    text: str
    issued_at: int
    priority: Priority = Priority.NORMAL


@dataclass(frozen=True, slots=True)
class RunResult:
    """An agent's answer, and its usage."""

    text: str
    sources: tuple[str, ...] = ()
    runtime_events: tuple[Any, ...] = ()
    files: tuple[Any, ...] = ()
    usage: Usage = contract.NOTHING_USED
    run_id: str | None = None
    policy_digest: str | None = None
    denials: tuple[denials.Row, ...] = ()
    told: supervisor_report.SupervisorReport | None = None


@dataclass(frozen=True, slots=True)
class Spent:
    """The usage and the denials of a failed run."""

    usage: Usage
    run_id: str | None = None
    policy_digest: str | None = None
    denials: tuple[denials.Row, ...] = ()
    told: supervisor_report.SupervisorReport | None = None


class Runner(Protocol):
    """Runs an agent on an intent."""

    async def run(self, card: Card, intent: Intent, *, caller: AgentId, deadline: int | None) -> RunResult:
        """Run it. ``deadline``: the time at which the caller stops waiting, in Unix milliseconds.

        Cancelling the call ends the run.

        Raises:
            errors.CovenantError: it did not start, or gave no answer; ``spent`` returns its usage.
        """

    async def end(self, intent_id: str, *, reason: str, whole: bool = False) -> bool:
        """End the run of this intent after its grace; returns False if there is none. ``whole``: at once, with its
        whole tree.

        Raises:
            errors.CovenantError: it could not be ended.
        """


class Approving(Protocol):
    """A runner whose runs may wait for an operator's approval."""

    def approvals(self) -> tuple[Approval, ...]:
        """Return the waiting approvals, oldest first."""

    async def resolve(self, approval_id: str, choice: str, *, by: AgentId) -> int:
        """Answer an approval. Returns the number of waiting requests that this resolved.

        Raises:
            errors.NoApprovalError: none waits under this id, or it does not offer this choice.
            errors.CovenantError: the answer could not be logged or sent.
        """


def with_spent(error: errors.CovenantError, took: Spent) -> errors.CovenantError:
    """Return the error with the usage ``took`` of its run."""
    error.details[_SPENT] = took
    return error


def spent(error: BaseException) -> Spent | None:
    """Return the usage of the run that ended with this error; None if nothing was started."""
    found = error.details.get(_SPENT) if isinstance(error, errors.CovenantError) else None
    return found if isinstance(found, Spent) else None


@dataclass
class LiveIntent:
    """An intent in progress at an agent, for ``caller``.

    ``preempted``: why its budget ended it; ``withdrawn``: which grant it rested on was revoked; empty otherwise.
    ``lacks`` returns the action of an additional grant that this intent needs, besides those of every intent to its
    agent, if it is no longer held.
    """

    card: Card
    intent_id: str
    caller: AgentId
    lacks: Lacks = lambda: None
    preempted: str = ""
    withdrawn: str = ""
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)


class Runners:
    """Each runtime's runner by its name in the manifest, and the runs in progress, oldest first."""

    def __init__(
        self,
        runners: Mapping[str, Runner],
        approving: Approving | None = None,
        signed: Callable[[Card], Awaitable[None]] | None = None,
    ) -> None:
        self._runners = dict(runners)
        self.approving = approving
        self._signed = signed
        self.live: dict[str, LiveIntent] = {}
        # Intents that may be requested a second time while they are in progress (respond.intent).
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
        """As ``Runner.run``, by the runner of the card's runtime; ``lacks`` as in ``LiveIntent``.

        Raises:
            errors.PreemptedError: its budget ended it; replaces the runner's own error.
            errors.RunRevokedError: likewise, a grant that it rested on was revoked.
            errors.CovenantError: as ``Runner.run``.
        """
        live = self.live[intent.id] = LiveIntent(card, intent.id, caller, lacks)
        try:
            with live.scope:
                ran = await self._of(card).run(card, intent, caller=caller, deadline=deadline)
                # An answer that came after its grant was revoked must not be returned.
                if not live.withdrawn:
                    return ran
                raise with_spent(_ended(live), _of_answer(ran))
            # Only a withdrawal of its grant cancels this scope.
            raise _ended(live)
        except errors.CovenantError as e:
            if not (live.preempted or live.withdrawn) or isinstance(e, errors.RunRevokedError):
                raise
            ended, took = _ended(live), spent(e)
            supervisor_report.with_told(ended, supervisor_report.of(e))
            raise ended if took is None else with_spent(ended, took) from e
        finally:
            del self.live[intent.id]

    async def check_signature(self, card: Card) -> None:
        """Verify an agent's package as it is now, without running it.

        Raises:
            errors.CovenantError: it is refused, or cannot be verified now.
        """
        if self._signed is None:
            raise errors.NoSupervisorError("no part of this daemon verifies signatures")
        await self._signed(card)

    async def end(self, live: LiveIntent, *, reason: str) -> bool:
        """As ``Runner.end``."""
        return await self._of(live.card).end(live.intent_id, reason=reason)

    async def withdraw(self, live: LiveIntent) -> None:
        """End a run that is marked as withdrawn (``LiveIntent.withdrawn``), at once and with its whole tree.

        A run that is not found has not started yet, and one whose runner fails ends with the call.
        """
        there = False
        try:
            there = await self._of(live.card).end(live.intent_id, reason=f"revoked: {live.withdrawn}", whole=True)
        finally:
            if not there:
                live.scope.cancel()

    def _of(self, card: Card) -> Runner:
        return self._runners[card.manifest.agent.runtime]


def _ended(live: LiveIntent) -> errors.CovenantError:
    if live.withdrawn:
        return errors.RunRevokedError(f"what the intent rested on was taken back: {live.withdrawn}")
    return errors.PreemptedError(f"the budget of agent `{live.card.id}` was used up: {live.preempted}")


def _of_answer(ran: RunResult) -> Spent:
    return Spent(ran.usage, ran.run_id, ran.policy_digest, ran.denials, ran.told)
