"""Resource grants to cgroup values: version 2 files, their version 1 equivalents, and OCI resources.

The sandbox's memory limit is the agent's ``memory_mb``, its scratch (a tmpfs lives in the sentry's memory) and a
measured overhead of the sentry; the agent's own pids ceiling is RLIMIT_NPROC inside, and ``pids.max`` counts host
tasks, so it is a second wall (decisions.md, Filesystem and execution; sandbox-facts.md, runsc).
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct, structs

from policy import errors
from policy.compile.artefacts import Provenance, built_in
from policy.compile.causes import Origins
from policy.grants.effective import Effective

MIB = 1024 * 1024
PERIOD_US = 100_000
# Measured on runsc 20240729, systrap, x86_64 (tests/kernel/test_limits.py holds it): an idle sandbox of python3 or node
# takes 21 to 24 MiB (sentry, gofer, runsc run), each guest process 0.45 MiB of stubs above its own pages, threads
# nothing. Twice that, so that an agent that may use memory_mb gets memory_mb.
_IDLE_MB = 64
OVERHEAD_VERSION = 1


def overhead_mb(pids_max: int) -> int:
    """Return the memory of the sandbox beside its guest, in MiB, with ``pids_max`` processes."""
    return _IDLE_MB + pids_max // 2


class CgroupFile(Struct, frozen=True):
    """One file to write. ``required`` is false for what we add ourselves and report where it is missing."""

    controller: str
    file: str
    value: str
    required: bool
    key: str

    def document(self) -> dict[str, Any]:
        """As it stands in cgroup.json, order of writing kept."""
        return {
            "controller": self.controller,
            "file": self.file,
            "value": self.value,
            "required": self.required,
        }


# Ceiling -> its word in io.max, in the kernel's order.
IO_KEYS = {"io_read_bps": "rbps", "io_write_bps": "wbps", "io_read_iops": "riops", "io_write_iops": "wiops"}
# What we add ourselves, and why.
_OWN = {
    "memory.high": "memory is taken back from the sandbox at its limit and not before",
    "memory.oom.group": "an out-of-memory kill takes the whole sandbox",
}
_BOUNDED = ("memory_mb", "disk_mb", "cpu_millis", "cpu_weight", "pids_max", "swap_mb")


def _bounded(effective: Effective, name: str) -> int:
    """A limit that every manifest has by default: unlimited can only be a mistake of ours, so it is refused."""
    value: int | None = getattr(effective.resources, name)
    if value is None:
        raise errors.NotEnforceableError(f"resources.{name} has no limit", hint=f"write resources.{name}")
    return value


def compile(effective: Effective, origins: Origins, provenance: Provenance, *, scratch_mb: int) -> dict[str, Any]:
    """cgroup.json: ``v2`` and ``v1`` lists in writing order, and ``oci`` (linux.resources). Bytes, microseconds.

    ``scratch_mb`` is the size of the tmpfs that lives in the sandbox's memory.
    ``v1`` is None with a limit of input and output: version 1 counts no buffered write, so it cannot hold one.
    """
    limits = {name: _bounded(effective, name) for name in _BOUNDED}
    overhead = overhead_mb(limits["pids_max"])
    memory = (limits["memory_mb"] + scratch_mb + overhead) * MIB
    quota = limits["cpu_millis"] * PERIOD_US // 1000
    pids = 2 * limits["pids_max"] + 64
    swap = limits["swap_mb"] * MIB
    shares = max(2, min(262144, limits["cpu_weight"] * 1024 // 100))
    files: dict[str, list[CgroupFile]] = {
        "v2": [
            CgroupFile("memory", "memory.max", str(memory), True, "resources.memory_mb"),
            # Below the limit it would slow an agent without swap to a crawl instead of ending it by its name.
            CgroupFile("memory", "memory.high", str(memory), False, "memory.high"),
            CgroupFile("memory", "memory.swap.max", str(swap), swap > 0, "resources.swap_mb"),
            CgroupFile("memory", "memory.oom.group", "1", False, "memory.oom.group"),
            CgroupFile("pids", "pids.max", str(pids), True, "resources.pids_max"),
            CgroupFile("cpu", "cpu.max", f"{quota} {PERIOD_US}", True, "resources.cpu_millis"),
            CgroupFile("cpu", "cpu.weight", str(limits["cpu_weight"]), True, "resources.cpu_weight"),
            *_io(effective),
        ],
        "v1": [
            CgroupFile("memory", "memory.limit_in_bytes", str(memory), True, "resources.memory_mb"),
            CgroupFile("memory", "memory.memsw.limit_in_bytes", str(memory + swap), swap > 0, "resources.swap_mb"),
            CgroupFile("memory", "memory.swappiness", "0", False, "resources.swap_mb"),
            CgroupFile("pids", "pids.max", str(pids), True, "resources.pids_max"),
            CgroupFile("cpu", "cpu.cfs_period_us", str(PERIOD_US), True, "resources.cpu_millis"),
            CgroupFile("cpu", "cpu.cfs_quota_us", str(quota), True, "resources.cpu_millis"),
            CgroupFile("cpu", "cpu.shares", str(shares), True, "resources.cpu_weight"),
        ],
    }
    if swap > 0:
        # Swap may be used only as far as it was granted; swappiness 0 would refuse what was granted.
        files["v1"] = [f for f in files["v1"] if f.file != "memory.swappiness"]
    if any(entry.controller == "io" for entry in files["v2"]):
        del files["v1"]
    for version, entries in files.items():
        _explain(version, entries, origins, provenance)
    documents = {version: [entry.document() for entry in entries] for version, entries in files.items()}
    return {
        "version": 2,
        "overhead": {"mb": overhead, "version": OVERHEAD_VERSION},
        "v2": documents["v2"],
        "v1": documents.get("v1"),
        "oci": {
            "memory": {"limit": memory, "swap": memory + swap},
            "pids": {"limit": pids},
            "cpu": {"shares": shares, "quota": quota, "period": PERIOD_US},
        },
    }


def _io(effective: Effective) -> list[CgroupFile]:
    """io.max of the device that holds the writable mounts, which the supervisor puts in place of ``$DEVICE``."""
    values = {key: getattr(effective.resources, name) for name, key in IO_KEYS.items()}
    if all(value is None for value in values.values()):
        return []
    # The kernel's words and its order (Documentation/admin-guide/cgroup-v2.rst, io.max).
    text = " ".join(f"{key}={'max' if value is None else value}" for key, value in values.items())
    return [CgroupFile("io", "io.max", f"$DEVICE {text}", True, "resources.io")]


def _explain(version: str, entries: list[CgroupFile], origins: Origins, provenance: Provenance) -> None:
    for entry in entries:
        rule = f"cgroup.json:{version}/{entry.file}"
        if entry.controller == "io":
            # One line of one file holds up to four ceilings: the first names the place, the reason all of them.
            held = [name for name in IO_KEYS if getattr(origins.effective.resources, name) is not None]
            cause = origins.resource(held[0])
            provenance.add(rule, structs.replace(cause, reason=", ".join(held)))
        elif entry.key.startswith("resources."):
            provenance.add(rule, origins.resource(entry.key.removeprefix("resources.")))
        else:
            provenance.add(rule, built_in(entry.key, _OWN[entry.key]))
