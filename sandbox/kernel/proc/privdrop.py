"""How a process of ours gives up everything before it hears the agent: files, identity, capabilities, system calls.

For a process with one thread: each step binds the calling thread and what it starts later.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from sandbox.kernel import libc

_COVER = libc.MS_RDONLY | libc.MS_NOSUID | libc.MS_NODEV | libc.MS_NOEXEC


@dataclass(frozen=True, slots=True)
class Seal:
    """What stays: the ids of ``uid``, ``limits`` as (resource, value) pairs, the calls that ``program`` (BPF) allows.

    ``parent`` is the process whose death ends this one.
    """

    uid: int
    parent: int
    limits: Sequence[tuple[int, int]]
    program: bytes

    def describe(self) -> str:
        """The operation in words."""
        return f"become uid {self.uid} without files and capabilities, under a filter"


def apply(seal: Seal) -> None:
    """Give up the rest, in the order in which each step still may.

    Raises:
        OSError: the kernel refused a step; the caller must end.
    """
    if not seal.uid:
        raise OSError(0, "refusing to serve an agent as root")
    _empty_root()
    libc.drop_bounding_set()
    os.setgroups([])
    os.setresgid(seal.uid, seal.uid, seal.uid)
    os.setresuid(seal.uid, seal.uid, seal.uid)
    libc.drop_capabilities()
    if os.getresuid() != (seal.uid,) * 3 or os.getresgid() != (seal.uid,) * 3 or os.getgroups():
        raise OSError(0, "the kernel did not take the identity")
    # A change of uid takes the signal away that the fork asked for (prctl(2)), so it is asked for again.
    libc.set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != seal.parent:
        raise OSError(0, "the supervisor is gone")
    # Others of this uid serve other agents: none may look into another's memory.
    libc.prctl(libc.PR_SET_DUMPABLE, 0)
    # After the identity: RLIMIT_NPROC over its number at setresuid(2) would count against the next step.
    for name, value in seal.limits:
        resource.setrlimit(name, (value, value))
    libc.set_no_new_privs()
    libc.set_seccomp_filter(seal.program)


def _empty_root() -> None:
    """A root directory with nothing in it: a gate that may make sockets must not reach the host's by their paths.

    Nothing can be imported after this; the filter refuses to open files anyway.
    """
    libc.private_mounts()
    # Any directory that surely exists; what it covers is covered in this process alone.
    libc.mount("none", "/proc", "tmpfs", _COVER, "size=4k,nr_inodes=1,mode=0555")
    os.chroot("/proc")
    os.chdir("/")
