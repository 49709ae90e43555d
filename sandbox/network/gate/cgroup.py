"""The cgroup that a run's gates live in: beside the agent's, so that neither takes from the other, and bounded too.

A gate is ours and runs what we wrote, but an agent says how much it has to do. Both gates of a run share these limits;
when one of them is killed for memory the run ends, and its network is closed (``gate_process``).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from policy.rules import budget
from sandbox.kernel.cgroup import cgroup

# Some 15 MiB each at rest; the rest is pipes and buffers of the connections that they carry.
MEMORY_BYTES: Final = budget.GATES_MB << 20
# At most eleven gates, and the threads of two connectors behind a proxy: 16 and 6, each with a relay beside.
PIDS_MAX: Final = 48
# One core for both: each has one thread.
_PERIOD_US: Final = 100_000
_GATES: Final = "gates."

LIMITS: Final[Mapping[int, tuple[cgroup.Limit, ...]]] = {
    1: (
        cgroup.Limit("memory", "memory.limit_in_bytes", str(MEMORY_BYTES)),
        cgroup.Limit("pids", "pids.max", str(PIDS_MAX)),
        cgroup.Limit("cpu", "cpu.cfs_period_us", str(_PERIOD_US)),
        cgroup.Limit("cpu", "cpu.cfs_quota_us", str(_PERIOD_US)),
    ),
    2: (
        cgroup.Limit("memory", "memory.max", str(MEMORY_BYTES)),
        cgroup.Limit("memory", "memory.swap.max", "0", required=False),
        cgroup.Limit("pids", "pids.max", str(PIDS_MAX)),
        cgroup.Limit("cpu", "cpu.max", f"{_PERIOD_US} {_PERIOD_US}"),
    ),
}


def of(leaf: cgroup.Leaf) -> cgroup.Leaf:
    """The leaf of the gates of the run whose own leaf this is; not made yet."""
    return cgroup.Leaf(leaf.hierarchies, f"{leaf.name}-gates")


def noted(gates: cgroup.Leaf) -> dict[str, Path]:
    """Where it will lie, under names that are no controller's: what recovery empties and removes with the run's own."""
    return {f"{_GATES}{name}": path for name, path in gates.plan().items()}


def written(gates: cgroup.Leaf) -> dict[str, str]:
    """The limits that were written, by file; what this machine has no file for is left out, as it was then."""
    limits = LIMITS[gates.hierarchies.version]
    files = {str(gates.paths[limit.controller] / limit.file): limit.value for limit in limits}
    return {file: value for file, value in files.items() if Path(file).exists()}


def adopted_of(adopted: cgroup.Leaf) -> cgroup.Leaf | None:
    """The gates' part of a leaf that was adopted by all that was noted; None where it has none."""
    gates = of(adopted)
    gates.paths = {name.removeprefix(_GATES): path for name, path in adopted.paths.items() if name.startswith(_GATES)}
    return gates if gates.paths else None


def without(adopted: cgroup.Leaf) -> cgroup.Leaf:
    """A leaf that was adopted by all that was noted, as the agent's own alone: gates are up before it is."""
    own = cgroup.Leaf(adopted.hierarchies, adopted.name)
    own.paths = {name: path for name, path in adopted.paths.items() if not name.startswith(_GATES)}
    return own
