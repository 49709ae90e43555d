"""Read running processes from /proc: family, rights, namespaces, cgroups, mounts. It changes nothing.

A process is identified by its pid and its start time, so that a reused pid is not taken for it. A process that ends
while it is read counts as gone (None). That is no finding by itself: the caller reads again.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import stat
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from msgspec import Struct

from sandbox.kernel import small_files

# The sets of /proc/PID/status (proc_pid_status(5)).
CAPABILITY_SETS: Final = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
NAMESPACES: Final = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
# The access-time options of a mount are no right.
_TIMES: Final = frozenset({"relatime", "noatime", "nodiratime", "strictatime", "lazytime"})
_ESCAPES: Final = (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\"))
_EXITING: Final = 0x4  # of the flags in /proc/PID/stat


class Name(Struct, frozen=True):
    """Identity of a process: its pid, and the clock tick of its start (proc_pid_stat(5), field 22)."""

    pid: int
    start: int


class Binary(Struct, frozen=True):
    """Identity of the file that a process executes.

    A difference in any field means another file. Times in nanoseconds.
    """

    device: int
    inode: int
    changed_ns: int
    size: int


class Process(Struct, frozen=True):
    """One process as /proc shows it.

    ``capabilities`` has the keys of ``CAPABILITY_SETS``. ``namespaces`` maps a word of ``NAMESPACES`` to an inode.
    ``cgroups`` maps a controller (empty for version 2) to a path. ``tracer`` is the tracer of its first thread, or 0.
    """

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


class ProcessMount(Struct, frozen=True):
    """One line of a process's mountinfo: the mount point, its own flags in the kernel's order, the source.

    ``super_options`` are those of the file system.
    """

    place: str
    options: tuple[str, ...]
    device: str
    root: str
    type: str
    super_options: tuple[str, ...] = ()


def name(pid: int) -> Name | None:
    """Return the process that has this pid now. Returns None if there is none or it is a zombie."""
    fields = _stat(pid)
    return None if fields is None or fields[0] in (b"Z", b"X") else Name(pid, int(fields[19]))


def exits(pid: int) -> bool:
    """Whether a process is at its end: it may have closed its files and be no zombie yet (PF_EXITING, sched.h)."""
    fields = _stat(pid)
    return fields is None or bool(int(fields[6]) & _EXITING)


def parent(pid: int) -> int:
    """Return the pid of a process's parent; 0 if it has none or is gone."""
    fields = _stat(pid)
    return 0 if fields is None else int(fields[1])


def descends(pid: int, ancestors: Collection[int]) -> bool:
    """Whether a process is one of these or descends from one of them."""
    for _ in range(64):
        if pid in ancestors or pid == 0:
            return pid != 0
        pid = parent(pid)
    return False


def family(of: Name, known: Collection[int] = ()) -> list[int] | None:
    """Return the pids of a process and of all its descendants. Returns None if it is gone.

    The kernel may omit a child whose sibling ends during the listing (proc_tid_children(5)). None of those in ``known``
    is missed.
    """
    if name(of.pid) != of:
        return None
    found = by_children(of.pid) if tells_children() else _by_parents(of.pid)
    ours = set(found)
    return [*found, *(pid for pid in sorted(set(known) - ours) if descends(pid, ours))]


@functools.cache
def tells_children() -> bool:
    """Whether this kernel was built with CONFIG_PROC_CHILDREN."""
    return os.path.exists(f"/proc/self/task/{os.getpid()}/children")


def by_children(first: int) -> list[int]:
    """Collect the children of each thread: some dozens, where a machine may have thousands of processes."""
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
    """Return the pids of all processes in this mount of /proc."""
    return (int(entry) for entry in os.listdir("/proc") if entry.isdigit())


def tracer(pid: int) -> int:
    """Return the thread that traces a process's first thread, or 0.

    Raises:
        FileNotFoundError, ProcessLookupError: Raised when the process is gone.
    """
    return int(_status(pid)["TracerPid"])


def tracers(pid: int) -> dict[int, int]:
    """Return the traced threads of a process with their tracers. Empty if the process is gone.

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
    """Return the fields of proc_pid_status(5)."""
    text = _read(pid, "status").decode("utf-8", "surrogateescape")
    return dict(line.split(":\t", 1) for line in text.split("\n") if ":\t" in line)


def process(pid: int) -> Process | None:
    """Read one process. Returns None if it is gone."""
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
    """Return the ids of a process's threads. Empty if it is gone."""
    try:
        return {int(task) for task in os.listdir(f"/proc/{pid}/task")}
    except (FileNotFoundError, ProcessLookupError):
        return set()


def thread_cgroups(pid: int) -> list[dict[str, str]]:
    """Return the cgroups of each thread of a process, by controller. Empty if it is gone."""
    found = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found.append(_cgroups(_read(pid, f"task/{task}/cgroup").decode()))
    except (FileNotFoundError, ProcessLookupError):
        return []
    return found


def namespaces() -> dict[str, int]:
    """Return the caller's own namespaces."""
    return {one: os.stat(f"/proc/self/ns/{one}").st_ino for one in NAMESPACES}


def mounts(pid: int) -> tuple[ProcessMount, ...]:
    """Return the mounts that a process sees, in the order of their creation.

    Raises:
        FileNotFoundError, ProcessLookupError: it is gone.
    """
    return parse_mounts(_read(pid, "mountinfo").decode("utf-8", "surrogateescape"))


def mount_ids(pid: int) -> set[int]:
    """Return the ids of the mounts that a process sees, as ``mnt_id`` of an open file names them (proc_pid_fdinfo(5)).

    Raises:
        FileNotFoundError, ProcessLookupError: it is gone.
    """
    lines = _read(pid, "mountinfo").split(b"\n")
    return {int(line.split(b" ", 1)[0]) for line in lines if line}


def parse_mounts(text: str) -> tuple[ProcessMount, ...]:
    """Parse the lines of a mountinfo (proc_pid_mountinfo(5))."""
    found = []
    # Not splitlines: users who mount choose names, and the kernel ends a line only with a newline.
    for line in filter(None, text.split("\n")):
        left, _, right = line.partition(" - ")
        _, _, device, root, place, options = left.split(" ")[:6]
        flags = tuple(option for option in options.split(",") if option not in _TIMES)
        kind, _, rest = right.partition(" ")
        supers = tuple(map(_plain, rest.rpartition(" ")[2].split(",")))
        found.append(ProcessMount(_plain(place), flags, device, _plain(root), kind, supers))
    return tuple(found)


def in_namespace(kind: str, inodes: Sequence[int]) -> dict[int, set[int]]:
    """By inode, the processes that are in these namespaces, whichever of their threads is.

    What has more rights than the caller (a container's first process, seen from within) does not let itself be read.
    """
    found: dict[int, set[int]] = {inode: set() for inode in inodes}
    for pid in pids():
        try:
            # Nearly every process has one thread: the others are read only if there are others.
            tasks = [str(pid)] if os.stat(f"/proc/{pid}/task").st_nlink <= 3 else os.listdir(f"/proc/{pid}/task")
            for task in tasks:
                inode = os.stat(f"/proc/{pid}/task/{task}/ns/{kind}").st_ino
                if inode in found:
                    found[inode].add(pid)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def open_binary(pid: int) -> tuple[int, Binary]:
    """Open the file that a process executes, even if its name leads elsewhere now. Returns also its identity.

    Raises:
        FileNotFoundError, ProcessLookupError: Raised when the process is gone.
    """
    fd = os.open(f"/proc/{pid}/exe", os.O_RDONLY | os.O_CLOEXEC)
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        os.close(fd)
        raise FileNotFoundError(f"process {pid} runs no plain file")
    return fd, Binary(info.st_dev, info.st_ino, info.st_ctime_ns, info.st_size)


def _stat(pid: int, most: int = -1) -> list[bytes] | None:
    """Return the fields of /proc/PID/stat from the state on; at most ``most`` of them are split.

    The name before the state may contain any characters.
    """
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
