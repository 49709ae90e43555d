"""Other processes: seeing, stopping, reading and steering them."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

from harness import Blocked, probe
from raw import IoVector, call

PTRACE_TRACEME, PTRACE_ATTACH, PTRACE_SEIZE, PTRACE_DETACH = 0, 16, 0x4206, 17
KCMP_FILE = 0
SCHED_FIFO = 1
ADDR_NO_RANDOMIZE = 0x0040000


def _foreign() -> list[int]:
    """Processes that are neither this one nor an ancestor of it."""
    own, pid = {1}, os.getpid()
    while pid > 1:
        own.add(pid)
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            pid = int(file.read().rpartition(")")[2].split()[1])
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and int(entry) not in own]


def _some_foreign() -> int:
    found = _foreign()
    if not found:
        raise Blocked("no other process is visible")
    return found[0]


@contextmanager
def _child() -> Iterator[int]:
    """A child that waits to be ended."""
    pid = os.fork()
    if pid == 0:
        # INVARIANT: the child never comes back from here, or it would answer in its parent's name.
        try:
            time.sleep(5)
        finally:
            os._exit(0)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@probe("process_visible")
def process_visible() -> str:
    return f"sees process {_some_foreign()}"


@probe("process_signal")
def process_signal() -> str:
    """Signal 0 does nothing and needs the same right as 9."""
    pid = _some_foreign()
    os.kill(pid, 0)
    return f"may signal process {pid}"


@probe("process_environment")
def process_environment() -> str:
    pid = _some_foreign()
    with open(f"/proc/{pid}/environ", "rb") as file:
        return f"read {len(file.read(4096))} bytes of the environment of {pid}"


@probe("process_command_line")
def process_command_line() -> str:
    """Read the command line of a host process (runsc's contains every path of the bundle)."""
    pid = _some_foreign()
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return f"{pid} is {file.read(200)!r}"


@probe("ptrace_traceme")
def ptrace_traceme() -> str:
    call("ptrace", PTRACE_TRACEME, 0, 0, 0)
    return "is traced by its parent"


@probe("ptrace_attach")
def ptrace_attach() -> str:
    with _child() as pid:
        call("ptrace", PTRACE_ATTACH, pid, 0, 0)
        os.waitpid(pid, 0)
        call("ptrace", PTRACE_DETACH, pid, 0, 0)
        return "attached to a process"


@probe("ptrace_seize")
def ptrace_seize() -> str:
    with _child() as pid:
        call("ptrace", PTRACE_SEIZE, pid, 0, 0)
        return "seized a process"


def _vectors(buffer: ctypes.Array[ctypes.c_char]) -> tuple[IoVector, IoVector, ctypes.Array[ctypes.c_char]]:
    own = ctypes.create_string_buffer(len(buffer))
    address = ctypes.addressof
    return (IoVector(address(own), len(own)), IoVector(address(buffer), len(buffer)), own)


@probe("memory_read_other")
def memory_read_other() -> str:
    """The child is a fork: the buffer has the same address there."""
    theirs = ctypes.create_string_buffer(b"their secret", 16)
    with _child() as pid:
        local, remote, own = _vectors(theirs)
        count = call("process_vm_readv", pid, local, 1, remote, 1, 0)
        return f"read {count} bytes: {own.value!r}"


@probe("memory_write_other")
def memory_write_other() -> str:
    theirs = ctypes.create_string_buffer(b"their secret", 16)
    with _child() as pid:
        local, remote, _ = _vectors(theirs)
        return f"wrote {call('process_vm_writev', pid, local, 1, remote, 1, 0)} bytes"


@probe("pidfd_take_descriptor")
def pidfd_take_descriptor() -> str:
    """Taking another's open file is reading it without opening it."""
    with _child() as pid:
        descriptor = call("pidfd_open", pid, 0)
        return f"took descriptor {call('pidfd_getfd', descriptor, 0, 0)}"


@probe("kcmp")
def kcmp() -> str:
    """Comparing kernel pointers of two processes leaks where they are."""
    return f"ordered: {call('kcmp', os.getpid(), os.getppid(), KCMP_FILE, 0, 0)}"


@probe("personality")
def personality() -> str:
    """Without address randomisation every exploit is easier."""
    call("personality", ADDR_NO_RANDOMIZE)
    return "address randomisation is off"


@probe("scheduler_realtime")
def scheduler_realtime() -> str:
    """A real-time thread starves everything else on its core."""
    priority = ctypes.create_string_buffer((1).to_bytes(4, "little"), 4)
    call("sched_setscheduler", 0, SCHED_FIFO, priority)
    return "runs with real-time priority"


@probe("pages_migrate")
def pages_migrate() -> str:
    nodes = ctypes.create_string_buffer((1).to_bytes(8, "little"), 8)
    return f"{call('migrate_pages', 0, 64, nodes, nodes)} pages stayed"


@probe("pages_move")
def pages_move() -> str:
    call("move_pages", 0, 0, None, None, None, 0)
    return "asked for pages to be moved"


@probe("memory_file_own_code")
def memory_file_own_code() -> str:
    """Write through /proc/self/mem into a read-only mapping: the agent's own code."""
    address = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p).value
    assert address is not None
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(address)
        held = memory.read(1)
        memory.seek(address)
        memory.write(held)
    return "wrote into read-only code"


@probe("memory_file_other")
def memory_file_other() -> str:
    """Write through /proc/PID/mem of another process."""
    pid = _some_foreign()
    with open(f"/proc/{pid}/maps", encoding="ascii") as file:
        start = int(file.readline().split("-")[0], 16)
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(start)
        return f"read {len(memory.read(16))} bytes of the memory of {pid}"


@probe("memory_map_other")
def memory_map_other() -> str:
    """Where another process keeps what."""
    pid = _some_foreign()
    with open(f"/proc/{pid}/maps", "rb") as file:
        return f"read {len(file.read(4096))} bytes of the map of {pid}"


@probe("process_root_other")
def process_root_other() -> str:
    """The root of another process, as a directory."""
    return f"lists {os.listdir(f'/proc/{_some_foreign()}/root')[:3]}"


@probe("process_limits_other")
def process_limits_other() -> str:
    """Another's limits, by prlimit64."""
    return f"they are {resource.prlimit(_some_foreign(), resource.RLIMIT_NOFILE)}"
