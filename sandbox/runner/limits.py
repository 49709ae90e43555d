"""Limits that no file of a cgroup holds: the processor time of a whole run, and the devices that io.max is about."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from policy import errors
from sandbox.kernel.cgroup.cgroup import Leaf
from sandbox.kernel.fs import filesystems
from sandbox.run_io import PeriodicCheck
from sandbox.rundir import directory

# The least time between two looks at the processor time, which is also how exactly it is held (seconds).
SHORTEST_SECONDS = 0.01
# In a run's directory: what its cgroups had counted when it was given its intent (``Meter.noted``).
METER = directory.METER
# In it where they count nothing.
_UNCOUNTED = b"-"


@dataclass
class CpuTime:
    """``cpu_time_ms``: looked at as often as it could be used up, so it is overrun by at most cores x 10 ms.

    It counts from the start of the agent's first process what the whole sandbox uses: the agent, and gVisor's kernel
    that works for it (an idle sandbox takes about 6 % of a core, sandbox-facts). What the start itself took is the
    supervisor's cost and not the agent's. ``read`` gives the processor time so far in microseconds.
    """

    limit_ms: int
    read: Callable[[], int]
    cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    _began_us: int | None = None
    _used_us: int = 0

    def started(self) -> None:
        """The agent's first process runs: what was used until now is not its."""
        self._began_us = self.read()

    def round(self) -> PeriodicCheck:
        """As the exchange takes it."""
        return PeriodicCheck(self._wait(), self._look, self._wait)

    def _look(self) -> errors.RunError | None:
        if self._began_us is None:
            return None
        self._used_us = self.read() - self._began_us
        if self._used_us <= self.limit_ms * 1000:
            return None
        return errors.CpuTimeError(
            f"{self._used_us // 1000} ms of processor time used (clock: cpu_time_ms, {self.limit_ms} ms)",
            hint="raise resources.cpu_time_ms, or give the agent less to do",
            clock="cpu_time_ms",
        )

    def _wait(self) -> float:
        left = self.limit_ms / 1000 - self._used_us / 1e6
        return max(SHORTEST_SECONDS, left / self.cores)


def was_begun(noted: Path) -> bool:
    """Whether a run whose process is gone was about to be given its intent."""
    try:
        return noted.stat().st_size > 0
    except FileNotFoundError:
        return False


@dataclass
class Meter:
    """Count the use of a run from its intent on. Its start and its wait belong to no task.

    Without a ``leaf`` nothing is counted, and the result says so.
    """

    leaf: Leaf | None
    gates: Leaf | None = None
    noted: Path | None = None
    _began_us: int | None = None
    _begun: bool = False

    def begin(self) -> None:
        """Start the count at the intent. Only the first call counts.

        ``noted`` writes the start for the process that counts when this one is killed.
        """
        if self._begun:
            return
        self._began_us = self._cpu_time_us()
        if self.noted is not None:
            raw = _UNCOUNTED if self._began_us is None else str(self._began_us).encode()
            fd = os.open(self.noted, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, raw)
            finally:
                os.close(fd)
        self._begun = True

    @classmethod
    def of_one_that_was_killed(cls, leaf: Leaf, gates: Leaf | None, noted: Path) -> Meter:
        """That of a run whose process is gone, from where it began; ``cpu_ms`` is None where it had not."""
        meter = cls(leaf, gates)
        with contextlib.suppress(OSError, ValueError):
            meter._began_us = int(noted.read_text())
        return meter

    def cpu_ms(self) -> int | None:
        """The processor time since then; None where it is not counted. Read before the cgroup is removed."""
        now_us = self._cpu_time_us()
        return None if now_us is None or self._began_us is None else (now_us - self._began_us) // 1000

    def memory_peak_bytes(self) -> int | None:
        """The most that it held at one time, its start included; None where it is not counted."""
        return None if self.leaf is None else self.leaf.memory_peak_bytes()

    def _cpu_time_us(self) -> int | None:
        if self.leaf is None:
            return None
        try:
            # A gate works for this agent alone.
            return self.leaf.cpu_time_us() + (0 if self.gates is None else self.gates.cpu_time_us())
        except errors.KernelError:
            return None  # no limit rests on it here: CpuTime reads it for itself, and does not go without


DEVICE = "$DEVICE"


def devices(places: Iterable[tuple[str, int]]) -> tuple[str, ...]:
    """The disks, ``major:minor``, that hold what a run reads and writes: paths with their open descriptors.

    Raises:
        errors.NotEnforceableError: something lies on no disk that io.max could bound.
    """
    found: set[str] = set()
    for path, fd in places:
        mount = filesystems.mount_of(fd)
        disk = filesystems.whole_disk(mount.device)
        if disk is None:
            raise errors.NotEnforceableError(
                f"io limits cannot be held: `{path}` lies on {mount.kind}, which is no one block device",
                hint="take the resources.io_* limits out, or keep it on ext4 or xfs",
                grant="resources.io",
            )
        found.add(disk)
    return tuple(sorted(found))


def on_devices(value: str, disks: Iterable[str]) -> str:
    """A line of cgroup.json about ``$DEVICE`` as a line for each disk; any other value as it is."""
    if not value.startswith(f"{DEVICE} "):
        return value
    return "\n".join(value.replace(DEVICE, disk, 1) for disk in disks)
