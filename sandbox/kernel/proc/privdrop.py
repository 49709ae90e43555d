"""Drop all privileges of a process before it reads from the agent: files, identity, capabilities, system calls.

Only for a single-threaded process: each step applies to the calling thread and its later children.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Sequence

from msgspec import Struct

from sandbox.kernel import libc

_COVER = libc.MS_RDONLY | libc.MS_NOSUID | libc.MS_NODEV | libc.MS_NOEXEC


class Seal(Struct, frozen=True):
    """The rest that a process keeps: the ids of ``uid``, ``limits`` (resource, value), the calls of ``program`` (BPF).

    ``parent`` is the process whose death ends this one. With ``files`` it keeps its root directory.
    """

    uid: int
    parent: int
    limits: Sequence[tuple[int, int]]
    program: bytes
    files: bool = False

    def describe(self) -> str:
        """Describe the operation."""
        return f"become uid {self.uid} without files and capabilities, under a filter"


def apply(seal: Seal) -> None:
    """Drop everything else, in an order in which each step is still permitted.

    Raises:
        OSError: Raised when the kernel refuses a step. The caller must exit.
    """
    if not seal.uid:
        raise OSError(0, "refusing to serve an agent as root")
    if not seal.files:
        _empty_root()
    become(seal.uid, seal.parent, on_death=signal.SIGKILL)
    # Set limits after the identity: RLIMIT_NPROC exceeded at setresuid(2) would make the next step fail.
    for name, value in seal.limits:
        resource.setrlimit(name, (value, value))
    libc.set_no_new_privs()
    libc.set_seccomp_filter(seal.program)


def become(uid: int, parent: int, *, on_death: signal.Signals) -> None:
    """Take the identity of ``uid``, without groups and capabilities, and end with ``parent`` by a signal.

    Raises:
        OSError: Raised when the kernel refuses a step, or ``parent`` is gone. The caller must exit.
    """
    libc.drop_bounding_set()
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    libc.drop_capabilities()
    if os.getresuid() != (uid,) * 3 or os.getresgid() != (uid,) * 3 or os.getgroups():
        raise OSError(0, "the kernel did not take the identity")
    # A change of uid clears the parent death signal (prctl(2)), so it is set again.
    libc.set_parent_death_signal(on_death)
    if os.getppid() != parent:
        raise OSError(0, "the process that started this one is gone")
    # Other processes of this uid serve other agents: none may read another's memory.
    libc.prctl(libc.PR_SET_DUMPABLE, 0)


def _empty_root() -> None:
    """Change to an empty root directory. A gate that may make sockets must not reach the host's by their paths.

    Nothing can be imported after this; the filter refuses to open files anyway.
    """
    libc.private_mounts()
    # Any directory that surely exists. It is covered in this process only.
    libc.mount("none", "/proc", "tmpfs", _COVER, "size=4k,nr_inodes=1,mode=0555")
    os.chroot("/proc")
    os.chdir("/")
