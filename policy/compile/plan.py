"""Effective policy and host facts to artefacts: the one place that calls every compiler, in a fixed order.

Pure and deterministic: the same input gives the same bytes on any machine, whatever the order in which grants
were written (tests/unit/policy/compile/test_plan.py, tests/golden/test_policy.py).
"""

from __future__ import annotations

from typing import Any

from policy import errors
from policy.compile import cgroup, firewall, mounts, oci, seccomp
from policy.compile.artefacts import Artefacts, Cause, Provenance, built_in, canonical
from policy.compile.causes import cause_of
from policy.grants.effective import Effective
from policy.host import Closure, HostFacts
from policy.manifest.agent import Manifest

# What the sandbox process is started with; each is stated although some are today's defaults, because a
# default may change with a new runsc (sandbox/self_test.py proves the one that all else hangs on).
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


def compile(effective: Effective, manifest: Manifest, host: HostFacts, *, package_digest: str) -> Artefacts:
    """Compile for the linux-gvisor backend.

    Raises:
        errors.NotEnforceableError: this host lacks what a grant needs.
        errors.NotYetEnforceableError: a grant whose enforcement is not built.
    """
    if host.runsc is None:
        raise errors.NotEnforceableError(
            "no working runsc on this host", hint="run `covenant doctor`", where=manifest.where("sandbox.backend")
        )
    provenance = Provenance()
    closures = _closures(effective, manifest, host)
    interpreter = host.runtimes[manifest.agent.runtime].entry if manifest.agent.runtime != "rust-bin" else ""
    filter_ = seccomp.compile(effective.syscalls.names, arch=host.arch)
    _explain_filter(effective, manifest, filter_.names, provenance)
    cgroup_doc = cgroup.compile(effective, manifest, provenance)
    mounts_doc = mounts.compile(effective, manifest, host, closures, provenance)
    config = oci.compile(
        effective,
        manifest,
        interpreter=interpreter,
        mounts=mounts_doc,
        seccomp=filter_.oci,
        resources=cgroup_doc["oci"],
        provenance=provenance,
    )
    documents: dict[str, Any] = {
        "config.json": config,
        "seccomp.json": filter_.oci,
        "cgroup.json": cgroup_doc,
        "mounts.json": mounts_doc,
        "network.json": firewall.compile(effective, manifest, provenance),
        "runtime.json": _runtime(host, provenance),
        "effective.json": {
            "version": 1,
            "package_digest": package_digest,
            "arch": host.arch,
            "grants": effective.canonical(),
        },
    }
    files = {name: canonical(document) for name, document in documents.items()}
    files["seccomp.bpf"] = filter_.bpf
    files["provenance.json"] = canonical(provenance.document())
    return Artefacts(files)


def _closures(effective: Effective, manifest: Manifest, host: HostFacts) -> tuple[Closure, ...]:
    """The runtime's closure first, then those of the granted executables, by path."""
    runtime = host.runtimes.get(manifest.agent.runtime)
    if runtime is None:
        raise errors.NotEnforceableError(
            f"runtime `{manifest.agent.runtime}` is not on this host",
            hint="run `covenant doctor` for the mend",
            where=manifest.where("agent.runtime"),
        )
    out = [runtime]
    for path in sorted(effective.executables.paths):
        closure = host.executables.get(path)
        if closure is None:
            raise errors.NotEnforceableError(
                f"executable `{path}` was not found on this host",
                where=manifest.where("permissions.executables.allow"),
            )
        out.append(closure)
    return tuple(out)


def _explain_filter(effective: Effective, manifest: Manifest, names: tuple[str, ...], provenance: Provenance) -> None:
    wrote_profile = manifest.wrote("permissions.syscalls.profile")
    profile = cause_of(manifest, "permissions.syscalls.profile" if wrote_profile else "agent.runtime")
    for name in names:
        if name in effective.syscalls.profile_names:
            cause = Cause(profile.kind, profile.key, f"profile {effective.syscalls.profile}")
        elif name in manifest.permissions.syscalls.allow:
            cause = Cause("manifest", "permissions.syscalls.allow", name)
        else:
            cause = Cause("manifest", "permissions.executables.allow", "a granted program can be started")
        provenance.add(f"seccomp.bpf:{name}", cause)
    provenance.add("seccomp.bpf:default", built_in("errno EPERM", "absent means not allowed"))
    if "clone" in names:
        reason = "its flags lie behind a pointer, so libc is sent back to clone"
        provenance.add("seccomp.bpf:clone3", built_in("clone3", reason))


def _runtime(host: HostFacts, provenance: Provenance) -> dict[str, Any]:
    assert host.runsc is not None
    for flag, (_, reason) in RUNSC_FLAGS.items():
        provenance.add(f"runtime.json:{flag}", built_in(flag, reason))
    return {
        "version": 1,
        "runsc": {"version": host.runsc.version, "sha256": host.runsc.sha256},
        "flags": {flag: value for flag, (value, _) in RUNSC_FLAGS.items()},
    }
