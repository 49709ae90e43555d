"""Idmapped mounts: the owner of a tree on the disk appears as another user, and every other id is unmapped.

mount_setattr(2) takes the mapping from a user namespace; the namespace needs no process once it has its maps.
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
    parent = os.getpid()
    ready_r, ready_w = os.pipe2(os.O_CLOEXEC)
    # As in spawn.spawn: a signal's exception must neither unwind the caller in the child nor leave the child behind.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    pid = os.fork()
    if pid == 0:
        _hold(ready_w, parent)
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(ready_w)
        if os.read(ready_r, 1) != b"1":
            hint = "see /proc/sys/user/max_user_namespaces"
            raise errors.KernelError("the kernel makes no user namespace", hint=hint)
        for name, mine, theirs in zip(("uid_map", "gid_map"), owner, shown, strict=True):
            nobody = _NOBODY if mine != _NOBODY else _NOBODY - 1
            Path(f"/proc/{pid}/{name}").write_text(f"{mine} {theirs} 1\n{nobody} 0 1\n")
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as e:
        raise errors.KernelError(f"a user namespace cannot be mapped: {e.strerror}") from e
    finally:
        os.close(ready_r)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _hold(ready: int, parent: int) -> None:
    """Keep the namespace alive in the child, and never return.

    The child has copies of all locks and descriptors of the caller, so it must not outlive it. Every signal but SIGKILL
    is blocked.
    """
    try:
        libc.unshare(libc.CLONE_NEWUSER)
        libc.set_parent_death_signal(signal.SIGKILL)
        if os.getppid() == parent:
            os.write(ready, b"1")
            signal.pause()
    finally:
        os._exit(1)
