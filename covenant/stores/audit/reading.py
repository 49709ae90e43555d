"""Readers of the log that run while it is written."""

from __future__ import annotations

import contextlib
import json
import mmap
import threading
from collections.abc import Iterator

from covenant.stores.audit import files
from policy.audit_log import chain as audit_log_chain


class Shape:
    """A shared lock on the identity of the file. Many readers by offset hold it at once; a cut, which replaces the
    file, waits for them."""

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._readers = 0
        self._changing = False

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Hold the file in place, to read it by offsets."""
        with self._turn:
            # A waiting cut takes precedence: the writing of rows waits behind it.
            while self._changing:
                self._turn.wait()
            self._readers += 1
        try:
            yield
        finally:
            with self._turn:
                self._readers -= 1
                self._turn.notify_all()

    @contextlib.contextmanager
    def changed(self) -> Iterator[None]:
        """Wait for the readers, then hold the file alone, to replace it."""
        with self._turn:
            self._changing = True
            try:
                while self._readers:
                    self._turn.wait()
                yield
            finally:
                self._changing = False
                self._turn.notify_all()


class LogFiles:
    """The files, with the interface ``proofs.RowSource``."""

    def __init__(self, of: files.Files) -> None:
        self._files = of

    @property
    def head(self) -> audit_log_chain.Head:
        """The acknowledged head."""
        return self._files.head

    def lines(self, start: int = 0) -> Iterator[tuple[int, bytes]]:
        """Yield the lines from an offset on, each with its own offset."""
        return self._files.lines(start)

    def index_of(self, event_id: str) -> int | None:
        """Return the index, counted from 0, of the line with this id."""
        size = self._files.head.chain_bytes
        if not size:
            return None
        needle = f'"event_id":{json.dumps(event_id)},'.encode()
        with mmap.mmap(self._files.chain, size, prot=mmap.PROT_READ) as chain:
            at = chain.find(needle)
            if at < 0:
                return None
            start = chain.rfind(b"\n", 0, at) + 1
            anchor = audit_log_chain.Anchor.parse(chain[start : chain.find(b"\n", at)])
        return anchor.index if anchor and anchor.event_id == event_id else None
