"""Demands of a manifest that this version, or this host, cannot hold under linux-gvisor. Not one of the nine rules.

A demand that cannot be enforced is refused with the grant, the missing part and the fix; nothing is weakened or
skipped in silence (design.md, Refusal). A demand that is not built yet compiles all the same, so that it can be looked
at and proved; a run asks here first. ``NOT_YET`` is the closed table of them; a feature that is built leaves it.
trusted-local has a check of its own (sandbox.runner.trusted_local).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msgspec import Struct

from policy import errors
from policy.grants.effective import RUNTIME_PROFILES
from policy.host import HostFacts
from policy.manifest import text
from policy.manifest.agent import Manifest
from policy.manifest.permissions import HOST_NAME
from policy.manifest.services import LOOPBACK

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
    for key, demand, why, mend in _not_yet(manifest):
        yield errors.NotYetEnforceableError(
            f"{demand} cannot be enforced yet: {why}", hint=mend, where=manifest.where(key), grant=key
        )
    for key, demand, lacking, mend in _unable(manifest, host):
        yield errors.NotEnforceableError(
            f"{demand} needs {lacking}, which this host has not", hint=mend, where=manifest.where(key), grant=key
        )


class Demand(Struct, frozen=True):
    """The demand of a key (``{0}`` is its value), the missing part, and the fix.

    ``unless`` are the values that demand nothing, beside those that are false in Python.
    """

    demand: str
    why: str
    mend: str
    unless: tuple[str, ...] = ()


RUNTIMES = tuple(RUNTIME_PROFILES)
NOT_YET: dict[str, Demand] = {
    "agent.runtime": Demand(
        "runtime {0}", "it is no process of this machine", "use python3, node, rust-bin or command", RUNTIMES
    ),
}
_IO = tuple(f"resources.io_{way}_{unit}" for unit in ("bps", "iops") for way in ("read", "write"))


def _not_yet(manifest: Manifest) -> Iterator[tuple[str, str, str, str]]:
    for key, entry in NOT_YET.items():
        for at, one in _demanded(key, entry, _value(manifest, key)):
            yield at, entry.demand.format(text.quote(one)), entry.why, entry.mend


def _value(manifest: Manifest, dotted: str) -> object:
    value: object = manifest
    for part in dotted.split("."):
        value = getattr(value, part)
    return value


def _demanded(key: str, entry: Demand, value: object) -> Iterator[tuple[str, object]]:
    """The items of a list with their places, or the one value when it demands something."""
    if isinstance(value, tuple):
        yield from ((f"{key}[{i}]", one) for i, one in enumerate(value))
    elif value and value not in entry.unless:
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
        yield "agent.runtime", f"runtime `{runtime}`", "its interpreter", "run `covenant doctor` for the fix"


def _cgroups(manifest: Manifest, host: HostFacts) -> Iterator[Lack]:
    missing = [name for name in CONTROLLERS if host.cgroup.version == 0 or name not in host.cgroup.controllers]
    if missing:
        names = ", ".join(f"`{name}`" for name in missing)
        yield "resources", "a limit of resources", f"the cgroup controllers {names}", "run `covenant doctor`"
    if manifest.resources.swap_mb and not host.cgroup.swap_accounting:
        mend = "write swap_mb = 0, or boot with swapaccount=1"
        yield "resources.swap_mb", f"swap_mb `{manifest.resources.swap_mb}`", "swap accounting", mend


def _cpu_time(manifest: Manifest, host: HostFacts) -> Iterator[Lack]:
    """Version 2 counts processor time wherever there is a cgroup; version 1 has a controller for it."""
    value = manifest.resources.cpu_time_ms
    if value is not None and host.cgroup.version == 1 and "cpuacct" not in host.cgroup.controllers:
        mend = "mount the controller, or take it out: cpu_ms_per_task and cpu_millis bound it together"
        yield "resources.cpu_time_ms", f"cpu_time_ms `{value}`", "the cgroup controller `cpuacct`", mend


def _io(manifest: Manifest, host: HostFacts) -> Iterator[Lack]:
    """Version 1 counts what a process itself reads and writes; what the kernel writes for it later escapes."""
    for key in _IO:
        value = _value(manifest, key)
        if value is not None and host.cgroup.version == 1:
            yield key, f"{key.removeprefix('resources.')} `{value}`", "cgroup version 2", "take it out"
        elif value is not None and "io" not in host.cgroup.controllers:
            yield key, f"{key.removeprefix('resources.')} `{value}`", "the cgroup controller `io`", "take it out"


def _waiting_secrets(manifest: Manifest, host: HostFacts) -> Iterator[Lack]:
    """Grants that begin at a run's start would age with a waiting standby sandbox."""
    standby = manifest.sandbox.standby
    if standby and manifest.permissions.credentials.files and manifest.permissions.credentials.grants:
        mend = (
            "write standby = 0, or leave permissions.credentials.files out: the broker gives them to instances as well"
        )
        lacking = "a way to change the files of an instance that waits"
        yield "sandbox.standby", f"standby `{standby}` beside credentials as files", lacking, mend


def _suspending(manifest: Manifest, host: HostFacts) -> Iterator[Lack]:
    """Version 2 has a freezer in every cgroup; version 1 a controller for it."""
    if host.cgroup.version != 1 or "freezer" in host.cgroup.controllers:
        return
    lacking, standby = "the cgroup controller `freezer`", manifest.sandbox.standby
    if manifest.lifetime.on_expiry == "suspend":
        mend = 'mount the controller, or write on_expiry = "terminate"'
        yield "lifetime.on_expiry", "on_expiry `suspend`", lacking, mend
    if standby:
        yield "sandbox.standby", f"standby `{standby}`", lacking, "mount the controller, or write standby = 0"


def _network(manifest: Manifest, host: HostFacts) -> Iterator[Lack]:
    mode = manifest.resources.network
    if mode != "off" and host.proxied:
        yield from _by_proxy(manifest)
    if mode != "off" and host.network.lacks:
        yield "resources.network", f"network {text.quote(mode)}", host.network.lacks, host.network.mend


def _by_proxy(manifest: Manifest) -> Iterator[Lack]:
    """The operator's proxy carries connections of which the gate reads the name: those by tls."""
    entries, lacking = manifest.permissions.network, "a way by the operator's proxy, which carries tls alone"
    if manifest.resources.network == "full" and not entries:
        mend = 'write network = "outbound-https-only" or entries by tls, or take [proxy] out of config.toml'
        yield "resources.network", "network `full`", lacking, mend
    for index, one in enumerate(entries):
        if one.protocol != "tls" and not one.to_host:
            mend = 'write protocol = "tls" if the server speaks TLS, or take [proxy] out of config.toml'
            yield f"permissions.network[{index}]", f"protocol `{one.protocol}`", lacking, mend


def _services(manifest: Manifest, host: HostFacts) -> Iterator[Lack]:
    asked, standby = manifest.services.models.allow, manifest.sandbox.standby
    search, fetch = manifest.services.search.allow, manifest.services.fetch.hosts
    agents, telemetry = manifest.services.agents.allow, manifest.services.telemetry.signals
    for key, granted in (("search", search), ("fetch", fetch), ("agents", agents), ("telemetry", telemetry)):
        if granted and standby:
            lacking = "keys of services that change while an instance waits"
            yield "sandbox.standby", f"standby `{standby}` beside services.{key}", lacking, "write standby = 0"
        if granted and host.network.lacks and not host.network.links:
            yield f"services.{key}", "a link to the service gate", host.network.lacks, host.network.mend
    for index, name in enumerate(search):
        if name not in host.searchers:
            write = f"write [providers.{name}] in providers.toml, of a kind that searches (docs/search.md)"
            mend = _meant(name, host.searchers) + write
            yield f"services.search.allow[{index}]", "a search", f"provider `{name}` of searches", mend
    if agents and not host.agent_servers:
        lacking, mend = "a server of agents", "write [providers.NAME] in providers.toml, of kind a2a (docs/a2a.md)"
        yield "services.agents.allow", "agents", lacking, mend
    if telemetry and not host.collects:
        lacking, mend = "a collector for agents", 'write agents = "URL" in [export] of config.toml (docs/export.md)'
        yield "services.telemetry.signals", "telemetry", lacking, mend
    if asked and standby:
        lacking = "keys of models that change while an instance waits"
        yield "sandbox.standby", f"standby `{standby}` beside services.models", lacking, "write standby = 0"
    if asked and host.network.lacks and not host.network.links:
        yield "services.models.allow", "a link to the service gate", host.network.lacks, host.network.mend
    for index, one in enumerate(asked):
        if one.provider not in host.providers:
            write = f"write [providers.{one.provider}] in providers.toml (docs/models.md)"
            mend = _meant(one.provider, host.providers) + write
            yield f"services.models.allow[{index}]", "a model", f"provider `{one.provider}`", mend


def _meant(name: str, known: tuple[str, ...]) -> str:
    near = text.nearest(name, known)
    return f"did you mean `{near}`? or: " if near else ""


def _asked(manifest: Manifest, host: HostFacts) -> Iterator[Lack]:
    if any(one.asked for one in manifest.permissions.network) and (standby := manifest.sandbox.standby):
        lacking = "a desk for each instance"
        yield "sandbox.standby", f'standby `{standby}` beside on_deny = "ask"', lacking, "write standby = 0"


def _inject(manifest: Manifest, host: HostFacts) -> Iterator[Lack]:
    if manifest.permissions.injected and (standby := manifest.sandbox.standby):
        lacking = "an authority for each instance"
        yield "sandbox.standby", f"standby `{standby}` beside inject", lacking, "write standby = 0"


def _ssh(manifest: Manifest, host: HostFacts) -> Iterator[Lack]:
    asked, standby = manifest.services.ssh_agent, manifest.sandbox.standby
    if asked and host.network.lacks and not host.network.links:
        key = "services.ssh_agent"
        yield key, "a link to the gate of the ssh-agent service", host.network.lacks, host.network.mend
    if asked and standby:
        lacking = "a gate for each instance"
        yield "sandbox.standby", f"standby `{standby}` beside services.ssh_agent", lacking, "write standby = 0"


def _tools(manifest: Manifest, host: HostFacts) -> Iterator[Lack]:
    asked, standby = manifest.permissions.skills.allow, manifest.sandbox.standby
    key = "permissions.skills.allow"
    if manifest.tools.command and standby:
        lacking = "a sandbox of each command for each instance"
        yield "sandbox.standby", f"standby `{standby}` beside tools.command", lacking, "write standby = 0"
    if manifest.tools.command and host.network.lacks and not host.network.links:
        yield "tools.command", "a link to the service gate", host.network.lacks, host.network.mend
    if asked and standby:
        lacking = "tool servers for each instance"
        yield "sandbox.standby", f"standby `{standby}` beside {key}", lacking, "write standby = 0"
    if asked and host.network.lacks and not host.network.links:
        yield key, "a link to the service gate", host.network.lacks, host.network.mend
    for index, uri in enumerate(asked):
        if uri not in host.tools:
            lacking = "a server of tools.json that has it"
            mend = "declare it in tools.json, or take it out of allow"
            yield f"{key}[{index}]", f"tool {text.quote(uri)}", lacking, mend


def _publish(manifest: Manifest, host: HostFacts) -> Iterator[Lack]:
    if manifest.publish and host.network.lacks and not host.network.links:
        yield "publish", "a link to the publish gate", host.network.lacks, host.network.mend
    if manifest.publish and (standby := manifest.sandbox.standby):
        lacking = "a place for each instance"
        yield "sandbox.standby", f"standby `{standby}` beside [[publish]]", lacking, "write standby = 0"
    for index, one in enumerate(manifest.publish):
        port = one.to.removeprefix(LOOPBACK)
        if one.to != port and int(port) not in host.publish_ports:
            mend = f"write publish_ports = [{port}] in config.toml, or publish at unix:/PATH"
            yield f"publish[{index}].to", f"publishing at {one.to}", "a port that its operator allows", mend


def _host_ports(manifest: Manifest, host: HostFacts) -> Iterator[Lack]:
    granted = manifest.permissions.host_ports
    if granted and host.network.lacks and not host.network.links:
        yield "permissions.network", "a link to the gate of this host's ports", host.network.lacks, host.network.mend
    if granted and (standby := manifest.sandbox.standby):
        lacking = "a gate for each instance"
        yield "sandbox.standby", f"standby `{standby}` beside {HOST_NAME}", lacking, "write standby = 0"
    for index, port in granted:
        if port not in host.host_ports:
            key, mend = f"permissions.network[{index}].ports", f"write host_ports = [{port}] in config.toml"
            yield key, f"port {port} of {HOST_NAME}", "a port that its operator allows", mend


def _writes(manifest: Manifest, host: HostFacts) -> Iterator[Lack]:
    for key, one in manifest.volumes:
        if one.name not in host.volumes:
            lacking = "a volume of that name that the caller may use"
            yield key, f"volume `{one.name}`", lacking, f"covenant volume create {one.name} --size 1G"
    for i, path in manifest.permissions.filesystem.write_paths:
        found = host.granted.get(path)
        if found is None or not found.room_mb:
            why = f" ({found.unbounded})" if found is not None and found.unbounded else ""
            mend = "mount an ext4 or xfs of at most disk_mb there (docs/limits.md), or grant no write path"
            key = f"permissions.filesystem.write[{i}]"
            yield key, f"write path {text.quote(path)}", f"a file system of its own{why}", mend


_LOOKS: tuple[Callable[[Manifest, HostFacts], Iterator[Lack]], ...] = (
    *(_runsc, _runtime, _cgroups, _cpu_time),
    *(
        _io,
        _suspending,
        _waiting_secrets,
        _network,
        _services,
        _tools,
        _publish,
        _host_ports,
        _asked,
        _inject,
        _ssh,
        _writes,
    ),
)
