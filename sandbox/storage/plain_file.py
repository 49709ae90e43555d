"""Read one file of a package directory, with a bound, before anything is known of the package."""

from __future__ import annotations

import errno
import os
import stat

from policy import errors

# O_NONBLOCK: a fifo in place of a file must not block.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def read(directory: int, name: str, *, most: int) -> bytes | None:
    """Return a file's bytes; None if the open directory has no such name.

    Raises:
        errors.PackageError: it is no plain file, cannot be read, or is over ``most`` bytes.
    """
    try:
        fd = os.open(name, _FILE, dir_fd=directory)
    except FileNotFoundError:
        return None
    except OSError as e:
        reason = "is a symlink" if e.errno == errno.ELOOP else f"cannot be read: {e.strerror}"
        raise errors.PackageError(f"`{name}` {reason}", where=name) from e
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise errors.PackageError(f"`{name}` is no plain file", where=name)
        with os.fdopen(fd, "rb", closefd=False) as stream:
            raw = stream.read(most + 1)
    except OSError as e:
        raise errors.PackageError(f"`{name}` cannot be read: {e.strerror}", where=name) from e
    finally:
        os.close(fd)
    if len(raw) > most:
        raise errors.PackageError(f"`{name}` is over {most} bytes", where=name)
    return raw
