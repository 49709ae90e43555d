"""The log on the disk. Many writers share a sync (``covenant.stores.turns``); readers work in threads beside them."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import anyio
import anyio.from_thread
import anyio.to_thread

from covenant.runtime import shares
from covenant.stores import journal, turns
from covenant.stores.audit import (
    adopting,
    checking,
    cutting,
    dictation,
    files,
    interface,
    notary,
    places,
    proving,
    reading,
    rows,
    shared,
)
from covenant.wire import parts
from covenant.wire.types import AgentId
from policy import audit, errors, events, ledger, note

T = TypeVar("T")

_LOG: Final = logging.getLogger(__name__)

_WHAT: Final = "the audit log"
_MOST_AT_ONCE: Final = 1024
# So many at once are a crowd: the daemon is busy enough for a second process to pay.
_CROWD: Final = 16
# So many crowds make a crowded time.
_AGAIN: Final = 16


# So many look for rows at one time, whoever they are for: each is a thread that keeps the interpreter from the loop for
# as long as there are rows, and of the threads that there are others have something to do as well.
_READERS: Final = 4


# What a line says behind its id and its time, and the key of whose it is.
_New = tuple[str, str]


@dataclass(frozen=True, slots=True)
class _Cut:
    before_ms: int


_Item = tuple[_New, ...] | _Cut
_Answer = list[ledger.Row] | interface.Purged


class DurableAudit:
    """The log in a home's ``audit`` and ``audit-head``. Make it with ``DurableAudit.open``."""

    def __init__(
        self,
        of: files.Files,
        notes: notary.Notary,
        kept: journal.Journal,
        issuer: AgentId,
        now_ms: Callable[[], int],
        crowds: int | None = None,
    ) -> None:
        self._files = of
        self._notes = notes
        self._kept = kept
        self._issuer = issuer
        self._now_ms = now_ms
        self._rows = rows.Rows(of)
        self._prover = proving.Prover(reading.Source(of), notes, of.key.public_key())
        self._listeners: list[interface.Listener] = []
        last = rows.opening(files.last_line(of.events, of.head.events_bytes)) if of.head.count else None
        self._last_ms = last.timestamp_ms if last else 0
        self._turns: turns.Turns[_Item, _Answer] = turns.Turns(
            self._write, what=_WHAT, most=_MOST_AT_ONCE, told=self._told
        )
        self._shape = reading.Shape()
        self._readers = shares.Shares(_READERS, operator=issuer.pubkey)
        self._proving = anyio.Lock()
        # Who writes: a thread of ours, or, while many wait at once, a process (``covenant.stores.audit.scribe``).
        self._dictation: dictation.Dictation | None = None
        self._crowds_until_scribe = crowds
        self._changing_hands = anyio.Lock()
        self._handing: asyncio.Task[None] | None = None
        self._taking: asyncio.Task[None] | None = None
        # Where the next row of the scribe's stands; how many had the log.
        self._begin_offset = self._scribes = 0

    @classmethod
    async def open(
        cls,
        home: Path,
        *,
        issuer: AgentId,
        now_ms: Callable[[], int],
        origin: str | None = None,
        crowds: int | None = None,
    ) -> Self:
        """Open or make the log; what a crash left is set right first (``recovered``).

        A process of its own writes once ``crowds`` times more waited at once than one group needs; None is never.

        Raises:
            errors.LedgerError: a file is unsafe, or the log does not hold together.
            errors.StoreError: the checkpoints cannot be read.
        """
        of = await anyio.to_thread.run_sync(_open, home)
        try:
            name = origin or proving.origin_of(of.key.public_key())
            notes = notary.Notary(name, await anyio.to_thread.run_sync(of.at.note_key, name))
            kept = await journal.Journal.open(home / "audit" / "checkpoints.jsonl")
            async for line in kept:
                notes.load(line)
            notes.newest()
        except BaseException:
            await anyio.to_thread.run_sync(of.close)
            raise
        opened = cls(of, notes, kept, issuer, now_ms, crowds)
        if crowds == 0:
            await opened._hand_over()
        return opened

    @property
    def recovered(self) -> list[str]:
        """What was found and set right at the opening."""
        return [*self._files.recovered, *self._kept.recovered]

    @property
    def origin(self) -> str:
        """As the interface says."""
        return self._notes.origin

    @property
    def verifier(self) -> note.Verifier:
        """As the interface says."""
        return self._notes.verifier

    @property
    def count(self) -> int:
        """Acknowledged rows that are in the file now."""
        return self._files.head.count

    def listen(self, listener: interface.Listener) -> None:
        """As the interface says."""
        self._listeners.append(listener)

    async def append(self, kind: str, fields: Mapping[str, Any], issuer: AgentId | None = None) -> str:
        """As the interface says."""
        written = await self._submit((self._new(kind, fields, issuer),))
        assert isinstance(written, list)
        return written[0].event_id

    async def append_all(self, entries: Sequence[interface.Entry]) -> list[str]:
        """As the interface says."""
        if not entries:
            return []
        written = await self._submit(tuple(self._new(one.kind, one.fields, one.issuer) for one in entries))
        assert isinstance(written, list)
        return [row.event_id for row in written]

    async def caught_up(self) -> None:
        """As the interface says."""
        await self._submit(())

    async def recent(
        self, limit: int, *, since_ms: int | None = None, issuer_pubkey: str | None = None
    ) -> list[parts.AuditEvent]:
        """As the interface says."""
        async with self._readers.place(issuer_pubkey or self._issuer.pubkey):
            return await self._reading(lambda: list(shared.newest(self._back(issuer_pubkey), limit, since_ms)))

    async def scan(
        self,
        wanted: Callable[[parts.AuditEvent], bool],
        limit: int,
        *,
        since_ms: int | None = None,
        issuer_pubkey: str | None = None,
    ) -> interface.Scan:
        """As the interface says."""
        async with self._readers.place(issuer_pubkey or self._issuer.pubkey):
            return await self._reading(lambda: shared.scanned(self._back(issuer_pubkey), wanted, limit, since_ms))

    async def verify(self) -> audit.Report:
        """As the interface says. Where it holds, neither file is read whole at once."""
        return await self._reading(lambda: checking.verify(self._files, self._snapshot()))

    async def purge(self, before_ms: int) -> interface.Purged:
        """As the interface says."""
        # Whoever asked may go away; who writes is decided all the same.
        while self._dictation is not None:
            self._taking = asyncio.get_running_loop().create_task(self._by_the_thread())
            await asyncio.shield(self._taking)
        done = await self._turns.submit(_Cut(before_ms))
        assert isinstance(done, interface.Purged)
        if done.rebase_id is not None and (newest := self._notes.newest()) is not None:
            # The cut may have taken the row that tells of it; without a row nobody sees that the checkpoint is missing.
            await self.append("audit_checkpoint", shared.checkpoint_fields(newest[0]))
        return done

    async def prove(self, event_id: str) -> interface.Proof | None:
        """As the interface says."""
        return await self._prove(lambda keep: self._prover.prove(event_id, keep))

    async def checkpoint(self) -> note.Note:
        """As the interface says."""
        return await self._prove(self._prover.checkpoint)

    async def cosigned(self, cosigned: note.Note, witnesses: Sequence[note.Verifier]) -> note.Note:
        """As the interface says."""
        async with self._proving:
            merged, found = self._notes.merged(cosigned, witnesses)
            await self._kept.append(notary.line(merged))
            self._notes.keep(merged)
        checkpoint = note.Checkpoint.parse(merged.text)
        await self.append_all([shared.cosigned_entry(checkpoint, one) for one in found])
        return merged

    async def consistency(self, old: int, size: int) -> list[bytes]:
        """As the interface says."""
        async with self._proving:
            return await self._reading(lambda: self._prover.consistency(old, size))

    async def close(self) -> None:
        """As the interface says."""
        settled = await self._end_writing()
        await self._turns.close("it was closed")
        await self._kept.close()
        await anyio.to_thread.run_sync(self._close, settled)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    # --- on the loop ------------------------------------------------------------------------------------

    def _new(self, kind: str, fields: Mapping[str, Any], issuer: AgentId | None) -> _New:
        who = issuer or self._issuer
        return shared.body_text(kind, fields, who), who.pubkey

    def _submit(self, item: tuple[_New, ...]) -> asyncio.Future[_Answer]:
        return (self._dictation or self._turns).submit(item)

    def _told(self, answers: Sequence[_Answer | Exception]) -> None:
        if self._crowds_until_scribe and len(answers) >= _CROWD:
            self._crowds_until_scribe -= 1
            if self._crowds_until_scribe == 0:
                self._handing = asyncio.get_running_loop().create_task(self._hand_over())
        self._publish(answers)

    def _publish(self, answers: Sequence[_Answer | Exception]) -> None:
        """Rows are told as they stand in the log, whatever became of whoever wrote them."""
        if not self._listeners:
            return
        for answer in answers:
            for row in answer if isinstance(answer, list) else ():
                event = rows.event(row.line)
                for listener in self._listeners:
                    if event is not None:
                        listener(event)

    def _back(self, pubkey: str | None) -> Iterator[bytes]:
        return self._rows.of(pubkey) if pubkey else (line for _, line in self._rows.backwards())

    async def _reading(self, look: Callable[[], T]) -> T:
        def run() -> T:
            with self._shape.kept():
                return look()

        return await anyio.to_thread.run_sync(run)

    async def _prove(self, prove: Callable[[proving.Keep], T]) -> T:
        """Run what may sign a checkpoint, which is durable before it is given out."""
        made: list[note.Note] = []
        async with self._proving:
            found = await self._reading(lambda: prove(made.append))
            await self._kept.append_all([notary.line(one) for one in made])
            for one in made:
                self._notes.keep(one)
        for one in made:
            checkpoint = note.Checkpoint.parse(one.text)
            await self.append("audit_checkpoint", shared.checkpoint_fields(checkpoint))
        return found

    # --- who writes -------------------------------------------------------------------------------------

    async def _hand_over(self) -> None:
        """Have a process write from now on. Where none can be started the thread goes on."""
        told = dictation.Told(self._batch, self._wrote, self._publish)
        taking = dictation.Dictation(self._files, told, what=_WHAT)
        async with self._changing_hands:
            try:
                await taking.start()
            except (OSError, errors.CovenantError) as e:
                _LOG.warning("the audit log goes on without a process of its own: %s", e)
                return
            # What is submitted from now on waits there, until what was before is written.
            self._dictation = taking
            try:
                await self._turns.submit(())
                self._begin_offset = self._files.head.events_bytes
                # INVARIANT: before: a reader's thread looks at it while the scribe may write already.
                self._scribes += 1
                taking.begin()
            except (OSError, errors.CovenantError) as e:
                _LOG.warning("the audit log goes on without a process of its own: %s", e)
                await self._without(taking.withdraw())

    async def _by_the_thread(self) -> None:
        async with self._changing_hands:
            if self._dictation is not None:
                await self._take_back(self._dictation)

    async def _take_back(self, taken: dictation.Dictation) -> None:
        """Have the thread write again."""
        await self._without(taken.end())
        self._crowds_until_scribe = _AGAIN

    async def _without(self, ending: Awaitable[Sequence[tuple[dictation.Waiter, dictation.Item]]]) -> None:
        left = await ending
        # INVARIANT: at once: nothing is submitted between the two.
        self._dictation = None
        self._turns.take_over(left)

    async def _end_writing(self) -> bool:
        """Refuse what comes from now on, after what waits has been written; whether the files are ours."""
        self._crowds_until_scribe = None
        if self._handing is not None:
            await asyncio.wait([self._handing])
        async with self._changing_hands:
            taken = self._dictation
            if taken is None:
                return True
            taken.refuse("it was closed")
            try:
                await taken.drained()
                await self._without(taken.end())
            except errors.CovenantError:
                # Whoever waited was told; the next opening finds out what is on the disk.
                await taken.abandon("it was closed")
                return False
            return True

    def _snapshot(self) -> files.Snapshot:
        """How the files are between two writes; asked from a reader's thread, which keeps a cut off."""
        while True:
            before = self._scribes
            found = anyio.from_thread.run(self._shown)
            if found is not None:
                return found
            # INVARIANT: in this thread. Another of the same threads might never come: as many readers hold them all.
            found = self._files.snapshot()
            # A scribe that was given the log meanwhile writes without asking us.
            if self._scribes == before:
                return found

    async def _shown(self) -> files.Snapshot | None:
        """What the scribe says; None where it has not got the log."""
        taken = self._dictation
        return await taken.snapshot() if taken is not None else None

    # --- in the writer's thread, or where rows are dictated ---------------------------------------------

    def _write(self, items: Sequence[_Item]) -> list[_Answer | Exception]:
        answers: list[_Answer | Exception] = []
        together: list[tuple[_New, ...]] = []
        for item in items:
            if isinstance(item, tuple):
                together.append(item)
                continue
            answers += self._write_rows(together)
            together = []
            answers.append(self._cut(item.before_ms))
        return answers + self._write_rows(together)

    def _write_rows(self, items: Sequence[tuple[_New, ...]]) -> list[_Answer | Exception]:
        if not any(items):
            return [[] for _ in items]
        batch = self._batch(items)
        begin = self._files.head.events_bytes
        try:
            self._files.append(batch.rows)
        except errors.StoreFullError as e:
            return [errors.StoreFullError(e.message, hint=e.hint, where=e.where) for _ in items]
        self._rows.wrote(batch.pubkeys, [row.line for row in batch.rows], begin)
        return [*batch.answers]

    def _batch(self, items: Sequence[tuple[_New, ...]]) -> dictation.Batch:
        if not any(items):
            return dictation.Batch(self._last_ms, [], [], [[] for _ in items])
        # INVARIANT: times never go backwards, whatever the clock does: a cut and `since_ms` stop at the first row.
        now = self._last_ms = max(self._now_ms(), self._last_ms)
        new = [one for item in items for one in item]
        ids = shared.event_ids(len(new))
        lines = events.lines(ids, now, [body for body, _ in new])
        made = list(map(ledger.Row, lines, ids, itertools.repeat(now)))
        pubkeys = [pubkey for _, pubkey in new]
        if len(items) == len(made) and all(items):
            return dictation.Batch(now, made, pubkeys, [[row] for row in made])
        following = iter(made)
        return dictation.Batch(now, made, pubkeys, [list(itertools.islice(following, len(item))) for item in items])

    def _wrote(self, batch: dictation.Batch) -> None:
        lines = [row[0] for row in batch.rows]
        self._rows.wrote(batch.pubkeys, lines, self._begin_offset)
        self._begin_offset += sum(map(len, lines)) + len(lines)

    def _cut(self, before_ms: int) -> _Answer | Exception:
        before = self._files.head.chain_hash_hex
        issuer = shared.issuer_text(self._issuer.display, self._issuer.pubkey)
        with self._shape.changed():
            try:
                now = self._last_ms = max(self._now_ms(), self._last_ms)
                done = cutting.cut(self._files, before_ms, issuer=issuer, now_ms=now)
            except errors.CovenantError as e:
                return e
            if done.rebase_id is not None:
                self._rows.forget()
                self._prover.forget()
        return interface.Purged(done.purged, before, self._files.head.chain_hash_hex, done.rebase_id)

    def _close(self, settled: bool) -> None:
        self._files.close(settled=settled)
        self._files.at.close()


def _open(home: Path) -> files.Files:
    at = places.Places.open(home)
    try:
        adopted = adopting.adopt(at)
        of = files.Files(at)
        of.recovered[:0] = adopted
        return of
    except OSError as e:
        at.close()
        raise errors.LedgerError(f"the log cannot be opened: {e.strerror}", where=str(home / "audit")) from e
    except BaseException:
        at.close()
        raise
