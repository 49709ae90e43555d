"""Counts every step that a process takes into the kernel, and kills a chosen process before a chosen one.

Between two steps nothing changes that another process can see, so these are all the points at which a kill can make a
difference. A step is a call of the os module, a lock, a file's making and its filling, a socket's message, a wait, a
program's start, or a call of sandbox.kernel.libc. Forked processes count for themselves, in the order of their forks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import mmap
import os
import pathlib
import resource
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Processes that are counted: the first and those that it forks and that go on as Python.
SLOTS = 64
# Of the os module, what asks nothing of the kernel, or is asked by this module.
_PURE = frozenset({"_exit", "fspath", "getpid", "strerror", "waitstatus_to_exitcode", "get_inheritable", "putenv"})
_SOCKET = ("bind", "close", "connect", "recv", "recvfrom", "recvmsg", "send", "sendall", "sendmsg", "sendto")
# Looking for a victim that is not there yet costs; it is looked for this often (seconds).
_LOOK_SECONDS = 0.002


@dataclass(frozen=True)
class Target:
    """Which process dies, or what runs out, and when: ``victim`` (see ``ROLES``, ``FAULTS``) as soon as the process
    ``slot`` is about to take its ``step`` (from 1), or the first after it at which there is such a victim."""

    slot: int
    step: int
    victim: str = "self"


class Counter:
    """Counters that the processes of one run share: each one's steps, their number, and whether the kill was done."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8 * (SLOTS + 2))

    def get(self, slot: int) -> int:
        """Return the number of steps that a process took so far."""
        return int(struct.unpack_from("Q", self._memory, 8 * slot)[0])

    def put(self, slot: int, value: int) -> None:
        """Set the number of steps of a process."""
        struct.pack_into("Q", self._memory, 8 * slot, value)

    @property
    def forks(self) -> int:
        """How many processes were forked."""
        return self.get(SLOTS)

    @property
    def fired(self) -> bool:
        """Whether the victim was killed."""
        return self.get(SLOTS + 1) != 0

    def counts(self) -> list[int]:
        """The steps of each process, in the order of their forks."""
        return [self.get(slot) for slot in range(min(SLOTS, self.forks + 1))]


class Trigger:
    """Installed once in the process that is to be watched, before it does anything."""

    def __init__(self, counter: Counter, target: Target | None, ballast: str = "") -> None:
        self._counter, self._target, self._ballast = counter, target, ballast
        self._slot, self._busy, self._looked, self._first = 0, False, 0.0, os.getpid()
        self._listdir, self._open, self._read, self._close = os.listdir, os.open, os.read, os.close
        self._kill = os.kill

    def install(self) -> None:
        """Put a count in front of everything that is a step."""
        assert shutil.rmtree.avoids_symlink_attacks  # decided at its import, by the functions that are replaced here
        os.register_at_fork(before=self._forking, after_in_child=self._forked)
        for name, call in list(vars(os).items()):
            if type(call) is type(len) and name not in _PURE and not name.startswith("W"):
                setattr(os, name, self._counted(call))
        for module, name in ((fcntl, "flock"), (fcntl, "ioctl"), (signal, "pidfd_send_signal")):
            setattr(module, name, self._counted(getattr(module, name)))
        for name in _SOCKET:
            setattr(socket.socket, name, self._counted(getattr(socket.socket, name)))
        setattr(selectors.DefaultSelector, "select", self._counted(selectors.DefaultSelector.select))  # noqa: B010
        setattr(subprocess, "_fork_exec", self._counted(subprocess._fork_exec))  # type: ignore[attr-defined] # noqa: B010
        from sandbox.kernel import libc

        setattr(libc, "_checked", self._after(libc._checked))  # noqa: B010
        for name in ("write_text", "write_bytes"):
            setattr(pathlib.Path, name, self._filled(getattr(pathlib.Path, name)))

    @property
    def slot(self) -> int:
        """Which of the processes this is."""
        return self._slot

    def tick(self) -> None:
        """One more step."""
        if self._busy:
            return
        self._busy = True
        try:
            count = self._counter.get(self._slot) + 1
            self._counter.put(self._slot, count)
            target = self._target
            if target is not None and self._slot == target.slot and count >= target.step and not self._counter.fired:
                self._fire(target.victim)
        finally:
            self._busy = False

    def _fire(self, victim: str) -> None:
        if victim == "self" or victim in FAULTS:
            self._counter.put(SLOTS + 1, 1)
            if victim == "self":
                self._kill(os.getpid(), signal.SIGKILL)
            FAULTS[victim](self._ballast)
            return
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        for parent, pid in self._descendants(self._first):
            if victim == ("agent" if self._role(parent) == "sandbox" else self._role(pid)):
                self._counter.put(SLOTS + 1, 1)
                try:
                    self._kill(pid, signal.SIGKILL)
                except ProcessLookupError:  # it ended by itself: nothing was killed at this step
                    self._counter.put(SLOTS + 1, 0)
                return

    def _descendants(self, pid: int) -> list[tuple[int, int]]:
        """Each with its parent before it."""
        children: list[int] = []
        try:
            for thread in self._listdir(f"/proc/{pid}/task"):
                children += map(int, self._bytes(f"/proc/{pid}/task/{thread}/children").split())
        except OSError:
            return []
        return [one for child in children for one in ((pid, child), *self._descendants(child))]

    def _role(self, pid: int) -> str:
        try:
            command = self._bytes(f"/proc/{pid}/cmdline")
            return role(command)
        except OSError:
            return ""

    def _bytes(self, path: str) -> bytes:
        fd = self._open(path, os.O_RDONLY)
        try:
            return self._read(fd, 65536)
        finally:
            self._close(fd)

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def counted(*args: Any, **more: Any) -> Any:
            self.tick()
            return call(*args, **more)

        return counted

    def _after(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def counted(*args: Any, **more: Any) -> Any:
            value = call(*args, **more)
            self.tick()
            return value

        return counted

    def _filled(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A file that is there and still empty is a point as well."""

        @functools.wraps(call)
        def counted(path: pathlib.Path, data: Any, *args: Any, **more: Any) -> Any:
            self.tick()
            if not path.exists():
                path.touch()
            self.tick()
            value = call(path, data, *args, **more)
            self.tick()
            return value

        return counted

    def _forking(self) -> None:
        self._counter.put(SLOTS, self._counter.forks + 1)

    def _forked(self) -> None:
        self._slot = min(self._counter.forks, SLOTS - 1)


def role(command: bytes) -> str:
    """Return the role of a process below a run, by its command line; a process below the sandbox is the agent's."""
    words = command.split(b"\0")
    if b"sandbox.network.gate import main" in command:
        return "gate"
    if words[0] == b"runsc-gofer":
        return "gofer"
    if words[0] == b"runsc-sandbox":
        return "sandbox"
    return "runsc" if b"run" in words and words[0].endswith(b"runsc") else ""


_held: list[bytearray] = []


def _fill(ballast: str) -> None:
    """Leave no room on the disk of this file."""
    fd = os.open(ballast, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        for size in (1 << 20, 4096, 1):
            try:
                while True:
                    os.write(fd, b"x" * size)
            except OSError as e:
                if e.errno != errno.ENOSPC:
                    raise
    finally:
        os.close(fd)


def _no_descriptors(ballast: str) -> None:
    """Take what is open for the most that may be."""
    most = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def _no_memory(ballast: str) -> None:
    """Take the address space that is in use for the most that may be, and use up what of it is free."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * mmap.PAGESIZE, resource.RLIM_INFINITY))
    for size in (1 << 20, 1 << 14, 1 << 10):
        with contextlib.suppress(MemoryError):
            while True:
                _held.append(bytearray(size))


# What runs out in place of a kill: the disk, open files, memory.
FAULTS: dict[str, Callable[[str], None]] = {"disk": _fill, "files": _no_descriptors, "memory": _no_memory}
ROLES = ("runsc", "sandbox", "gofer", "agent", "gate")
