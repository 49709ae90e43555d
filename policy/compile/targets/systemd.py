"""Effective grants to units of systemd: a service that a socket starts, with a user and an empty root of its own.

It is confinement by the host's own kernel: namespaces, a filter over the names of system calls, cgroups. What gVisor
adds is lost, and said so (policy/data/targets.toml). Every restriction stands once, under the setting's own name.

    NAME@.service         one instance a connection: the agent reads its intent from the socket and answers there
    NAME.socket           root alone opens it; one connection at a time, so the user has one live run
    NAME.sysusers.conf    the user, this agent's alone
    NAME.tmpfiles.conf    the empty directory that the root is built in

The root is RootDirectory= and not TemporaryFileSystem=/: beside ProtectSystem=strict systemd drops the latter as a
second entry for one path, and the whole host would be there. The user is made by sysusers and not by DynamicUser=: that
implies PrivateTmp=, whose /tmp nothing bounds. tests/kernel/test_unit_of_systemd.py starts what is made here.
"""

from __future__ import annotations

import hashlib
import posixpath
from collections.abc import Iterator

from msgspec import Struct

from policy import data, errors
from policy.compile import oci
from policy.compile.artefacts import canonical
from policy.compile.mounts import RESERVED, SCRATCH, WORKSPACE
from policy.compile.targets import loss, unit_quoting, unit_root
from policy.compile.targets.kubernetes_names import label
from policy.compile.targets.limits import limit, scratch_mb
from policy.grants.effective import Effective
from policy.grants.sets import addresses
from policy.host import Closure, HostFacts
from policy.manifest import text
from policy.manifest.agent import Manifest

PACKAGES = "/var/lib/covenant/packages"
ROOTS = "/run/covenant/roots"
SOCKETS = "/run/covenant/agents"
CREDENTIALS = "/etc/credstore.encrypted"
_MIB = 1024 * 1024
_ARCHES = {"x86_64": "x86-64", "aarch64": "arm64"}
# What systemd would add to the environment; decisions.md lists all that an agent has.
_UNSET = (
    "INVOCATION_ID", "JOURNAL_STREAM", "LISTEN_FDNAMES", "LISTEN_FDS", "LISTEN_PID", "LOGNAME", "REMOTE_ADDR",
    "REMOTE_PORT", "SHELL", "SYSTEMD_EXEC_PID", "USER",
)  # fmt: skip

# The same for every agent: (setting, value). Sources: systemd.exec(5), systemd.resource-control(5).
FIXED = (
    ("Type", "exec"),
    ("StandardInput", "socket"),
    ("StandardOutput", "socket"),
    ("StandardError", "journal"),
    # Else a line that begins with <0> is an emergency, which the journal shows on every terminal of the machine.
    ("SyslogLevelPrefix", "no"),
    ("Restart", "no"),
    ("KillMode", "control-group"),
    ("KillSignal", "SIGKILL"),
    ("OOMPolicy", "kill"),
    ("NotifyAccess", "none"),
    ("UMask", "0077"),
    ("NoNewPrivileges", "yes"),
    ("CapabilityBoundingSet", ""),
    ("AmbientCapabilities", ""),
    ("SupplementaryGroups", ""),
    ("PrivateUsers", "yes"),
    ("RestrictSUIDSGID", "yes"),
    ("MountAPIVFS", "yes"),
    ("PrivateMounts", "yes"),
    ("PrivateDevices", "yes"),
    ("DevicePolicy", "closed"),
    ("PrivateIPC", "yes"),
    ("RemoveIPC", "yes"),
    ("KeyringMode", "private"),
    ("ProtectSystem", "strict"),
    ("ProtectHome", "yes"),
    ("ProtectHostname", "yes"),
    ("ProtectClock", "yes"),
    ("ProtectKernelTunables", "yes"),
    ("ProtectKernelModules", "yes"),
    ("ProtectKernelLogs", "yes"),
    ("ProtectControlGroups", "yes"),
    ("ProtectProc", "invisible"),
    ("ProcSubset", "pid"),
    ("RestrictNamespaces", "yes"),
    ("RestrictRealtime", "yes"),
    ("LockPersonality", "yes"),
    ("SystemCallErrorNumber", "EPERM"),
    ("SocketBindDeny", "any"),
    ("IPAddressDeny", "any"),
    ("LimitCORE", "0"),
    ("LimitMEMLOCK", "64K"),
    ("LimitNOFILE", "1024"),
)
_SAFE = "nosuid,nodev,noexec"
_EMPTY = f"ro,size=4K,mode=0755,{_SAFE}"
# Of the root, with the sign that says so: what systemd mounts there and no grant covers. ProtectKernelTunables= wants
# /sys to be there; /dev/shm and /dev/pts of PrivateDevices= are the host's own.
_HIDDEN = ("+/sys", "+/dev/shm", "-+/dev/pts", "-+/dev/mqueue", "-+/dev/hugepages", "-+/dev/log")


class _Agent(Struct, frozen=True):
    """The names that everything of one agent has. ``id`` is that of its manifest, ``policy`` a digest."""

    name: str
    user: str
    root: str
    policy: str


Lines = Iterator[tuple[str, str]]


def compile(
    effective: Effective, manifest: Manifest, host: HostFacts, *, package_digest: str, accepted: tuple[str, ...]
) -> dict[str, bytes]:
    """The files by name; ``accepted`` are the losses that were accepted.

    Raises:
        errors.NotEnforceableError: this host lacks the runtime, a program or a path, a path collides with the root's
            own, or a limit that every manifest has is missing.
    """
    closures = _closures(effective, manifest, host)
    decided = [package_digest, effective.canonical(), [[c.name, c.digest] for c in closures]]
    suffix = hashlib.sha256(manifest.agent.id.encode()).hexdigest()[:16]
    name = f"covenant-{label(manifest.agent.id)}"
    agent = _Agent(name, f"cov-{suffix}", f"{ROOTS}/{name}", hashlib.sha256(canonical(decided)).hexdigest())
    marks = [
        ("PolicyDigest", agent.policy),
        ("PackageDigest", package_digest),
        ("AcceptedLosses", " ".join(accepted)),
    ]
    service = [
        ("Unit", [("Description", f"Covenant agent {name}"), ("CollectMode", "inactive-or-failed")]),
        ("Service", list(_service(effective, manifest, host, closures, agent, package_digest))),
        ("X-Covenant", marks),
    ]
    return {
        f"{name}@.service": _file(service),
        f"{name}.socket": _file([*_socket(agent), ("X-Covenant", marks)]),
        f"{name}.sysusers.conf": f'u {agent.user} - "Covenant agent" - -\n'.encode(),
        f"{name}.tmpfiles.conf": f"d {agent.root} 0555 root root -\nd {SOCKETS} 0755 root root -\n".encode(),
    }


def _file(sections: list[tuple[str, list[tuple[str, str]]]]) -> bytes:
    blocks = ("\n".join([f"[{name}]", *(f"{key}={value}" for key, value in lines)]) for name, lines in sections)
    return ("\n\n".join(blocks) + "\n").encode()


def _socket(agent: _Agent) -> list[tuple[str, list[tuple[str, str]]]]:
    settings = [
        ("ListenStream", f"{SOCKETS}/{agent.name}.sock"),
        ("SocketMode", "0600"),
        ("Accept", "yes"),
        ("MaxConnections", "1"),
        ("RemoveOnStop", "yes"),
    ]
    return [
        ("Unit", [("Description", f"Intents of Covenant agent {agent.name}")]),
        ("Socket", settings),
        ("Install", [("WantedBy", "sockets.target")]),
    ]


def _service(
    effective: Effective,
    manifest: Manifest,
    host: HostFacts,
    closures: tuple[Closure, ...],
    agent: _Agent,
    package_digest: str,
) -> Lines:
    yield "User", agent.user
    yield "Group", agent.user
    yield from FIXED
    binds = unit_root.binds(closures)
    yield from _root(effective, manifest, host, binds, agent, package_digest)
    yield from _process(effective, manifest, closures)
    yield from _filter(effective, host.arch)
    yield from _network(effective)
    yield from _limits(effective)
    yield from _disks(effective, binds)
    for credential in sorted(effective.credentials.names):
        name = unit_quoting.bare(credential)
        yield "LoadCredentialEncrypted", f"{name}:{CREDENTIALS}/{name}"


def _closures(effective: Effective, manifest: Manifest, host: HostFacts) -> tuple[Closure, ...]:
    """The runtime's closure first, then those of the granted programs."""
    runtime: str = manifest.agent.runtime
    wanted = [(runtime, host.runtimes.get(runtime), "agent.runtime")]
    wanted += [
        (path, host.executables.get(path), "permissions.executables.allow") for path in effective.executables.paths
    ]
    for what, found, key in wanted:
        if found is None:
            raise errors.NotEnforceableError(
                f"{text.quote(what)} is not on this host", hint="run `covenant doctor`", where=manifest.where(key)
            )
    return tuple(closure for _, closure, _ in wanted if closure is not None)


def _root(
    effective: Effective,
    manifest: Manifest,
    host: HostFacts,
    binds: tuple[unit_root.Bind, ...],
    agent: _Agent,
    package_digest: str,
) -> Lines:
    """An empty read-only root; what is not bound into it does not exist. Nothing in it runs but what is named."""
    own = manifest.agent.runtime == "rust-bin"
    yield "RootDirectory", agent.root  # our own prefix and a label: this setting knows no quotes
    for one in binds:
        yield "BindReadOnlyPaths", unit_quoting.bind(one.source, one.destination)
    store = f"{PACKAGES}/{package_digest}{'-x' if own else ''}"
    yield "BindReadOnlyPaths", unit_quoting.bind(store, WORKSPACE)
    shown: dict[str, str] = {}
    for path in effective.filesystem.read.paths:
        # systemd makes no links in a root: what a link leads to is bound at both names.
        for name in (path, _place(path, host)):
            _check_path(name, path, binds, manifest, host)
            shown[name] = _place(path, host)
    for name, place in shown.items():
        yield "BindReadOnlyPaths", unit_quoting.bind(place, name)
    scratch = scratch_mb(effective)
    yield "TemporaryFileSystem", f"{SCRATCH}:" + (f"size={scratch}M,mode=1777,{_SAFE}" if scratch else _EMPTY)
    # MountAPIVFS= puts a tmpfs there that the agent could fill.
    yield "TemporaryFileSystem", f"/run:{_EMPTY}"
    yield "InaccessiblePaths", unit_quoting.words(_HIDDEN)
    yield "NoExecPaths", unit_quoting.words(["+/"])
    runs = [one.destination for one in binds if one.runs]
    for path in [*runs, f"{WORKSPACE}/{manifest.agent.entry}"] if own else runs:
        yield "ExecPaths", unit_quoting.rooted(path)


def _place(path: str, host: HostFacts) -> str:
    return host.granted[path].place if path in host.granted else path


def _check_path(name: str, path: str, binds: tuple[unit_root.Bind, ...], manifest: Manifest, host: HostFacts) -> None:
    taken = [*RESERVED, "/run", *(one.destination for one in binds)]
    meets = next((one for one in taken if _within(name, one) or _within(one, name)), None)
    if meets is not None or path not in host.granted:
        why = f"collides with `{meets}` of the agent's root" if meets else "was not found on this host"
        raise errors.NotEnforceableError(
            f"read path {text.quote(path)} {why}",
            hint="grant another path, or copy it into the package",
            where=manifest.where("permissions.filesystem.read"),
        )


def _within(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def _process(effective: Effective, manifest: Manifest, closures: tuple[Closure, ...]) -> Lines:
    scratch = effective.filesystem.mode != "read-only-package" and effective.resources.disk_mb
    environment = {"HOME": SCRATCH if scratch else WORKSPACE, "LANG": "C.UTF-8", "PATH": "/usr/bin:/bin"}
    if scratch:
        environment["TMPDIR"] = SCRATCH
    program, *arguments = oci.arguments(manifest, closures[0].entry)
    yield "WorkingDirectory", WORKSPACE
    yield "Environment", unit_quoting.words(f"{name}={value}" for name, value in environment.items())
    # %i is the instance: one connection of the socket, told apart from every other of this boot.
    yield "Environment", "COVENANT_RUN_ID=%i"
    yield "UnsetEnvironment", " ".join(_UNSET)
    yield "ExecStart", " ".join([unit_quoting.program(program), *map(unit_quoting.word, arguments)])
    ends = loss.deadline_ms(effective)
    yield "RuntimeMaxSec", f"{ends}ms"
    yield "TimeoutStartSec", "60s"
    yield "TimeoutStopSec", "1s"


def _filter(effective: Effective, arch: str) -> Lines:
    """The names alone: systemd has no rules over arguments.

    clone3 stands among them beside clone, and is answered with ENOSYS by the filter of RestrictNamespaces=: a list of
    allowed calls cannot name an error, and with EPERM libc does not fall back to clone (policy.compile.seccomp).
    """
    names = effective.syscalls.names & set(data.syscalls(arch).numbers)
    yield "SystemCallArchitectures", "native"
    # INVARIANT: never empty, which would take the whole filter away. What systemd adds to every list is @default.
    yield "SystemCallFilter", " ".join(sorted(names | ({"clone3"} if "clone" in names else set()))) or "@default"


def _network(effective: Effective) -> Lines:
    if effective.network.mode == "off":
        yield "PrivateNetwork", "yes"
        yield "RestrictAddressFamilies", "AF_UNIX"
        return
    # Without AF_UNIX: sockets of the host's abstract names are reached in the host's network namespace.
    yield "RestrictAddressFamilies", "AF_INET AF_INET6"
    for first, last, _ in effective.network.reach:
        for block in addresses.blocks(first, last):
            yield "IPAddressAllow", str(block)


def _limits(effective: Effective) -> Lines:
    scratch = scratch_mb(effective)
    millis, pids = limit(effective, "cpu_millis"), limit(effective, "pids_max")
    yield "MemoryMax", str((limit(effective, "memory_mb") + scratch) * _MIB)
    yield "MemorySwapMax", str(limit(effective, "swap_mb") * _MIB)
    yield "TasksMax", str(pids)
    yield "LimitNPROC", str(pids)
    yield "LimitFSIZE", str(limit(effective, "disk_mb") * _MIB)
    yield "CPUQuota", f"{millis // 10}.{millis % 10}%"
    yield "CPUWeight", str(limit(effective, "cpu_weight"))
    if effective.resources.cpu_time_ms is not None:
        # Each process by itself; whole seconds, since the kernel counts no less.
        yield "LimitCPU", str(-(-effective.resources.cpu_time_ms // 1000))


def _disks(effective: Effective, binds: tuple[unit_root.Bind, ...]) -> Lines:
    """Per device: systemd finds the one that a path's file system lies on.

    Every directory that something is bound from is named: /usr/local or /opt may be a disk of its own.
    """
    homes = {posixpath.dirname(one.source) for one in binds}
    places = sorted({"/", "/usr", PACKAGES, *homes, *effective.filesystem.read.paths})
    settings = {
        "IOReadBandwidthMax": effective.resources.io_read_bps,
        "IOWriteBandwidthMax": effective.resources.io_write_bps,
        "IOReadIOPSMax": effective.resources.io_read_iops,
        "IOWriteIOPSMax": effective.resources.io_write_iops,
    }
    for setting, value in settings.items():
        for path in places if value is not None else ():
            yield setting, f"{unit_quoting.path(path)} {value}"
