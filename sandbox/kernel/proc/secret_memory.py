"""Memory for secrets: pages of their own that are not swapped, dumped or inherited, overwritten when let go.

Python copies what it computes with. What holds a secret for longer than one call is a ``Locked``, and what fills and
reads it works on its buffer (``os.readv``, ``decrypt_into``); SECURITY.md says what that does not reach.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from types import TracebackType
from typing import Self

from policy import errors
from sandbox import core_dumps
from sandbox.kernel import libc


class Locked:
    """``size`` bytes of zeros. Use as a context manager: leaving overwrites them.

    INVARIANT: a process that forks while it holds one does not touch it in the child, which has not these pages.

    Raises:
        errors.KernelError: the pages cannot be locked.
    """

    def __init__(self, size: int) -> None:
        self._map = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        try:
            libc.mlock(self._address(), len(self._map))
            self._map.madvise(mmap.MADV_DONTDUMP)
            self._map.madvise(mmap.MADV_DONTFORK)
        except OSError as e:
            self._map.close()
            raise errors.KernelError(f"memory for secrets: {e}", hint="raise RLIMIT_MEMLOCK") from e
        self._view = memoryview(self._map)[:size]

    @property
    def view(self) -> memoryview:
        """The bytes themselves."""
        return self._view

    def __len__(self) -> int:
        return len(self._view)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def fill_random(self) -> None:
        """Fresh bytes of the kernel's generator."""
        libc.getrandom(self._address(), len(self._view))

    def close(self) -> None:
        """Overwrite the bytes and give the pages back; what still looks at them sees zeros."""
        if self._map.closed:
            return
        ctypes.memset(self._address(), 0, len(self._map))
        self._view.release()
        # A remaining slice of the view keeps the pages, already overwritten, until it is freed.
        with contextlib.suppress(BufferError):
            self._map.close()

    def _address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))


def guard_process() -> None:
    """Forbid core dumps of this process, and tracing or reading its memory by processes of its own uid (prctl(2)).

    This is permanent: memory that was given back may still hold a secret.
    """
    core_dumps.forbid()
    libc.prctl(libc.PR_SET_DUMPABLE, 0)
