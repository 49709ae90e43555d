"""Where rows go, and how a pump of one log feeds one sink."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from covenant.export.cursor import Cursor, Cursors
from policy import errors
from policy.audit_log import exported
from sandbox.audit import log_follow
from sandbox.audit.follow_process import Readers

POLL_SECONDS: Final = 0.05
# Of the log in one request. In OTLP's JSON it is about four times as long, and a collector takes 20 MiB by default.
MOST_BYTES: Final = 2 * 1024 * 1024
FIRST_WAIT_SECONDS: Final = 0.1
MOST_WAIT_SECONDS: Final = 30.0
# Looks without an answer, while a writer is between its files, after which `once` ends.
_QUIET_LOOKS: Final = 20

Tell = Callable[[str], None]


@dataclass(frozen=True)
class About:
    """Host and version for every record, and how failures of a target are treated.

    ``tell`` gets the remarks of the export. ``patience_seconds``: how long a target may take nothing before the export
    ends with an error; None waits for ever.
    """

    host: str
    version: str
    tell: Tell
    patience_seconds: float | None = None

    def backoff(self, target: str) -> Backoff:
        """Return the waits for one target, which is named in the error that ends them."""
        return Backoff(target, self.patience_seconds)


@dataclass(frozen=True)
class RowBatch:
    """Rows as a destination takes them, and the cursor that is saved once it has them."""

    content: Any
    cursor: Cursor


class Sink(Protocol):
    """One destination of one log. ``make`` and ``deliver`` are each called in the order of the rows."""

    name: str

    def resume(self, cursor: Cursor) -> None:
        """Go on where the cursor is."""

    def make(self, rows: Sequence[exported.ExportedRow], log: exported.Log, cursor: Cursor) -> RowBatch:
        """Encode rows, in a thread. The batch's cursor is the given one with what this sink has to remember."""

    async def deliver(self, content: Any) -> None:
        """Hand over a batch. It returns once the destination has acknowledged it, however long that takes."""


@dataclass
class Pump:
    """Carry the rows of one log to one sink: read, deliver, then move the cursor.

    One batch is made while the destination has the one before, and at most one waits between the two.
    """

    log: str
    sink: Sink
    readers: Readers
    cursors: Cursors
    about: About
    once: bool = False

    async def run(self) -> None:
        """Carry rows until cancelled; with ``once`` until all that are there are delivered."""
        cursor = self.cursors.load(self.log, self.sink.name)
        self.sink.resume(cursor)
        ahead = asyncio.Queue[RowBatch | None](1)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._make(cursor, ahead))
            while (batch := await ahead.get()) is not None:
                await self.sink.deliver(batch.content)
                # INVARIANT: only after the acknowledgement. A kill before it repeats rows, and loses none.
                await save(self.cursors, self.log, self.sink.name, batch.cursor, self.about)

    async def _make(self, cursor: Cursor, ahead: asyncio.Queue[RowBatch | None]) -> None:
        """Put batches in the order of the rows, and None behind the last."""
        limit, quiet = log_follow.CHUNK_BYTES, 0
        while True:
            chunk = await asyncio.to_thread(self.readers.read, self.log, cursor.position, limit)
            if chunk is not None:
                self.cursors.check(self.log, self.sink.name, cursor, chunk.origin)
            if chunk is None or not (chunk.lines or chunk.lost):
                quiet = quiet + 1 if chunk is None else 0
                if self.once and (quiet > _QUIET_LOOKS if chunk is None else chunk.whole):
                    await ahead.put(None)
                    return
                await asyncio.sleep(POLL_SECONDS)
                continue
            quiet = 0
            cursor = Cursor(chunk.origin, chunk.end)
            await ahead.put(await asyncio.to_thread(self._made, chunk, cursor))
            # Behind, one acknowledgement and one sync of the cursor carry more rows.
            limit = log_follow.CHUNK_BYTES if chunk.whole else min(2 * limit, MOST_BYTES)

    def _made(self, chunk: log_follow.Chunk, cursor: Cursor) -> RowBatch:
        log = exported.Log(self.log, chunk.origin, chunk.tree_size)
        return self.sink.make(rows_of(chunk, log), log, cursor)


async def save(cursors: Cursors, log: str, sink: str, cursor: Cursor, about: About) -> None:
    """Save a cursor. A full disk is waited for: to go on without it would repeat ever more rows after a kill.

    Raises:
        errors.ExportTimeoutError: it took nothing for as long as this export waits.
    """
    backoff = about.backoff(f"the disk of the {log} log's cursor")
    while True:
        try:
            cursors.save(log, sink, cursor)
            return
        except OSError as e:
            if backoff.since is None:
                about.tell(f"the cursor of the {log} log cannot be written: {e.strerror}; rows wait in the log")
            await asyncio.sleep(backoff.failed())


def rows_of(chunk: log_follow.Chunk, log: exported.Log) -> list[exported.ExportedRow]:
    """Return the rows of a chunk, with a record in front that stands for rows which were cut unseen."""
    start = chunk.start
    lines = chunk.lines.split(b"\n")[:-1]
    found = list(exported.rows(lines, log, index=start.index, chain_hash_hex=start.chain_hash_hex))
    if not chunk.lost:
        return found
    now_ms = time.time_ns() // 1_000_000
    return [exported.gap(log, start.cut - chunk.lost, start.cut, now_ms), *found]


class Backoff:
    """Wait longer after each failure in a row, with jitter, so that many exporters do not come at once."""

    def __init__(self, target: str, patience_seconds: float | None) -> None:
        """``target`` is named in the error that ends the export after ``patience_seconds``."""
        self._target, self._patience = target, patience_seconds
        self._seconds = FIRST_WAIT_SECONDS
        self.since: float | None = None

    def failed(self, at_least: float = 0.0) -> float:
        """Return the seconds to wait; ``at_least`` is what the destination asked for.

        Raises:
            errors.ExportTimeoutError: the failures have lasted as long as the export waits.
        """
        now = time.monotonic()
        if self.since is None:
            self.since = now
        wait = max(self._seconds * (0.5 + secrets.randbelow(1000) / 2000), at_least)
        self._seconds = min(MOST_WAIT_SECONDS, self._seconds * 2)
        if self._patience is None:
            return wait
        if (left := self.since + self._patience - now) <= 0:
            raise errors.ExportTimeoutError(
                f"{self._target} took nothing for {self._patience:g} s; the rows are kept in the log",
                hint="repeat the command once it is reachable; --timeout SECONDS waits longer",
            )
        return min(wait, left)

    def succeeded(self) -> float | None:
        """Forget the failures. Return the seconds that they lasted; None where there was none."""
        lasted = None if self.since is None else time.monotonic() - self.since
        self._seconds, self.since = FIRST_WAIT_SECONDS, None
        return lasted
