"""Read compiled artefacts of any origin back into grants.

Only the artefacts that something enforces are read: the OCI configuration, both forms of the filter, cgroups, mounts,
network, gates, credentials, supervision and runsc's flags. effective.json and provenance.json say what was meant, and
policy.prove compares. Everything read is held to be hostile: what is not understood is an ArtefactError, and no
other exception leaves ``read``.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct, structs

from policy import data
from policy.decompile import calls, cgroup, config, documents, mounts, oci_seccomp, supervision
from policy.decompile.calls import CallTable
from policy.decompile.documents import Files, fixed, refuse
from policy.decompile.network import network
from policy.grants.credentials import CredentialSet, InjectSet
from policy.grants.effective import DOMAINS, canonical
from policy.grants.executables import ExecutableSet
from policy.grants.identity import Identity
from policy.grants.lifetime import LifetimeGrant
from policy.grants.network import Network
from policy.grants.paths import FilesystemGrants
from policy.grants.resources import Ceilings
from policy.grants.services import AgentSet, HostPorts, PublishSet, ServiceSet, SshSet, TelemetrySet, WebSet
from policy.grants.sets.domain import Domain
from policy.grants.skills import SkillSet
from policy.grants.spawning import MayGrant, Spawning
from policy.grants.syscalls import SyscallSet

SECCOMP = "seccomp.json"
BPF = "seccomp.bpf"


class Grants(Struct, frozen=True):
    """The domains as they were found.

    INVARIANT: not an ``Effective``. That type takes execve away where no program is granted; a reader that
    made one would not see an artefact that leaves it in.
    """

    identity: Identity
    filesystem: FilesystemGrants
    network: Network
    syscalls: SyscallSet
    executables: ExecutableSet
    resources: Ceilings
    credentials: CredentialSet
    skills: SkillSet
    spawning: Spawning
    lifetime: LifetimeGrant
    services: ServiceSet
    publish: PublishSet
    inject: InjectSet
    web: WebSet
    host_ports: HostPorts
    ssh: SshSet
    may_grant: MayGrant
    agents: AgentSet
    telemetry: TelemetrySet

    def domains(self) -> tuple[tuple[str, Domain], ...]:
        """Name and value of each domain, in the order of ``DOMAINS``."""
        return tuple((name, getattr(self, name)) for name in DOMAINS)

    def canonical(self) -> dict[str, Any]:
        """The grants as JSON would hold them."""
        return canonical(self.domains())


class ReadProcess(Struct, frozen=True):
    """How the first process is started and speaks, beside its arguments."""

    env: tuple[str, ...]
    cwd: str
    terminal: bool
    contract: str
    intent: str


class Decompiled(Struct, frozen=True):
    """The grants that the artefacts hold.

    ``calls`` holds the system calls with the arguments that pass, as both filters have them; ``limits`` the resource
    ceilings by what holds them (``v2``, ``v1`` where version 1 can, ``oci``), of which ``grants`` has those of ``v2``;
    ``seen`` and ``reached`` what mounts and network say in more detail than grants have. ``args`` start the agent, with
    ``init`` as the child of an init, and with ``relay`` by way of the relay of the ssh-agent service.
    """

    grants: Grants
    arch: str
    calls: CallTable
    limits: tuple[tuple[str, Ceilings], ...]
    cgroup_files: tuple[tuple[str, tuple[str, ...]], ...]
    seen: mounts.RootContents
    args: tuple[str, ...]
    process: ReadProcess
    init: bool
    relay: bool
    runsc: config.Runsc
    reached: network.Reached


def read(files: Files) -> Decompiled:
    """The grants that these artefacts amount to.

    Raises:
        errors.ArtefactError: an artefact is missing, malformed, holds what is not understood, or two of them
            contradict each other.
    """
    oci = config.read(files)
    arch, found = _filters(files, oci)
    seen = mounts.read(files, oci)
    calls_init = arch in config.INIT_ARCHES and found.allowed.keys() >= config.INIT_CALLS
    if oci.init != (calls_init and bool(seen.executables)):
        raise refuse(f"{config.CONFIG}:process/args", "an init starts the agent exactly where it may start programs")
    reached = network.read(files)
    _check_network(oci, seen, reached)
    held, credentials = supervision.read(files), supervision.credentials(files)
    _check_supervision(oci, seen, reached, held, credentials)
    asks = held.spawning.allowed or bool(credentials.listing()) or held.skills.mcp
    disk = _disk_mb(oci, seen)
    limits = cgroup.read(
        files, oci.resources, pids_max=oci.pids_max, scratch_mb=(seen.scratch_mb or 0) + seen.shared_mb
    )
    common = Ceilings(
        cpu_ms_per_task=held.wall_ms,
        cpu_time_ms=held.cpu_time_ms,
        disk_mb=disk,
        net_bps=reached.net_bps,
    )
    by_version = {
        name: _resources(common, limit, f"{cgroup.CGROUP}:{name}", oci.pids_max)
        for name, limit in (("v2", limits.v2), ("v1", limits.v1), ("oci", limits.oci))
        if limit is not None
    }
    return Decompiled(
        Grants(
            identity=held.identity,
            filesystem=seen.filesystem,
            network=reached.network,
            syscalls=SyscallSet(frozenset(found.allowed)),
            executables=seen.executables,
            resources=by_version["v2"],
            credentials=credentials,
            skills=held.skills,
            spawning=held.spawning,
            lifetime=held.lifetime,
            services=reached.services,
            publish=reached.publish,
            inject=reached.inject,
            web=reached.web,
            host_ports=reached.host_ports,
            ssh=reached.ssh,
            may_grant=held.may_grant,
            agents=reached.agents,
            telemetry=reached.telemetry,
        ),
        arch,
        found,
        tuple(by_version.items()),
        limits.files,
        seen,
        oci.args,
        ReadProcess(oci.env, oci.cwd, oci.terminal, held.contract, held.intent),
        oci.init,
        oci.relay,
        config.runtime(files, stack=oci.stack, broker=asks),
        reached,
    )


def _check_network(oci: config.Config, seen: mounts.RootContents, reached: network.Reached) -> None:
    """Check that the network's parts of the other artefacts are those of this network.

    Raises:
        errors.ArtefactError: they are not.
    """
    if oci.relay != bool(reached.ssh):
        raise refuse(f"{config.CONFIG}:process/args", "a relay starts the agent exactly where keys of SSH are granted")
    if bool(oci.stack) != reached.linked:
        raise refuse(f"{config.CONFIG}:linux/namespaces", f"they are not those of network {reached.mode}")
    if seen.resolver != reached.named:
        raise refuse(mounts.MOUNTS, "a resolver is named exactly where names are resolved")


def _check_supervision(
    oci: config.Config,
    seen: mounts.RootContents,
    reached: network.Reached,
    held: supervision.Supervision,
    credentials: CredentialSet,
) -> None:
    """Check that what the supervisor serves is what the other artefacts have a part for.

    Raises:
        errors.ArtefactError: it is not.
    """
    if seen.secrets != oci.secrets or (seen.secrets and not credentials.listing()):
        raise refuse(mounts.MOUNTS, "credentials are files exactly where the environment says so, and some are granted")
    if reached.tools != bool(held.skills.allow.listing()):
        raise refuse("gates.json:services", "tools are answered for exactly where some are granted")
    if oci.terminal != (held.contract == "terminal"):
        raise refuse(config.CONFIG, f"a terminal, and the contract {held.contract}")


def _disk_mb(oci: config.Config, seen: mounts.RootContents) -> int:
    """Return the MiB that a file may have: the sum of the places to write to.

    Raises:
        errors.ArtefactError: it is another.
    """
    disk, odd = divmod(oci.disk_bytes, config.MIB)
    written = sum(seen.rooms.values()) + (0 if seen.workspace is None else seen.workspace.max_mb)
    if odd or (seen.scratch_mb is not None and seen.scratch_mb + seen.shared_mb + written != disk):
        sizes = f"scratch {seen.scratch_mb} MiB, shared memory {seen.shared_mb} and written paths {written}"
        message = f"a file may have {oci.disk_bytes} bytes, {sizes}"
        raise refuse(config.CONFIG, message)
    return disk


def _filters(files: Files, oci: config.Config) -> tuple[str, CallTable]:
    """The machine and the calls that pass, of which all three filters must say the same."""
    document = documents.load(files, SECCOMP)
    fixed(oci.seccomp, f"{config.CONFIG}:linux/seccomp", document)
    architectures = document.get("architectures") if type(document) is dict else None
    named = architectures[0] if type(architectures) is list and architectures else None
    arch = config.ARCHES.get(named) if type(named) is str else None
    if arch is None:
        raise refuse(SECCOMP, f"{documents.shown(architectures)} is no machine")
    numbers = data.syscalls(arch).numbers
    program = documents.raw(files, BPF)
    read_bpf = calls.read_bpf(program, arch, {number: name for name, number in numbers.items()})
    read_oci = oci_seccomp.read(document, arch, numbers)
    for difference in calls.differences(read_bpf, read_oci):
        raise refuse(BPF, difference.describe(BPF, SECCOMP))
    return arch, read_bpf


def _resources(common: Ceilings, limit: cgroup.Limits, where: str, pids_max: int) -> Ceilings:
    if limit.pids_max != pids_max:
        raise refuse(where, f"the wall around tasks is that of {limit.pids_max} processes, not of {pids_max}")
    return structs.replace(
        common,
        memory_mb=limit.memory_mb,
        swap_mb=limit.swap_mb,
        pids_max=pids_max,
        cpu_millis=limit.cpu_millis,
        cpu_weight=limit.cpu_weight,
        **dict(limit.io),
    )
