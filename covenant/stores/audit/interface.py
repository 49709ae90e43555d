"""The interface of the daemon's audit log, for every implementation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from covenant.wire import parts
from covenant.wire.types import AgentId
from policy import errors
from policy.audit_log import chain, merkle, note
from policy.audit_log import verify as audit_log_verify

# Called on the event loop with each row once it is durable; it must not block.
Listener = Callable[[parts.AuditEvent], None]


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """A row to write. Without an issuer, the daemon is the issuer."""

    kind: str
    fields: Mapping[str, Any]
    issuer: AgentId | None = None


@dataclass(frozen=True, slots=True)
class Purged:
    """The result of a purge. ``rebase_id``: the id of the record that now begins the log, None if no row was cut."""

    purged: int
    root_before_hex: str
    root_after_hex: str
    rebase_id: str | None


@dataclass(frozen=True, slots=True)
class Proof:
    """Proof that a row is in the log: its leaf, its path to the root, and the checkpoint of that root."""

    event_id: str
    inclusion: merkle.Inclusion
    root: bytes
    checkpoint: note.Note


@dataclass(frozen=True, slots=True)
class Scan:
    """The rows that a scan found, newest first, and how many it read.

    ``cut``: the scan stopped at the limit of rows held at once, and read no older row.
    """

    events: tuple[parts.AuditEvent, ...]
    scanned: int
    cut: bool = False


@dataclass(frozen=True, slots=True)
class ChainSuffix:
    """A row's place in the chain of hashes, and the hashes of the rows after it."""

    index: int
    event_hash_hex: str
    previous_hash_hex: str
    suffix: tuple[str, ...]
    root_hash_hex: str


# The most rows that a proof by the chain follows: their hashes fit in one frame.
MOST_SUFFIX: Final = 60_000


def chain_suffix(lines: Iterable[bytes], event_id: str) -> ChainSuffix | None:
    """Return the suffix of the row with this id; None if there is none.

    Raises:
        errors.NoteError: more than ``MOST_SUFFIX`` rows follow it.
    """
    needle = b'{"id":' + json.dumps(event_id).encode() + b","
    root, found, suffix = chain.Head().chain_hash_hex, None, []
    for index, line in enumerate(lines):
        hashed = chain.event_hash(line)
        if found is not None:
            suffix.append(hashed)
            if len(suffix) > MOST_SUFFIX:
                raise errors.NoteError(
                    f"more than {MOST_SUFFIX} rows follow this one", hint="ask with `extended`: covenant audit prove ID"
                )
        elif line.startswith(needle):
            found = (index, hashed, root)
        root = chain.chain_hash(root, hashed)
    return None if found is None else ChainSuffix(*found, tuple(suffix), root)


class AuditLog(Protocol):
    """The daemon's log. Times are Unix milliseconds and decrease from row to row only behind ``set_clock``."""

    @property
    def origin(self) -> str:
        """The name of this log in checkpoints."""

    @property
    def verifier(self) -> note.Verifier:
        """The verifier for the key that signs its checkpoints."""

    def listen(self, listener: Listener) -> None:
        """Call ``listener`` with every row from now on."""

    async def append(self, kind: str, fields: Mapping[str, Any], issuer: AgentId | None = None) -> str:
        """Write a row and return its id; the row is durable when this returns.

        ``run_id`` and ``operator`` may be left out if the kind allows null for them.

        Raises:
            errors.EventError: the fields are not those of the kind; nothing was written.
            errors.StoreFullError: there is no room; nothing was written.
            errors.StoreError: the disk failed; the log takes no more rows.
        """

    async def append_all(self, entries: Sequence[AuditEntry]) -> list[str]:
        """Write several rows in sequence, otherwise as ``append``; after a crash the log has all of them or none."""

    async def caught_up(self) -> None:
        """Wait until every row submitted before is in the log, or was refused.

        After its ``append`` was cancelled, a task must wait for this before it can check whether its rows are present.

        Raises:
            errors.StoreError: the disk failed; the log's state is unknown until the next opening.
        """

    async def recent(
        self, limit: int, *, since_ms: int | None = None, issuer_pubkey: str | None = None
    ) -> list[parts.AuditEvent]:
        """Return the newest rows, newest first, none older than ``since_ms``; with ``issuer_pubkey`` only those of that
        issuer."""

    async def scan(
        self,
        wanted: Callable[[parts.AuditEvent], bool],
        limit: int,
        *,
        since_ms: int | None = None,
        issuer_pubkey: str | None = None,
    ) -> Scan:
        """Return the newest rows that are ``wanted``, with ``issuer_pubkey`` only of that issuer. ``wanted`` is called
        in a worker thread."""

    async def verify(self) -> audit_log_verify.Report:
        """Check the rows against their chain and the signed head."""

    async def purge(self, before_ms: int) -> Purged:
        """Remove rows older than ``before_ms``; the rest begins with a signed record of the cut.

        Rows are cut from the oldest on, up to the last that is older.
        """

    async def set_clock(self, now_ms: int) -> None:
        """Let rows have times from ``now_ms`` on again, after the machine's clock was ahead."""

    async def prove(self, event_id: str) -> Proof | None:
        """Prove that a row is in the log, under a checkpoint that covers it. Returns None if no row has that id."""

    async def prove_by_chain(self, event_id: str) -> ChainSuffix | None:
        """Prove as version 1 does that a row is in the log: by the hashes of all rows after it. Returns None if no row
        has that id.

        Raises:
            errors.NoteError: more than ``MOST_SUFFIX`` rows follow it.
        """

    async def checkpoint(self) -> note.Note:
        """Return a signed checkpoint of the whole log: the last one, with cosignatures, if no row was added since."""

    async def cosigned(self, cosigned: note.Note, witnesses: Sequence[note.Verifier]) -> note.Note:
        """Store the cosignatures of our checkpoint that verify. Returns the checkpoint with all its cosignatures.

        Raises:
            errors.NoteError: it is not a checkpoint of ours, or has no cosignature of one of ``witnesses``.
        """

    async def consistency(self, old: int, size: int) -> list[bytes]:
        """Return the proof that the log of ``old`` rows begins the one of ``size`` rows (RFC 6962, 2.1.2).

        Raises:
            errors.NoteError: the log never had such a size, or rows before it were cut.
        """

    async def close(self) -> None:
        """Write the queued rows, and close the files."""
