"""A file system for the secrets of one run, in memory that is never swapped. Read-only once it is filled.

It is a tmpfs with ``noswap`` (Linux 6.4), else a ramfs, which is never swapped and only as large as its content.
systemd does the same for its credentials. No process sees the mount before it is attached; it ends with its last use.
"""

from __future__ import annotations

import os
from types import TracebackType
from typing import Final, Self

from policy import errors
from sandbox.kernel import libc

_SIZE: Final = "4m"
_INODES: Final = "300"
_ATTRIBUTES: Final = libc.MOUNT_ATTR_NOSUID | libc.MOUNT_ATTR_NODEV | libc.MOUNT_ATTR_NOEXEC


class SecretFiles:
    """A new file system for the user ``uid``. As a context manager it is closed at the end; attached mounts stay.

    Raises:
        errors.KernelError: Raised when the kernel makes none.
    """

    def __init__(self, uid: int) -> None:
        self._uid = uid
        try:
            self.fd = _mounted()
        except OSError as e:
            raise errors.KernelError(f"a file system for secrets cannot be made: {e}") from e

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self.fd)

    def put(self, name: str, value: memoryview) -> None:
        """Write a file that only the user can read.

        Raises:
            errors.KernelError: Raised when it cannot be written.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            fd = os.open(name, flags, 0o400, dir_fd=self.fd)
            try:
                left = value
                while left:
                    left = left[os.write(fd, left) :]
                os.fchmod(fd, 0o400)
                os.fchown(fd, self._uid, self._uid)
            finally:
                os.close(fd)
        except OSError as e:
            raise errors.KernelError(f"secret `{name}` cannot be made a file: {e.strerror}") from e

    def seal(self) -> None:
        """Make the file system read-only.

        Raises:
            errors.KernelError: Raised when the kernel refuses.
        """
        try:
            directory = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.fd)
            try:
                os.fchmod(directory, 0o500)
                os.fchown(directory, self._uid, self._uid)
            finally:
                os.close(directory)
            libc.mount_setattr(self.fd, _ATTRIBUTES | libc.MOUNT_ATTR_RDONLY)
        except OSError as e:
            raise errors.KernelError(f"the file system for secrets cannot be sealed: {e.strerror}") from e


def _mounted() -> int:
    try:
        options = {"size": _SIZE, "nr_inodes": _INODES, "noswap": None, "mode": "0700"}
        return libc.new_mount("tmpfs", options, _ATTRIBUTES)
    except OSError:
        return libc.new_mount("ramfs", {"mode": "0700"}, _ATTRIBUTES)
