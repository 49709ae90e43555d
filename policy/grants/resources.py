"""Resource grants: ceilings. None is no ceiling, and stands above every number."""

from __future__ import annotations

from typing import Any, Self

from msgspec import Struct

# Field -> unit, as people read it; the order of the manifest's section.
UNITS: dict[str, str] = {
    "cpu_ms_per_task": "ms a task",
    "memory_mb": "MiB",
    "disk_mb": "MiB",
    "pids_max": "processes and threads",
    "cpu_millis": "thousandths of one core",
    "cpu_weight": "weight",
    "cpu_time_ms": "ms of processor time",
    "swap_mb": "MiB",
    "io_read_bps": "bytes a second",
    "io_write_bps": "bytes a second",
    "io_read_iops": "operations a second",
    "io_write_iops": "operations a second",
    "net_bps": "bytes a second",
}


def least(a: int | None, b: int | None) -> int | None:
    """The lower of two ceilings."""
    if a is None or b is None:
        return b if a is None else a
    return min(a, b)


def within(a: int | None, b: int | None) -> bool:
    """Whether ceiling ``a`` is no higher than ``b``."""
    return b is None or (a is not None and a <= b)


class Ceilings(Struct, frozen=True):
    """The ceilings of one agent, in the units of ``UNITS``; None where there is no ceiling."""

    cpu_ms_per_task: int | None = None
    memory_mb: int | None = None
    disk_mb: int | None = None
    pids_max: int | None = None
    cpu_millis: int | None = None
    cpu_weight: int | None = None
    cpu_time_ms: int | None = None
    swap_mb: int | None = None
    io_read_bps: int | None = None
    io_write_bps: int | None = None
    io_read_iops: int | None = None
    io_write_iops: int | None = None
    net_bps: int | None = None

    @classmethod
    def bottom(cls) -> Self:
        """Nothing of anything."""
        return cls(*(0 for _ in UNITS))

    @classmethod
    def top(cls) -> Self:
        """No ceiling at all."""
        return cls()

    def values(self) -> tuple[int | None, ...]:
        """The ceilings in the order of ``UNITS``."""
        return tuple(getattr(self, name) for name in UNITS)

    def meet(self, other: Self, /) -> Self:
        """The lower ceiling of each."""
        return type(self)(*map(least, self.values(), other.values()))

    def is_subset(self, other: Self, /) -> bool:
        """Whether no ceiling is above ``other``'s."""
        return all(map(within, self.values(), other.values()))

    def difference(self, other: Self, /) -> Self:
        """The ceilings that are above ``other``'s; 0 elsewhere."""
        pairs = zip(self.values(), other.values(), strict=True)
        return type(self)(*(0 if within(a, b) else a for a, b in pairs))

    def describe(self) -> tuple[str, ...]:
        """A line a ceiling that is not 0."""
        pairs = zip(UNITS.items(), self.values(), strict=True)
        return tuple(
            f"{name} not limited" if value is None else f"{name} {value} {unit}"
            for (name, unit), value in pairs
            if value != 0
        )

    def canonical(self) -> dict[str, Any]:
        """The ceilings by name."""
        return dict(zip(UNITS, self.values(), strict=True))
