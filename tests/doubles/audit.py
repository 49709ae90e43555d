"""The log in memory: the same rows, chain, checkpoints and cuts, for tests and for a daemon without files."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from covenant.stores.audit import checkpoints, event_text, interface, proofs, rows
from covenant.wire import parts
from covenant.wire.types import AgentId
from policy.audit_log import chain, events, merkle, note, truncation
from policy.audit_log import verify as audit_log_verify


class InMemoryAudit:
    """A log that ends with the process. It signs with keys of its own, made with it."""

    def __init__(self, *, issuer: AgentId, now_ms: Callable[[], int], origin: str | None = None) -> None:
        self._issuer = issuer
        self._now_ms = now_ms
        self._key = Ed25519PrivateKey.generate()
        public = self._key.public_key()
        self._notes = checkpoints.Notary(origin or proofs.origin_of(public), Ed25519PrivateKey.generate())
        self._listeners: list[interface.Listener] = []
        self._lines: list[bytes] = []
        self._chain = b""
        self._before = self._head = chain.Head()
        self._last_ms = 0
        self._prover = proofs.Prover(self, self._notes, public)

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
        """Rows that are there now."""
        return len(self._lines)

    @property
    def head(self) -> chain.Head:
        """How far they go."""
        return self._head

    def listen(self, listener: interface.Listener) -> None:
        """As the interface says."""
        self._listeners.append(listener)

    async def append(self, kind: str, fields: Mapping[str, Any], issuer: AgentId | None = None) -> str:
        """As the interface says."""
        return (await self.append_all([interface.AuditEntry(kind, fields, issuer)]))[0]

    async def append_all(self, entries: Sequence[interface.AuditEntry]) -> list[str]:
        """As the interface says."""
        bodies = [event_text.body_text(one.kind, one.fields, one.issuer or self._issuer) for one in entries]
        now, ids = self._tick(), [str(uuid.uuid4()) for _ in entries]
        lines = events.lines(ids, now, bodies)
        written = [chain.ChainRow(line, event_id, now) for line, event_id in zip(lines, ids, strict=True)]
        self._write(written)
        for row in written:
            event = rows.event(row.line)
            for listener in self._listeners:
                if event is not None:
                    listener(event)
        return [row.event_id for row in written]

    async def caught_up(self) -> None:
        """As the interface says: nothing waits here."""

    async def recent(
        self, limit: int, *, since_ms: int | None = None, issuer_pubkey: str | None = None
    ) -> list[parts.AuditEvent]:
        """As the interface says."""
        lines = (line for line in reversed(self._lines) if issuer_pubkey in (None, _pubkey(line)))
        return list(event_text.newest(lines, limit, since_ms))

    async def scan(
        self,
        wanted: Callable[[parts.AuditEvent], bool],
        limit: int,
        *,
        since_ms: int | None = None,
        issuer_pubkey: str | None = None,
    ) -> interface.Scan:
        """As the interface says."""
        lines = (line for line in reversed(self._lines) if issuer_pubkey in (None, _pubkey(line)))
        return event_text.scanned(lines, wanted, limit, since_ms)

    async def verify(self) -> audit_log_verify.Report:
        """As the interface says."""
        blank = b" " * (chain.SLOT_BYTES - 1) + b"\n"
        slots = {chain.slot_offset(head): chain.sign_head(head, self._key) for head in (self._before, self._head)}
        shown = slots.get(0, blank) + slots.get(chain.SLOT_BYTES, blank)
        return audit_log_verify.verify(self._raw(), self._chain, shown, self._key.public_key())

    async def set_clock(self, now_ms: int) -> None:
        """As the interface says."""
        self._last_ms = now_ms

    async def purge(self, before_ms: int) -> interface.Purged:
        """As the interface says."""
        done = self._purge(before_ms)
        if done.rebase_id is not None and (newest := self._notes.newest()) is not None:
            await self.append("audit_checkpoint", event_text.checkpoint_fields(newest[0]))
        return done

    def _purge(self, before_ms: int) -> interface.Purged:
        root = self._head.chain_hash_hex
        begun = truncation.frontier(self._lines[0], self._key.public_key()) if self._lines else None
        begun = begun or merkle.Frontier()
        first = int(begun.size > 0)
        there = [_row(line) for line in self._lines]
        older = [i for i, row in enumerate(there) if i >= first and row.timestamp_ms < before_ms]
        stay = older[-1] + 1 if older else first
        if stay <= first:
            return interface.Purged(0, root, root, None)
        whole, tree = begun, begun.copy()
        for i, row in enumerate(there[first:], first):
            whole.append(merkle.leaf_hash(row.line))
            if i == stay - 1:
                tree = whole.copy()
        previous = chain.event_hash(self._lines[0]) if first else None
        cut = truncation.Cut(stay - first, there[first], there[stay - 1], root, whole, tree, previous)
        now, event_id = self._tick(), str(uuid.uuid4())
        issuer = event_text.issuer_text(self._issuer.display, self._issuer.pubkey)
        line = events.assembled(
            event_id, now, issuer, events.kind_text(truncation.KIND, truncation.fields(cut, self._key))
        )
        self._lines, self._chain, self._before, self._head = [], b"", chain.Head(), chain.Head()
        self._write([chain.ChainRow(line, event_id, now), *there[stay:]])
        self._prover.forget()
        return interface.Purged(stay - first, root, self._head.chain_hash_hex, event_id)

    async def prove(self, event_id: str) -> interface.Proof | None:
        """As the interface says."""
        made: list[note.Note] = []
        found = self._prover.prove(event_id, made.append)
        await self._told(made)
        return found

    async def prove_by_chain(self, event_id: str) -> interface.ChainSuffix | None:
        """As the interface says."""
        return interface.chain_suffix(self._lines, event_id)

    async def checkpoint(self) -> note.Note:
        """As the interface says."""
        made: list[note.Note] = []
        found = self._prover.checkpoint(made.append)
        await self._told(made)
        return found

    async def cosigned(self, cosigned: note.Note, witnesses: Sequence[note.Verifier]) -> note.Note:
        """As the interface says."""
        merged, found = self._notes.merged(cosigned, witnesses)
        self._notes.keep(merged)
        checkpoint = note.Checkpoint.parse(merged.text)
        await self.append_all([event_text.cosigned_entry(checkpoint, one) for one in found])
        return merged

    async def consistency(self, old: int, size: int) -> list[bytes]:
        """As the interface says."""
        return self._prover.consistency(old, size)

    async def close(self) -> None:
        """As the interface says."""

    def lines(self, start: int = 0) -> Iterator[tuple[int, bytes]]:
        """The lines from an offset on, each with its own."""
        offset = 0
        for line in list(self._lines):
            if offset >= start:
                yield offset, line
            offset += len(line) + 1

    def index_of(self, event_id: str) -> int | None:
        """Which line, counted from 0, has this id."""
        return next((i for i, line in enumerate(self._lines) if _row(line).event_id == event_id), None)

    async def _told(self, made: Sequence[note.Note]) -> None:
        for one in made:
            self._notes.keep(one)
            await self.append("audit_checkpoint", event_text.checkpoint_fields(note.Checkpoint.parse(one.text)))

    def _write(self, written: Sequence[chain.ChainRow]) -> None:
        entries, before, head = chain.extend(self._head, written)
        self._lines += [row.line for row in written]
        self._chain += entries
        if written:
            self._before, self._head = before, head

    def _raw(self) -> bytes:
        return b"".join(line + b"\n" for line in self._lines)

    def _tick(self) -> int:
        self._last_ms = max(self._now_ms(), self._last_ms)
        return self._last_ms


def _row(line: bytes) -> chain.ChainRow:
    found = rows.opening(line)
    return chain.ChainRow(line, found.event_id if found else "", found.timestamp_ms if found else 0)


def _pubkey(line: bytes) -> str | None:
    found = rows.opening(line)
    return found.pubkey if found else None
