"""Read a secret from a descriptor straight into locked memory; never from an argument or the environment."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from policy import errors
from sandbox.kernel.proc.secret_memory import Locked, guard_process
from sandbox.vault.backend import MAX_VALUE_BYTES


@contextlib.contextmanager
def from_descriptor(fd: int) -> Iterator[memoryview]:
    """Yield all bytes from a descriptor, without one newline at the end.

    Raises:
        errors.SecretError: Raised when there is more than a secret may have, or a read fails.
    """
    guard_process()
    # Room for that newline, and for a byte too much.
    with Locked(MAX_VALUE_BYTES + 2) as buffer:
        size = 0
        while size < len(buffer):
            try:
                got = os.readv(fd, [buffer.view[size:]])
            except OSError as e:
                raise errors.SecretError(f"descriptor {fd} cannot be read: {e.strerror}") from None
            if not got:
                break
            size += got
        if size and buffer.view[size - 1] == ord("\n"):
            size -= 1
        yield buffer.view[:size]


@contextlib.contextmanager
def typed(text: str) -> Iterator[memoryview]:
    """Yield a secret typed at a prompt. Python keeps ``text`` itself until it is collected.

    Raises:
        errors.SecretError: Raised when it is longer than a secret may be.
    """
    guard_process()
    raw = bytearray(text.encode("utf-8", "surrogateescape"))
    with Locked(len(raw)) as buffer:
        buffer.view[:] = raw
        raw[:] = bytes(len(raw))
        yield buffer.view
