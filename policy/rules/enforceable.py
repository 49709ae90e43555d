"""What a manifest demands and this version, or this host, cannot hold under linux-gvisor. Not one of the nine rules.

A demand that cannot be enforced is refused with the grant, the missing thing and the mend; nothing is weakened or
skipped in silence (design.md, Refusal). ``_NOT_YET`` is the closed table of what is not built: whoever builds one
takes its line out. trusted-local has a check of its own (sandbox.trusted_local).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from policy import errors
from policy.host import HostFacts
from policy.manifest import text
from policy.manifest.agent import Manifest

CONTROLLERS = ("cpu", "memory", "pids")


def check(manifest: Manifest, host: HostFacts) -> None:
    """Refuse the first demand that cannot be held.

    Raises:
        errors.NotYetEnforceableError: its enforcement is not built in this version.
        errors.NotEnforceableError: this host lacks what its enforcement needs.
    """
    for finding in findings(manifest, host):
        raise finding


def findings(manifest: Manifest, host: HostFacts) -> Iterator[errors.MachineError]:
    """Every demand that cannot be held, what is not built first."""
    for key, demand, mend in _not_yet(manifest):
        yield errors.NotYetEnforceableError(
            f"{demand} cannot be enforced yet", hint=mend, where=manifest.where(key), grant=key
        )
    for key, demand, lacking, mend in _unable(manifest, host):
        yield errors.NotEnforceableError(
            f"{demand} needs {lacking}, which this host has not", hint=mend, where=manifest.where(key), grant=key
        )


# Dotted key -> what it demands when its value is more than nothing, and the mend. A value is more than nothing when
# it is true as Python sees it.
_NOT_YET: dict[str, tuple[str, str]] = {
    "permissions.credentials.grants": ("credential {0}", "take it out of grants"),
    "permissions.skills.allow": ("skill {0}", "take it out of allow"),
    "permissions.skills.side_effects": ("side effect {0}", "take it out of side_effects"),
    "spawn.allowed": ("spawning agents", "write allowed = false"),
    "sandbox.standby": ("standby {0}", "write standby = 0"),
    "resources.cpu_time_ms": ("cpu_time_ms {0}", "take it out: cpu_ms_per_task and cpu_millis bound it together"),
    "resources.io_read_bps": ("io_read_bps {0}", "take it out"),
    "resources.io_write_bps": ("io_write_bps {0}", "take it out"),
    "resources.io_read_iops": ("io_read_iops {0}", "take it out"),
    "resources.io_write_iops": ("io_write_iops {0}", "take it out"),
    "resources.net_bps": ("net_bps {0}", "take it out"),
}


def _not_yet(manifest: Manifest) -> Iterator[tuple[str, str, str]]:
    if manifest.agent.runtime == "hermes":
        yield "agent.runtime", "runtime `hermes`", "use python3, node or rust-bin"
    if manifest.resources.network != "off":
        yield "resources.network", f"network `{manifest.resources.network}` under gVisor", 'write network = "off"'
    for key, (demand, mend) in _NOT_YET.items():
        value = _value(manifest, key)
        for at, one in _each(key, value):
            yield at, demand.format(text.quote(one)), mend
    if manifest.lifetime.on_expiry == "suspend":
        yield "lifetime.on_expiry", "on_expiry `suspend`", 'write on_expiry = "terminate"'
    if manifest.spawn.on_parent_exit != "terminate":
        yield "spawn.on_parent_exit", f"on_parent_exit `{manifest.spawn.on_parent_exit}`", 'write "terminate"'


def _value(manifest: Manifest, dotted: str) -> object:
    value: object = manifest
    for part in dotted.split("."):
        value = getattr(value, part)
    return value


def _each(key: str, value: object) -> Iterator[tuple[str, object]]:
    """The items of a list with their places, or the one value when it is more than nothing."""
    if isinstance(value, tuple):
        yield from ((f"{key}[{i}]", one) for i, one in enumerate(value))
    elif value:
        yield key, value


# Each looks at one thing of the host and yields (dotted key, demand, what is lacking, the mend).
Lack = tuple[str, str, str, str]


def _unable(manifest: Manifest, host: HostFacts) -> Iterator[Lack]:
    for look in _LOOKS:
        yield from look(manifest, host)


def _runsc(manifest: Manifest, host: HostFacts) -> Iterator[Lack]:
    if host.runsc is None:
        yield "sandbox.backend", "backend `linux-gvisor`", "a working runsc", "run `covenant doctor`"


def _runtime(manifest: Manifest, host: HostFacts) -> Iterator[Lack]:
    runtime = manifest.agent.runtime
    if runtime not in host.runtimes and runtime != "hermes":
        yield "agent.runtime", f"runtime `{runtime}`", "its interpreter", "run `covenant doctor` for the mend"


def _cgroups(manifest: Manifest, host: HostFacts) -> Iterator[Lack]:
    missing = [name for name in CONTROLLERS if host.cgroup.version == 0 or name not in host.cgroup.controllers]
    if missing:
        names = ", ".join(f"`{name}`" for name in missing)
        yield "resources", "a limit of resources", f"the cgroup controllers {names}", "run `covenant doctor`"
    if manifest.resources.swap_mb and not host.cgroup.swap_accounting:
        mend = "write swap_mb = 0, or boot with swapaccount=1"
        yield "resources.swap_mb", f"swap_mb `{manifest.resources.swap_mb}`", "swap accounting", mend


def _writes(manifest: Manifest, host: HostFacts) -> Iterator[Lack]:
    for i, path in enumerate(manifest.permissions.filesystem.write):
        if not host.project_quota:
            mend = "mount its file system with prjquota, or grant no write path"
            key = f"permissions.filesystem.write[{i}]"
            yield key, f"write path {text.quote(path)}", "a project quota", mend


_LOOKS: tuple[Callable[[Manifest, HostFacts], Iterator[Lack]], ...] = (_runsc, _runtime, _cgroups, _writes)
