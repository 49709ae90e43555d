"""Read the seccomp filters of a running process from the kernel: PTRACE_SECCOMP_GET_FILTER.

One thread is stopped for less than a millisecond. The read needs CAP_SYS_ADMIN, a kernel with checkpoint and restore,
and a reader without a filter of its own. If one is missing, or the thread is frozen, the result is None.
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

from sandbox.kernel import procfs
from sandbox.kernel.net import netns

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
# How long a thread may wait in the kernel, where no tracer stops it (state D of proc_pid_stat(5)). A frozen thread
# waits
# there without limit, and the process that froze it may be waiting for this read.
_STANDS_SECONDS: Final = 0.1
# How long another tracer may only be reading filters, such as `covenant attest` beside a supervisor.
_TRACED_SECONDS: Final = 5.0
# The number of EPERM in a row without a visible tracer that counts as a missing right. A tracer may detach between the
# failed attempt and the check for tracers, and with many readers that happens several times in a row.
_NOBODY: Final = 10
# EAGAIN: there is no thread left.
_CANNOT: Final = frozenset({errno.EPERM, errno.EACCES, errno.EIO, errno.EINVAL, errno.EOPNOTSUPP, errno.EAGAIN})


def digests(pid: int) -> tuple[str, ...] | None:
    """Return ``instructions:sha256`` of each filter of a process's first thread, oldest first.

    Returns None if the filters cannot be read or there is none.

    Raises:
        ProcessLookupError, FileNotFoundError: Raised when the process is gone.
        OSError: Raised when another tracer stays. It can suspend the filters that are read here
            (PTRACE_O_SUSPEND_SECCOMP, ptrace(2)), and controls memory and registers.
    """

    def look() -> tuple[str, ...] | None:
        with _stopped(pid) as stopped:
            return tuple(_filters(pid)) if stopped else None

    until, nobody = time.monotonic() + _TRACED_SECONDS, 0
    while True:
        try:
            # INVARIANT: trace in a thread that ends. A tracer is a thread, and only its end releases a thread that did
            # not stop for it. A frozen thread would otherwise stop for good after its thaw.
            return netns.aside(look)()
        except OSError as e:
            if e.errno not in _CANNOT:
                raise
            if e.errno != errno.EPERM:
                return None
        tracer = procfs.tracer(pid)
        nobody = 0 if tracer else nobody + 1
        if nobody == _NOBODY:
            return None
        if tracer and time.monotonic() >= until:
            raise OSError(errno.EBUSY, f"process {pid} is traced by {tracer}: its filters may be out of force")
        time.sleep(0.005)


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
    """Stop one thread. It is seized, not attached, so the process gets no signal that it could see."""
    _ptrace(PTRACE_SEIZE, pid)
    _ptrace(PTRACE_INTERRUPT, pid)
    status = _wait(pid)
    if status is None:
        # A thread that does not stop (frozen or gone) cannot be detached; the kernel does it when this thread ends.
        yield False
        return
    try:
        yield True
    finally:
        # A pending signal may stop the thread first (ptrace(2), signal-delivery-stop). The thread gets this signal only
        # if the detach passes it on. Any other stop is an event's, with a number above the signal's.
        with contextlib.suppress(OSError):
            _ptrace(PTRACE_DETACH, pid, data=0 if status >> 16 else os.WSTOPSIG(status))


def _wait(pid: int) -> int | None:
    """Wait for the stop and return its status (wait(2)); None if the thread does not stop."""
    begin = time.monotonic()
    while (now := time.monotonic()) - begin < _DEADLINE_SECONDS:
        found, status = os.waitpid(pid, os.WNOHANG | _WALL)
        if found:
            return status if os.WIFSTOPPED(status) else None
        if now - begin >= _STANDS_SECONDS and _stands(pid):
            return None
        time.sleep(0.0005)
    return None


def _stands(pid: int) -> bool:
    with open(f"/proc/{pid}/stat", "rb") as file:
        # The name before the state is in parentheses, and may contain parentheses itself.
        return file.read().rpartition(b")")[2].split()[0] == b"D"


def _ptrace(request: int, pid: int, address: int = 0, data: int = 0) -> int:
    result: int = _libc.ptrace(request, pid, address or None, data or None)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"ptrace: {os.strerror(number)}")
    return result
