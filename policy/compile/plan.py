"""Effective policy and host facts to artefacts: the one place that calls every compiler, in a fixed order.

Pure and deterministic: the same input gives the same bytes on any machine, for any order of the written
grants (tests/unit/policy/compile/test_plan.py, tests/golden/test_policy.py).

Everything that parses is compiled, also what cannot be run yet: a run asks policy.rules.enforceable first.
"""

from __future__ import annotations

from typing import Any

from policy import data, errors
from policy.compile import cgroup, credentials, init, mounts, oci, seccomp, supervision
from policy.compile.artefacts import Artefacts, Cause, Provenance, built_in, canonical
from policy.compile.causes import Origins
from policy.compile.network import firewall, gates
from policy.compile.network.destinations import Destinations
from policy.compile.network.routes import Traced
from policy.grants.effective import RUNTIME_PROFILES, Effective
from policy.host import Closure, HostFacts
from policy.manifest import text
from policy.manifest.agent import Manifest

# What the sandbox process is started with; each is stated although some are today's defaults, because a
# default may change with a new runsc (sandbox/host/filter_check.py proves the one that all else hangs on).
RUNSC_FLAGS = {
    "--platform": ("systrap", "kvm hangs where /dev/kvm is not a real one; ptrace is slow"),
    "--network": ("none", "network off: loopback only"),
    "--oci-seccomp": ("true", "without it linux.seccomp is dead text"),
    "--overlay2": ("none", "the default overlay writes a file store beside the root"),
    "--host-uds": ("none", "open would reach every socket in a granted directory"),
    "--host-fifo": ("none", "a fifo in a granted directory is a channel"),
    "--ignore-cgroups": ("true", "the supervisor makes the cgroup, writes the limits and reads them back"),
    "--allow-flag-override": ("false", "annotations cannot change these flags"),
}
# The agent's broker: its one descriptor beside stdio, by its number inside (docs/broker.md). Where nothing is granted
# that is asked for over it, there is none.
BROKER = ("--pass-fd", "3", "the agent asks its supervisor over it for children, credentials, tools, and for no more")
# --network where a network is granted, by the host's facts: who makes the packets on the agent's end of the veth. The
# gateway's rules are the same for both, and stand where neither reaches.
STACKS = {
    "sandbox": "gVisor's own network stack, on the agent's end of the veth",
    "host": "the host kernel's network stack, in the agent's namespace alone: the operator's choice for this host",
}


def compile(
    effective: Effective,
    manifest: Manifest,
    host: HostFacts,
    *,
    package_digest: str,
    parent: Effective | None = None,
) -> Artefacts:
    """Compile for the linux-gvisor backend.

    ``effective`` is what the agent gets, which may be less than ``manifest`` asks for; ``parent`` is the ceiling that
    the parent's grants put (``policy.rules.parent.Parent.ceiling``), so that the provenance can say what it took.

    Raises:
        errors.NotEnforceableError: this host lacks what a grant needs.
        errors.UnexplainedError: a grant that no key of the manifest covers.
    """
    if host.runsc is None:
        raise errors.NotEnforceableError(
            "no working runsc on this host", hint="run `covenant doctor`", where=manifest.where("sandbox.backend")
        )
    provenance = Provenance()
    origins = Origins(manifest, effective, None if parent is None else _requested(manifest))
    closures = _closures(effective, manifest, host)
    if effective.ssh and not init.relays(effective, host.arch):
        raise _no_relay(effective, manifest, host)
    filter_ = seccomp.compile(effective.syscalls.names, arch=host.arch, network=effective.linked)
    _explain_filter(manifest, filter_.names, provenance)
    traced = Traced.of(Destinations.of(effective.network), origins)
    in_memory_mb = mounts.scratch_mb(effective, origins, host) + mounts.shared_mb(effective, manifest)
    cgroup_doc = cgroup.compile(effective, origins, provenance, scratch_mb=in_memory_mb)
    mounts_doc = mounts.compile(effective, origins, host, closures, provenance, named=bool(traced.found.names))
    config = oci.compile(
        effective,
        origins,
        interpreter=closures[0].entry if manifest.agent.runtime != "rust-bin" else "",
        mounts=mounts_doc,
        seccomp=filter_.oci,
        resources=cgroup_doc["oci"],
        provenance=provenance,
        stack=host.network.stack,
        first=init.wanted(effective, host.arch),
    )
    documents: dict[str, Any] = {
        "config.json": config,
        "seccomp.json": filter_.oci,
        "cgroup.json": cgroup_doc,
        "mounts.json": mounts_doc,
        "network.json": firewall.document(effective, traced, origins, provenance),
        "gates.json": gates.compile(effective, traced, origins, provenance),
        "credentials.json": credentials.compile(effective, origins, provenance),
        "supervision.json": supervision.compile(effective, origins, provenance),
        "runtime.json": _runtime(host, effective, provenance),
        "effective.json": {
            "version": 1,
            "package_digest": package_digest,
            "arch": host.arch,
            "grants": effective.canonical(),
        },
    }
    files = {name: canonical(document) for name, document in documents.items()}
    files["seccomp.bpf"] = filter_.bpf
    files["firewall.nft"] = firewall.compile(effective, traced, origins, provenance)
    files["provenance.json"] = provenance.encoded()
    return Artefacts(files)


def _requested(manifest: Manifest) -> Effective:
    """Return the requested grants, before any parent. The order of roles is that of the built-in table."""
    return Effective.from_manifest(
        manifest, profiles=data.profiles(), additions=data.additions(), below=data.roles().below
    )


def _closures(effective: Effective, manifest: Manifest, host: HostFacts) -> tuple[Closure, ...]:
    """The runtime's closure first, then those of the granted executables, by path."""
    runtime = host.runtimes.get(manifest.agent.runtime)
    if manifest.agent.runtime not in RUNTIME_PROFILES:
        raise errors.NotEnforceableError(
            f"runtime `{manifest.agent.runtime}` is no process of this machine: there is nothing to confine",
            hint="use python3, node, rust-bin or command",
            where=manifest.where("agent.runtime"),
        )
    if runtime is None:
        raise errors.NotEnforceableError(
            f"runtime `{manifest.agent.runtime}` is not on this host",
            hint="run `covenant doctor` for the fix",
            where=manifest.where("agent.runtime"),
        )
    key = "permissions.executables.allow"
    if effective.executables.any:
        raise errors.UnexplainedError("no key of the manifest covers every program", where=manifest.where(key))
    out = [runtime]
    for path in effective.executables.paths:
        closure = host.executables.get(path)
        if closure is None:
            message = f"executable {text.quote(path)} was not found on this host"
            raise errors.NotEnforceableError(message, where=manifest.where(key))
        pins = {file.sha256 for file in effective.executables if file.path == path and file.sha256}
        found = mounts.entry_digest(closure)
        if pins and pins != {found}:
            raise errors.NotEnforceableError(
                f"executable {text.quote(path)} has digest {found or 'none'}, granted is {min(pins)}",
                hint="sign the digest of the program that this host has",
                where=manifest.where(key),
            )
        out.append(closure)
    return tuple(out)


def _no_relay(effective: Effective, manifest: Manifest, host: HostFacts) -> errors.NotEnforceableError:
    """The error for keys of SSH that no socket inside can serve."""
    key, lacking = "services.ssh_agent", sorted((init.CALLS | init.SSH_CALLS) - effective.syscalls.names)
    hint = f"run it on {min(init.ARCHES)}"
    if not effective.executables:
        hint = "grant a program that the parent has too"
    elif lacking:
        hint = f"take {', '.join(lacking)} out of permissions.syscalls.deny"
    elif host.arch in init.ARCHES:
        hint = 'write sandbox.filesystem = "ephemeral"'
    return errors.NotEnforceableError("the ssh-agent service has no socket here", hint=hint, where=manifest.where(key))


def _explain_filter(manifest: Manifest, names: tuple[str, ...], provenance: Provenance) -> None:
    """Why each call is allowed. The causes are made once: a filter has some 150 calls, and few reasons."""
    profile = manifest.permissions.syscalls.profile or RUNTIME_PROFILES.get(manifest.agent.runtime, "")
    by_profile = data.profiles()[profile].names if profile in data.profiles() else frozenset[str]()
    added = {name: index for index, name in enumerate(manifest.permissions.syscalls.allow)}
    key = "permissions.syscalls.profile" if manifest.wrote("permissions.syscalls.profile") else "agent.runtime"
    from_profile = Cause("manifest", key, f"profile {profile}")
    from_network = _link_cause(manifest)
    from_programs = Cause("manifest", "permissions.executables.allow", "a granted program can be started")
    by_network = frozenset[str]() if from_network is None else data.additions()["network"].names
    for name in names:
        if name in by_profile:
            provenance.causes[f"seccomp.bpf:{name}"] = from_profile
        elif name in added:
            cause = Cause("manifest", f"permissions.syscalls.allow[{added[name]}]", name)
            provenance.add(f"seccomp.bpf:{name}", cause)
        else:
            cause = from_network if from_network is not None and name in by_network else from_programs
            provenance.add(f"seccomp.bpf:{name}", cause)
    provenance.add("seccomp.bpf:default", built_in("errno EPERM", "absent means not allowed"))
    if "clone" in names:
        reason = "its flags lie behind a pointer, so libc is sent back to clone"
        provenance.add("seccomp.bpf:clone3", built_in("clone3", reason))


def _link_cause(manifest: Manifest) -> Cause | None:
    """Return why the agent has a link and so the calls of sockets, None if it has none."""
    if manifest.resources.network != "off":
        return Cause("manifest", "resources.network", "a network that is not off")
    if manifest.services.models.allow:
        return Cause("manifest", "services.models.allow", "a link to the service gate")
    asked = manifest.services
    web = (
        ("search.allow", asked.search.allow),
        ("fetch.hosts", asked.fetch.hosts),
        ("agents.allow", asked.agents.allow),
        ("telemetry.signals", asked.telemetry.signals),
    )
    for key, granted in web:
        if granted:
            return Cause("manifest", f"services.{key}", "a link to the service gate")
    if manifest.permissions.skills.allow:
        return Cause("manifest", "permissions.skills.allow", "a link to the service gate")
    for index, _ in manifest.permissions.host_ports:
        return Cause("manifest", f"permissions.network[{index}]", "a link to the gate of this host's ports")
    if manifest.services.ssh_agent:
        return Cause("manifest", "services.ssh_agent", "a link to the gate of the ssh-agent service")
    return Cause("manifest", "publish", "a link to the publish gate") if manifest.publish else None


def flags(effective: Effective, host: HostFacts) -> dict[str, str]:
    """runsc's flags for these grants, ``--pass-fd`` with the number that the descriptor has inside."""
    stated = {flag: value for flag, (value, _) in RUNSC_FLAGS.items()}
    if effective.linked:
        stated["--network"] = host.network.stack
    if effective.spawning.allowed or effective.credentials.listing() or effective.skills.mcp:
        stated[BROKER[0]] = BROKER[1]
    return stated


def _runtime(host: HostFacts, effective: Effective, provenance: Provenance) -> dict[str, Any]:
    assert host.runsc is not None
    stated = flags(effective, host)
    for flag, found in stated.items():
        value, reason = RUNSC_FLAGS.get(flag, BROKER[1:])
        provenance.add(f"runtime.json:{flag}", built_in(flag, reason if found == value else STACKS[found]))
    return {
        "version": 1,
        "runsc": {"version": host.runsc.version, "sha256": host.runsc.sha256},
        "flags": stated,
    }
