"""cgroup.json read back: the ceilings that the cgroup holds, for each version of cgroups by itself.

A sandbox is more than its agent, so what is written there is more than what is granted, by amounts that are fixed:
the sentry's own memory, the host tasks of the sandbox, and the coarser shares of version 1. They are undone
exactly here; what does not come out even was not made from a grant.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from msgspec import Struct

from policy.decompile import documents
from policy.decompile.config import MIB
from policy.decompile.documents import Files, NoneType, closed, fixed, refuse, shown

CGROUP = "cgroup.json"
VERSION = 2
PERIOD_US: Final = 100_000
_NUMBER = re.compile(r"0|[1-9][0-9]{0,18}")
_IO = re.compile(
    r"\$DEVICE" + "".join(rf" {key}=(max|[1-9][0-9]{{0,15}})" for key in ("rbps", "wbps", "riops", "wiops"))
)
_IO_NAMES = ("io_read_bps", "io_write_bps", "io_read_iops", "io_write_iops")


def overhead_mb(version: int, pids_max: int) -> int | None:
    """The memory of the sandbox itself in MiB for so many processes, None for a version that is not known.

    Version 1, as measured: 64 MiB, and half a MiB a process.
    """
    return {1: 64 + pids_max // 2}.get(version)


def wall(pids_max: int) -> int:
    """Host tasks of a sandbox whose agent may have so many processes and threads."""
    return 2 * pids_max + 64


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one version of cgroups, in the units of the grants; io ceilings None where there are none."""

    memory_mb: int
    swap_mb: int
    pids_max: int
    cpu_millis: int
    cpu_weight: int
    io: tuple[tuple[str, int | None], ...] = tuple((name, None) for name in _IO_NAMES)


class Read(Struct, frozen=True):
    """The limits by version: ``v1`` is None when they cannot be held there; ``oci`` is what runsc is told.

    ``files`` are the names of the files of each version that is held.
    """

    v2: Limits
    v1: Limits | None
    oci: Limits
    files: tuple[tuple[str, tuple[str, ...]], ...]


class _Written(Struct, frozen=True):
    """The file values of one version, in bytes, tasks and microseconds; ``weight`` is in that version's units."""

    memory: int
    swap: int
    pids: int
    quota: int
    period: int
    weight: int


def read(files: Files, resources: Mapping[str, Any], *, pids_max: int, scratch_mb: int) -> Read:
    """The ceilings. ``resources`` is that part of config.json, which must say the same as cgroup.json.

    Raises:
        errors.ArtefactError: a file is missing, unknown or malformed, or a value comes from no grant.
    """
    whole = closed(
        documents.load(files, CGROUP),
        CGROUP,
        {"oci": dict, "overhead": dict, "v1": (list, NoneType), "v2": list, "version": int},
    )
    fixed(whole["version"], f"{CGROUP}:version", VERSION)
    fixed(resources, "config.json:linux/resources", whole["oci"])
    overhead = closed(whole["overhead"], f"{CGROUP}:overhead", {"mb": int, "version": int})
    known = overhead_mb(overhead["version"], pids_max)
    if known is None or overhead["mb"] != known:
        raise refuse(f"{CGROUP}:overhead", f"{shown(overhead)} is no overhead of a sandbox with {pids_max} processes")
    beside = (known + scratch_mb) * MIB
    v2, io = _v2(whole["v2"])
    if whole["v1"] is None and not any(ceiling for _, ceiling in io):
        raise refuse(f"{CGROUP}:v1", "there are no limits for version 1, which can hold these")
    if whole["v1"] is not None and any(ceiling for _, ceiling in io):
        raise refuse(f"{CGROUP}:v1", "version 1 holds no ceiling of io, so there can be no limits for it")
    oci = _of_oci(whole["oci"])
    return Read(
        _limits(v2, f"{CGROUP}:v2", beside, v2.weight, io),
        None if whole["v1"] is None else _of_v1(whole["v1"], beside),
        _limits(oci, f"{CGROUP}:oci", beside, weight_of(oci.weight, f"{CGROUP}:oci"), None),
        tuple(
            (version, tuple(entry["file"] for entry in whole[version]))
            for version in ("v1", "v2")
            if whole[version] is not None
        ),
    )


def _of_v1(value: list[Any], beside: int) -> Limits:
    found = _v1(value)
    return _limits(found, f"{CGROUP}:v1", beside, weight_of(found.weight, f"{CGROUP}:v1"), None)


def _limits(
    found: _Written, where: str, beside: int, weight: int, io: tuple[tuple[str, int | None], ...] | None
) -> Limits:
    """The grants behind what is written. Raises ArtefactError when it does not come out even."""
    memory, odd = divmod(found.memory - beside, MIB)
    swap, odd_swap = divmod(found.swap, MIB)
    pids, odd_pids = divmod(found.pids - wall(0), 2)
    if odd or odd_swap or odd_pids or memory < 1 or swap < 0 or pids < 1:
        raise refuse(where, f"memory {found.memory}, swap {found.swap} and tasks {found.pids} come from no grant")
    if found.period != PERIOD_US or found.quota % (PERIOD_US // 1000) or found.quota <= 0:
        raise refuse(where, f"quota {found.quota} of {found.period} microseconds comes from no grant")
    cpu = found.quota // (PERIOD_US // 1000)
    return Limits(memory, swap, pids, cpu, weight, *(() if io is None else (io,)))


def shares(weight: int) -> int:
    """cpu.shares of version 1 for a weight: 100 is 1024, rounded down."""
    return weight * 1024 // 100


def weight_of(found: int, where: str) -> int:
    """The one weight whose shares these are: between two weights lie ten shares, so none is lost."""
    weight = -(-found * 100 // 1024)
    if not 1 <= weight <= 10_000 or shares(weight) != found:
        raise refuse(where, f"{found} shares come from no weight")
    return weight


def _number(text: str, where: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise refuse(where, f"{shown(text)} is no whole number")
    return int(text)


def _entries(value: list[Any], where: str, known: Mapping[str, tuple[str, bool | None]]) -> dict[str, tuple[str, bool]]:
    """File -> (value, required). ``known`` says each file's controller, and whether it is required, None for either."""
    found: dict[str, tuple[str, bool]] = {}
    for item in value:
        entry = closed(item, where, {"controller": str, "file": str, "required": bool, "value": str})
        name = entry["file"]
        if name not in known or name in found:
            raise refuse(where, f"file {shown(name)} is not known, or stands twice")
        controller, required = known[name]
        fixed(entry["controller"], f"{where}/{name}", controller)
        if required is not None:
            fixed(entry["required"], f"{where}/{name}", required)
        found[name] = (entry["value"], entry["required"])
    if list(found) != [name for name in known if name in found]:
        # Version 1 takes memory.memsw only after memory.limit: the order is part of what holds.
        raise refuse(where, "the files are not in their order")
    return found


def _needed(found: Mapping[str, tuple[str, bool]], where: str, names: tuple[str, ...]) -> dict[str, int]:
    """The numbers of files that must be there."""
    if missing := [name for name in names if name not in found]:
        raise refuse(where, f"file `{missing[0]}` is missing")
    return {name: _number(found[name][0], f"{where}/{name}") for name in names}


_V2: Final[Mapping[str, tuple[str, bool | None]]] = {
    "memory.max": ("memory", True),
    "memory.high": ("memory", False),
    # Where nothing may be swapped, a machine without swap accounting does as well.
    "memory.swap.max": ("memory", None),
    "memory.oom.group": ("memory", False),
    "pids.max": ("pids", True),
    "cpu.max": ("cpu", True),
    "cpu.weight": ("cpu", True),
    "io.max": ("io", True),
}


def _v2(value: list[Any]) -> tuple[_Written, tuple[tuple[str, int | None], ...]]:
    where = f"{CGROUP}:v2"
    found = _entries(value, where, _V2)
    simple = tuple(name for name in _V2 if name not in ("cpu.max", "io.max"))
    numbers = _needed(found, where, simple)
    fixed(numbers["memory.oom.group"], f"{where}/memory.oom.group", 1)
    fixed(numbers["memory.high"], f"{where}/memory.high", numbers["memory.max"])
    fixed(found["memory.swap.max"][1], f"{where}/memory.swap.max", bool(numbers["memory.swap.max"]))
    quota, _, period = found.get("cpu.max", ("", True))[0].partition(" ")
    weight = numbers["cpu.weight"]
    if not 1 <= weight <= 10_000:
        raise refuse(f"{where}/cpu.weight", f"{weight} is no weight")
    written = _Written(
        numbers["memory.max"],
        numbers["memory.swap.max"],
        numbers["pids.max"],
        _number(quota, f"{where}/cpu.max"),
        _number(period, f"{where}/cpu.max"),
        weight,
    )
    return written, _io(found.get("io.max", (None, True))[0], f"{where}/io.max")


def _io(text: str | None, where: str) -> tuple[tuple[str, int | None], ...]:
    if text is None:
        return tuple((name, None) for name in _IO_NAMES)
    match = _IO.fullmatch(text)
    values = [None if part == "max" else int(part) for part in match.groups()] if match else []
    if not any(values):
        raise refuse(where, f"{shown(text)} holds no ceiling")
    return tuple(zip(_IO_NAMES, values, strict=True))


_V1: Final[Mapping[str, tuple[str, bool | None]]] = {
    "memory.limit_in_bytes": ("memory", True),
    "memory.memsw.limit_in_bytes": ("memory", None),
    "memory.swappiness": ("memory", False),
    "pids.max": ("pids", True),
    "cpu.cfs_period_us": ("cpu", True),
    "cpu.cfs_quota_us": ("cpu", True),
    "cpu.shares": ("cpu", True),
}


def _v1(value: list[Any]) -> _Written:
    where = f"{CGROUP}:v1"
    found = _entries(value, where, _V1)
    numbers = _needed(found, where, tuple(name for name in _V1 if name != "memory.swappiness"))
    memory = numbers["memory.limit_in_bytes"]
    swap = numbers["memory.memsw.limit_in_bytes"] - memory
    fixed(found["memory.memsw.limit_in_bytes"][1], f"{where}/memory.memsw.limit_in_bytes", bool(swap))
    # Without swap accounting only swappiness keeps an agent without swap from it.
    fixed(found.get("memory.swappiness", ("", False))[0], f"{where}/memory.swappiness", "" if swap else "0")
    return _Written(
        memory,
        swap,
        numbers["pids.max"],
        numbers["cpu.cfs_quota_us"],
        numbers["cpu.cfs_period_us"],
        numbers["cpu.shares"],
    )


def _of_oci(value: dict[str, Any]) -> _Written:
    where = f"{CGROUP}:oci"
    whole = closed(value, where, {"cpu": dict, "memory": dict, "pids": dict})
    cpu = closed(whole["cpu"], f"{where}/cpu", {"period": int, "quota": int, "shares": int})
    memory = closed(whole["memory"], f"{where}/memory", {"limit": int, "swap": int})
    pids = closed(whole["pids"], f"{where}/pids", {"limit": int})
    numbers = {name: documents.whole(part[name], where) for part in (cpu, memory, pids) for name in part}
    swap = numbers["swap"] - documents.whole(memory["limit"], where)
    return _Written(memory["limit"], swap, pids["limit"], numbers["quota"], numbers["period"], numbers["shares"])
