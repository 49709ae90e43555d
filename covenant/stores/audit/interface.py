"""What the daemon asks of its audit log, whatever keeps it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from covenant.wire import parts
from covenant.wire.types import AgentId
from policy.audit_log import merkle, note
from policy.audit_log import verify as audit_log_verify

# Told of each row once it is durable, on the event loop; it must not wait.
Listener = Callable[[parts.AuditEvent], None]


@dataclass(frozen=True, slots=True)
class Entry:
    """A row to be written. Without an issuer it is the daemon's own."""

    kind: str
    fields: Mapping[str, Any]
    issuer: AgentId | None = None


@dataclass(frozen=True, slots=True)
class Purged:
    """What a purge did: ``rebase_id`` is the id of the record that begins the log now, None where nothing was cut."""

    purged: int
    root_before_hex: str
    root_after_hex: str
    rebase_id: str | None


@dataclass(frozen=True, slots=True)
class Proof:
    """That a row is in the log: its leaf, its path to the root, and the checkpoint of that root."""

    event_id: str
    inclusion: merkle.Inclusion
    root: bytes
    checkpoint: note.Note


@dataclass(frozen=True, slots=True)
class Scan:
    """Rows that were looked for, newest first, and how many were looked at.

    ``cut``: what was found is as much as is held at once, and nothing older was looked at.
    """

    events: tuple[parts.AuditEvent, ...]
    scanned: int
    cut: bool = False


class AuditLog(Protocol):
    """The daemon's log. Times are Unix milliseconds and never go backwards from row to row."""

    @property
    def origin(self) -> str:
        """The name of this log in checkpoints."""

    @property
    def verifier(self) -> note.Verifier:
        """The key that its checkpoints verify under."""

    def listen(self, listener: Listener) -> None:
        """Tell ``listener`` of every row from now on."""

    async def append(self, kind: str, fields: Mapping[str, Any], issuer: AgentId | None = None) -> str:
        """Write a row and return its id; when this returns it is durable.

        ``run_id`` and ``operator`` may be left out where the kind allows null for them.

        Raises:
            errors.EventError: the fields are not those of the kind; nothing was written.
            errors.StoreFullError: there is no room; nothing was written.
            errors.StoreError: the disk failed; the log takes no more rows.
        """

    async def append_all(self, entries: Sequence[Entry]) -> list[str]:
        """As ``append`` for several rows, one behind the other: after a crash all of them are there or none."""

    async def caught_up(self) -> None:
        """Wait until everything that was asked to be written before is in the log, or was refused.

        Whoever was cut off in the middle of ``append`` knows only then by a look whether its rows are there.

        Raises:
            errors.StoreError: the disk failed; nobody knows until the log is opened again.
        """

    async def recent(
        self, limit: int, *, since_ms: int | None = None, issuer_pubkey: str | None = None
    ) -> list[parts.AuditEvent]:
        """The newest rows, newest first: of one issuer where one is named, none older than ``since_ms``."""

    async def scan(
        self,
        wanted: Callable[[parts.AuditEvent], bool],
        limit: int,
        *,
        since_ms: int | None = None,
        issuer_pubkey: str | None = None,
    ) -> Scan:
        """The newest rows that are ``wanted``, of one issuer where one is named; asked in a worker thread."""

    async def verify(self) -> audit_log_verify.Report:
        """Hold the rows against their chain and the signed head."""

    async def purge(self, before_ms: int) -> Purged:
        """Cut the rows that are older; what is left begins with a signed record of what was cut.

        Rows are cut from the oldest on, up to the first that is not older.
        """

    async def prove(self, event_id: str) -> Proof | None:
        """That a row is in the log, under a checkpoint that covers it; None where no row has that id."""

    async def checkpoint(self) -> note.Note:
        """The checkpoint of the whole log, signed; the last one, with its cosignatures, where nothing came since."""

    async def cosigned(self, cosigned: note.Note, witnesses: Sequence[note.Verifier]) -> note.Note:
        """Keep the cosignatures of a checkpoint of ours that verify; the checkpoint with all that it has now.

        Raises:
            errors.NoteError: it is no checkpoint of ours, or nobody of ``witnesses`` cosigned it.
        """

    async def consistency(self, old: int, size: int) -> list[bytes]:
        """The proof that the log of ``old`` rows begins the one of ``size`` (RFC 6962, 2.1.2).

        Raises:
            errors.NoteError: the log never had such a size, or rows before it were cut.
        """

    async def close(self) -> None:
        """Write what waits, and let go."""
