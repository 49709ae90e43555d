"""Mounts of a run: detached copies of each source, the file system of its credentials, and the memory that it shows."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

from policy.compile import mounts as compiled_mounts
from policy.compile.mounts import CALLERS, REPOSITORY
from sandbox.kernel import libc, small_files
from sandbox.kernel.fs import idmap as idmapped
from sandbox.kernel.fs import secret_files
from sandbox.kernel.proc import launch
from sandbox.rootfs import covered
from sandbox.rundir.directory import RunDirectory
from sandbox.runner.spec import CREDENTIALS, VOLUMES, SandboxSpec

# What runsc takes the memory of a sandbox from (gvisor runsc/sandbox: totalSystemMemory), and tells gVisor's kernel.
MEMINFO = "/proc/meminfo"
_ATTRIBUTES = {
    "rw": 0,
    "ro": libc.MOUNT_ATTR_RDONLY,
    "nosuid": libc.MOUNT_ATTR_NOSUID,
    "nodev": libc.MOUNT_ATTR_NODEV,
    "noexec": libc.MOUNT_ATTR_NOEXEC,
    "nosymfollow": libc.MOUNT_ATTR_NOSYMFOLLOW,
    "idmapped": libc.MOUNT_ATTR_IDMAP,
}


def with_secrets(job: SandboxSpec, stack: contextlib.ExitStack, uid: int) -> SandboxSpec:
    """The job with the file system of its credentials among its sources, where its policy has one."""
    places = [m["destination"] for m in job.artefacts.json("mounts.json")["mounts"] if m["source"] == CREDENTIALS]
    if not places:
        return job
    files = stack.enter_context(secret_files.SecretFiles(uid))
    if job.secrets is not None:
        asked = {} if job.operations is None else job.operations.before()
        if (outcome := job.secrets(files.put, {**job.watches, **asked})) is not None:
            raise outcome
    files.seal()
    sources = {**job.files.sources, **dict.fromkeys(places, files.fd)}
    return structs.replace(job, files=structs.replace(job.files, sources=sources))


def with_workspace(job: SandboxSpec, uid: int) -> SandboxSpec:
    """The job with the overlays of the caller's directory and of its git directory among its sources, where its policy
    has them.
    """
    if not (there := places(job)):
        return job
    assert job.workspace is not None, "the request was checked"
    made = job.workspace.mounted(uid)
    sources = {**job.files.sources, there[0]: made.directory, there[1]: made.repository}
    return structs.replace(job, files=structs.replace(job.files, sources=sources))


def with_volumes(job: SandboxSpec, uid: int, stack: contextlib.ExitStack) -> SandboxSpec:
    """The job with the volumes of its policy mounted among its sources. ``stack`` lets them go."""
    plan = job.artefacts.json("mounts.json")
    places = [m for m in plan["mounts"] if m["source"].startswith(VOLUMES)]
    if not places:
        return job
    # Imported only here: most agents have none, and a cold start pays for each import.
    from sandbox.volumes import session

    state, found = job.config.state, {}
    for mount in places:
        name, place = mount["source"].partition(":")[2], mount["destination"]
        noexec = "noexec" in compiled_mounts.host_flags(mount["source"], mount["options"])
        found[place] = session.mounted(state, name, plan["rooms"][place], uid, stack, noexec=noexec)
    return structs.replace(job, files=structs.replace(job.files, sources={**job.files.sources, **found}))


def places(job: SandboxSpec) -> list[str]:
    """Return the places of the workspace and of its git directory in the agent's root; none without a workspace."""
    found = {m["source"]: m["destination"] for m in job.artefacts.json("mounts.json")["mounts"]}
    return [found[one] for one in (CALLERS, REPOSITORY) if one in found]


def attached(job: SandboxSpec, directory: RunDirectory, stack: contextlib.ExitStack, uid: int) -> list[launch.Attach]:
    """Detached copies of every source, flags set before anything can see them (sandbox-facts: the gofer's view
    has no flags unless the mount has them already)."""
    plan: list[Mapping[str, Any]] = job.artefacts.json("mounts.json")["mounts"]
    targets = directory.targets([m["kind"] if m["type"] == "bind" else "" for m in plan])
    root_fd = os.open(job.files.rootfs, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    stack.callback(os.close, root_fd)
    out = [_attach(root_fd, ("ro", "nosuid", "nodev"), directory.rootfs, stack)]
    if job.files.root_file is not None:
        target = directory.target_of_root_file()
        # Without noexec: gVisor maps the agent's programs from it.
        out.append(_attach(job.files.root_file.fd, ("ro", "nosuid", "nodev"), target, stack))
    for mount, target in zip(plan, targets, strict=True):
        if mount["type"] == "bind":
            fd, options = job.files.sources[mount["destination"]], mount["options"]
            if mount["source"] in (CREDENTIALS, CALLERS, REPOSITORY) or mount["source"].startswith(VOLUMES):
                # It is no copy of anything, and has its flags.
                out.append(launch.Attach(fd, str(target)))
                continue
            flags = compiled_mounts.host_flags(mount["source"], options)
            out.append(_attach(fd, flags, target, stack, writer=uid if "idmapped" in options else None))
    # After the copies: what covers a path now may have done so when it was copied, and what came later is drift.
    covered.check_all(plan, job.files.sources)
    return out


def memory(job: SandboxSpec, directory: RunDirectory, stack: contextlib.ExitStack) -> launch.Attach:
    """Return the mount by which runsc sees ``memory_mb`` as this machine's memory, and so shows it to the agent.

    This runsc has a flag for it on its inner command alone. Without the mount an agent sees the host's memory: V8, the
    JVM and Go then plan with more than the agent has, and the kernel kills it (docs/limits.md).
    """
    shown_mb = job.artefacts.json("effective.json")["grants"]["resources"]["memory_mb"]
    path = directory.bundle / "meminfo"
    small_files.put(path, f"MemTotal: {shown_mb * 1024} kB\n".encode())
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW)
    stack.callback(os.close, fd)
    return _attach(fd, ("ro", "nosuid", "nodev", "noexec"), Path(MEMINFO), stack)


def _attach(
    fd: int, options: Sequence[str], target: Path, stack: contextlib.ExitStack, *, writer: int | None = None
) -> launch.Attach:
    """``writer`` is the run's user, who is the owner of what is granted for writing, in this mount alone."""
    detached = libc.open_tree_clone(fd)
    stack.callback(os.close, detached)
    attributes = 0
    for option in options:
        attributes |= _ATTRIBUTES[option]
    idmap = None
    if writer is not None:
        info = os.fstat(fd)
        idmap = idmapped.namespace((info.st_uid, info.st_gid), (writer, writer))
        stack.callback(os.close, idmap)
    libc.mount_setattr(detached, attributes, idmap=idmap)
    return launch.Attach(detached, str(target))
