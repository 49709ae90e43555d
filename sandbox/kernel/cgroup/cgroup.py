"""Manage cgroups, version 1 and 2: make a run's leaf, write limits, read them back, kill, remove.

Writes only below a directory named ``covenant``, or in a unit that systemd delegated to us (``delegation``). runsc
writes no limit into an existing cgroup (sandbox-facts), so every limit is written here and proved by reading it back.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from msgspec import Struct

from policy import errors
from sandbox.kernel import small_files
from sandbox.kernel.cgroup import delegation
from sandbox.kernel.cgroup.delegation import BASE, NEEDED, OPTIONAL
from sandbox.kernel.fs import filesystems, hanging

# Used if they are mounted: freezer stops every thread of a leaf, cpuacct counts its CPU time.
OPTIONAL_V1 = ("freezer", "cpuacct")
# How long a leaf is waited for that was not empty at an earlier deadline.
_HANGS_SECONDS = 1.0
# The name of the cgroup below a frozen leaf of version 1 (``Leaf.keep_frozen``).
_STILL = "still"
# The errors for a removed cgroup: when its file is opened, and when an open file is read.
_GONE = (errno.ENOENT, errno.ENODEV)


class Hierarchies(Struct, frozen=True):
    """Mount points of the controllers. ``version`` is 2 if the unified hierarchy has all needed controllers."""

    version: int
    mounts: Mapping[str, Path]

    @classmethod
    def read(cls, mountinfo: str | None = None) -> Hierarchies:
        """Read the caller's mount table; ``mountinfo`` overrides it in tests.

        On a hybrid machine the controllers that matter are on version 1 and the unified one is ignored.
        """
        legacy, unified = _mounted("\n".join(filesystems.lines(mountinfo)))
        if all(name in legacy for name in NEEDED):
            return cls(1, {n: legacy[n] for n in (*NEEDED, *OPTIONAL_V1) if n in legacy})
        there = _controllers(unified) if unified is not None else set()
        if unified is not None and set(NEEDED) <= there:
            return cls(2, dict.fromkeys((*NEEDED, *(name for name in OPTIONAL if name in there)), unified))
        return cls(0, {})


@functools.lru_cache(maxsize=2)
def _mounted(table: str) -> tuple[Mapping[str, Path], Path | None]:
    """Return the mount points of version 1's controllers and of version 2. Cached: a run asks three times."""
    legacy: dict[str, Path] = {}
    unified: Path | None = None
    for line in table.split("\n"):
        left, _, right = line.partition(" - ")
        fields, (fstype, _, options) = left.split(), [*right.split(" ", 2), "", "", ""][:3]
        if fstype == "cgroup2":
            unified = unified or Path(fields[4])
        elif fstype == "cgroup":
            for name in options.split(","):
                legacy.setdefault(name, Path(fields[4]))
    return MappingProxyType(legacy), unified


def _controllers(root: Path) -> set[str]:
    try:
        return set((root / "cgroup.controllers").read_text().split())
    except OSError:
        return set()


class Limit(Struct, frozen=True):
    """One file to write: ``controller``/``file`` = ``value``. ``required`` says whether absence is an error.

    A file with a line for each device accepts one line for each write; ``value`` then contains all of them.
    """

    controller: str
    file: str
    value: str
    required: bool = True

    def describe(self) -> str:
        """Describe the operation, for the plan and the log."""
        return f"write {self.value} to {self.controller}:{self.file}"


def _exchange(directory: Path | None, limit: Limit) -> str:
    """Write a limit and return the value that the kernel then has."""
    if directory is None:
        raise FileNotFoundError(errno.ENOENT, "no such controller in this leaf")
    path = directory / limit.file
    # Never O_CREAT: for a file that does not exist the kernel returns EACCES, which looks like a lack of rights.
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        for line in limit.value.splitlines():
            os.write(fd, line.encode())
    finally:
        os.close(fd)
    return small_files.text(path).strip()


def same(held: str, wanted: str) -> bool:
    """Whether a file contains the written value. The kernel orders the lines of devices itself."""
    return held == wanted or sorted(held.splitlines()) == sorted(wanted.splitlines())


def members(path: Path) -> list[int]:
    """Return the processes in a cgroup; none if the cgroup is gone.

    Raises:
        errors.KernelError: Raised when the list cannot be read.
    """
    try:
        return [int(pid) for pid in small_files.whole(f"{path}/cgroup.procs").split()]
    except OSError as e:
        if e.errno in _GONE:
            return []
        raise errors.KernelError(f"who is in cgroup `{path}` cannot be read: {e.strerror}") from e


@dataclass
class Leaf:
    """One run's cgroup in every hierarchy that it needs. As a context manager it is killed and removed at the end."""

    hierarchies: Hierarchies
    name: str
    paths: dict[str, Path] = field(default_factory=dict)
    reported: list[str] = field(default_factory=list)
    # A kill of it has failed before: a process in it waits for a file system, and SIGKILL does not end that.
    _hangs: bool = False

    def __enter__(self) -> Leaf:
        if self.hierarchies.version == 0:
            raise errors.NotEnforceableError(
                "no cgroup hierarchy carries memory, pids and cpu", hint="mount cgroup v2, or v1 controllers"
            )
        try:
            for controller, path in self.plan().items():
                if path not in self.paths.values():
                    path.parent.mkdir(mode=0o755, exist_ok=True)
                    path.mkdir(mode=0o755)
                self.paths[controller] = path
        except OSError as e:
            self.remove()
            raise errors.KernelError(f"cannot make cgroup `{e.filename}`: {e.strerror}") from e
        return self

    def plan(self) -> dict[str, Path]:
        """Return the leaf's future paths by controller. On version 2 this may start a systemd unit (``delegation``)."""
        if self.hierarchies.version == 2:
            place = delegation.base(self.hierarchies.mounts["memory"]) / self.name
            return dict.fromkeys(self.hierarchies.mounts, place)
        return {controller: root / BASE / self.name for controller, root in self.hierarchies.mounts.items()}

    def __exit__(self, *exc: object) -> None:
        self.kill()
        self.remove()

    def adopt(self, paths: Mapping[str, Path]) -> None:
        """Take over the cgroups that an earlier process planned, as far as they exist."""
        self.paths = {controller: path for controller, path in paths.items() if path.is_dir()}

    def apply(self, limits: Iterable[Limit]) -> None:
        """Write each limit and read it back.

        Raises:
            errors.NotEnforceableError: Raised when a required file is absent.
            errors.KernelError: Raised when the kernel has another value than the written one.
        """
        for limit in limits:
            try:
                held = _exchange(self.paths.get(limit.controller), limit)
            except OSError as e:
                if not limit.required and e.errno in {errno.ENOENT, errno.EOPNOTSUPP}:
                    self.reported.append(f"{limit.file}: not on this host")
                    continue
                raise errors.NotEnforceableError(
                    f"cgroup limit {limit.controller}:{limit.file} cannot be set: {e.strerror}"
                ) from e
            if not same(held, limit.value):
                raise errors.KernelError(
                    f"cgroup limit {limit.controller}:{limit.file} was written as {limit.value}, "
                    f"the kernel holds {held}"
                )

    def join_files(self) -> tuple[str, ...]:
        """Return the files into which a single-threaded process writes 0 to join, as its first act.

        Version 1 has `tasks`: the kernel moves the writing thread without a global lock. For `cgroup.procs` it waits an
        RCU grace period for that lock, 4 ms in each hierarchy (kernel/cgroup/cgroup.c, cgroup_attach_lock).
        """
        name = "tasks" if self.hierarchies.version == 1 else "cgroup.procs"
        return tuple(sorted({str(p / name) for p in self.paths.values()}))

    def pids(self) -> list[int]:
        """Return the host processes in this leaf, of all hierarchies.

        Raises:
            errors.KernelError: Raised when a list cannot be read; the leaf must not count as empty then.
        """
        return sorted({pid for path in set(self.paths.values()) for pid in members(path)})

    def oom_kills(self) -> int:
        """Count the processes of this leaf that the kernel killed for memory. Called after the exit."""
        file = "memory.events" if self.hierarchies.version == 2 else "memory.oom_control"
        with contextlib.suppress(OSError, KeyError):
            for line in _read(self.paths["memory"], file).splitlines():
                key, _, value = line.partition(" ")
                if key == "oom_kill":
                    return int(value)
        return 0

    def pids_refused(self) -> int:
        """Count the tasks that the kernel refused to this leaf. Called after the exit."""
        with contextlib.suppress(OSError, KeyError, ValueError):
            for line in _read(self.paths["pids"], "pids.events").splitlines():
                key, _, value = line.partition(" ")
                if key == "max":
                    return int(value)
        return 0

    def memory_bytes(self) -> int:
        """Return the memory that the leaf uses now; 0 if the leaf does not exist."""
        name = "memory.usage_in_bytes" if self.hierarchies.version == 1 else "memory.current"
        try:
            return int(_read(self.paths["memory"], name))
        except (KeyError, FileNotFoundError):
            return 0

    def memory_peak_bytes(self) -> int | None:
        """Return the peak memory use of the leaf; None if the kernel has no such file (version 2 before Linux 5.19)."""
        name = "memory.max_usage_in_bytes" if self.hierarchies.version == 1 else "memory.peak"
        try:
            return int(_read(self.paths["memory"], name))
        except (KeyError, OSError, ValueError):
            return None

    def cpu_time_us(self) -> int:
        """Return the CPU time of all processes that were ever in this leaf, in microseconds.

        Raises:
            errors.KernelError: Raised when it cannot be read.
        """
        try:
            if self.hierarchies.version == 1:
                return int(_read(self.paths["cpuacct"], "cpuacct.usage")) // 1000
            for line in _read(self.paths["cpu"], "cpu.stat").splitlines():
                key, _, value = line.partition(" ")
                if key == "usage_usec":
                    return int(value)
        except (OSError, KeyError, ValueError) as e:
            raise errors.KernelError(f"the processor time of cgroup `{self.name}` cannot be read: {e}") from e
        raise errors.KernelError(f"the processor time of cgroup `{self.name}` is not counted")

    def kill(self, deadline_seconds: float = 10.0) -> None:
        """Kill every process in the leaf with SIGKILL until the leaf is empty.

        A frozen leaf is thawed only after the SIGKILL, so that no process in it executes another instruction. A leaf
        that was not empty at an earlier deadline is waited for briefly.

        Raises:
            errors.KernelError: Raised when a process is alive at the deadline, or the list cannot be read.
        """
        until = time.monotonic() + (_HANGS_SECONDS if self._hangs else deadline_seconds)
        if self.hierarchies.version == 2 and self.paths:
            with contextlib.suppress(OSError):
                (self.paths["memory"] / "cgroup.kill").write_text("1")
        # Version 2 kills frozen processes as well; a freezer write in each round would only delay it.
        freezing = self.hierarchies.version == 1 and self.freezable
        while True:
            pids, unread = self._left()
            if not pids and not unread:
                return
            if freezing:
                with contextlib.suppress(OSError):
                    self._ask(frozen=True)
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if freezing:  # v1 delivers SIGKILL only after the thaw (sandbox-facts)
                with contextlib.suppress(OSError):
                    self._ask(frozen=False)
            if time.monotonic() > until:
                self._hangs = True
                raise errors.KernelError(unread or f"{hanging.survivors(pids)} survive SIGKILL in cgroup `{self.name}`")
            time.sleep(0.002)

    def _left(self) -> tuple[list[int], str]:
        """Return the remaining processes, or none and the error: a lack of descriptors may be over in a moment."""
        try:
            return self.pids(), ""
        except errors.KernelError as e:
            return [], e.message

    @property
    def freezable(self) -> bool:
        """Whether this leaf has a freezer: version 2 always, version 1 where its controller is mounted."""
        return bool(self.paths) if self.hierarchies.version == 2 else "freezer" in self.paths

    def freeze(
        self,
        deadline_seconds: float = 5.0,
        *,
        allow_thaw: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """Freeze every thread in the leaf, the sentry's too.

        Returns when the kernel reports all threads as frozen, or the leaf is empty because its processes were killed.
        ``allow_thaw`` is entered around the thaw after a failure, and raises if the leaf must stay frozen.

        Raises:
            errors.NotEnforceableError: Raised when there is no freezer.
            errors.KernelError: Raised when a thread still runs at the deadline; the leaf is thawed again.
        """
        try:
            self._settle(frozen=True, deadline_seconds=deadline_seconds)
        except errors.KernelError:
            with allow_thaw(), contextlib.suppress(OSError):
                self._ask(frozen=False)
            raise

    def keep_frozen(self) -> None:
        """Make the next thaw as fast as if other cgroups were frozen. Failures are ignored.

        On version 1 the kernel patches its own code when the last frozen cgroup of a machine is thawed (freezer_active,
        0.14 ms on two cores). An empty frozen cgroup below this leaf prevents that until the leaf is removed.
        """
        if self.hierarchies.version == 1 and self.freezable:
            still = self.paths["freezer"] / _STILL
            with contextlib.suppress(OSError):
                still.mkdir(mode=0o755)
                _write(still, "freezer.state", "FROZEN")

    def thaw(self, deadline_seconds: float = 5.0) -> None:
        """Thaw the leaf.

        Raises:
            errors.NotEnforceableError: Raised when there is no freezer.
            errors.KernelError: Raised when the leaf is still frozen at the deadline, or is gone.
        """
        self._settle(frozen=False, deadline_seconds=deadline_seconds)

    def frozen(self) -> bool:
        """Whether the kernel reports every thread in the leaf as frozen. False while some are still stopping.

        Raises:
            errors.NotEnforceableError: Raised when there is no freezer.
            errors.KernelError: Raised when the leaf is gone.
        """
        return self._freezer_says() is True

    def _settle(self, *, frozen: bool, deadline_seconds: float) -> None:
        until = time.monotonic() + deadline_seconds
        wanted = "frozen" if frozen else "thawed"
        try:
            self._ask(frozen=frozen)
        except OSError as e:
            raise errors.KernelError(f"cgroup `{self.name}` cannot be {wanted}: {e.strerror}") from e
        # Most threads are frozen at the first check (0.1 ms). A thread that waits for a disk takes longer.
        while self._freezer_says() is not frozen:
            if frozen and self._left() == ([], ""):
                return
            if time.monotonic() > until:
                raise errors.KernelError(f"cgroup `{self.name}` is not {wanted} after {deadline_seconds:g} s")
            time.sleep(0.0005)

    def _ask(self, *, frozen: bool) -> None:
        if self.hierarchies.version == 2:
            _write(self._freezer(), "cgroup.freeze", "1" if frozen else "0")
        else:
            _write(self._freezer(), "freezer.state", "FROZEN" if frozen else "THAWED")

    def _freezer_says(self) -> bool | None:
        """Return True if frozen, False if thawed, None in between. Version 2 returns False in between."""
        directory = self._freezer()
        try:
            if self.hierarchies.version == 2:
                return "frozen 1" in _read(directory, "cgroup.events").splitlines()
            return {"FROZEN": True, "THAWED": False}.get(_read(directory, "freezer.state").strip())
        except OSError as e:
            raise errors.KernelError(f"the freezer of cgroup `{self.name}` cannot be read: {e.strerror}") from e

    def _freezer(self) -> Path:
        if not self.freezable:
            raise errors.NotEnforceableError(
                "nothing here can be frozen: the cgroup freezer is not there", hint="mount the v1 freezer controller"
            )
        return self.paths["memory" if self.hierarchies.version == 2 else "freezer"]

    def remove(self, deadline_seconds: float = 5.0) -> None:
        """Remove the leaf's directories. A zombie may keep one busy for a moment.

        Raises:
            errors.KernelError: Raised when one still exists after ``deadline_seconds``.
        """
        until = time.monotonic() + deadline_seconds
        with contextlib.suppress(KeyError, OSError):
            (self.paths["freezer"] / _STILL).rmdir()
        for path in set(self.paths.values()):
            while True:
                try:
                    path.rmdir()
                except FileNotFoundError:
                    break
                except OSError as e:
                    if time.monotonic() > until:
                        raise errors.KernelError(f"cgroup `{path}` cannot be removed: {e.strerror}") from e
                    time.sleep(0.005)
                else:
                    break
        self.paths.clear()


def _read(directory: Path, name: str) -> str:
    return small_files.text(f"{directory}/{name}")


def _write(directory: Path, name: str, text: str) -> None:
    fd = os.open(f"{directory}/{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
