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

What of (6) to (8) succeeded is on disk before (9). A run that fails is settled, has its receipt and its rows, and
whoever goes away, and a daemon that stops, leave rows that say so. What was reserved in (4) is settled last of all:
from (4) on an intent is in the ledger until its rows are in the log, and the next start writes those of one whose
daemon died (``covenant.respond.aftermath``).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import anyio

from covenant.respond import accounting, authority, denials, live, memory, routing, supervisor_rows
from covenant.respond.caller import Caller
from covenant.respond.server import Server
from covenant.runtime.packages import Card
from covenant.runtime.running import Intent, RunResult, Spent
from covenant.stores.audit.interface import Entry
from covenant.wire import responses
from covenant.wire.types import (
    BudgetPauseCheckpoint,
    MemoryRecord,
    Priority,
    SettlementReceipt,
    SignedCapability,
    Tier,
)
from policy import budget, contract, errors

_LOG: Final = logging.getLogger(__name__)
T = TypeVar("T")

_WRITE: Final = routing.WRITE
# So much of an ignored text has its row, where whoever submitted it may do nothing with one that is not.
MOST_OF_IGNORED: Final = 1024
_RANK: Final = (Priority.LOW, Priority.NORMAL, Priority.HIGH)
# For what is written after a run, whatever becomes of whoever asked.
_WRITING_SECONDS: Final = 60.0
# Ends that say nothing of what was used until then.
_UNSEEN: Final = (errors.KilledError, errors.ServiceError, errors.InternalError, errors.PreemptedError)
# Whose intent waits: in the state of its checkpoint, where a copy of the name would decide nothing.
SUBMITTER: Final = "submitter_pubkey"
# The key that it was asked under, behind a word, so that none looks like a path of this machine.
KEY: Final = "idempotency"
KEY_WORD: Final = "key:"
# What of one submitter's may wait: checkpoints are held in memory, and nothing ends them but a resumption.
_MOST_WAITING: Final = 1_000
_MOST_WAITING_BYTES: Final = 16 * 1024 * 1024

# Refused before anything began, which costs whoever asked nothing.
_BEFORE: Final = frozenset({"router", "capability", "budget"})


@dataclass
class Dispatch:
    """One intent on its way. ``agent`` names who is to do it; ``resumes`` is the checkpoint that it comes from."""

    server: Server
    caller: Caller
    text: str
    agent: str | None = None
    priority: Priority | None = None
    resumes: BudgetPauseCheckpoint | None = None
    key: str | None = None
    # What else has to hold of whom it is for, asked at the last moment; it does not wait where it holds.
    still: Callable[[Card | None], Awaitable[None]] | None = None
    intent_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    _stage: str = "router"
    _reserved: accounting.Reserved | None = None
    _metered: list[SignedCapability] = field(default_factory=list)
    _did: dict[str, Any] = field(default_factory=dict)

    async def go(self) -> responses.IntentResult:
        """(1) to (9).

        Raises:
            errors.CovenantError: refused, or failed; either is in the log.
        """
        self._say("submitted")
        try:
            result = await self._go()
        except errors.CovenantError as e:
            self._say(live.ENDED, status="failed", code=e.code)
            raise
        except BaseException:
            self._say(live.ENDED, status="cancelled")
            raise
        self._say(live.ENDED, status=result.status)
        return result

    async def _go(self) -> responses.IntentResult:
        _check_size(self.text)
        # (1)
        pattern = await self.server.ignore.find(self.text)
        if pattern is not None:
            await self._ignored(pattern)
            return responses.IntentResult(intent_id=self.intent_id, status="ignored", text="")
        if self.server.floods.full(self.caller):
            self._refuse_foreseen()
        card: Card | None = None
        try:
            card = self._route()  # (2)
            await self._check(card)  # (3)
            await self._reserve(card)  # (4)
            await self._look_again(card)
            ran = await self._run(card)  # (5)
        except errors.CovenantError as e:
            with _writing():
                await self._kept(functools.partial(self._failed, card, e))
            raise self._told(card, e) from e
        except BaseException as e:
            # Whatever it is, the run was ended with us.
            with _writing():
                await self._kept(functools.partial(self._failed, card, _cut(e)))
            raise
        with _writing() as scope:
            result = await self._kept(functools.partial(self._finish, card, ran))  # (6) to (9)
        if scope.cancelled_caught:
            raise errors.StoreError("the answer could not be written in time")
        return result

    async def _kept(self, write: Callable[[], Awaitable[T]]) -> T:
        """Write the end of the intent. What no disk takes is kept until one does, once a reservation is to be closed:
        an agent may have run, and is neither paid for nor given back until it is written (``respond.unfinished``).

        Raises:
            errors.StoreError: it could not be written now.
        """
        try:
            return await write()
        except errors.StoreError as e:
            if self._reserved is None:
                raise
            self.server.unfinished.keep(self.intent_id, write)
            raise errors.restored(
                {
                    "code": e.code,
                    "message": f"what became of intent `{self.intent_id}` cannot be written now: {e.message}",
                    "hint": "it is kept and written when there is room; with its key, ask again then",
                    "where": e.where,
                }
            ) from e

    async def _step(self, name: str, act: Callable[[], Awaitable[T]]) -> T:
        """Do one step of an end once: where a later one fails, all are asked for again."""
        if name not in self._did:
            self._did[name] = await act()
        return self._did[name]  # type: ignore[no-any-return]

    async def _ignored(self, pattern: str) -> None:
        floods, text = self.server.floods, self._of_ignored()
        row = self._row("intent_ignored", {"intent_text": text, "matched_pattern": pattern})
        why = ("text_ignored", f"the text matches `{pattern}`")
        await floods.write(self.server, self.caller, [row], why, size=len(text.encode()))

    def _refuse_foreseen(self) -> None:
        """Of one who was refused so often of late, what would be refused is only counted.

        Raises:
            errors.CovenantError: as ``_check`` and ``_reserve``.
        """
        error = routing.foreseen(self.server, self.caller, self.text, self.agent)
        if error is not None:
            self.server.floods.count(self.caller, self.server.now_ms(), error.code, error.message)
            raise error

    def _of_ignored(self) -> str:
        """The text as the log keeps it: of whoever may not have it kept anywhere else, its beginning."""
        facts = authority.Facts(tier=Tier.WORKING)
        decided = authority.decide(
            self.server.capabilities, self.caller.agent.pubkey, _WRITE, facts, self.server.now_ms()
        )
        return self.text if decided.grant is not None else self.text[:MOST_OF_IGNORED]

    # --- (2) to (5) -------------------------------------------------------------------------------------------

    def _route(self) -> Card | None:
        card, score = routing.find(self.server, self.text, self.agent)
        if card is not None and score is not None:
            self._say("routed", agent_id=card.id, score=score)
        return card

    async def _check(self, card: Card | None) -> None:
        self._stage = "capability"
        server, caller = self.server, self.caller
        facts = authority.Facts(tier=Tier.WORKING)
        await authority.require(server, caller, _WRITE, agent_id="memory:write", facts=facts)
        if card is not None:
            self._metered = await authority.require_all(server, caller, routing.others(card), agent_id=card.id)
            await authority.require_left(server, self._metered)

    async def _reserve(self, card: Card | None) -> None:
        self._stage = "budget"
        server = self.server
        # Where the end of a run that was cannot be written, none begins.
        await server.unfinished.write()
        try:
            self._reserved = await accounting.reserve(server, self.caller, card, self.intent_id)
        except errors.BudgetExhaustedError as e:
            if self.resumes is None and card is not None:
                await self._pause(card, "budget_exhausted", e.details["tokens_remaining"], e.details["refill_eta_ms"])
            raise
        self._stage = "capability"
        # Counted once there are credits: an intent that waits for them has used nothing.
        await authority.consume(server, self._metered)
        self._stage = "budget"
        if self.resumes is not None:
            # The row before the claim: of one that waits no longer it is known what it became.
            await self._append("intent_resumed", resumed_from=self.resumes.intent_id)
            await server.checkpoints.claim(self.resumes.intent_id, self.resumes.agent)
        await self._no_longer_waits()

    async def _no_longer_waits(self) -> None:
        """It was asked again under its key, and runs now: nobody resumes it a second time."""
        for found in self.server.checkpoints.active():
            if found.intent_id == self.intent_id:
                await self.server.checkpoints.claim(found.intent_id, found.agent)

    async def _look_again(self, card: Card | None) -> None:
        """While rows and reservations were written a grant may have ended and a package have become another: what was
        decided then is decided once more, and nothing waits between that and the run.

        Raises:
            errors.StaleAgentError: the agent is not the one that was asked about.
            errors.CovenantError: as ``_check``, and what ``still`` raises.
        """
        self._stage = "capability"
        server, facts = self.server, authority.Facts(tier=Tier.WORKING)
        if routing.missing(server, self.caller, card):
            # Of a refusal there is a row, as of the one before.
            await authority.require(server, self.caller, _WRITE, agent_id="memory:write", facts=facts)
            agent_id = "" if card is None else card.id
            await authority.require_all(server, self.caller, routing.others(card), agent_id=agent_id)
        if self.still is not None:
            await self.still(card)
        if card is not None and server.agents.find(card.id).digest != card.digest:
            raise errors.StaleAgentError(
                f"the manifest of agent `{card.id}` was changed", hint="ask again", where=card.where
            )

    async def _run(self, card: Card | None) -> RunResult:
        self._stage = "run"
        if card is None:
            return RunResult(text=f"phase 0 echo (no agent matched): {self.text}")
        wanted = card.manifest.settlement.priority
        priority = Priority(wanted) if self.priority is None else min(Priority(wanted), self.priority, key=_RANK.index)
        intent = Intent(self.intent_id, self.text, self.server.now_ms(), priority)
        self._say("running", agent_id=card.id)
        ran: RunResult = await self.server.runners.run(card, intent, caller=self.caller.agent)
        return ran

    # --- what a failure leaves ----------------------------------------------------------------------------------

    async def _failed(self, card: Card | None, error: errors.CovenantError) -> None:
        """Settle what was used and give back what was not, and write both down."""
        server, took, rows, receipt = self.server, supervisor_rows.took(error), list[Entry](), None
        agent_id = None if card is None else card.id
        if card is not None and self._stage == "run":
            sandboxed = card.manifest.agent.runtime != "hermes"
            rows += supervisor_rows.of_failed(error, self.intent_id, self.caller, sandboxed=sandboxed)
        if took is not None and card is not None:
            receipt = await self._step(
                "receipt", lambda: accounting.receipt_of_run(server, self.caller, self.intent_id, took)
            )
            rows += [self._used(card, took, "failed", receipt), accounting.receipt_row(receipt, self.intent_id)]
            rows += denials.rows(took, card.id, self.caller)
        if card is not None and isinstance(error, errors.PreemptedError):
            tokens = server.budget.tokens(accounting.budget_of(card.id)) or 0
            with contextlib.suppress(errors.BusyError):
                await self._pause(card, "projected_overshoot", tokens, 0)
        failed = {
            "matched_agent": agent_id,
            "run_id": None if took is None else took.run_id,
            "stage": self._stage,
            "code": error.code,
            "message": error.message,
        }
        await self._step("rows", lambda: server.audit.append_all([*rows, self._row("intent_failed", failed)]))
        if self._stage in _BEFORE:
            size = len(self.text.encode()) if isinstance(error, errors.BudgetExhaustedError) else 0
            server.floods.note(self.caller, server.now_ms(), size=size)
        if self._reserved is None:
            return
        if receipt is not None or (self._stage == "run" and isinstance(error, _UNSEEN)):
            # One that may have run, of which nobody said what it used, is taken what was reserved for it.
            await accounting.settle(server, self._reserved, self.intent_id, receipt)
        else:
            await accounting.release(server, self.caller, self._reserved, self.intent_id)

    async def _pause(self, card: Card, reason: Any, tokens: int, eta_ms: int) -> None:
        """Keep the intent for when there are credits; durable before anybody is told."""
        agent, submitter = accounting.budget_of(card.id), self.caller.agent.pubkey
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
        """The error as whoever asked is told it, with the agent's name."""
        if isinstance(error, errors.BudgetExhaustedError | errors.PreemptedError):
            # Not how many credits: the budget is shared with everybody else who asks this agent.
            waits = self.intent_id
            if self.resumes is not None and isinstance(error, errors.BudgetExhaustedError):
                waits = self.resumes.intent_id
            return type(error)(
                f"intent `{waits}` waits: the budget of agent `{card.id if card else ''}` is used up",
                hint=f"covenant intents resume {waits}",
            )
        if self._stage != "run" or card is None:
            return error
        words = {"code": error.code, "hint": error.hint, "where": error.where}
        return errors.restored({**words, "message": f"agent `{card.id}` failed: {error.message}"})

    # --- (6) to (9) -----------------------------------------------------------------------------------------------

    async def _finish(self, card: Card | None, ran: RunResult) -> responses.IntentResult:
        rows, receipt = list[Entry](), None
        if card is not None:
            self._stage = "receipt"
            took = Spent(ran.usage, ran.run_id, ran.policy_digest, ran.denials, ran.told)
            write = functools.partial(accounting.receipt_of_run, self.server, self.caller, self.intent_id, took)
            receipt = await self._step("receipt", write)
            if ran.told is not None:
                rows += supervisor_rows.entries(ran.told, self.intent_id, self.caller, run_id=ran.run_id)
            rows += [self._used(card, took, "ok", receipt), accounting.receipt_row(receipt, self.intent_id)]
            rows += denials.rows(took, card.id, self.caller)
        self._stage = "memory"
        stored, of_memory = await self._step("memory", lambda: self._remember(card, ran))
        rows += of_memory
        dispatched = {
            "run_id": ran.run_id,
            "intent_text": self._of_done(kept=stored is not None),
            "matched_agent": None if card is None else card.id,
            "result_hash_hex": hashlib.sha256(ran.text.encode()).hexdigest(),
            "status": "ok" if stored else "not_stored",
        }
        rows.append(self._row("intent_dispatched", dispatched))
        await self._step("rows", lambda: self.server.audit.append_all(rows))
        if self._reserved is not None:
            await accounting.settle(self.server, self._reserved, self.intent_id, receipt)
        return responses.IntentResult(
            intent_id=self.intent_id,
            status="ok",
            text=ran.text,
            sources=ran.sources,
            settlement=receipt or stored,
            agent_id=None if card is None else card.id,
            run_id=ran.run_id,
            policy_digest=ran.policy_digest,
        )

    def _of_done(self, *, kept: bool) -> str:
        """The text as the row of what was done has it: its beginning where it cost nothing and memory has no room for
        it, or a peer whose room is full would have all the room that the log has."""
        paid = self._reserved is not None and self._reserved.credits > 0
        return self.text if kept or paid or self.caller.operator else self.text[:MOST_OF_IGNORED]

    async def _remember(self, card: Card | None, ran: RunResult) -> tuple[SettlementReceipt | None, list[Entry]]:
        """Keep the answer in working memory; the receipt of that, None where it was not kept, and their rows."""
        # What it names as its sources is kept beside it.
        ignore = self.server.ignore
        sources = "\n".join(ran.sources)
        pattern = await ignore.find(ran.text, of_answer=True) or await ignore.find(sources, of_answer=True)
        if pattern is not None:
            ignored = {"memory_id": self.intent_id, "matched_pattern": pattern}
            return None, [Entry("memory_write_ignored", ignored, self.caller.agent)]
        record = MemoryRecord(
            id=self.intent_id,
            tier=Tier.WORKING,
            owner=self.caller.agent,
            text=ran.text,
            embedding=await memory.embedding_of(self.server, ran.text, what=f"the answer of intent {self.intent_id}"),
            metadata={
                "intent_text": self.text,
                "agent_id": None if card is None else card.id,
                "status": "ok",
                "sources": list(ran.sources),
                "run_id": ran.run_id,
                "policy_digest": ran.policy_digest,
            },
            created_at=self.server.now_ms(),
        )
        try:
            memory.check_size(record)
            # What costs credits is bounded by them; of what costs none, such as an echo, nobody fills the disk.
            paid = self._reserved is not None and self._reserved.credits > 0
            await self.server.memory.put(record, room=None if paid else memory.room_of(self.caller))
            receipt = await accounting.settle_memory(self.server, self.caller, record.id, record.text)
            self.server.feed.publish("memory", record)
        except errors.CovenantError as e:
            # The run is done and paid for: its answer is not thrown away with the memory of it.
            _LOG.warning("the answer of intent %s is not kept in memory: %s", self.intent_id, e)
            failed = {"matched_agent": record.metadata["agent_id"], "run_id": ran.run_id, "stage": "memory"}
            return None, [self._row("intent_failed", {**failed, "code": e.code, "message": e.message})]
        return receipt, [memory.written(record, "intent"), accounting.receipt_row(receipt, self.intent_id)]

    def _used(self, card: Card, took: Spent, status: str, receipt: SettlementReceipt) -> Entry:
        usage = took.usage
        hermes = card.manifest.agent.runtime == "hermes"
        about = {
            "run_id": took.run_id or "",
            "agent_id": card.id,
            "policy_digest": took.policy_digest,
            "backend": "hermes" if hermes else card.manifest.sandbox.backend,
            "status": status,
            "cpu_ms": usage.cpu_ms,
            "memory_peak_bytes": usage.memory_peak_bytes,
            "wall_ms": usage.wall_ms,
            "credits": receipt.credits_consumed,
        }
        return self._row("run_usage", about)

    async def _append(self, kind: str, **fields: Any) -> None:
        await self.server.audit.append(kind, {"intent_id": self.intent_id, **fields}, self.caller.agent)

    def _row(self, kind: str, fields: Mapping[str, Any]) -> Entry:
        return Entry(kind, {"intent_id": self.intent_id, **fields}, self.caller.agent)

    def _say(self, event: str, **fields: Any) -> None:
        self.server.live.say(self.intent_id, self.caller.agent.pubkey, event, self.server.now_ms(), **fields)


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
        raise errors.UsageError(f"the intent is {size} bytes, at most {contract.INTENT_BYTES} are taken")


def _cut(error: BaseException) -> errors.CovenantError:
    """What the log says of an intent that ended without an error of ours."""
    if isinstance(error, Exception):
        return errors.InternalError(f"the daemon failed: {type(error).__name__}")
    return errors.KilledError("whoever asked went away, or the daemon stopped")


def _writing() -> anyio.CancelScope:
    """What is written in this block is written whoever goes away meanwhile, and not for ever."""
    return anyio.move_on_after(_WRITING_SECONDS, shield=True)
