"""One intent from its text to its answer, in the order of the seed:

    (1) the ignore set               IntentIgnored, and nothing else happens
    (2) the router, or the agent that the request names
    (3) the capability check         a row either way: to write memory, and what the agent requires of its caller
    (4) the budget                   a credit is reserved; without one the intent waits in a checkpoint. Then a use of
                                     each metered grant is counted
    (5) the run
    (6) working-tier memory          with an embedding; what the ignore set matches is answered and not kept
    (7) settlement receipts          of the run by what was measured, and of the memory
    (8) the audit row
    (9) the result

The writes of (6) to (8) are on disk before (9). A failed run is settled and has its receipt and its rows. A caller that
leaves and a daemon that stops leave rows that say so. What was reserved in (4) is settled last of all:
from (4) on an intent is in the ledger until its rows are in the log, and the next start writes those of one whose
daemon died (``covenant.handlers.intents.recovery``).
"""

from __future__ import annotations

import contextlib
import functools
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

import anyio.lowlevel

from covenant.handlers import billing
from covenant.handlers.access import authorization
from covenant.handlers.caller import Caller
from covenant.handlers.intents import agent_selection, completion, denials, supervisor_events
from covenant.handlers.server import Server
from covenant.handlers.state import intent_progress
from covenant.runtime.packages import Card
from covenant.runtime.runner import Intent, RunResult
from covenant.stores.audit.interface import AuditEntry
from covenant.wire import responses
from covenant.wire.types import BudgetPauseCheckpoint, Priority, SignedCapability, Tier
from policy import budget, contract, errors

_WRITE: Final = agent_selection.WRITE
MOST_OF_IGNORED: Final = completion.MOST_OF_IGNORED
_RANK: Final = (Priority.LOW, Priority.NORMAL, Priority.HIGH)
# Ends that say nothing of what was used until then.
_UNSEEN: Final = (
    errors.KilledError,
    errors.ServiceError,
    errors.InternalError,
    errors.PreemptedError,
    errors.RunRevokedError,
)
# Whose intent waits: in the state of its checkpoint, where a copy of the name would decide nothing.
SUBMITTER: Final = "submitter_pubkey"
# The key that it was asked under, behind a word, so that none looks like a path of this machine.
KEY: Final = "idempotency"
KEY_WORD: Final = "key:"
# What of one submitter's may wait: checkpoints are held in memory, and nothing ends them but a resumption.
_MOST_WAITING: Final = 1_000
_MOST_WAITING_BYTES: Final = 16 * 1024 * 1024

# Refused before anything began, which costs the caller nothing.
_BEFORE: Final = frozenset({"router", "capability", "budget"})
# Says nothing of the agent that was to be started.
_PASSING: Final = (errors.BusyError, errors.StoreError, errors.LedgerError)


@dataclass
class IntentPipeline:
    """One intent on its way. ``agent`` names who is to do it; ``resumes`` is the checkpoint that it comes from."""

    server: Server
    caller: Caller
    text: str
    agent: str | None = None
    priority: Priority | None = None
    resumes: BudgetPauseCheckpoint | None = None
    key: str | None = None
    # What else has to hold of whom it is for, asked at the last moment; it does not wait where it holds.
    precondition: Callable[[Card | None], Awaitable[None]] | None = None
    # The action of it that is held no more, asked while the agent works.
    missing_grant: Callable[[Card], str | None] = lambda card: None
    intent_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    _stage: str = "router"
    _metered: list[SignedCapability] = field(default_factory=list)
    _end: completion.Completion = field(init=False)

    async def go(self) -> responses.IntentResult:
        """(1) to (9).

        Raises:
            errors.CovenantError: refused, or failed; either is in the log.
        """
        self._end = completion.Completion(self.server, self.caller, self.intent_id, self.text, self.key)
        self._say("submitted")
        try:
            result = await self._go()
        except errors.CovenantError as e:
            self._say(intent_progress.ENDED, status="failed", code=e.code)
            raise
        except BaseException:
            self._say(intent_progress.ENDED, status="cancelled")
            raise
        self._say(intent_progress.ENDED, status=result.status)
        return result

    async def _go(self) -> responses.IntentResult:
        _check_size(self.text)
        # (1)
        pattern = await self.server.ignore.find(self.text)
        if pattern is not None:
            await self._ignored(pattern)
            return responses.IntentResult(intent_id=self.intent_id, status="ignored", text="")
        if self.server.refusals.full(self.caller):
            self._refuse_foreseen()
        self._admit()
        card: Card | None = None
        try:
            card = self._route()  # (2)
            await self._check(card)  # (3)
            await self._reserve(card)  # (4)
            await self._look_again(card)
            ran = await self._run(card)  # (5)
        except errors.CovenantError as e:
            with completion.writing() as scope:
                await self._end.retry_until_written(functools.partial(self._failed, card, e))
            if scope.cancelled_caught:
                # As with the answer of one that was done: what is told is written down.
                raise errors.StoreError("what became of the intent could not be written in time") from e
            raise self._told(card, e) from e
        except BaseException as e:
            # With any cause, the run ended with this task.
            with completion.writing():
                await self._end.retry_until_written(functools.partial(self._failed, card, _cut(e)))
            raise
        with completion.writing() as scope:
            result = await self._end.retry_until_written(functools.partial(self._end.finish, card, ran))  # (6) to (9)
        if scope.cancelled_caught:
            raise errors.StoreError("the answer could not be written in time")
        return result

    async def _ignored(self, pattern: str) -> None:
        refusals, text = self.server.refusals, self._of_ignored()
        row = self._end.row("intent_ignored", {"intent_text": text, "matched_pattern": pattern})
        why = ("text_ignored", f"the text matches `{pattern}`")
        await refusals.write(self.server.audit, self.caller, self.server.now_ms, [row], why, size=len(text.encode()))

    def _refuse_foreseen(self) -> None:
        """Count a refusal without a row, for a caller that was refused often of late.

        Raises:
            errors.CovenantError: as ``_check`` and ``_reserve``.
        """
        error = agent_selection.foreseen(self.server, self.caller, self.text, self.agent)
        if error is not None:
            self.server.refusals.suppress(self.caller, self.server.now_ms(), error.code, error.message)
            raise error

    def _admit(self) -> None:
        """Bound the rate of intents that cost no credits.

        A task of the mailbox, which has ``precondition``, was admitted when it was sent.

        Raises:
            errors.BusyError: the caller sent too many; the refusal is counted.
        """
        if self.caller.operator or self.precondition is not None:
            return
        try:
            card, _ = agent_selection.find(self.server, self.text, self.agent)
        except errors.CovenantError:
            return  # it is refused, with its row
        if card is None or not card.manifest.settlement.budget_credits_per_hour:
            self.server.rates.admit(self.caller, self.server.refusals, self.server.now_ms())

    def _of_ignored(self) -> str:
        """Return the text for the log. Of a text that may not be kept elsewhere this is its beginning."""
        facts = authorization.RequestFacts(tier=Tier.WORKING)
        decided = authorization.decide(
            self.server.capabilities, self.caller.agent.pubkey, _WRITE, facts, self.server.now_ms()
        )
        return self.text if decided.grant is not None else self.text[:MOST_OF_IGNORED]

    # --- (2) to (5) -------------------------------------------------------------------------------------------

    def _route(self) -> Card | None:
        card, score = agent_selection.find(self.server, self.text, self.agent)
        if card is not None and score is not None:
            self._say("routed", agent_id=card.id, score=score)
        return card

    async def _check(self, card: Card | None) -> None:
        self._stage = "capability"
        server, caller = self.server, self.caller
        facts = authorization.RequestFacts(tier=Tier.WORKING)
        await authorization.require(server, caller, _WRITE, agent_id="memory:write", facts=facts)
        if card is not None:
            self._metered = await authorization.require_all(
                server, caller, agent_selection.others(card), agent_id=card.id
            )
            await authorization.require_left(server, self._metered)

    async def _reserve(self, card: Card | None) -> None:
        self._stage = "budget"
        server = self.server
        # Where the end of a run that was cannot be written, none begins.
        await server.unfinished.write()
        try:
            # Whole or not at all: a reservation that was cut off in the middle would be unknown here.
            with completion.writing() as scope:
                self._end.reserved = await billing.reserve(server, self.caller, card, self.intent_id)
            if scope.cancelled_caught:
                raise errors.StoreError("the budget could not be written in time")
            # No run begins for a caller that has left.
            await anyio.lowlevel.checkpoint_if_cancelled()
        except errors.BudgetExhaustedError as e:
            if self.resumes is None and card is not None:
                await self._pause(card, "budget_exhausted", e.details["tokens_remaining"], e.details["refill_eta_ms"])
            raise
        self._stage = "capability"
        # Counted once there are credits: an intent that waits for them has used nothing.
        await authorization.consume(server, self._metered)
        self._stage = "budget"
        if self.resumes is not None:
            # The row before the claim: of one that waits no longer it is known what it became.
            await self._append("intent_resumed", resumed_from=self.resumes.intent_id)
            await server.checkpoints.claim(self.resumes.intent_id, self.resumes.agent)
        await self._no_longer_waits()

    async def _no_longer_waits(self) -> None:
        """Forget the checkpoint: the intent was asked for again under its key and runs now."""
        for found in self.server.checkpoints.active():
            if found.intent_id == self.intent_id:
                await self.server.checkpoints.claim(found.intent_id, found.agent)

    async def _look_again(self, card: Card | None) -> None:
        """While rows and reservations were written a grant may have ended and a package have become another: what was
        decided then is decided once more, and nothing waits between that and the run.

        Raises:
            errors.StaleAgentError: the agent is not the one that was asked about.
            errors.CovenantError: as ``_check``, and what ``precondition`` raises.
        """
        self._stage = "capability"
        server, facts = self.server, authorization.RequestFacts(tier=Tier.WORKING)
        # Again, where rows were written meanwhile: of those that found a grant another may have been taken back.
        while agent_selection.missing(server, self.caller, card):
            # Of a refusal there is a row, as of the one before.
            await authorization.require(server, self.caller, _WRITE, agent_id="memory:write", facts=facts)
            agent_id = "" if card is None else card.id
            await authorization.require_all(server, self.caller, agent_selection.others(card), agent_id=agent_id)
        if self.precondition is not None:
            await self.precondition(card)
        if card is not None and server.agents.find(card.id).digest != card.digest:
            raise errors.StaleAgentError(
                f"the manifest of agent `{card.id}` was changed", hint="ask again", where=card.where
            )

    async def _run(self, card: Card | None) -> RunResult:
        self._stage = "run"
        if card is None:
            return RunResult(text=echo(self.text))
        wanted = card.manifest.settlement.priority
        priority = Priority(wanted) if self.priority is None else min(Priority(wanted), self.priority, key=_RANK.index)
        intent = Intent(self.intent_id, self.text, self.server.now_ms(), priority)
        self._say("running", agent_id=card.id)
        lacks = functools.partial(self.missing_grant, card)
        ran: RunResult = await self.server.runners.run(card, intent, caller=self.caller.agent, lacks=lacks)
        self.server.refusals.unstartable(self.caller, card.digest, None)
        return ran

    # --- what a failure leaves ----------------------------------------------------------------------------------

    async def _failed(self, card: Card | None, error: errors.CovenantError) -> None:
        """Settle what was used and give back what was not, and write both down."""
        server, took, rows, receipt = self.server, supervisor_events.took(error), list[AuditEntry](), None
        agent_id = None if card is None else card.id
        if card is not None and self._stage == "run":
            sandboxed = card.manifest.agent.runtime != "hermes"
            rows += supervisor_events.of_failed(error, self.intent_id, self.caller, sandboxed=sandboxed)
        if took is not None and card is not None:
            receipt = await self._end.receipt(took)
            rows += [self._end.used(card, took, "failed", receipt), billing.receipt_row(receipt, self.intent_id)]
            rows += denials.rows(took, card.id, self.caller)
        if card is not None and isinstance(error, errors.PreemptedError):
            tokens = server.budget.tokens(billing.budget_of(card.id)) or 0
            with contextlib.suppress(errors.BusyError):
                await self._pause(card, "projected_overshoot", tokens, 0)
        failed = {
            "matched_agent": agent_id,
            "run_id": None if took is None else took.run_id,
            "stage": self._stage,
            "code": error.code,
            "message": error.message,
        }
        await self._end.written([*rows, self._end.row("intent_failed", failed)])
        unseen = self._stage == "run" and isinstance(error, _UNSEEN)
        never_began = self._stage == "run" and took is None and not unseen
        if self._stage in _BEFORE or never_began:
            size = len(self.text.encode()) if isinstance(error, errors.BudgetExhaustedError) else 0
            server.refusals.record(self.caller, server.now_ms(), size=size)
        if never_began and card is not None and not isinstance(error, _PASSING):
            server.refusals.unstartable(self.caller, card.digest, error)
        if receipt is not None or unseen:
            # A run that may have begun, with unknown use, is billed its reservation.
            await self._end.settle(receipt)
        else:
            await self._end.release()

    async def _pause(self, card: Card, reason: Any, tokens: int, eta_ms: int) -> None:
        """Keep the intent for when there are credits; durable before anybody is told."""
        agent, submitter = billing.budget_of(card.id), self.caller.agent.pubkey
        checkpoint = BudgetPauseCheckpoint(
            intent_id=self.intent_id,
            agent=agent,
            reason=reason,
            requested_credits=budget.DISPATCH_CREDITS,
            tokens_remaining=tokens,
            refill_eta_ms=eta_ms,
            saved_at_ms=self.server.now_ms(),
            resume_state={
                SUBMITTER: submitter,
                "intent_text": self.text,
                "agent_id": card.id,
                "priority": str(self.priority or card.manifest.settlement.priority),
                **({} if self.key is None else {KEY: KEY_WORD + self.key}),
            },
        )
        mine = [one for one in self.server.checkpoints.active() if one.resume_state.get(SUBMITTER) == submitter]
        if any(one.intent_id == self.intent_id for one in mine):
            return  # asked again under the same key, while it waits
        texts = [self.text, *(one.resume_state.get("intent_text", "") for one in mine)]
        if len(mine) >= _MOST_WAITING or sum(len(text.encode()) for text in texts) > _MOST_WAITING_BYTES:
            raise errors.BusyError("as many intents of yours wait for credits as may", hint="resume some of them")
        await self.server.checkpoints.save(checkpoint)
        if reason == "budget_exhausted":
            await self._append(
                "budget_exhausted",
                agent_display=agent.display,
                intent_text=self.text,
                requested=budget.DISPATCH_CREDITS,
                tokens_remaining=tokens,
                refill_eta_ms=eta_ms,
            )

    def _told(self, card: Card | None, error: errors.CovenantError) -> errors.CovenantError:
        """Return the error for the caller, with the name of the agent."""
        if isinstance(error, errors.BudgetExhaustedError | errors.PreemptedError):
            # Not how many credits: the budget is shared with everybody else who asks this agent.
            waits = self.intent_id
            if self.resumes is not None and isinstance(error, errors.BudgetExhaustedError):
                waits = self.resumes.intent_id
            return type(error)(
                # Version 1's words: its scripts look for them.
                f"budget exhausted: intent `{waits}` waits for credits of agent `{card.id if card else ''}`",
                hint=f"covenant intents resume {waits}",
            )
        if self._stage != "run" or card is None:
            return error
        took, hint = supervisor_events.took(error), error.hint
        if not hint and took is not None and took.run_id and self.caller.operator:
            # Others do not read the supervisor's rows.
            hint = f"covenant audit show {took.run_id}"
        words = {"code": error.code, "hint": hint, "where": error.where}
        return errors.restored({**words, "message": f"agent `{card.id}` failed: {error.message}"})

    async def _append(self, kind: str, **fields: Any) -> None:
        await self.server.audit.append(kind, {"intent_id": self.intent_id, **fields}, self.caller.agent)

    def _say(self, event: str, **fields: Any) -> None:
        self.server.live.say(self.intent_id, self.caller.agent.pubkey, event, self.server.now_ms(), **fields)


def echo(text: str) -> str:
    """Return the answer of version 1 to an intent without an agent."""
    return f"phase 0 echo (no agent matched): {text}"


_LONG: Final = "put the text into a file of the agent's workspace or a record of memory, and name that"


def _check_size(text: str) -> None:
    """Refuse what no agent is given, before it costs a row of the log.

    Raises:
        errors.UsageError: it is too long, or no text.
    """
    try:
        size = len(text.encode())
    except UnicodeEncodeError as e:
        raise errors.UsageError("the intent's text is not valid Unicode") from e
    if size > contract.INTENT_BYTES:
        raise errors.UsageError(f"the intent is {size} bytes, at most {contract.INTENT_BYTES} are taken", hint=_LONG)


def _cut(error: BaseException) -> errors.CovenantError:
    """Return the row of an intent that ended without an error of the daemon."""
    if isinstance(error, Exception):
        return errors.InternalError(f"the daemon failed: {type(error).__name__}")
    return errors.KilledError("whoever asked went away, or the daemon stopped")
