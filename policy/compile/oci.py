"""The OCI config.json of one agent, as a template: run id and uid are filled in per run by ``bundle``.

Only fields that runsc enforces are emitted; annotations never (they can set runsc's flags, sandbox-facts).
"""

from __future__ import annotations

from typing import Any

from policy.compile import init
from policy.compile.artefacts import Cause, Provenance, built_in
from policy.compile.causes import Origins
from policy.compile.mounts import CREDENTIALS, SCRATCH, WORKSPACE, as_files
from policy.grants.effective import Effective
from policy.manifest.agent import Manifest
from policy.manifest.process import inject_variables

# Replaced per run by bundle.instantiate; 65534 is what a bare compile shows.
TEMPLATE_UID = 65534
TEMPLATE_RUN_ID = "00000000-0000-0000-0000-000000000000"
HOSTNAME = "agent"
SEARCH_PATH = "/usr/bin:/bin"
# The terminal that a session of the contract `terminal` shows, unless the manifest says another.
TERMINAL = "xterm-256color"
# By these an OpenTelemetry SDK finds the service gate. They turn no telemetry on in a program that has it off.
TELEMETRY = {
    "OTEL_EXPORTER_OTLP_ENDPOINT": "http://telemetry.covenant",
    "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
}
CAPABILITY_SETS = ("ambient", "bounding", "effective", "inheritable", "permitted")
NAMESPACES = ("ipc", "mount", "network", "pid", "uts")
OWN_NETWORK = "/proc/self/ns/net"
# Every number of a user as itself: what runsc makes for its own stack, and with the host's leaves out.
ALL_IDS = [{"containerID": 0, "hostID": 0, "size": 2**32 - 1}]
MIB = 1024 * 1024


def arguments(manifest: Manifest, interpreter: str) -> list[str]:
    """The agent's process, as the seed's runtime contract says it is started. ``interpreter`` is the program itself for
    the runtime command."""
    if manifest.agent.runtime == "rust-bin":
        return [f"{WORKSPACE}/{manifest.agent.entry}", *manifest.process.args]
    script = [] if manifest.agent.runtime == "command" else [manifest.agent.entry]
    return [interpreter, *script, *manifest.process.args]


def environment(manifest: Manifest, effective: Effective, *, scratch: bool, secrets: bool) -> list[str]:
    """The environment of the first process, sorted by name: ours, and over it that of the manifest."""
    ours = {
        "COVENANT_RUN_ID": TEMPLATE_RUN_ID,
        **({"CREDENTIALS_DIRECTORY": CREDENTIALS} if secrets else {}),
        "HOME": SCRATCH if scratch else WORKSPACE,
        "LANG": "C.UTF-8",
        "PATH": SEARCH_PATH,
        **({"TERM": TERMINAL} if manifest.process.contract == "terminal" else {}),
        **({"TMPDIR": SCRATCH} if scratch else {}),
        **inject_variables(manifest.permissions.placeholders, effective.inject.hosts),
        **({"SSH_AUTH_SOCK": init.SSH_SOCKET} if effective.ssh else {}),
        **(TELEMETRY if effective.telemetry else {}),
    }
    return [f"{name}={value}" for name, value in sorted({**ours, **dict(manifest.process.env)}.items())]


def compile(
    effective: Effective,
    origins: Origins,
    *,
    interpreter: str,
    mounts: dict[str, Any],
    seccomp: dict[str, Any],
    resources: dict[str, Any],
    provenance: Provenance,
    stack: str = "sandbox",
    first: bool = False,
) -> dict[str, Any]:
    """config.json as a document. ``interpreter`` is the runtime's path in the root, empty for rust-bin; ``stack`` whose
    network stack it is (policy.host.NetworkFacts), where there is a network; by ``first`` an init starts the agent."""
    scratch = effective.filesystem.mode != "read-only-package"
    manifest = origins.manifest
    _explain(origins, provenance)
    if first:
        reason = "a process whose parent has ended is the first process's to reap"
        provenance.add("config.json:process/init", origins.of("permissions.executables.allow", reason=reason))
    relay = [init.SSH_RELAY] if effective.ssh else []
    if relay:
        reason = "clients of SSH find the agent service at a socket of their own"
        provenance.add("config.json:process/ssh-relay", origins.of("services.ssh_agent", reason=reason))
    if stack == "host" and effective.linked:
        _explain_user(provenance)
    return {
        "ociVersion": "1.0.2",
        "hostname": HOSTNAME,
        "root": {"path": "rootfs", "readonly": True},
        "process": {
            "terminal": manifest.process.contract == "terminal",
            "user": {"uid": TEMPLATE_UID, "gid": TEMPLATE_UID},
            "args": [*([init.PROGRAM] if first else []), *relay, *arguments(manifest, interpreter)],
            "env": environment(manifest, effective, scratch=scratch, secrets=as_files(effective, manifest)),
            "cwd": manifest.process.cwd,
            "capabilities": {name: [] for name in CAPABILITY_SETS},
            "noNewPrivileges": True,
            "rlimits": _rlimits(effective, own=int(first) + len(relay)),
        },
        "mounts": [_mount(i, m) for i, m in enumerate(mounts["mounts"])],
        "linux": {
            **namespaces(stack if effective.linked else None),
            "resources": resources,
            "seccomp": seccomp,
        },
    }


def _explain_user(provenance: Provenance) -> None:
    reason = "with the host's network stack runsc makes none by itself, and its rights would be rights on the host"
    for place in ("namespaces/user", "gidMappings", "uidMappings"):
        provenance.add(f"config.json:linux/{place}", built_in("namespace user", reason))


def namespaces(stack: str | None) -> dict[str, Any]:
    """New ones, but for the network of an agent that has one: there it is that in which the supervisor starts runsc,
    which takes the addresses of the device that it finds there. ``stack`` is None where there is no network.

    With the host's stack runsc makes no user namespace unless it is told, and its rights would be rights on the host.
    """
    own = {"network": {"path": OWN_NETWORK}} if stack is not None else {}
    found = [{"type": name, **own.get(name, {})} for name in NAMESPACES]
    if stack != "host":
        return {"namespaces": found}
    return {"gidMappings": ALL_IDS, "namespaces": [*found, {"type": "user"}], "uidMappings": ALL_IDS}


def _rlimits(effective: Effective, *, own: int) -> list[dict[str, Any]]:
    """The limits of a process. ``own`` processes of ours have the agent's uid, and count beside those that it has."""
    values = {
        "RLIMIT_CORE": 0,
        "RLIMIT_FSIZE": (effective.resources.disk_mb or 0) * MIB,
        "RLIMIT_MEMLOCK": 64 * 1024,
        "RLIMIT_NOFILE": 1024,
        "RLIMIT_NPROC": (effective.resources.pids_max or 0) + own,
    }
    return [{"type": name, "hard": value, "soft": value} for name, value in values.items()]


def _mount(index: int, mount: dict[str, Any]) -> dict[str, Any]:
    # A bind's source is the place in the bundle to which the supervisor moves the mount it made beforehand, with
    # its flags, in a mount namespace of its own; a host path never stands in the config.
    source = f"mounts/{index}" if mount["type"] == "bind" else mount["source"]
    kind = ["bind"] if mount["type"] == "bind" else []
    return {
        "destination": mount["destination"],
        "type": mount["type"],
        "source": source,
        "options": [*kind, *mount["options"]],
    }


_ENVIRONMENT = "PATH, HOME, LANG, COVENANT_RUN_ID and nothing else"


def _explain(origins: Origins, provenance: Provenance) -> None:
    process = origins.manifest.process
    for rule, cause in (
        ("process/args", origins.of("process.args" if process.args else "agent.runtime")),
        ("process/cwd", origins.of("process.cwd" if origins.manifest.wrote("process.cwd") else "agent.entry")),
        ("process/env", origins.of("process.env") if process.env else built_in("environment", _ENVIRONMENT)),
        *((("process/terminal", origins.of("process.contract")),) if process.contract == "terminal" else ()),
        ("process/user", built_in("uid", "never uid 0 inside; each live run has a uid of its own")),
        ("process/capabilities", built_in("capabilities", "no capability is grantable")),
        ("process/noNewPrivileges", built_in("no-new-privs", "execve never grants privileges")),
        ("process/rlimits/RLIMIT_CORE", built_in("core", "a core dump would write memory to a file")),
        ("process/rlimits/RLIMIT_FSIZE", origins.resource("disk_mb")),
        ("process/rlimits/RLIMIT_MEMLOCK", built_in("memlock", "locked pages cannot be reclaimed")),
        ("process/rlimits/RLIMIT_NOFILE", built_in("nofile", "descriptors are the sentry's memory")),
        ("process/rlimits/RLIMIT_NPROC", origins.resource("pids_max")),
        ("hostname", built_in("hostname", "the host's name is not told")),
        ("root", built_in("root", "an empty root, read-only; what is not granted does not exist")),
        ("linux/resources", built_in("resources", "the same values as cgroup.json, for a runtime that applies them")),
    ):
        provenance.add(f"config.json:{rule}", cause)
    for name in NAMESPACES:
        provenance.add(
            f"config.json:linux/namespaces/{name}",
            Cause("built-in", f"namespace {name}", "each run has namespaces of its own"),
        )
