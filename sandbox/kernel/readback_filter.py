"""The seccomp filters of a running process, out of the kernel that holds them: PTRACE_SECCOMP_GET_FILTER.

One thread is stopped for less than a millisecond. It needs CAP_SYS_ADMIN and a kernel with checkpoint and restore;
where that is missing, or another tracer is there, nothing is read and the answer is None.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import time
from collections.abc import Iterator
from typing import Final

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long

# linux/ptrace.h
PTRACE_DETACH: Final = 17
PTRACE_SEIZE: Final = 0x4206
PTRACE_INTERRUPT: Final = 0x4207
PTRACE_SECCOMP_GET_FILTER: Final = 0x420C
# linux/wait.h: wait for threads that are no children of ours as well.
_WALL: Final = 0x40000000
_INSTRUCTION_BYTES: Final = 8
_DEADLINE_SECONDS: Final = 1.0
_CANNOT: Final = frozenset({errno.EPERM, errno.EACCES, errno.EIO, errno.EINVAL, errno.EOPNOTSUPP})


def digests(pid: int) -> tuple[str, ...] | None:
    """``instructions:sha256`` of each filter of a process's first thread, oldest first; None when it cannot be read,
    or it has none.

    Raises:
        ProcessLookupError: it is gone.
    """
    try:
        with _stopped(pid) as stopped:
            return tuple(_filters(pid)) if stopped else None
    except OSError as e:
        if e.errno in _CANNOT:
            return None
        raise


def _filters(pid: int) -> Iterator[str]:
    for index in range(64):
        try:
            count = _ptrace(PTRACE_SECCOMP_GET_FILTER, pid, index)
        except OSError as e:
            if e.errno == errno.ENOENT:
                return
            raise
        buffer = ctypes.create_string_buffer(count * _INSTRUCTION_BYTES)
        _ptrace(PTRACE_SECCOMP_GET_FILTER, pid, index, ctypes.addressof(buffer))
        yield f"{count}:{hashlib.sha256(buffer.raw).hexdigest()}"


@contextlib.contextmanager
def _stopped(pid: int) -> Iterator[bool]:
    """Hold one thread still. Seized and not attached: no signal is sent that the process could see."""
    _ptrace(PTRACE_SEIZE, pid)
    try:
        _ptrace(PTRACE_INTERRUPT, pid)
        yield _wait(pid)
    finally:
        # A thread that does not stop (frozen, or gone) cannot be let go either; the kernel does it when we end.
        with contextlib.suppress(OSError):
            _ptrace(PTRACE_DETACH, pid)


def _wait(pid: int) -> bool:
    until = time.monotonic() + _DEADLINE_SECONDS
    while time.monotonic() < until:
        found, status = os.waitpid(pid, os.WNOHANG | _WALL)
        if found:
            return os.WIFSTOPPED(status)
        time.sleep(0.0005)
    return False


def _ptrace(request: int, pid: int, address: int = 0, data: int = 0) -> int:
    result: int = _libc.ptrace(request, pid, address or None, data or None)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"ptrace: {os.strerror(number)}")
    return result
