"""Read the kernel's counters of a live run: CPU time, memory, processes, and bytes on its network device.

Reading costs the run nothing. A missing counter is None: the run is starting or ending, or no hierarchy counts it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct


class Usage(Struct, frozen=True):
    """Counters of the run's whole cgroup, its sandbox included. ``received_bytes`` counts bytes sent to the agent."""

    cpu_us: int | None = None
    memory_bytes: int | None = None
    processes: int | None = None
    received_bytes: int | None = None
    sent_bytes: int | None = None


def usage(cgroups: Mapping[str, Path], *, keeper: int = 0, device: str = "") -> Usage:
    """Return the counters of the cgroup directories, by controller, and of the host's end of the run's link.

    The link is looked up in the network namespace of the process ``keeper``.
    """
    received, sent = _link(keeper, device) if keeper and device else (None, None)
    return Usage(
        cpu_us=_cpu_us(cgroups),
        memory_bytes=_number(cgroups, "memory", "memory.current", "memory.usage_in_bytes"),
        processes=_number(cgroups, "pids", "pids.current"),
        received_bytes=received,
        sent_bytes=sent,
    )


def _cpu_us(cgroups: Mapping[str, Path]) -> int | None:
    nanoseconds = _number(cgroups, "cpuacct", "cpuacct.usage")
    if nanoseconds is not None:
        return nanoseconds // 1000
    with contextlib.suppress(OSError, KeyError, ValueError):
        for line in (cgroups["cpu"] / "cpu.stat").read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == "usage_usec":
                return int(value)
    return None


def _number(cgroups: Mapping[str, Path], controller: str, *files: str) -> int | None:
    for file in files:
        with contextlib.suppress(OSError, KeyError, ValueError):
            return int((cgroups[controller] / file).read_bytes())
    return None


def _link(keeper: int, device: str) -> tuple[int | None, int | None]:
    """Return received and sent bytes of the agent: the reverse of the host's counters of its end."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/{keeper}/net/dev").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name.strip() == device:
                fields = rest.split()
                return int(fields[8]), int(fields[0])
    return None, None
