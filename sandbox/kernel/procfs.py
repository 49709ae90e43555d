"""What the kernel says of running processes: family, rights, namespaces, cgroups, mounts. It only reads.

A process is known by its number and the time of its start, so that a number that is given out again is not taken for
it. What ends while it is read is gone (None), which is no finding by itself: whoever asks looks again.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import stat
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sandbox.kernel import small_files

# The sets of /proc/PID/status (proc_pid_status(5)).
CAPABILITY_SETS: Final = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
NAMESPACES: Final = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
# How a mount tells its times apart is no right.
_TIMES: Final = frozenset({"relatime", "noatime", "nodiratime", "strictatime", "lazytime"})
_ESCAPES: Final = (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\"))


@dataclass(frozen=True, slots=True)
class Name:
    """Which process is meant: its number, and the clock tick at which it started (proc_pid_stat(5), field 22)."""

    pid: int
    start: int


@dataclass(frozen=True, slots=True)
class Binary:
    """Which file a process runs. Times in nanoseconds; it is another file when any of these is another."""

    device: int
    inode: int
    changed_ns: int
    size: int


@dataclass(frozen=True, slots=True)
class Process:
    """One process as /proc shows it. ``capabilities`` are by the names of ``CAPABILITY_SETS``; ``namespaces`` maps a
    word of ``NAMESPACES`` to the namespace's inode; ``cgroups`` a controller (empty for version 2) to a path;
    ``tracer`` is who traces its first thread, 0 for nobody."""

    name: Name
    parent: int
    arguments: tuple[str, ...]
    binary: Binary
    uid: int
    capabilities: Mapping[str, int]
    no_new_privs: bool
    seccomp: int
    filters: int
    namespaces: Mapping[str, int]
    cgroups: Mapping[str, str]
    tracer: int = 0


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of a process's mountinfo: where it lies, its own flags in the kernel's order, what it shows."""

    place: str
    options: tuple[str, ...]
    device: str
    root: str
    type: str


def name(pid: int) -> Name | None:
    """The process that has this number now; None when there is none, or it has ended and nobody waited for it."""
    fields = _stat(pid)
    return None if fields is None or fields[0] in (b"Z", b"X") else Name(pid, int(fields[19]))


def parent(pid: int) -> int:
    """The number of a process's parent; 0 when it has none, or is gone."""
    fields = _stat(pid)
    return 0 if fields is None else int(fields[1])


def descends(pid: int, ancestors: Collection[int]) -> bool:
    """Whether a process is one of these, or a child of one, or of a child, and so on."""
    for _ in range(64):
        if pid in ancestors or pid == 0:
            return pid != 0
        pid = parent(pid)
    return False


def family(of: Name, known: Collection[int] = ()) -> list[int] | None:
    """The numbers of a process and of all that descend from it; None when it is gone.

    The kernel may omit a child whose sibling ends during the listing (proc_tid_children(5)). None of those in ``known``
    is missed.
    """
    if name(of.pid) != of:
        return None
    found = _by_children(of.pid) if _tells_children() else _by_parents(of.pid)
    ours = set(found)
    return [*found, *(pid for pid in sorted(set(known) - ours) if descends(pid, ours))]


@functools.cache
def _tells_children() -> bool:
    """Whether this kernel was built with CONFIG_PROC_CHILDREN."""
    return os.path.exists(f"/proc/self/task/{os.getpid()}/children")


def _by_children(first: int) -> list[int]:
    """Each thread is asked for its own: some dozens, where a machine may have thousands of processes."""
    found = {first: None}
    for pid in (ahead := [first]):
        for task in threads(pid):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                for child in map(int, small_files.whole(f"/proc/{pid}/task/{task}/children").split()):
                    if child not in found:
                        found[child] = None
                        ahead.append(child)
    return list(found)


def _by_parents(first: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for pid in pids():
        fields = _stat(pid, 2)  # of every process of the machine
        if fields is not None and fields[0] not in (b"Z", b"X"):
            parents.setdefault(int(fields[1]), []).append(pid)
    found = [first]
    for pid in found:
        found += parents.get(pid, [])
    return found


def pids() -> Iterable[int]:
    """The numbers of all processes that this mount of /proc shows."""
    return (int(entry) for entry in os.listdir("/proc") if entry.isdigit())


def tracer(pid: int) -> int:
    """The thread that traces a process's first; 0 for nobody.

    Raises:
        FileNotFoundError, ProcessLookupError: it is gone.
    """
    return int(_status(pid)["TracerPid"])


def tracers(pid: int) -> dict[int, int]:
    """The traced threads of a process, each with the thread that traces it; none when the process is gone.

    Raises:
        OSError: Raised when the kernel does not show the tracer of a thread.
    """
    found: dict[int, int] = {}
    try:
        tasks = os.open(f"/proc/{pid}/task", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):
        return found
    try:
        for task in os.listdir(tasks):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if tracer := _tracer(tasks, task):
                    found[int(task)] = tracer
    except (FileNotFoundError, ProcessLookupError):
        return found
    finally:
        os.close(tasks)
    return found


def _tracer(tasks: int, task: str) -> int:
    # A run has some 60 threads: by three calls each, relative to their directory, they cost about a millisecond.
    fd = os.open(f"{task}/status", os.O_RDONLY | os.O_CLOEXEC, dir_fd=tasks)
    try:
        # The line is the eighth. The name before it has at most 64 characters, and its newlines are escaped.
        head = os.read(fd, 1024)
    finally:
        os.close(fd)
    _, line, rest = head.partition(b"\nTracerPid:\t")
    if not line:
        raise OSError(errno.EPROTO, f"/proc does not say who traces thread {task}")
    return int(rest.partition(b"\n")[0])


def _status(pid: int) -> dict[str, str]:
    """The fields of proc_pid_status(5)."""
    text = _read(pid, "status").decode("utf-8", "surrogateescape")
    return dict(line.split(":\t", 1) for line in text.split("\n") if ":\t" in line)


def process(pid: int) -> Process | None:
    """Everything about one process; None when it is gone."""
    try:
        fields = _stat(pid)
        if fields is None or fields[0] in (b"Z", b"X"):
            return None
        status = _status(pid)
        info = os.stat(f"/proc/{pid}/exe")
        arguments = _read(pid, "cmdline").decode("utf-8", "surrogateescape").split("\0")[:-1]
        return Process(
            name=Name(pid, int(fields[19])),
            parent=int(fields[1]),
            arguments=tuple(arguments),
            binary=Binary(info.st_dev, info.st_ino, info.st_ctime_ns, info.st_size),
            uid=int(status["Uid"].split()[1]),
            capabilities={one: int(status[one], 16) for one in CAPABILITY_SETS},
            no_new_privs=status["NoNewPrivs"] == "1",
            seccomp=int(status["Seccomp"]),
            filters=int(status.get("Seccomp_filters", "0")),
            namespaces={one: os.stat(f"/proc/{pid}/ns/{one}").st_ino for one in NAMESPACES},
            cgroups=_cgroups(_read(pid, "cgroup").decode()),
            tracer=int(status["TracerPid"]),
        )
    except (FileNotFoundError, ProcessLookupError):
        return None


def threads(pid: int) -> set[int]:
    """The numbers of a process's threads; none when it is gone."""
    try:
        return {int(task) for task in os.listdir(f"/proc/{pid}/task")}
    except (FileNotFoundError, ProcessLookupError):
        return set()


def thread_cgroups(pid: int) -> list[dict[str, str]]:
    """The cgroups of each of a process's threads, by controller; none when it is gone."""
    found = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found.append(_cgroups(_read(pid, f"task/{task}/cgroup").decode()))
    except (FileNotFoundError, ProcessLookupError):
        return []
    return found


def namespaces() -> dict[str, int]:
    """The caller's own."""
    return {one: os.stat(f"/proc/self/ns/{one}").st_ino for one in NAMESPACES}


def mounts(pid: int) -> tuple[Mount, ...]:
    """The mounts that a process sees, in the order in which they were made.

    Raises:
        FileNotFoundError, ProcessLookupError: it is gone.
    """
    return parse_mounts(_read(pid, "mountinfo").decode("utf-8", "surrogateescape"))


def parse_mounts(text: str) -> tuple[Mount, ...]:
    """The lines of a mountinfo (proc_pid_mountinfo(5))."""
    found = []
    # Not splitlines: who mounts chooses names, and the kernel ends a line with a newline and nothing else.
    for line in filter(None, text.split("\n")):
        left, _, right = line.partition(" - ")
        _, _, device, root, place, options = left.split(" ")[:6]
        flags = tuple(option for option in options.split(",") if option not in _TIMES)
        found.append(Mount(_plain(place), flags, device, _plain(root), right.split(" ", 1)[0]))
    return tuple(found)


def in_namespace(kind: str, inodes: Sequence[int]) -> dict[int, set[int]]:
    """By inode, the processes that are in these namespaces, whichever of their threads is.

    What has more rights than the caller (a container's first process, seen from within) does not let itself be read.
    """
    found: dict[int, set[int]] = {inode: set() for inode in inodes}
    for pid in pids():
        try:
            # A process is its first thread nearly always: the others are asked where there are others.
            tasks = [str(pid)] if os.stat(f"/proc/{pid}/task").st_nlink <= 3 else os.listdir(f"/proc/{pid}/task")
            for task in tasks:
                inode = os.stat(f"/proc/{pid}/task/{task}/ns/{kind}").st_ino
                if inode in found:
                    found[inode].add(pid)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def open_binary(pid: int) -> tuple[int, Binary]:
    """A descriptor of the file that a process runs, whatever its name leads to now, and which file that is.

    Raises:
        FileNotFoundError, ProcessLookupError: the process is gone.
    """
    fd = os.open(f"/proc/{pid}/exe", os.O_RDONLY | os.O_CLOEXEC)
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        os.close(fd)
        raise FileNotFoundError(f"process {pid} runs no plain file")
    return fd, Binary(info.st_dev, info.st_ino, info.st_ctime_ns, info.st_size)


def _stat(pid: int, most: int = -1) -> list[bytes] | None:
    """The fields of /proc/PID/stat from the state on, the first ``most`` of them each by itself: the name before it may
    hold anything."""
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):
        return None
    try:
        # One line of at most 64 characters of name and 52 numbers.
        return os.read(fd, 4096).rpartition(b")")[2].split(None, most)
    except ProcessLookupError:
        return None
    finally:
        os.close(fd)


def _read(pid: int, file: str) -> bytes:
    return small_files.whole(f"/proc/{pid}/{file}")


def _cgroups(text: str) -> dict[str, str]:
    found = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        found.update(dict.fromkeys(controllers.split(","), path))
    return found


def _plain(text: str) -> str:
    for escape, character in _ESCAPES:
        text = text.replace(escape, character)
    return text
