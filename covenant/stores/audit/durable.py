"""The audit log on disk. Writers share a sync (``covenant.stores.group_commit``); readers run in worker threads."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import anyio
import anyio.to_thread

from covenant import fair_share
from covenant.stores import group_commit, journal
from covenant.stores.audit import adopt_v1, checkpoints, event_text, files, interface, paths, proofs, reading, rows
from covenant.stores.audit import purge as audit_purge
from covenant.stores.audit import verify as audit_verify
from covenant.wire import parts
from covenant.wire.types import AgentId
from policy import errors
from policy.audit_log import chain, events, note
from policy.audit_log import verify as audit_log_verify

T = TypeVar("T")

_WHAT: Final = "the audit log"
_MOST_AT_ONCE: Final = 1024
# The most concurrent readers for all callers together. Each is a thread that competes with the event loop for the
# interpreter for as long as it reads rows, and the thread pool has other users.
_READERS: Final = 4


# The text of a line after its id and time, and the public key of its issuer.
_New = tuple[str, str]


@dataclass(frozen=True, slots=True)
class _SetClock:
    now_ms: int


@dataclass(frozen=True, slots=True)
class _Cut:
    before_ms: int


_Item = tuple[_New, ...] | _Cut | _SetClock
_Answer = list[chain.ChainRow] | interface.Purged


class DurableAudit:
    """The log in a home's ``audit`` and ``audit-head``. Make it with ``DurableAudit.open``."""

    def __init__(
        self,
        of: files.Files,
        notes: checkpoints.Notary,
        kept: journal.Journal,
        issuer: AgentId,
        now_ms: Callable[[], int],
    ) -> None:
        self._files = of
        self._notes = notes
        self._kept = kept
        self._issuer = issuer
        self._now_ms = now_ms
        self._rows = rows.Rows(of)
        self._prover = proofs.Prover(reading.LogFiles(of), notes, of.key.public_key())
        self._listeners: list[interface.Listener] = []
        last = rows.opening(files.last_line(of.events, of.head.events_bytes)) if of.head.count else None
        self._last_ms = last.timestamp_ms if last else 0
        self._turns: group_commit.GroupCommit[_Item, _Answer] = group_commit.GroupCommit(
            self._write, what=_WHAT, most=_MOST_AT_ONCE, told=self._publish
        )
        self._shape = reading.Shape()
        self._readers = fair_share.Shares(_READERS, operator=issuer.pubkey)
        self._proving = anyio.Lock()

    @classmethod
    async def open(
        cls,
        home: Path,
        *,
        issuer: AgentId,
        now_ms: Callable[[], int],
        origin: str | None = None,
    ) -> Self:
        """Open or create the log. Repairs after a crash come first and are listed in ``recovered``.

        Raises:
            errors.LedgerError: a file is unsafe, or the log fails verification.
            errors.StoreError: the checkpoints cannot be read.
        """
        of = await anyio.to_thread.run_sync(_open, home)
        try:
            name = origin or proofs.origin_of(of.key.public_key())
            notes = checkpoints.Notary(name, await anyio.to_thread.run_sync(of.at.note_key, name))
            kept = await journal.Journal.open(home / "audit" / "checkpoints.jsonl")
            async for line in kept:
                notes.load(line)
            notes.newest()
        except BaseException:
            await anyio.to_thread.run_sync(_close, of)
            raise
        return cls(of, notes, kept, issuer, now_ms)

    @property
    def recovered(self) -> list[str]:
        """Messages about the repairs made at the opening."""
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

    async def append_all(self, entries: Sequence[interface.AuditEntry]) -> list[str]:
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
            return await self._reading(lambda: list(event_text.newest(self._back(issuer_pubkey), limit, since_ms)))

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
            return await self._reading(lambda: event_text.scanned(self._back(issuer_pubkey), wanted, limit, since_ms))

    async def verify(self) -> audit_log_verify.Report:
        """As the interface says. Where it holds, neither file is read whole at once."""
        return await self._reading(lambda: audit_verify.verify(self._files, self._files.snapshot()))

    async def set_clock(self, now_ms: int) -> None:
        """As the interface says."""
        await self._turns.submit(_SetClock(now_ms))

    async def purge(self, before_ms: int) -> interface.Purged:
        """As the interface says."""
        newest = self._notes.newest()
        cosigned = [] if newest is None else await self._cosigned_rows(*newest)
        done = await self._turns.submit(_Cut(before_ms))
        assert isinstance(done, interface.Purged)
        if done.rebase_id is not None and newest is not None:
            # The cut may have removed the rows of the newest checkpoint and of its cosignatures; without a row a
            # missing one goes unnoticed.
            row = interface.AuditEntry("audit_checkpoint", event_text.checkpoint_fields(newest[0]))
            await self.append_all([row, *cosigned])
        return done

    async def _cosigned_rows(self, checkpoint: note.Checkpoint, signed: note.Note) -> list[interface.AuditEntry]:
        """Return the entries of a checkpoint's cosignatures, as the log has them."""
        count = len(signed.signatures) - 1  # the log's own
        if count < 1:
            return []

        def about_it(row: parts.AuditEvent) -> bool:
            return row.kind.get("type") == "audit_checkpoint_cosigned" and row.kind.get("tree_size") == checkpoint.size

        found = await self._reading(lambda: event_text.scanned(self._back(None), about_it, count, None))
        fields = ({name: value for name, value in row.kind.items() if name != "type"} for row in found.events)
        return [interface.AuditEntry("audit_checkpoint_cosigned", one) for one in fields]

    async def prove(self, event_id: str) -> interface.Proof | None:
        """As the interface says."""
        return await self._prove(lambda keep: self._prover.prove(event_id, keep))

    async def prove_by_chain(self, event_id: str) -> interface.ChainSuffix | None:
        """As the interface says."""
        # A row that is not there would have the whole log read for each request.
        if await self._reading(lambda: reading.LogFiles(self._files).index_of(event_id)) is None:
            return None
        lines = (line for _, line in self._files.lines())
        return await self._reading(lambda: interface.chain_suffix(lines, event_id))

    async def checkpoint(self) -> note.Note:
        """As the interface says."""
        return await self._prove(self._prover.checkpoint)

    async def cosigned(self, cosigned: note.Note, witnesses: Sequence[note.Verifier]) -> note.Note:
        """As the interface says."""
        async with self._proving:
            merged, found = self._notes.merged(cosigned, witnesses)
            await self._kept.append(note.stored_line(merged))
            self._notes.keep(merged)
        checkpoint = note.Checkpoint.parse(merged.text)
        await self.append_all([event_text.cosigned_entry(checkpoint, one) for one in found])
        return merged

    async def consistency(self, old: int, size: int) -> list[bytes]:
        """As the interface says."""
        async with self._proving:
            return await self._reading(lambda: self._prover.consistency(old, size))

    async def close(self) -> None:
        """As the interface says."""
        await self._turns.close("it was closed")
        await self._kept.close()
        await anyio.to_thread.run_sync(self._close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    # --- on the loop ------------------------------------------------------------------------------------

    def _new(self, kind: str, fields: Mapping[str, Any], issuer: AgentId | None) -> _New:
        who = issuer or self._issuer
        return event_text.body_text(kind, fields, who), who.pubkey

    def _submit(self, item: tuple[_New, ...]) -> asyncio.Future[_Answer]:
        return self._turns.submit(item)

    def _publish(self, answers: Sequence[_Answer | Exception]) -> None:
        """Pass written rows to the listeners as they are in the log, even if their writer was cancelled meanwhile."""
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

    async def _prove(self, prove: Callable[[proofs.Keep], T]) -> T:
        """Run a function that may sign a checkpoint. The checkpoint is durable before this returns."""
        made: list[note.Note] = []
        async with self._proving:
            found = await self._reading(lambda: prove(made.append))
            await self._kept.append_all([note.stored_line(one) for one in made])
            for one in made:
                self._notes.keep(one)
        for one in made:
            checkpoint = note.Checkpoint.parse(one.text)
            await self.append("audit_checkpoint", event_text.checkpoint_fields(checkpoint))
        return found

    # --- in the writer's thread -------------------------------------------------------------------------

    def _write(self, items: Sequence[_Item]) -> list[_Answer | Exception]:
        answers: list[_Answer | Exception] = []
        together: list[tuple[_New, ...]] = []
        for item in items:
            if isinstance(item, tuple):
                together.append(item)
                continue
            answers += self._write_rows(together)
            together = []
            if isinstance(item, _SetClock):
                self._last_ms = item.now_ms
                answers.append([])
            else:
                answers.append(self._cut(item.before_ms))
        return answers + self._write_rows(together)

    def _write_rows(self, items: Sequence[tuple[_New, ...]]) -> list[_Answer | Exception]:
        if not any(items):
            return [[] for _ in items]
        # INVARIANT: times do not decrease, even if the clock is set back: `since_ms` stops at the first row past its
        # limit. Only `set_clock` takes them back, and the rows behind it are newer than those before.
        now = self._last_ms = max(self._now_ms(), self._last_ms)
        new = [one for item in items for one in item]
        ids = event_text.event_ids(len(new))
        lines = events.lines(ids, now, [body for body, _ in new])
        made = list(map(chain.ChainRow, lines, ids, itertools.repeat(now)))
        begin = self._files.head.events_bytes
        try:
            self._files.append(made)
        except errors.StoreFullError as e:
            return [errors.StoreFullError(e.message, hint=e.hint, where=e.where) for _ in items]
        self._rows.wrote([pubkey for _, pubkey in new], lines, begin)
        following = iter(made)
        return [list(itertools.islice(following, len(item))) for item in items]

    def _cut(self, before_ms: int) -> _Answer | Exception:
        before = self._files.head.chain_hash_hex
        issuer = event_text.issuer_text(self._issuer.display, self._issuer.pubkey)
        with self._shape.changed():
            try:
                now = self._last_ms = max(self._now_ms(), self._last_ms)
                done = audit_purge.cut(self._files, before_ms, issuer=issuer, now_ms=now)
            except errors.CovenantError as e:
                return e
            if done.rebase_id is not None:
                self._rows.forget()
                self._prover.forget()
        return interface.Purged(done.purged, before, self._files.head.chain_hash_hex, done.rebase_id)

    def _close(self) -> None:
        _close(self._files)


def _close(of: files.Files) -> None:
    of.close()
    of.at.close()


def _open(home: Path) -> files.Files:
    at = paths.Places.open(home)
    try:
        adopted = adopt_v1.adopt(at)
        of = files.Files(at)
        of.recovered[:0] = adopted
        return of
    except OSError as e:
        at.close()
        raise errors.LedgerError(f"the log cannot be opened: {e.strerror}", where=str(home / "audit")) from e
    except BaseException:
        at.close()
        raise
