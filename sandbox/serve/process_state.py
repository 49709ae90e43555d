"""What the process of a keeper is, as the kernel says it: taken before and after a request, to show that the request
has left nothing in it.

Whatever a request leaves in a process that ends, the kernel takes away. One that goes on must be shown to have none of
it: no descriptor more (and with it no lock), no child, no thread, the same namespaces, rights, limits and handlers.
"""

from __future__ import annotations

import ctypes
import gc
import locale
import os
import resource
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from typing import Final

from sandbox.kernel import libc, small_files
from sandbox.kernel.proc import secret_memory

# Of proc_pid_status(5): who it is, what it may, what it ignores or catches or is still to be told, who looks into it,
# where it may run, what it keeps from the disk.
_LINES: Final = frozenset(
    (
        *("Umask", "TracerPid", "Uid", "Gid", "Groups", "Threads", "SigPnd", "ShdPnd", "SigBlk", "SigIgn", "SigCgt"),
        *("NoNewPrivs", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "Seccomp", "Seccomp_filters"),
        *("Cpus_allowed", "Mems_allowed", "VmLck"),
    )
)
# Those of prctl(2) that answer with a number, and those that write one. Not PR_GET_DUMPABLE: a caller's package is read
# with their rights, which takes it away for good (credentials(7)), and nothing here rests on it.
_SAID: Final = (libc.PR_GET_KEEPCAPS, libc.PR_GET_SECUREBITS, libc.PR_GET_TIMERSLACK, libc.PR_GET_THP_DISABLE)
_WRITTEN: Final = (libc.PR_GET_PDEATHSIG, libc.PR_GET_CHILD_SUBREAPER)
_SELF: Final = "/proc/self"
_CLOCKS: Final = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_SIGNALS: Final = range(1, signal.SIGSYS + 1)
_PAGE: Final = resource.getpagesize()


@dataclass(frozen=True, slots=True)
class Bearings:
    """What a request could have changed, and the next must find as it was. ``free`` says that it has no child, no clock
    that runs, and never had a secret in its memory."""

    status: tuple[str, ...]
    descriptors: frozenset[tuple[str, str, tuple[str, ...]]]
    spaces: frozenset[tuple[str, str]]
    places: tuple[str, str]
    limits: str
    cgroups: str
    oom: str
    priority: tuple[int, ...]
    switches: tuple[int, ...]
    interpreter: tuple[object, ...]
    handlers: tuple[object, ...]
    environment: frozenset[tuple[str, str]]
    free: bool

    @classmethod
    def take(cls) -> Bearings:
        """Those of this process, now.

        Raises:
            OSError: the kernel does not say.
        """
        lines = small_files.text(f"{_SELF}/status").splitlines()
        return cls(
            status=tuple(line for line in lines if line.partition(":")[0] in _LINES),
            descriptors=frozenset((number, file, _opened(number)) for number, file in _links("fd")),
            spaces=_links("ns"),
            places=(os.readlink(f"{_SELF}/cwd"), os.readlink(f"{_SELF}/root")),
            limits=small_files.text(f"{_SELF}/limits"),
            cgroups=small_files.text(f"{_SELF}/cgroup"),
            oom=small_files.text(f"{_SELF}/oom_score_adj"),
            priority=(
                os.getpriority(os.PRIO_PROCESS, 0),
                os.sched_getscheduler(0),
                os.sched_getparam(0).sched_priority,
                os.getpgrp(),
                os.getsid(0),
            ),
            switches=(*(libc.prctl(which) for which in _SAID), *(_written(which) for which in _WRITTEN)),
            interpreter=_interpreter(),
            handlers=tuple(signal.getsignal(number) for number in _SIGNALS),
            environment=frozenset(os.environ.items()),
            free=not _has_children()
            and not secret_memory.is_guarded()
            and not any(signal.getitimer(clock)[0] for clock in _CLOCKS),
        )


def resident_bytes() -> int:
    """The memory of this process that is there, what it shares with others among it."""
    return int(small_files.whole(f"{_SELF}/statm").split()[1]) * _PAGE


def _written(which: int) -> int:
    found = ctypes.c_int(-1)
    libc.prctl(which, ctypes.addressof(found))
    return found.value


def _interpreter() -> tuple[object, ...]:
    """What of Python's own settings holds for a whole process."""
    return (
        sys.getswitchinterval(),
        sys.getrecursionlimit(),
        threading.stack_size(),
        socket.getdefaulttimeout(),
        gc.isenabled(),
        gc.get_threshold(),
        locale.setlocale(locale.LC_ALL),
        tuple(sys.path),
        (sys.gettrace(), sys.getprofile(), sys.excepthook, sys.unraisablehook),
    )


def _links(name: str) -> frozenset[tuple[str, str]]:
    """The entries of a directory of links; that of the directory itself, which is being read, is gone by then."""
    found = set()
    for entry in os.listdir(f"{_SELF}/{name}"):
        try:
            found.add((entry, os.readlink(f"{_SELF}/{name}/{entry}")))
        except FileNotFoundError:
            continue
    return frozenset(found)


def _opened(number: str) -> tuple[str, ...]:
    """How a descriptor is open, and what of its file it has locked (proc_pid_fdinfo(5)): two that are open on one file
    have one name. Not how far it was read or written: the log on 2 is that of all."""
    lines = small_files.text(f"{_SELF}/fdinfo/{number}").splitlines()
    return tuple(line for line in lines if not line.startswith("pos:"))


def _has_children() -> bool:
    """Whether any is there, one that has ended and was not waited for among them."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
