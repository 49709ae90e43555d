"""The receipts as a journal: ``receipts/working.jsonl``, one per line, rewritten when they are settled."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import anyio

from covenant.stores.journal import Journal
from covenant.stores.settlement import in_memory, rows
from policy import errors
from sandbox.storage import atomic_file


class DurableReceipts(in_memory.InMemoryReceipts):
    """``interface.Receipts`` over a journal. Make it with ``open``."""

    def __init__(self, journal: Journal, path: Path) -> None:
        super().__init__()
        self._journal = journal
        self._path = path

    @classmethod
    async def open(cls, path: Path) -> Self:
        """Open or create the receipts at ``path``.

        Raises:
            errors.StoreError: the file cannot be used, or a line of it is no receipt.
        """
        journal = await Journal.open(path)
        receipts = cls(journal, path)
        await journal.replay(receipts._restore)
        return receipts

    @property
    def recovered(self) -> list[str]:
        """Messages about data set aside at the opening, as ``Journal.recovered``."""
        return self._journal.recovered

    async def close(self) -> None:
        """As ``interface.Receipts.close``."""
        await self._journal.close()

    async def _keep(self, line: bytes) -> None:
        # Shielded: even if the caller is cancelled, the receipt added in memory becomes durable or is removed.
        with anyio.CancelScope(shield=True):
            await self._journal.append(line)

    def copy_path(self, now_ms: int) -> str | None:
        """As ``interface.Receipts.copy_path``."""
        return str(self._path.with_name(f"{self._path.name}.rollback-{now_ms}"))

    async def _replace(self, lines: Mapping[str, bytes], copy: str | None) -> None:
        def select(there: list[bytes]) -> list[bytes]:
            if copy is not None:
                _write_copy(Path(copy), there)
            return [lines.get(rows.receipt_id(line), line) for line in there]

        await self._journal.rewrite(select)


def _write_copy(path: Path, lines: list[bytes]) -> None:
    """Write the unchanged lines to a new file. Runs in the journal's thread, between two writes."""
    directory = atomic_file.open_directory(path.parent, error=errors.StoreError)
    try:
        atomic_file.create(directory, path.name, b"".join(line + b"\n" for line in lines))
    except OSError as e:
        raise errors.StoreError(f"no copy could be made first: {e.strerror}", where=str(path)) from e
    finally:
        os.close(directory)
