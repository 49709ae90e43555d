"""Idmapped mounts: a mount in which the owner of a tree on the disk is another user, and nobody else is anybody.

mount_setattr(2) takes the mapping from a user namespace; the namespace needs no process once it has its maps.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from policy import errors
from sandbox.kernel import libc

# Who creates a file through the mount as host root (gVisor does, and gives the file to its user at once) must be
# somebody on the disk for that moment: the user that owns nothing.
_NOBODY = 65534


def namespace(owner: tuple[int, int], shown: tuple[int, int]) -> int:
    """A descriptor of a user namespace that maps ``owner`` (uid and gid on the disk) to ``shown``, and root to nobody.

    Every other id is mapped to nothing: files of others are nobody's there, and cannot be made.

    Raises:
        errors.KernelError: the kernel does not make one.
    """
    parent = os.getpid()
    ready_r, ready_w = os.pipe2(os.O_CLOEXEC)
    # As in spawn.spawn: what a signal raises must neither unwind the caller in the child nor leave the child behind.
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
    """In the child: never returns. It has copies of all that the caller holds, locks among them, and must not outlive
    it; every signal but SIGKILL is blocked."""
    try:
        libc.unshare(libc.CLONE_NEWUSER)
        libc.set_parent_death_signal(signal.SIGKILL)
        if os.getppid() == parent:
            os.write(ready, b"1")
            signal.pause()
    finally:
        os._exit(1)
