"""The stdout of one command. Its failure is one error of ours, whether we write, click or another library."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import TYPE_CHECKING

from policy import errors

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Stdout(io.FileIO):
    """Descriptor 1."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            if (count := super().write(data)) is None:  # full and not blocking: the buffer would not report it
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        except BrokenPipeError:
            raise
        except OSError as e:
            # The interpreter writes the rest at its exit, and would fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), 1)
            raise errors.StdoutError(
                f"stdout cannot be written: {(e.strerror or str(e)).lower()}",
                hint="make room where stdout leads; `covenant audit recent` shows what was done",
            ) from e
        return count


def install() -> None:
    """Wrap ``sys.stdout``. From now on a write to it raises ``errors.StdoutError`` where it fails.

    A reader that has ended is no fault: that stays a BrokenPipeError.

    Raises:
        errors.StdoutError: stdout is closed.
    """
    present = sys.stdout
    if present is None:
        raise errors.StdoutError("stdout is closed", hint="leave it open, or write > /dev/null")
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(_Stdout(1, "w", closefd=False)),
        encoding=present.encoding,
        errors=present.errors,
        line_buffering=bool(present.line_buffering),
    )
