"""Check a cgroup for settings that widen its limits: bursts, protections and attached BPF programs."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterable, Iterator
from typing import Final

from policy.prove.live import Layer, Standing
from sandbox.kernel import libc, small_files

# Files that no policy names, each with its content in a new cgroup. Only the first line of memory.oom_control counts.
# A kernel without a file has nothing to widen there.
_FILES: Final = {
    "cpu.cfs_burst_us": "0",
    "cpu.max.burst": "0",
    "cpu.rt_runtime_us": "0",
    "cpu.uclamp.min": "0.00",
    "memory.oom_control": "oom_kill_disable 0",
    "memory.min": "0",
    "memory.low": "0",
}
_FAIR: Final = frozenset({os.SCHED_OTHER, os.SCHED_BATCH, os.SCHED_IDLE})
# linux/bpf.h, enum bpf_attach_type: every place of a cgroup up to BPF_CGROUP_UNIX_GETSOCKNAME.
_PLACES: Final = (*range(4), 6, *range(8, 16), *range(18, 23), *range(29, 33), 34, 43, *range(49, 54))


def judge(directories: Iterable[str], what: str) -> Iterator[Layer]:
    """Yield a layer for each difference from a new cgroup. ``what`` names the owner of the cgroup.

    BPF programs are checked on version 2 only: the kernel attaches none to a cgroup of version 1.
    """
    for directory in sorted(set(directories)):
        for name, value in _present(directory):
            held = small_files.whole(f"{directory}/{name}").decode().partition("\n")[0].strip()
            if held != value:
                yield Layer("cgroup", Standing.WIDER, f"{name} {value} for {what}", held)
        if _unified(directory) and (count := programs(directory)):
            yield Layer("cgroup", Standing.WIDER, f"no BPF program at the cgroup of {what}", str(count))


@functools.lru_cache(maxsize=64)
def _present(directory: str) -> tuple[tuple[str, str], ...]:
    """Return the files of ``_FILES`` that a cgroup has. The kernel adds and removes none while the cgroup exists."""
    there = set(os.listdir(directory))
    return tuple((name, value) for name, value in _FILES.items() if name in there)


@functools.lru_cache(maxsize=64)
def _unified(directory: str) -> bool:
    return os.path.exists(f"{directory}/cgroup.controllers")


def scheduled(threads: Iterable[int]) -> Iterator[Layer]:
    """Yield a layer for each thread whose scheduling policy the CPU quota does not limit (real time, deadline)."""
    for thread in sorted(threads):
        with contextlib.suppress(ProcessLookupError):
            if (policy := os.sched_getscheduler(thread) & ~os.SCHED_RESET_ON_FORK) not in _FAIR:
                found = f"policy {policy} for thread {thread}"
                yield Layer("cgroup", Standing.WIDER, "the run's threads under the quota of the processor", found)


def programs(directory: str) -> int:
    """Count the BPF programs that are attached to the cgroup itself."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return sum(libc.attached_programs(fd, place) for place in _PLACES)
    finally:
        os.close(fd)
