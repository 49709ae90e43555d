"""The trusted-local backend: the manifests that it may run, and the limits that it can hold. Pure.

trusted-local is no sandbox: a dedicated uid, limits of the process, a deny list. A demand beyond that is refused with
the fix. A demand that the seed calls advisory is accepted and named in ``not_enforced``, which is printed and goes into
the audit log.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from policy import data, errors
from policy.compile import seccomp
from policy.manifest.agent import Manifest

HINT = 'set [sandbox] backend = "linux-gvisor"'
MIB = 1024 * 1024

# Written, these are demands that only cgroups or a sandbox hold; as defaults they are ceilings that the
# agent did not ask for, and are named as not enforced.
_UNHELD_RESOURCES = frozenset(
    f"resources.{name}"
    for name in (
        "cpu_millis",
        "cpu_weight",
        "cpu_time_ms",
        "swap_mb",
        "io_read_bps",
        "io_write_bps",
        "io_read_iops",
        "io_write_iops",
        "net_bps",
    )
)
# System V objects hold memory that belongs to no process, so no limit of a process bounds it: RLIMIT_AS of 128 MiB
# held 640. memfd_create, the other way, is on the permanent list.
_UNBOUNDED = frozenset({"msgget", "semget", "shmget"})
# Without these no program starts, so a filter that denies one is a run that cannot begin.
_NEEDED_TO_START = frozenset({"execve", "exit_group"})
_UNIX_SOCKETS = "resources.network: unix sockets that the user may open can be reached, those of /run included"


class LocalPolicy(Struct, frozen=True):
    """The limits of a trusted-local agent. Bytes, counts; ``scratch_bytes`` 0 means no writable directory.

    ``own_network`` is an empty network namespace; ``hide_run`` covers /run, whose sockets reach the network
    through other programs. ``not_enforced`` is for people and the log, in a fixed order.
    """

    runtime: str
    entry: str
    memory_bytes: int
    file_bytes: int
    processes: int
    scratch_bytes: int
    own_network: bool
    hide_run: bool
    filter: seccomp.DenyFilter
    not_enforced: tuple[str, ...]


def compile(manifest: Manifest, *, arch: str, signed: bool) -> LocalPolicy:
    """The policy of a manifest under trusted-local.

    Raises:
        errors.NotYetEnforceableError: the runtime is `hermes`, on any backend.
        errors.BackendError: the manifest demands what this backend cannot hold.
        errors.DenyListViolation: it allows a call that is permanently denied.
        errors.UnknownSyscallError: it names a call that does not exist.
    """
    if manifest.agent.runtime == "hermes":
        raise errors.NotYetEnforceableError(
            "runtime `hermes` cannot be run yet",
            hint="use python3, node or rust-bin",
            where=manifest.where("agent.runtime"),
            grant="agent.runtime",
        )
    for key, what in _refusals(manifest, signed=signed):
        raise errors.BackendError(f"trusted-local {what}", hint=HINT, where=manifest.where(key), grant=key)
    resources = manifest.resources
    # An absent network is possible only for an unsigned package; it runs as v1 did and says so.
    off = manifest.wrote("resources.network") and resources.network == "off"
    scratch = manifest.sandbox.filesystem != "read-only-package"
    return LocalPolicy(
        runtime=manifest.agent.runtime,
        entry=manifest.agent.entry,
        memory_bytes=resources.memory_mb * MIB,
        file_bytes=resources.disk_mb * MIB,
        processes=resources.pids_max,
        scratch_bytes=resources.disk_mb * MIB if scratch else 0,
        own_network=off,
        hide_run=off,
        filter=seccomp.compile_denylist(_denied(manifest), arch=arch, network=not off),
        not_enforced=tuple(_not_enforced(manifest)),
    )


def _refusals(manifest: Manifest, *, signed: bool) -> Iterator[tuple[str, str]]:
    """(key of the manifest, what trusted-local says): the first one is the error."""
    sandbox, spawn, lifetime = manifest.sandbox, manifest.spawn, manifest.lifetime
    network, role = manifest.resources.network, manifest.agent.role
    has_network = manifest.wrote("resources.network")
    spawns = spawn.allowed or spawn.max_depth or spawn.max_descendants or spawn.on_parent_exit != "terminate"
    table = (
        (sandbox.required, "sandbox.required", "is no sandbox, and `sandbox.required` is true"),
        (sandbox.backend != "trusted-local", "sandbox.backend", f"is not the backend named: `{sandbox.backend}`"),
        (role is not None, "agent.role", f"cannot hold an agent to role `{role}`"),
        (has_network and network not in ("off", "full"), "resources.network", f"cannot hold network `{network}`"),
        (signed and not has_network, "resources", "wants `resources.network` written as `off` or `full`"),
        (spawns, "spawn", "starts no agents for an agent"),
        (lifetime.unlimited, "lifetime.unlimited", "gives no unlimited lifetime"),
        (lifetime.on_expiry != "terminate", "lifetime.on_expiry", f"cannot `{lifetime.on_expiry}` an agent"),
    )
    yield from ((key, what) for refused, key, what in table if refused)
    for key in sorted(manifest.written):
        # Written and empty still means `nothing`, which this backend could not hold either.
        beyond = key.startswith("permissions.") and not _within(key, "permissions.syscalls")
        if beyond or key in _UNHELD_RESOURCES:
            yield key, f"cannot hold `{key}`"


def _denied(manifest: Manifest) -> frozenset[str]:
    """The permanent deny list, what this backend cannot bound, and the manifest's own."""
    deny, syscalls = data.deny(), manifest.permissions.syscalls
    for name in (*syscalls.allow, *syscalls.deny):
        if name not in data.syscall_names() and name not in deny.reasons:
            raise errors.UnknownSyscallError(
                f"unknown system call `{name}`", where=manifest.where("permissions.syscalls")
            )
    for name in syscalls.allow:
        if name in deny.reasons:
            raise errors.DenyListViolation(
                f"system call `{name}` is permanently denied",
                grant=name,
                hint=deny.reasons[name],
                where=manifest.where("permissions.syscalls.allow"),
            )
        if name in _UNBOUNDED:
            raise errors.BackendError(
                f"trusted-local cannot bound the memory that `{name}` holds",
                hint=HINT,
                where=manifest.where("permissions.syscalls.allow"),
            )
    for name in syscalls.deny:
        if name in _NEEDED_TO_START:
            raise errors.BackendError(
                f"trusted-local cannot start a program without `{name}`",
                hint=HINT,
                where=manifest.where("permissions.syscalls.deny"),
            )
    return frozenset(deny.reasons) | _UNBOUNDED | frozenset(syscalls.deny)


def _not_enforced(manifest: Manifest) -> Iterator[str]:
    resources = manifest.resources
    if not manifest.wrote("resources.network"):
        yield "resources.network: not written, so the whole network can be reached"
        yield _UNIX_SOCKETS
    elif resources.network == "full":
        yield "resources.network: `full` reaches private and loopback addresses too"
        yield _UNIX_SOCKETS
    else:
        yield "resources.network: unix sockets outside /run that the user may open can be reached"
    yield "sandbox.filesystem: host files that every user may read can be read"
    yield "executables: any host program that every user may execute can be started"
    yield "resources.memory_mb: bounds each process, not their sum"
    yield "resources.disk_mb: bounds each file and the scratch directory, not what goes through other programs"
    yield "resources.pids_max: counts every process of the user, all its runs together"
    yield "resources.cpu_millis: not bounded"
    yield "resources.cpu_weight: not applied"
    yield "resources.swap_mb: not bounded"
    if manifest.wrote("permissions.syscalls.profile") or manifest.wrote("permissions.syscalls.allow"):
        yield "permissions.syscalls: only the permanent deny list and `deny` are enforced, not the allow set"
    if manifest.settlement.budget_credits_per_hour:
        yield "settlement.budget_credits_per_hour: not counted"
    yield "host: device nodes, /sys and kernel-wide files of /proc are visible as to every user"


def _within(key: str, section: str) -> bool:
    return key == section or key.startswith((f"{section}.", f"{section}["))
