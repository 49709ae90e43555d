"""The receipts in ``receipts/working.jsonl``: a journal, one receipt a line, rewritten when they are settled.

No receipt is kept in memory (ADR 0161): an index on disk tells where each is (``indexed_file``).
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, Protocol, Self, TypeVar

import anyio
import anyio.to_thread

from covenant.stores import journal
from covenant.stores.settlement import interface, rows
from covenant.stores.settlement.index import Index, Placed, Position
from covenant.stores.settlement.indexed_file import IndexedFile
from covenant.wire import types
from policy import errors
from policy.audit_log import receipt_tree
from sandbox.storage import atomic_file

# How many receipts are read at a time. Between two pages other threads get their turn.
_PAGE: Final = 256
_FEW: Final = 16
# How many threads of this store may wait for the index, which is used by one at a time.
_THREADS: Final = 16

T = TypeVar("T")


class _Page(Protocol):
    """Selects the next rows behind the last receipt of the page before."""

    def __call__(self, index: Index, *, last: Placed | None, size: int) -> Sequence[Position]: ...


class DurableReceipts:
    """``interface.Receipts`` over a file. Make it with ``open``."""

    def __init__(self, lines: journal.Journal, file: IndexedFile, path: Path) -> None:
        self._journal = lines
        self._file = file
        self._path = path
        # The ids that are being appended. A second append of one waits, and then finds it.
        self._appending: dict[str, anyio.Event] = {}
        # Separate from the shared threads: while the index is made again or the disk hangs, all these may wait.
        self._threads = anyio.CapacityLimiter(_THREADS)
        # Changes of present receipts take turns; appends do not wait for them.
        self._changing = anyio.Lock()
        self.flushing = anyio.Lock()

    @classmethod
    async def open(cls, path: Path) -> Self:
        """Open or create the receipts at ``path``, with the index beside them.

        Raises:
            errors.StoreError: the file cannot be used, or a line of it is no receipt.
        """
        file = IndexedFile(path)
        try:
            return cls(await journal.Journal.open(path, follow=file.follow), file, path)
        except BaseException:
            file.close()
            raise

    @property
    def recovered(self) -> list[str]:
        """Messages about data set aside at the opening, as ``Journal.recovered``."""
        return self._journal.recovered

    async def append(self, receipt: types.SettlementReceipt) -> None:
        """As ``interface.Receipts.append``."""
        while (other := self._appending.get(receipt.id)) is not None:
            await other.wait()
        done = self._appending[receipt.id] = anyio.Event()
        try:
            await self._append(receipt)
        finally:
            del self._appending[receipt.id]
            done.set()

    async def get(self, receipt_id: str) -> types.SettlementReceipt | None:
        """As ``interface.Receipts.get``."""
        found = await self._in_thread(lambda: self._by_id(receipt_id))
        return None if found is None else found.receipt

    async def recent(
        self, limit: int, since_ms: int | None = None, *, keep: interface.Keep = interface.every
    ) -> Sequence[types.SettlementReceipt]:
        """As ``interface.Receipts.recent``."""

        def page(index: Index, *, last: Placed | None, size: int) -> Sequence[Position]:
            return index.newest(None if last is None else last.row.place, since_ms, size)

        def admits(one: types.SettlementReceipt) -> bool:
            # The index has no times from 2**63 on.
            return (since_ms is None or one.settled_at >= since_ms) and keep(one)

        return await self._in_thread(lambda: self._chosen(page, limit, admits))

    async def unsettled(
        self, limit: int, *, keep: interface.Keep = interface.every
    ) -> Sequence[types.SettlementReceipt]:
        """As ``interface.Receipts.unsettled``."""

        def page(index: Index, *, last: Placed | None, size: int) -> Sequence[Position]:
            return index.open_after(0 if last is None else last.row.place, size)

        return await self._in_thread(lambda: self._chosen(page, limit, keep))

    async def mark_batch(self, receipt_ids: Sequence[str]) -> interface.Batch:
        """As ``interface.Receipts.mark_batch``."""
        async with self._changing:
            batch, changes = await self._in_thread(lambda: self._batch_of(receipt_ids))
            await self._change(changes)
            return batch

    async def mark_batch_confirmed(self, batch_id: str, anchor: interface.Anchor) -> int:
        """As ``interface.Receipts.mark_batch_confirmed``."""
        async with self._changing:
            placed = await self._in_thread(lambda: list(self._of_batch(batch_id)))
            if not placed:
                raise errors.ReceiptError(f"there is no batch `{batch_id}`")
            if interface.is_confirmed(_batch_at(placed[0].receipt, len(placed)), anchor):
                return 0
            await self._change([(one, interface.confirmed(one.receipt, anchor)) for one in placed])
            return len(placed)

    async def batches(self, limit: int) -> Sequence[interface.Batch]:
        """As ``interface.Receipts.batches``."""
        return await self._in_thread(lambda: self._batches(lambda index: index.batches(_natural(limit))))

    async def unconfirmed(self, limit: int) -> Sequence[interface.Batch]:
        """As ``interface.Receipts.unconfirmed``."""
        return await self._in_thread(lambda: self._batches(lambda index: index.unconfirmed(_natural(limit))))

    async def prove(self, receipt_id: str) -> receipt_tree.ReceiptProof | None:
        """As ``interface.Receipts.prove``."""
        return await self._in_thread(lambda: self._prove(receipt_id))

    def copy_path(self, now_ms: int) -> str | None:
        """As ``interface.Receipts.copy_path``."""
        return str(self._path.with_name(f"{self._path.name}.rollback-{now_ms}"))

    async def revise(self, receipts: Sequence[types.SettlementReceipt], *, now_ms: int) -> None:
        """As ``interface.Receipts.revise``."""
        async with self._changing:
            placed = await self._in_thread(lambda: [self._by_id(one.id) for one in receipts])
            changes = []
            for old, one in zip(placed, receipts, strict=True):
                if old is None or old.row.batch is not None or one.batch_id is not None:
                    raise errors.ReceiptError(f"receipt `{one.id}` is in a batch, or is not there: it cannot change")
                changes.append((old, one))
            await self._change(changes, copy=self.copy_path(now_ms))

    async def close(self) -> None:
        """As ``interface.Receipts.close``."""
        await self._journal.close()
        # The daemon gives each store a limited time to close. A reader that its disk holds has the file's lock.
        await anyio.to_thread.run_sync(self._file.close, abandon_on_cancel=True)

    async def _append(self, receipt: types.SettlementReceipt) -> None:
        found = await self._in_thread(lambda: self._by_id(receipt.id))
        if interface.is_stored(receipt, None if found is None else found.receipt):
            return
        # Shielded: the line may be written even if the caller is cancelled, and its id stays reserved until then.
        with anyio.CancelScope(shield=True):
            await self._journal.append(_line(receipt))

    async def _change(
        self, changed: Sequence[tuple[Placed, types.SettlementReceipt]], *, copy: str | None = None
    ) -> None:
        """Replace lines durably, after making the copy that is asked for."""
        last = {old.row.place: Placed(old.row, _line(new), new) for old, new in changed}
        changes = [last[place] for place in sorted(last)]
        old_lines = {old.row.offset: old.line for old, _ in changed}

        def change(there: Iterable[bytes]) -> Iterator[bytes]:
            if copy is not None:
                _write_copy(Path(copy), there)
            yield from self._replaced(there, old_lines, {one.row.offset: one.line for one in changes})
            self._file.will_change(changes)

        with anyio.CancelScope(shield=True):
            await self._journal.change(change)

    def _replaced(self, there: Iterable[bytes], old: dict[int, bytes], new: dict[int, bytes]) -> Iterator[bytes]:
        """Yield the lines with those at the offsets of ``old`` replaced. In the journal's thread."""
        offset = 0
        for line in there:
            if old.get(offset, line) != line:
                break
            yield new.pop(offset, line)
            offset += len(line) + 1
        if new:
            raise errors.StoreError("somebody else changed the file", where=str(self._path))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await anyio.to_thread.run_sync(work, limiter=self._threads)

    # --- in worker threads --------------------------------------------------------------------------------

    def _by_id(self, receipt_id: str) -> Placed | None:
        def row(index: Index) -> Sequence[Position]:
            found = index.by_id(receipt_id)
            return () if found is None else (found,)

        return next(iter(self._file.find(row)), None)

    def _pages(self, page: _Page, size: int = _PAGE) -> Iterator[Placed]:
        """Yield the receipts page by page. Places stay, so that each page continues where the last one ended."""
        last: Placed | None = None
        while found := self._file.find(functools.partial(page, last=last, size=size)):
            yield from found
            last = found[-1]

    def _chosen(self, page: _Page, limit: int, keep: interface.Keep) -> tuple[types.SettlementReceipt, ...]:
        size = max(_FEW, min(limit, _PAGE))
        found = (one.receipt for one in self._pages(page, size))
        return tuple(itertools.islice(filter(keep, found), _natural(limit)))

    def _of_batch(self, batch_id: str) -> Iterator[Placed]:
        def page(index: Index, *, last: Placed | None, size: int) -> Sequence[Position]:
            return index.of_batch(batch_id, 0 if last is None else last.row.place, size)

        return self._pages(page)

    def _batch_of(
        self, receipt_ids: Sequence[str]
    ) -> tuple[interface.Batch, list[tuple[Placed, types.SettlementReceipt]]]:
        placed = []
        for key in receipt_ids:
            one = self._by_id(key)
            if one is None or one.row.batch is not None:
                raise errors.ReceiptError(f"receipt `{key}` is in a batch already, or is not there")
            placed.append(one)
        # INVARIANT: a batch has the order of the file, which is all that is left of it when the index is made again.
        placed.sort()
        batch = interface.batch_of([one.receipt for one in placed])
        return batch, [(one, interface.in_batch(one.receipt, batch)) for one in placed]

    def _batches(self, chosen: Callable[[Index], Sequence[tuple[str, int]]]) -> tuple[interface.Batch, ...]:
        return tuple(
            _batch_at(first.receipt, count)
            for batch_id, count in self._file.ask(chosen)
            for first in self._file.find(functools.partial(Index.of_batch, batch_id=batch_id, place=0, limit=1))
        )

    def _prove(self, receipt_id: str) -> receipt_tree.ReceiptProof | None:
        asked = self._by_id(receipt_id)
        if asked is None or (batch_id := asked.receipt.batch_id) is None:
            return None
        place, leaves = 0, []
        for number, one in enumerate(self._of_batch(batch_id)):
            leaves.append(interface.leaf(one.receipt).digest())
            place = number if one.row.id == receipt_id else place
        return interface.proof_of(batch_id, leaves, place, asked.receipt.merkle_root)


def _line(receipt: types.SettlementReceipt) -> bytes:
    """Return the line of a receipt. A changed copy of a receipt was not validated: the line is read back.

    Raises:
        errors.ReceiptError: the line would be no receipt, and with it the file could not be opened again.
    """
    try:
        line = rows.line(receipt)
        rows.read(line, receipt.id)
    except (errors.StoreError, ValueError) as e:
        raise errors.ReceiptError(f"receipt `{receipt.id}` has a value that no receipt can have") from e
    return line


def _natural(limit: int) -> int:
    return max(0, min(limit, 2**63 - 1))


def _batch_at(receipt: types.SettlementReceipt, count: int) -> interface.Batch:
    return interface.Batch(
        batch_id=receipt.batch_id or "",
        merkle_root=receipt.merkle_root or "",
        receipt_count=count,
        chain=receipt.chain,
        cluster=receipt.cluster,
        tx_sig=receipt.tx_sig or receipt.onchain_sig,
        slot=receipt.slot,
        confirmed_at=receipt.confirmed_at,
    )


def _write_copy(path: Path, lines: Iterable[bytes]) -> None:
    """Write the unchanged lines to a new file. Runs in the journal's thread, between two writes."""
    directory = atomic_file.open_directory(path.parent, error=errors.StoreError)
    try:
        atomic_file.create(directory, path.name, journal.joined(lines))
    except OSError as e:
        raise errors.StoreError(f"no copy could be made first: {e.strerror}", where=str(path)) from e
    finally:
        os.close(directory)
