"""Self-test of a policy: a throw-away sandbox with the artefacts of the run, whose first process tries forbidden acts.

The sandbox is the same as the agent's: artefacts, mounts, limits, filter, namespaces, firewall and gates, made and read
back by the same code. Only the first process differs; the root directory contains it in addition. A success is
remembered by policy, host, runsc, kernel and our own code, for a day.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from policy import denials, errors
from policy.compile import plan
from policy.host import Closure, ClosureFile, HostFacts
from policy.prove import live
from sandbox.config import Config
from sandbox.host import code_digest
from sandbox.probes import denial_probes, probe_program
from sandbox.rootfs.skeleton import MountPoint, Skeletons
from sandbox.run_io import Limits
from sandbox.rundir.label import SELF_TEST
from sandbox.rundir.uid_pool import UidLease
from sandbox.runner import gvisor
from sandbox.shim import signals as shim_signals
from sandbox.storage import atomic_file, json_cache

# An older self-test is repeated, so that silent changes of a machine are found within a day.
VALID_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class Key:
    """Subject of a self-test. The test is repeated after a change of any field."""

    policy: str
    facts: HostFacts
    uplink: str

    def digest(self) -> str:
        """Return the digest under which the result is remembered."""
        facts = self.facts
        assert facts.runsc is not None
        cgroup = [facts.cgroup.version, sorted(facts.cgroup.controllers), facts.cgroup.swap_accounting]
        flags = [list(one) for one in plan.RUNSC_FLAGS.items()]
        about = [self.policy, facts.arch, facts.kernel, cgroup, dataclasses.asdict(facts.runsc), flags, self.uplink]
        return hashlib.sha256(json.dumps([code_digest.digest(), *about], sort_keys=True).encode()).hexdigest()


def _record(state: Path) -> Path:
    return state / "closures" / "canaries.json"


def passed(state: Path, key: Key, *, now_ms: int) -> bool:
    """Whether this test passed within the last day. A time in the future does not count."""
    when = (json_cache.read(_record(state)) or {}).get(key.digest())
    return type(when) is int and 0 <= now_ms - when < VALID_MS


def remember(state: Path, key: Key, *, now_ms: int) -> None:
    """Remember that the test passed now, and forget results older than a day."""
    held = json_cache.read(_record(state)) or {}
    young = {name: when for name, when in held.items() if type(when) is int and 0 <= now_ms - when < VALID_MS}
    json_cache.write(_record(state), {**young, key.digest(): now_ms})


def closure(config: Config, arch: str) -> Closure:
    """Return the canary program as one more closure of a root directory."""
    raw = probe_program.program(arch)
    source = config.state / "closures" / f"canary-{arch}"
    source.parent.mkdir(mode=0o700, exist_ok=True)
    atomic_file.derive(source, raw, mode=0o700)
    digest = hashlib.sha256(raw).hexdigest()
    file = ClosureFile(probe_program.PATH, "file", 0o755, len(raw), digest, source=str(source))
    return Closure("canary", probe_program.PATH, (file,))


def attempt(job: gvisor.SandboxSpec, closures: Sequence[Closure], *, runs: Path, uids: UidLease) -> tuple[str, ...]:
    """Run the canary in place of the agent of ``job``. Returns all differences from the policy.

    ``closures`` are those of the agent's root directory.

    Raises:
        errors.MachineError: Raised when the sandbox cannot be set up.
    """
    artefacts = job.artefacts
    root = artefacts.json("mounts.json")["root"]
    points: list[MountPoint] = [(point["path"], point["kind"]) for point in root["mount_points"]]
    tried = denial_probes.plan(artefacts)
    drift: list[live.Layer] = []
    refused: Counter[denials.Denial] = Counter()

    def told(denial: denials.Denial, *, count: int = 1) -> None:
        refused[denial] += count

    own = closure(job.config, artefacts.json("effective.json")["arch"])
    held = Skeletons(job.config.state / "rootfs").hold([*closures, own], points)
    with shim_signals.DeferredSignals() as signals, held as rootfs:
        signals.hold()
        throw_away = dataclasses.replace(
            job,
            run_id=str(uuid.uuid4()),
            rootfs=rootfs,
            intent=tried.message(),
            # A handful of system calls takes milliseconds; a gate that does not answer is a failure in the end.
            limits=Limits(job.limits.start_seconds, job.limits.start_seconds, SELF_TEST, 0.0),
            label={**job.label, SELF_TEST: "yes"},
            claim=lambda: None,
            # Refusals of a canary are no denials of an agent.
            denied=told,
            drifted=drift.append,
            rounds=(),
            watches={},
            tries=None,
            arguments=(probe_program.PATH,),
            broker=None,
            later=None,
            signals=signals,
        )
        try:
            finished = gvisor.run(throw_away, runs=runs, uids=uids)
        finally:
            # An interrupted test has not failed: the next run repeats it.
            if signals.pending:
                raise KeyboardInterrupt
    if signals.pending:
        raise KeyboardInterrupt
    if drift:
        return tuple(f"{layer.name}: {layer.found}" for layer in drift)
    if finished.error is not None:
        return (f"the canary ended with `{finished.error.code}`: {finished.error.message}",)
    return tried.faults(finished.stdout, refused)


def error(faults: Sequence[str]) -> errors.SelfTestError:
    """Return the error for a run whose policy failed the test."""
    return errors.SelfTestError(
        f"what the policy forbids is not refused here: {faults[0]}",
        hint="run `covenant doctor`; with self_test = false in the configuration runs go without it, and each says so",
        faults=list(faults),
    )
