"""The linux-gvisor runner: compiled artefacts to a running sandbox, and back to one result with nothing left.

Every acquisition is entered on one stack and released in reverse, whatever happens; what a kill -9 of this process
leaves behind (a run directory, an empty cgroup) is removed by the next start (``recover``).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policy import denials, errors
from policy.compile import bundle as compiled_bundle
from policy.compile.artefacts import Artefacts
from sandbox.bundle import RunDirectory, abandoned, cgroups_of, label_of, remove
from sandbox.config import Config
from sandbox.kernel import cgroupfs, libc, process, runsc, trace
from sandbox.limits import CpuTime
from sandbox.runner import Channel, Exchange, Finished, Limits, Round, out_of_memory
from sandbox.uids import UidLease

_ATTRIBUTES = {
    "rw": 0,
    "ro": libc.MOUNT_ATTR_RDONLY,
    "nosuid": libc.MOUNT_ATTR_NOSUID,
    "nodev": libc.MOUNT_ATTR_NODEV,
    "noexec": libc.MOUNT_ATTR_NOEXEC,
    "nosymfollow": libc.MOUNT_ATTR_NOSYMFOLLOW,
}


@dataclass(frozen=True, slots=True)
class Job:
    """One run, decided and prepared. ``sources`` gives, for each bind destination, an open descriptor of what is
    to be mounted there; the descriptors stay the caller's. ``label`` says whose run it is (bundle.live_labels);
    ``claim`` is called once others can see it, and raises when the run may not go on beside theirs. ``denied`` is told
    of everything that was refused to the agent; ``rounds`` are looked at while the run lasts."""

    run_id: str
    artefacts: Artefacts
    runsc_path: str
    rootfs: Path
    sources: Mapping[str, int]
    intent: bytes
    limits: Limits
    label: Mapping[str, str]
    claim: Callable[[], None]
    config: Config
    denied: Callable[[denials.Denial], None]
    rounds: Sequence[Round] = ()


def run(job: Job, *, runs: Path, uids: UidLease, hierarchies: cgroupfs.Hierarchies | None = None) -> Finished:
    """Start the sandbox, hold the exchange, end everything.

    Raises:
        errors.MachineError: the sandbox could not be set up; nothing of it is left.
    """
    with contextlib.ExitStack() as stack:
        uid = stack.enter_context(uids)
        directory = stack.enter_context(RunDirectory(runs / job.run_id, job.label))
        job.claim()
        leaf = cgroupfs.Leaf(hierarchies or cgroupfs.Hierarchies.read(), job.run_id)
        directory.note_cgroups(leaf.plan())
        stack.enter_context(leaf)
        leaf.apply(_limits(job.artefacts, leaf.hierarchies.version))
        directory.write_config(compiled_bundle.instantiate(job.artefacts, run_id=job.run_id, uid=uid))
        mounts = _mounts(job, directory, stack)
        started = trace.StartTrace(directory.trace)
        stack.callback(started.close)
        child = stack.enter_context(process.spawn(_launch(job, directory, leaf, mounts, started.config)))
        exchange = Exchange(_channel(job, directory, leaf, child, started), job.intent, job.limits)
        exchange.run()
        status = child.reap()
        leaf.kill()
        return _finish(exchange, status, leaf)


def recover(
    runs: Path,
    *,
    ended: Callable[[str, Mapping[str, str]], None] = lambda run_id, label: None,
    hierarchies: cgroupfs.Hierarchies | None = None,
) -> list[str]:
    """Remove what runs left whose process is gone: their cgroups with everything in them, then their directories.

    ``ended`` is told the run's id and label when nothing of it runs any more and before the last trace is removed.
    """
    removed = []
    with abandoned(runs) as paths:
        for path in paths:
            leaf = cgroupfs.Leaf(hierarchies or cgroupfs.Hierarchies.read(), path.name)
            leaf.adopt(cgroups_of(path))
            leaf.kill()
            leaf.remove()
            label = label_of(path)
            if label is not None:
                ended(path.name, label)
            remove(path)
            removed.append(path.name)
    return removed


def _limits(artefacts: Artefacts, version: int) -> list[cgroupfs.Limit]:
    entries: Sequence[Mapping[str, Any]] | None = artefacts.json("cgroup.json")[f"v{version}"]
    if entries is None:
        raise errors.NotEnforceableError(f"cgroup version {version} cannot hold the limits that were granted")
    return [cgroupfs.Limit(e["controller"], e["file"], e["value"], e["required"]) for e in entries]


def _mounts(job: Job, directory: RunDirectory, stack: contextlib.ExitStack) -> list[process.Attach]:
    """Detached copies of every source, flags set before anything can see them (sandbox-facts: the gofer's view
    has no flags unless the mount has them already)."""
    plan: list[Mapping[str, Any]] = job.artefacts.json("mounts.json")["mounts"]
    targets = directory.targets([m["kind"] if m["type"] == "bind" else "" for m in plan])
    root_fd = os.open(job.rootfs, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    stack.callback(os.close, root_fd)
    out = [_attach(root_fd, ("ro", "nosuid", "nodev"), directory.rootfs, stack)]
    for mount, target in zip(plan, targets, strict=True):
        if mount["type"] == "bind":
            out.append(_attach(job.sources[mount["destination"]], mount["options"], target, stack))
    return out


def _attach(fd: int, options: Sequence[str], target: Path, stack: contextlib.ExitStack) -> process.Attach:
    detached = libc.open_tree_clone(fd)
    stack.callback(os.close, detached)
    attributes = 0
    for option in options:
        attributes |= _ATTRIBUTES[option]
    libc.mount_setattr(detached, attributes)
    return process.Attach(detached, str(target))


def _launch(
    job: Job, directory: RunDirectory, leaf: cgroupfs.Leaf, mounts: Sequence[process.Attach], pod_init: Path
) -> process.Launch:
    return process.Launch(
        program=job.runsc_path,
        arguments=runsc.run_arguments(
            job.runsc_path,
            job.artefacts.json("runtime.json")["flags"],
            root=directory.runsc_root,
            pod_init=pod_init,
            bundle=directory.bundle,
            container=job.run_id,
        ),
        environment=runsc.ENVIRONMENT,
        join_files=leaf.join_files(),
        mounts=mounts,
    )


def _channel(
    job: Job, directory: RunDirectory, leaf: cgroupfs.Leaf, child: process.Child, started: trace.StartTrace
) -> Channel:
    def terminate() -> None:
        runsc.kill(
            job.runsc_path,
            root=directory.runsc_root,
            container=job.run_id,
            signal_name="TERM",
            timeout_seconds=job.limits.grace_seconds,
        )

    limit_ms = job.artefacts.json("supervision.json")["task"]["cpu_time_ms"]
    clock = None if limit_ms is None else CpuTime(limit_ms, leaf.cpu_time_us)

    def has_started() -> bool:
        if not started.poll():
            return False
        if clock is not None:
            clock.started()
        return True

    return Channel(
        stdin=child.stdin,
        stdout=child.stdout,
        stderr=child.stderr,
        pidfd=child.pidfd,
        started=started.fileno(),
        has_started=has_started,
        terminate=terminate,
        kill=leaf.kill,
        out_of_memory=lambda: leaf.oom_kills() > 0,
        rounds=(*job.rounds, *(() if clock is None else (clock.round(),))),
    )


def _finish(exchange: Exchange, status: int, leaf: cgroupfs.Leaf) -> Finished:
    oom = leaf.oom_kills()
    error = exchange.error
    if oom and (error is None or isinstance(error, errors.DeadlineError)):
        # An OOM kill shows as status 137, or as 1 with an empty stderr like an agent's own exit 1, or as a sandbox
        # that hangs: only the cgroup's counter tells (sandbox-facts).
        error = out_of_memory()
    elif error is None and exchange.started_at is None:
        error = errors.SandboxCrashedError(f"the sandbox ended with status {status} before the agent started")
    elif error is None and status != 0:
        error = errors.AgentFailedError(f"the agent exited with status {status}", exit_status=status)
    return exchange.finished(status, error, oom_kills=oom, reported=tuple(leaf.reported))
