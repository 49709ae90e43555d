"""A uid of its own for each live run, from the configured range; held by a file lock that ends with its holder."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType

from policy import errors


class UidLease:
    """The lowest free uid of the range. Use as a context manager; a crash of the holder frees it."""

    def __init__(self, directory: Path, *, first: int, count: int) -> None:
        self._directory, self._first, self._count = directory, first, count
        self._fd = -1

    def __enter__(self) -> int:
        self._directory.mkdir(mode=0o700, exist_ok=True)
        for uid in range(self._first, self._first + self._count):
            path = self._directory / str(uid)
            fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                continue
            self._fd = fd
            return uid
        raise errors.HostError(
            f"all {self._count} uids of the range are in use", hint="raise uid_count in the configuration"
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)
