"""Remove files whose blocks are freed by further threads.

A file system frees the blocks of a removed file when its last descriptor is closed, and may wait for its disk
meanwhile: 0.3 to 0.5 ms for each file (ADR 0131). The names are gone in order; only the closing is concurrent.
"""

from __future__ import annotations

import os
import queue
import threading
from types import TracebackType
from typing import Final

_THREADS: Final = 8
# Descriptors that wait to be closed.
_MOST_OPEN: Final = 64


class Freeing:
    """Remove files. At the end of the block all of them are freed. Nothing may be forked within it."""

    def __init__(self) -> None:
        self._open: queue.Queue[int | None] = queue.Queue(_MOST_OPEN)
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Freeing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _ in self._threads:
            self._open.put(None)
        for one in self._threads:
            one.join()

    def unlink(self, directory: int, name: str) -> None:
        """Remove a name of an open directory. The file is freed later.

        Raises:
            OSError: it cannot be removed.
        """
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
        try:
            os.unlink(name, dir_fd=directory)
        except OSError:
            os.close(fd)
            raise
        if self._has_threads():
            self._open.put(fd)
        else:
            os.close(fd)

    def _has_threads(self) -> bool:
        """Start one thread more, up to the most. False: the user may have none (RLIMIT_NPROC)."""
        if len(self._threads) < _THREADS:
            one = threading.Thread(target=self._close, daemon=True)
            try:
                one.start()
            except RuntimeError:
                return bool(self._threads)
            self._threads.append(one)
        return True

    def _close(self) -> None:
        while (fd := self._open.get()) is not None:
            os.close(fd)
