"""The end of one intent, (6) to (9) of ``covenant.handlers.intents.pipeline``: memory, receipts, rows, settlement,
answer.

An end is written once, however often it is tried. Each step of it that came through is remembered; of one that was cut
off in the middle (a disk that hung, a daemon that stops) it is looked whether it is there, before it is done again.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import anyio

from covenant.handlers import billing
from covenant.handlers.caller import Caller
from covenant.handlers.intents import denials, recovery, supervisor_events
from covenant.handlers.memory import records
from covenant.handlers.server import Server
from covenant.runtime.packages import Card
from covenant.runtime.runner import RunResult, Spent
from covenant.stores.audit.interface import AuditEntry
from covenant.wire import responses
from covenant.wire.types import MemoryRecord, SettlementReceipt, Tier
from policy import errors

_LOG: Final = logging.getLogger(__name__)
T = TypeVar("T")

# Bytes of an ignored text in its row, where its caller may do nothing with a text that is kept.
MOST_OF_IGNORED: Final = 1024
# Limit of the writes after a run, also when the caller has left.
_WRITING_SECONDS: Final = 60.0


def writing() -> anyio.CancelScope:
    """Shield the writes of this block from a caller that leaves, within a time limit."""
    return anyio.move_on_after(_WRITING_SECONDS, shield=True)


@dataclass
class Completion:
    """The writes that complete an intent. ``reserved`` once it has its reservation."""

    server: Server
    caller: Caller
    intent_id: str
    text: str
    key: str | None
    reserved: billing.Reserved | None = None
    _did: dict[str, Any] = field(default_factory=dict)
    _cut: set[str] = field(default_factory=set)

    async def retry_until_written(self, write: Callable[[], Awaitable[T]]) -> T:
        """Write the end of the intent. What cannot be written is kept until it can, once a reservation is to be closed:
        an agent may have run, and is neither paid for nor given back until it is written (``respond.unfinished``). The
        same of a write that was cut off.

        Raises:
            errors.CovenantError: it could not be written now.
        """
        if self.reserved is None:
            return await write()
        return await self.server.unfinished.write_or_keep(
            self.intent_id,
            write,
            what=f"what became of intent `{self.intent_id}`",
            hint="it is kept and written when there is room; with its key, ask again then",
        )

    async def once(
        self, name: str, act: Callable[[], Awaitable[T]], there: Callable[[], Awaitable[T | None]] | None = None
    ) -> T:
        """Do one step of an end once: where a later one fails, all are asked for again. ``there`` finds what the step
        left that was cut off, None where it left nothing."""
        if name in self._did:
            return self._did[name]  # type: ignore[no-any-return]
        found = await there() if there is not None and name in self._cut else None
        if found is None:
            self._cut.add(name)
            try:
                found = await act()
            except errors.CovenantError:
                # It says so itself: nothing of it is there.
                self._cut.discard(name)
                raise
        self._did[name] = found
        return found

    async def finish(self, card: Card | None, ran: RunResult) -> responses.IntentResult:
        """(6) to (9) of an intent that was done.

        Raises:
            errors.CovenantError: it could not be written; asked again, it goes on there.
        """
        rows, receipt = list[AuditEntry](), None
        if card is not None:
            took = Spent(ran.usage, ran.run_id, ran.policy_digest, ran.denials, ran.told)
            receipt = await self.receipt(took)
            if ran.told is not None:
                rows += supervisor_events.entries(ran.told, self.intent_id, self.caller, run_id=ran.run_id)
            rows += [self.used(card, took, "ok", receipt), billing.receipt_row(receipt, self.intent_id)]
            rows += denials.rows(took, card.id, self.caller)
        record, of_memory = await self.once("memory", functools.partial(self._remember, card, ran), self._remembered)
        stored = None
        if record is not None:
            stored = await self._receipt_of_memory(record)
            of_memory = [records.written(record, "intent"), billing.receipt_row(stored, self.intent_id)]
        if card is None and self.key is not None:
            # By this it is known that it was done, also where memory does not say so, or no longer.
            receipt = await self.receipt(None)
            rows.append(billing.receipt_row(receipt, self.intent_id))
        rows += of_memory
        dispatched = {
            "run_id": ran.run_id,
            "intent_text": self._of_done(kept=stored is not None),
            "matched_agent": None if card is None else card.id,
            "result_hash_hex": hashlib.sha256(ran.text.encode()).hexdigest(),
            "status": "ok" if stored else "not_stored",
        }
        rows.append(self.row("intent_dispatched", dispatched))
        await self.written(rows)
        await self.settle(receipt)
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

    async def receipt(self, took: Spent | None) -> SettlementReceipt:
        """Keep the receipt of what a run used; None: of what no agent did, which costs nothing."""

        async def make() -> SettlementReceipt:
            return billing.run_receipt(self.server, self.caller, self.intent_id, took)

        return await self._kept("receipt", make)

    async def written(self, rows: list[AuditEntry]) -> None:
        """Write the rows that say how it ended."""

        async def append() -> bool:
            await self.server.audit.append_all(rows)
            return True

        await self.once("rows", append, self._is_told)

    async def settle(self, receipt: SettlementReceipt | None) -> None:
        """Close the reservation by what the run cost."""
        reserved = self.reserved
        if reserved is not None:
            close = functools.partial(billing.settle, self.server, reserved, self.intent_id, receipt)
            await self.once("settled", functools.partial(_done, close), self._is_closed)

    async def release(self) -> None:
        """Give the reservation back."""
        reserved = self.reserved
        if reserved is not None:
            close = functools.partial(billing.release, self.server, self.caller, reserved, self.intent_id)
            await self.once("settled", functools.partial(_done, close), self._is_closed)

    def used(self, card: Card, took: Spent, status: str, receipt: SettlementReceipt) -> AuditEntry:
        """The row of what a run used."""
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
        return self.row("run_usage", about)

    def row(self, kind: str, fields: Mapping[str, Any]) -> AuditEntry:
        """Return a row of this intent, issued by its caller."""
        return AuditEntry(kind, {"intent_id": self.intent_id, **fields}, self.caller.agent)

    def _of_done(self, *, kept: bool) -> str:
        """The text as the row of what was done has it: its beginning where it cost nothing and memory has no room for
        it, or a peer whose room is full would have all the room that the log has."""
        paid = self.reserved is not None and self.reserved.credits > 0
        return self.text if kept or paid or self.caller.operator else self.text[:MOST_OF_IGNORED]

    async def _remember(self, card: Card | None, ran: RunResult) -> tuple[MemoryRecord | None, list[AuditEntry]]:
        """Keep the answer in working memory. Return its record, or None and the row that says why it was not kept."""
        # What it names as its sources is kept beside it.
        ignore = self.server.ignore
        sources = "\n".join(ran.sources)
        pattern = await ignore.find(ran.text, of_answer=True) or await ignore.find(sources, of_answer=True)
        if pattern is not None:
            ignored = {"memory_id": self.intent_id, "matched_pattern": pattern}
            return None, [AuditEntry("memory_write_ignored", ignored, self.caller.agent)]
        record = MemoryRecord(
            id=self.intent_id,
            tier=Tier.WORKING,
            owner=self.caller.agent,
            text=ran.text,
            embedding=await records.embedding_of(self.server, ran.text, what=f"the answer of intent {self.intent_id}"),
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
            records.check_size(record)
            # Credits bound most intents. This keeps those without a cost, such as an echo, from filling the disk.
            paid = self.reserved is not None and self.reserved.credits > 0
            await self.server.memory.put(record, room=None if paid else records.room_of(self.caller))
        except errors.CovenantError as e:
            # The run is done and paid for: its answer is not thrown away with the memory of it.
            _LOG.warning("the answer of intent %s is not kept in memory: %s", self.intent_id, e)
            failed = {"matched_agent": record.metadata["agent_id"], "run_id": ran.run_id, "stage": "memory"}
            return None, [self.row("intent_failed", {**failed, "code": e.code, "message": e.message})]
        return record, []

    async def _remembered(self) -> tuple[MemoryRecord, list[AuditEntry]] | None:
        """The result of ``_remember`` for a record that is in memory already."""
        record = await self.server.memory.get(self.intent_id)
        return None if record is None else (record, [])

    async def _receipt_of_memory(self, record: MemoryRecord) -> SettlementReceipt:
        """Keep the receipt of a record, a step of its own: a record that was kept has a receipt before the intent ends.

        Raises:
            errors.StoreError: the receipt could not be written now; the record is there.
        """

        async def make() -> SettlementReceipt:
            return billing.memory_receipt(self.server, self.caller, record.id, record.text)

        told = functools.partial(self.server.feed.publish, "memory", record)
        return await self._kept("receipt of memory", make, told)

    async def _kept(
        self, name: str, make: Callable[[], Awaitable[SettlementReceipt]], told: Callable[[], None] | None = None
    ) -> SettlementReceipt:
        """Make a receipt and keep it. All tries keep the same one: a slow disk may take that of a try that was cut off,
        and an equal one again changes nothing. ``told`` is called once it is kept."""
        receipt = await self.once(name, make)

        async def write() -> SettlementReceipt:
            await self.server.receipts.append(receipt)
            if told is not None:
                told()
            return receipt

        return await self.once(f"{name}, kept", write)

    async def _is_told(self) -> bool | None:
        """Whether the rows are in the log, of this try: under a key one may have failed before."""
        since_ms = next((one.at_ms for one in self._open()), None)
        if since_ms is None:
            return None
        # What a disk that hangs was given is not to be seen yet, and comes all the same.
        await self.server.audit.caught_up()
        return bool(await recovery.written_ends(self.server, {self.intent_id: since_ms})) or None

    async def _is_closed(self) -> bool | None:
        return None if self._open() else True

    def _open(self) -> list[Any]:
        return [one for one in self.server.budget.unsettled() if one.paired_receipt == self.intent_id]


async def _done(act: Callable[[], Awaitable[None]]) -> bool:
    await act()
    return True
