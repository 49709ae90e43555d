"""Idmapped mounts: the owner of a tree on the disk appears as another user, and every other id is unmapped.

mount_setattr(2) takes the mapping from a user namespace. The namespace needs no process once it has its maps, and gets
them while the process that it was made for is a zombie: so none has to live, and a killed caller leaves none behind.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from policy import errors
from sandbox.kernel import libc

# gVisor creates a file through the mount as host root, and gives it to its user at once. For that moment root must have
# an id on the disk: the user that owns nothing.
_NOBODY = 65534


def namespace(owner: tuple[int, int], shown: tuple[int, int]) -> int:
    """Return a descriptor of a user namespace that maps ``owner`` to ``shown`` (uid, gid), and root to uid 65534.

    ``owner`` are the ids on the disk. Every other id is unmapped: files of other users have no owner there, and cannot
    be created.

    Raises:
        errors.KernelError: Raised when the kernel makes no namespace.
    """
    # As in spawn.spawn: a signal's exception must not leave the child behind.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        return _mapped(owner, shown)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _mapped(owner: tuple[int, int], shown: tuple[int, int]) -> int:
    try:
        pid = libc.clone_ended(libc.CLONE_NEWUSER)
    except OSError as e:
        hint = "see /proc/sys/user/max_user_namespaces"
        raise errors.KernelError(f"the kernel makes no user namespace: {e.strerror}", hint=hint) from e
    try:
        for name, mine, theirs in zip(("uid_map", "gid_map"), owner, shown, strict=True):
            nobody = _NOBODY if mine != _NOBODY else _NOBODY - 1
            Path(f"/proc/{pid}/{name}").write_text(f"{mine} {theirs} 1\n{nobody} 0 1\n")
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as e:
        raise errors.KernelError(f"a user namespace cannot be mapped: {e.strerror}") from e
    finally:
        os.waitpid(pid, 0)
