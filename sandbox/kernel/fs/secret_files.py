"""A file system of secrets: in memory that is never swapped, of one run alone, and read-only once it is filled.

tmpfs with ``noswap`` (Linux 6.4), else ramfs, which is never swapped and as large as what we write: as systemd does for
its own credentials. It is no mount that anybody sees before it is attached, and gone with its last.
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
    """Made for the user ``uid``. Use as a context manager: leaving lets go of it, and what is attached stays.

    Raises:
        errors.KernelError: the kernel makes none.
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
        """A file that the user alone can read.

        Raises:
            errors.KernelError: it cannot be written.
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
        """From now on nobody writes there.

        Raises:
            errors.KernelError: the kernel does not.
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
