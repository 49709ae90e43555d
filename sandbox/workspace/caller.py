"""Do a piece of work with the rights of a caller alone: its ids, and no capability."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
from msgspec import Struct

from policy import errors
from sandbox.kernel import libc
from sandbox.kernel.proc import child

T = TypeVar("T")


class CallerIdentity(Struct, frozen=True):
    """The ids of a caller."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()


def of(uid: int, gid: int) -> CallerIdentity:
    """Return the identity of a user with the groups that this machine gives it."""
    import pwd

    try:
        groups = os.getgrouplist(pwd.getpwuid(uid).pw_name, gid)
    except KeyError:
        groups = [gid]
    return CallerIdentity(uid, gid, tuple(sorted(set(groups))))


def work(
    identity: CallerIdentity, does: Callable[[], T], kind: type[T], seconds: int = 0, *, starts_programs: bool = False
) -> T:
    """Call ``does`` in a process with the caller's rights, and return its result, which has the type ``kind``.

    The process is killed after ``seconds``, unless they are 0: the caller may have a file system of its own at any of
    its paths, which never answers. With ``starts_programs`` it is the first of a PID namespace, so that no program
    outlives it: a caller can trace a program of its own rights, and would have processes among the supervisor's.

    Raises:
        errors.WorkspaceError: it raised an error of the system, or the process was killed.
    """

    def done() -> tuple[bytes, Sequence[int]]:
        take(identity)
        _alarm(seconds)
        return msgspec.msgpack.encode(does()), ()

    def apart() -> tuple[bytes, Sequence[int]]:
        # The alarm is this process's: the first one of a namespace is not ended by it (pid_namespaces(7)).
        _alarm(seconds)
        libc.unshare(libc.CLONE_NEWPID)
        return child.work(done)

    try:
        raw, _ = child.work(apart if starts_programs else done)
    except OSError as e:
        raise errors.WorkspaceError(e.strerror or str(e)) from e
    return msgspec.msgpack.decode(raw, type=kind)


def _alarm(seconds: int) -> None:
    """Let this process be killed after so many seconds, unless they are 0."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    signal.alarm(seconds)


def take(identity: CallerIdentity) -> None:
    """Become the caller for good.

    Raises:
        OSError: the kernel refuses a step.
    """
    parent = os.getppid()
    libc.drop_bounding_set()
    os.setgroups(identity.groups)
    os.setresgid(identity.gid, identity.gid, identity.gid)
    os.setresuid(identity.uid, identity.uid, identity.uid)
    libc.drop_capabilities()
    libc.set_no_new_privs()
    # A change of uid clears the signal (prctl(2)).
    libc.set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent:
        raise OSError(0, "the parent is gone")
