"""Take more than the manifest grants; each bomb has its own bound and ends even where no limit stops it.

The bounds are above the limits of this package's agent.toml (192 MiB, 16 MiB of disk, 32 processes, 10 s). They are far
too small to harm the machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

from harness import Blocked, probe

MIB = 1 << 20
PROCESSES = 100
THREADS = 100
DESCRIPTORS = 5_000
MEMORY_BYTES = 512 * MIB
DISK_BYTES = 64 * MIB
SMALL_FILES = 6_144
SHARED_BYTES = 512 * MIB
OUTPUT_BYTES = 20 * MIB
SECONDS = 16.0
SAFETY_SECONDS = 30  # a child that loses its parent ends by itself
F_SETPIPE_SZ = 1031
IPC_PRIVATE, IPC_RMID, IPC_CREAT = 0, 0, 0o1000


def _sleeper(seconds: float, *, leave: bool = False) -> int:
    """Start a child that sleeps and then exits, in its own session if `leave` is set."""
    pid = os.fork()
    if pid == 0:
        # INVARIANT: the child never comes back from here, or it would answer in its parent's name.
        try:
            if leave:
                os.setsid()
        except OSError:
            pass
        finally:
            try:
                time.sleep(seconds)
            finally:
                os._exit(0)
    return pid


@probe("bomb_fork")
def bomb_fork() -> str:
    children: list[int] = []
    try:
        while len(children) < PROCESSES:
            children.append(_sleeper(SAFETY_SECONDS))
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        for pid in children:
            os.waitpid(pid, 0)
    return f"{len(children)} processes at once"


@probe("bomb_threads")
def bomb_threads() -> str:
    gate = threading.Event()
    threads: list[threading.Thread] = []
    try:
        while len(threads) < THREADS:
            thread = threading.Thread(target=gate.wait, args=(SAFETY_SECONDS,), daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # Python's word for EAGAIN here
                raise OSError(errno.EAGAIN, f"{error} after {len(threads)}") from None
            threads.append(thread)
    finally:
        gate.set()
        for thread in threads:
            thread.join()
    return f"{len(threads)} threads at once"


@probe("bomb_descriptors")
def bomb_descriptors() -> str:
    """Every descriptor is a host file or memory of the sentry, neither of which is the agent's."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    held: list[int] = []
    try:
        while len(held) < DESCRIPTORS:
            held.append(os.open("/workspace/main.py", os.O_RDONLY))
    finally:
        for descriptor in held:
            os.close(descriptor)
    return f"{len(held)} open files"


@probe("bomb_memory", alone=True)
def bomb_memory() -> str:
    blocks: list[bytearray] = []
    step = 8 * MIB
    try:
        while len(blocks) * step < MEMORY_BYTES:
            blocks.append(bytearray(b"\xa5") * step)
    except MemoryError as error:
        raise OSError(errno.ENOMEM, f"after {len(blocks) * step // MIB} MiB") from error
    return f"{len(blocks) * step // MIB} MiB of memory"


@probe("bomb_memory_shared", alone=True)
def bomb_memory_shared() -> str:
    """Shared anonymous memory is a file of the sentry, so no address space limit sees all of it."""
    with mmap.mmap(-1, SHARED_BYTES) as area:
        for offset in range(0, SHARED_BYTES, mmap.PAGESIZE):
            area[offset] = 0xA5
    return f"{SHARED_BYTES // MIB} MiB of shared memory"


@probe("bomb_memory_sysv", alone=True)
def bomb_memory_sysv() -> str:
    """System V segments outlive the process that made them."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.shmat.restype = ctypes.c_void_p
    segment = libc.shmget(IPC_PRIVATE, ctypes.c_size_t(SHARED_BYTES), IPC_CREAT | 0o600)
    if segment < 0:
        raise OSError(ctypes.get_errno(), "shmget")
    try:
        address = libc.shmat(segment, None, 0)
        if address is None or address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), "shmat")
        ctypes.memset(address, 0xA5, SHARED_BYTES)
    finally:
        libc.shmctl(segment, IPC_RMID, None)
    return f"{SHARED_BYTES // MIB} MiB in a segment"


def _fill(path: str, total: int) -> str:
    block = b"\xa5" * MIB
    written = 0
    try:
        with open(path, "xb", buffering=0) as file:
            while written < total:
                written += file.write(block)
    finally:
        if os.path.exists(path):
            os.unlink(path)
    return f"{written // MIB} MiB in {path}"


@probe("bomb_disk")
def bomb_disk() -> str:
    return _fill("/tmp/bomb", DISK_BYTES)


@probe("bomb_disk_small_files")
def bomb_disk_small_files() -> str:
    """Many files of one page each: 24 MiB."""
    directory = "/tmp/small"
    os.mkdir(directory)
    made = 0
    try:
        while made < SMALL_FILES:
            with open(f"{directory}/{made}", "xb", buffering=0) as file:
                made += 1
                if file.write(b"\xa5" * 4096) < 4096:
                    raise OSError(errno.ENOSPC, "short write")
    finally:
        for number in range(made):
            os.unlink(f"{directory}/{number}")
        os.rmdir(directory)
    return f"{made} files"


@probe("bomb_disk_shm")
def bomb_disk_shm() -> str:
    """/dev/shm is a disk that no disk_mb counts."""
    return _fill("/dev/shm/bomb", DISK_BYTES)


@probe("bomb_disk_deleted")
def bomb_disk_deleted() -> str:
    """Fill the disk with files that are already unlinked: they still take space.

    Many small files keep below RLIMIT_FSIZE.
    """
    written = 0
    with contextlib.ExitStack() as held:
        while written < DISK_BYTES:
            file = held.enter_context(open("/tmp/deleted", "xb", buffering=0))
            os.unlink("/tmp/deleted")
            for _ in range(4):
                written += file.write(b"\xa5" * MIB)
    return f"{written // MIB} MiB without a name"


@probe("bomb_stdout", alone=True)
def bomb_stdout() -> str:
    line = b"x" * 1023 + b"\n"
    for _ in range(OUTPUT_BYTES // len(line)):
        sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()
    return f"{OUTPUT_BYTES // MIB} MiB on stdout"


@probe("bomb_stdout_line", alone=True)
def bomb_stdout_line() -> str:
    """The same without a newline, for a reader that counts only at the ends of lines."""
    for _ in range(OUTPUT_BYTES // MIB):
        sys.stdout.buffer.write(b"x" * MIB)
    sys.stdout.buffer.write(b"\n")
    sys.stdout.buffer.flush()
    return f"{OUTPUT_BYTES // MIB} MiB on one line"


@probe("bomb_time", alone=True)
def bomb_time() -> str:
    deadline, turns = time.monotonic() + SECONDS, 0
    while time.monotonic() < deadline:
        turns += 1
    if not turns:
        raise Blocked("the clock stood")
    return f"computed for {SECONDS:g} s"


@probe("bomb_ignore_signals", alone=True)
def bomb_ignore_signals() -> str:
    """Ignore every signal that can be ignored, in children too, under a storm of signals and timers."""
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        signal.signal(number, signal.SIG_IGN)
    children = []
    for _ in range(4):
        children.append(_sleeper(SECONDS, leave=True))
    _orphan()
    for pid in children:
        os.waitpid(pid, 0)
    return f"ignored signals for {SECONDS:g} s"


def _orphan() -> None:
    """Start an orphan in its own session that a timer and it itself interrupt without end."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    # INVARIANT: the child never comes back from here, or it would answer in its parent's name.
    try:
        os.setsid()
        if os.fork() == 0:
            for number in (signal.SIGALRM, signal.SIGUSR1):
                signal.signal(number, lambda *_: None)
            signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
            until = time.monotonic() + SECONDS
            while time.monotonic() < until:
                os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        os._exit(0)


@probe("bomb_disk_mapped")
def bomb_disk_mapped() -> str:
    """Sparse files are longer than the quota; pages that are touched through a mapping fill them past every write."""
    child = os.fork()
    if child == 0:
        # INVARIANT: the child never comes back from here, or it would answer in its parent's name.
        status = 1
        try:
            _touch()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        raise OSError(errno.ENOSPC, f"ended by signal {os.WTERMSIG(status)}")  # SIGBUS: no page could be had
    if status:
        raise Blocked("ended with an error")
    return f"{DISK_BYTES // MIB} MiB through mappings"


def _touch() -> None:
    with contextlib.ExitStack() as held:
        for _ in range(DISK_BYTES // (4 * MIB)):
            file = held.enter_context(_unnamed())
            os.ftruncate(file, 4 * MIB)
            area = held.enter_context(mmap.mmap(file, 4 * MIB))
            for offset in range(0, 4 * MIB, mmap.PAGESIZE):
                area[offset] = 0xA5


@probe("bomb_disk_reserved")
def bomb_disk_reserved() -> str:
    """Space is taken without a byte being written."""
    with contextlib.ExitStack() as held:
        for _ in range(DISK_BYTES // (4 * MIB)):
            os.posix_fallocate(held.enter_context(_unnamed()), 0, 4 * MIB)
    return f"{DISK_BYTES // MIB} MiB reserved"


@contextlib.contextmanager
def _unnamed() -> Iterator[int]:
    """A descriptor of a new file in /tmp that has lost its name."""
    path = "/tmp/unnamed"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    os.unlink(path)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@probe("bomb_disk_attributes")
def bomb_disk_attributes() -> str:
    """Attributes of a file are data beside its data."""
    kept = 0
    for number in range(DISK_BYTES // (60 * 1024)):
        path = f"/tmp/attribute-{number}"
        with open(path, "xb"):
            pass
        os.setxattr(path, "user.data", b"x" * (60 * 1024))
        kept += 60 * 1024
    return f"{kept // MIB} MiB in attributes"


@probe("bomb_memory_pipes", alone=True)
def bomb_memory_pipes() -> str:
    """Fill pipes: their buffers are kernel memory that is charged to no process's address space."""
    kept, ends = 0, []
    while kept < SHARED_BYTES:
        reader, writer = os.pipe()
        ends += [reader, writer]
        fcntl.fcntl(writer, F_SETPIPE_SZ, MIB)
        os.set_blocking(writer, False)
        kept += _stuffed(lambda data, end=writer: os.write(end, data))
    return f"{kept // MIB} MiB in {len(ends) // 2} pipes"


@probe("bomb_memory_sockets", alone=True)
def bomb_memory_sockets() -> str:
    """Fill sockets with data that no peer receives; it stays in the socket buffers."""
    kept, ends = 0, []
    while kept < SHARED_BYTES:
        pair = socket.socketpair()
        ends += pair
        pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MIB)
        pair[0].setblocking(False)
        kept += _stuffed(pair[0].send)
    return f"{kept // MIB} MiB in {len(ends) // 2} sockets"


def _stuffed(write: Callable[[bytes], int]) -> int:
    """Write until the descriptor would block, and return the number of bytes written."""
    block, taken = b"\xa5" * (64 << 10), 0
    with contextlib.suppress(BlockingIOError):
        while taken < SHARED_BYTES:
            taken += write(block)
    return taken
