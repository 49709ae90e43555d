"""Find out from /proc whether a sandbox waits for its stdin, without a request to the sandbox and without a trace.

While a guest task reads or polls a host pipe, gVisor's kernel has the pipe in its epoll set (gvisor pkg/fdnotifier).
/proc/PID/fdinfo shows every member of an epoll set by its inode (proc_pid_fdinfo(5)). A read, a poll and an epoll of
the guest look the same. tests/kernel/test_standby.py fails with a runsc that does it otherwise.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

_EPOLL = "anon_inode:[eventpoll]"


def reads_from(pids: Iterable[int], inode: int) -> bool:
    """Whether one of these processes has the pipe with this inode in an epoll set, to learn when it can be read."""
    member = f"ino:{inode:x} "
    return any(_has(pid, member) for pid in pids)


def _has(pid: int, member: str) -> bool:
    # A process that ends meanwhile waits for nothing.
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{fd}") == _EPOLL and _reads(f"/proc/{pid}/fdinfo/{fd}", member):
                    return True
    return False


def _reads(path: str, member: str) -> bool:
    with open(path, encoding="ascii") as stream:
        for line in stream:
            # tfd:  7 events: 80002059 data: ... pos:0 ino:381dcc sdev:f    EPOLLIN is 1
            if line.startswith("tfd:") and member in line and int(line.split("events:")[1].split()[0], 16) & 1:
                return True
    return False
