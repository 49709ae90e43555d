"""Confine a trusted-local agent on the host: namespaces, covered directories, a uid, limits, a deny filter.

``enter`` runs as root in the child that ``spawn.spawn`` forked, in its own mount namespace. It returns only in the
process that becomes the agent. Two small processes of ours remain above it:

    supervisor -> keeper (host's pid namespace) -> init (pid 1 of a new one) -> agent (pid 2) and what it starts

When init ends the kernel kills every process in its namespace, daemons and new sessions included. Init ends with the
agent, with the keeper (parent death signal), and so with the supervisor. The keeper handles two signals. It passes
SIGTERM on to every process of the agent. At ``KILL_ALL`` it kills init and waits until the namespace is empty.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
from collections.abc import Iterator
from typing import Any, NoReturn

from msgspec import Struct

from policy import errors
from sandbox.kernel import libc
from sandbox.kernel.seccomp import load

KILL_ALL = signal.SIGUSR1
_SIGNALS = frozenset({signal.SIGTERM, KILL_ALL, signal.SIGCHLD})
_COVER = libc.MS_NOSUID | libc.MS_NODEV | libc.MS_NOEXEC
_FAILED = 127


class Confinement(Struct, frozen=True):
    """Confinement that the child applies to itself before execve.

    ``hidden`` directories become empty and unreadable. The first of ``scratch`` is a tmpfs of ``scratch_bytes`` that
    the agent owns, and the others show the same one. With 0 bytes they are empty and read-only. ``limits`` are
    (resource, value) pairs. ``filter`` comes from ``load.prepare``.
    """

    uid: int
    gid: int
    hidden: tuple[str, ...]
    scratch: tuple[str, ...]
    scratch_bytes: int
    own_network: bool
    limits: tuple[tuple[int, int], ...]
    filter: Any

    def describe(self) -> str:
        """Describe the operation."""
        network = "an empty network" if self.own_network else "the host's network"
        return f"become uid {self.uid} with {network}, without {', '.join(self.hidden)}"


def enter(confinement: Confinement) -> None:
    """Confine the calling process. Returns only in the agent's process.

    Raises:
        errors.KernelError: Raised when a step fails, with its name. No code of the agent has run.
    """
    with _step("make namespaces"):
        network = libc.CLONE_NEWNET if confinement.own_network else 0
        libc.unshare(libc.CLONE_NEWPID | libc.CLONE_NEWIPC | network)
    with _step("make the host read-only"):
        root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        libc.mount_setattr(root, libc.MOUNT_ATTR_RDONLY | libc.MOUNT_ATTR_NOSUID, recursive=True)
        os.close(root)
    for path in confinement.hidden:
        with _step(f"hide {path}"):
            libc.mount("covenant", path, "tmpfs", _COVER | libc.MS_RDONLY, "size=4k,mode=0700")
    _scratch(confinement)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    lives, keeps = os.pipe2(os.O_CLOEXEC)
    with _step("fork"):
        init = os.fork()
    if init:
        _keep(init, keeps)
    with _step("follow the keeper"):
        libc.set_parent_death_signal(signal.SIGKILL)
        os.close(keeps)
        if _hung_up(lives):
            os._exit(_FAILED)  # the keeper died before the line above
    with _step("mount /proc"):
        libc.mount("proc", "/proc", "proc", _COVER)
    with _step("fork"):
        agent = os.fork()
    if agent:
        _reap(agent)
    _become(confinement)


def _scratch(confinement: Confinement) -> None:
    first, *others = confinement.scratch
    size = confinement.scratch_bytes
    with _step(f"mount {first}"):
        if size:
            # size=0 would mean no limit, hence the other branch; inodes are kernel memory and bounded with it.
            owner = f"uid={confinement.uid},gid={confinement.gid}"
            data = f"size={size},nr_inodes={max(64, size // 4096)},mode=1777,{owner}"
            libc.mount("covenant", first, "tmpfs", _COVER, data)
        else:
            libc.mount("covenant", first, "tmpfs", _COVER | libc.MS_RDONLY, "size=4k,mode=0555")
    for path in others:
        with _step(f"mount {path}"):
            libc.mount(first, path, flags=libc.MS_BIND)


def _become(confinement: Confinement) -> None:
    """Drop all privileges in the agent's process, in an order in which each step is still permitted."""
    with _step("leave the session"):
        os.setsid()
    with _step("reset signals"):
        # Python ignores these two, and an ignored signal stays ignored across execve.
        for number in (signal.SIGXFSZ, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
    with _step("mark descriptors"):
        # Not closed yet: one of them reports a failure of the steps below, and closes at execve.
        libc.close_range(3, at_exec=True)
    with _step(f"become uid {confinement.uid}"):
        if not confinement.uid or not confinement.gid:
            raise OSError(0, "refusing to run an agent as root")
        libc.drop_bounding_set()
        os.setgroups([])
        os.setresgid(confinement.gid, confinement.gid, confinement.gid)
        os.setresuid(confinement.uid, confinement.uid, confinement.uid)
        if os.getresuid() != (confinement.uid,) * 3 or os.getresgid() != (confinement.gid,) * 3 or os.getgroups():
            raise OSError(0, "the kernel did not take the identity")
    with _step("set limits"):
        for name, value in confinement.limits:
            resource.setrlimit(name, (value, value))
    with _step("give up new privileges"):
        libc.set_no_new_privs()
    with _step("load the filter"):
        load.enter(confinement.filter)


def _keep(init: int, keeps: int) -> NoReturn:
    """Run the keeper: it passes signals on and ends with init. It holds only the descriptor that init watches."""
    status = _FAILED
    try:
        libc.close_range(0, keeps - 1)
        libc.close_range(keeps + 1)
        while True:
            number = signal.sigwait(_SIGNALS)
            if number == signal.SIGTERM:
                os.kill(init, signal.SIGTERM)
            elif number == KILL_ALL:
                os.kill(init, signal.SIGKILL)
            else:
                # Init's exit is reaped only after its namespace is empty (pid_namespaces(7)).
                pid, raw = os.waitpid(init, os.WNOHANG)
                if pid:
                    status = _status(raw)
                    break
    finally:
        os._exit(status)


def _reap(agent: int) -> NoReturn:
    """Run init: it reaps orphans, passes SIGTERM on, and ends with the agent."""
    try:
        libc.close_range(0)
        while True:
            if signal.sigwait(_SIGNALS) == signal.SIGTERM:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(-1, signal.SIGTERM)
            with contextlib.suppress(ChildProcessError):
                while True:
                    pid, raw = os.waitpid(-1, os.WNOHANG)
                    if not pid:
                        break
                    if pid == agent:
                        # Exit at once: orphans that end faster than they are reaped would keep this loop running.
                        os._exit(_status(raw))
    finally:
        os._exit(_FAILED)


def _status(raw: int) -> int:
    code = os.waitstatus_to_exitcode(raw)
    return code if code >= 0 else 128 - code


def _hung_up(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, 0)
    return bool(poll.poll(0))


@contextlib.contextmanager
def _step(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise errors.KernelError(f"{name}: {e.strerror}") from e
    except ValueError as e:
        raise errors.KernelError(f"{name}: {e}") from e
