"""Rules 5 and 6: what is left of the ancestors' budgets, and of this host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from policy import errors
from policy.compile import mounts
from policy.compile.cgroup import overhead_mb
from policy.grants.effective import Effective
from policy.grants.resources import Ceilings
from policy.rules.case import Case
from policy.rules.parent import Drawn, Parent

# So many of those that hold something are named in a refusal.
_NAMED = 4
# What the gates of a run with a network may take together, in MiB: the limit of their own cgroup (gate_leaf.py).
GATES_MB = 256


def spawn_budget(case: Case) -> None:
    """(5) Reserved on every ancestor at once: two spawns that race for the last place must not both win.

    Raises:
        errors.SpawnBudgetViolation: as ``within_budget``.
    """
    if case.parent is not None:
        within_budget(case.parent, case.effective.resources, case.where)


def within_budget(parent: Parent, wanted: Ceilings, where: Callable[[str], str]) -> None:
    """Rule 5 for what is live now: asked once more when a run's place is taken, and no other run can take one.

    ``where`` gives the place of a key in the child's manifest.

    Raises:
        errors.SpawnBudgetViolation: an ancestor allows no further level or descendant, or a sum exceeds the parent's.
    """
    depth = parent.ancestors[-1].depth + 1
    if not parent.effective.spawning.allowed:
        raise errors.SpawnBudgetViolation(f"agent `{parent.agent_id}` may not start agents", grant="spawn.allowed")
    for one in parent.ancestors:
        limits, below = one.spawning, depth - one.depth
        if limits.max_depth is not None and below > limits.max_depth:
            raise errors.SpawnBudgetViolation(
                f"the child would be {below} levels below agent `{one.agent_id}`, which allows {limits.max_depth}",
                grant="spawn.max_depth",
            )
        if limits.max_descendants is not None and one.live_descendants + 1 > limits.max_descendants:
            raise errors.SpawnBudgetViolation(
                f"agent `{one.agent_id}` has {one.live_descendants} live descendants and may have"
                f" {limits.max_descendants}",
                grant="spawn.max_descendants",
                hint="wait until one of them has ended",
            )
    _check_sums(parent, wanted, where)


def _check_sums(parent: Parent, wanted: Ceilings, where: Callable[[str], str]) -> None:
    for name in Drawn.__struct_fields__:
        ceiling, asked = getattr(parent.effective.resources, name), getattr(wanted, name)
        drawn: int = getattr(parent.drawn, name)
        if ceiling is not None and (asked is None or drawn + asked > ceiling):
            raise errors.SpawnBudgetViolation(
                f"{name} {'no limit' if asked is None else asked} does not fit agent `{parent.agent_id}`:"
                f" {drawn} of {ceiling} are drawn",
                grant=f"resources.{name}",
                hint=f"at most {max(ceiling - drawn, 0)} are left",
                where=where(f"resources.{name}"),
            )


def resource_availability(case: Case) -> None:
    """(6) Ceilings that this host could never give are refused now, not found out by an out-of-memory kill.

    Raises:
        errors.ResourceViolation: this host has less than is asked for.
    """
    for name, wanted, available, unit in _needs(case):
        if wanted > available:
            raise errors.ResourceViolation(
                f"{name} needs {wanted} {unit} and this host has {available}",
                grant=f"resources.{name}",
                hint="ask for less, or free some",
                where=case.where(f"resources.{name}"),
                **({"missing_mb": wanted - available} if name == "memory_mb" else {}),
            )


class Promised(Struct, frozen=True):
    """The memory that a live run may take, in MiB. ``shown``: the receiver of a refusal may know of the run.

    Of the other runs a refusal tells the sum.
    """

    run_id: str
    agent_id: str
    memory_mb: int
    shown: bool = True


def within_host(
    wanted_mb: int, capacity_mb: int, promised: Sequence[Promised], where: Callable[[str], str], *, share: str = ""
) -> None:
    """Rule 6 for the live runs: this machine has the memory that all of them may take together.

    ``capacity_mb`` is what may be promised in all; ``share`` says how much of the machine that is.

    Raises:
        errors.ResourceViolation: with what is missing, and who holds the rest.
    """
    held = sum(one.memory_mb for one in promised)
    if held + wanted_mb <= capacity_mb:
        return
    most = sorted((one for one in promised if one.shown), key=lambda one: -one.memory_mb)
    named = ", ".join(f"`{one.agent_id}` {one.memory_mb} MiB (run {one.run_id[:8]})" for one in most[:_NAMED])
    more = f" and {len(most) - _NAMED} more" if len(most) > _NAMED else ""
    hidden = sum(one.memory_mb for one in promised if not one.shown)
    holders = ", ".join(filter(None, (f"{named}{more}", f"{hidden} MiB by runs of others" if hidden else "")))
    raise errors.ResourceViolation(
        f"memory_mb needs {wanted_mb} MiB, and {max(capacity_mb - held, 0)} of the {capacity_mb} that this host"
        f" may promise{share} are left",
        grant="resources.memory_mb",
        hint=f"held by {holders}: wait for one of them, or raise overcommit" if promised else "ask for less",
        where=where("resources.memory_mb"),
        missing_mb=held + wanted_mb - capacity_mb,
    )


def host_memory_mb(effective: Effective, *, gvisor: bool, rooms_mb: int = 0) -> int:
    """Return the memory that a run may take of its machine, in MiB. ``rooms_mb`` of disk_mb are on a disk."""
    want = effective.resources
    memory, disk, pids = want.memory_mb or 0, want.disk_mb or 0, want.pids_max or 0
    # A tmpfs lives in memory, and the sentry needs its own (decisions.md, Filesystem and execution).
    scratch = max(disk - rooms_mb, 0) if gvisor and effective.filesystem.mode != "read-only-package" else 0
    gates = GATES_MB if gvisor and effective.linked else 0
    return memory + scratch + gates + (overhead_mb(pids) if gvisor else 0)


def _needs(case: Case) -> tuple[tuple[str, int, int, str], ...]:
    """Key, what it takes of this host, what is there, and the unit."""
    want, host = case.effective.resources, case.host
    gvisor = case.manifest.sandbox.backend == "linux-gvisor"
    pids = want.pids_max or 0
    rooms_mb = sum(mounts.rooms(case.effective, host).values())
    memory = host_memory_mb(case.effective, gvisor=gvisor, rooms_mb=rooms_mb)
    on_disk = (want.disk_mb or 0) if len(case.effective.filesystem.write) else 0
    return (
        ("memory_mb", memory, host.memory_available_mb, "MiB"),
        ("pids_max", 2 * pids + 64 if gvisor else pids, host.pids_free, "tasks"),
        ("cpu_millis", want.cpu_millis or 0, host.cpus * 1000, "thousandths of a core"),
        ("disk_mb", on_disk, host.disk_free_mb, "MiB"),
    )
