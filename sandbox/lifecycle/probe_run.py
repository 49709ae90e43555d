"""Self-test of a policy: a throw-away sandbox with the artefacts of the run, whose first process tries forbidden acts.

The sandbox is the same as the agent's: artefacts, mounts, limits, filter, namespaces, firewall and gates, made and read
back by the same code. Only the first process differs; the root contains it in addition. A root of layers is a directory
here: sandbox.host.runsc_probe tries what gVisor does with an EROFS file, and packing takes 10 s for each GB. A success
is remembered by policy, host, runsc, kernel and our own code, for a day.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import uuid
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct, structs

from policy import contract, denials, errors
from policy.compile import plan
from policy.host import Closure, HostFacts
from policy.prove import live
from sandbox.config import Config
from sandbox.host import code_digest
from sandbox.probes import denial_probes, probe_program
from sandbox.rootfs import closure_files
from sandbox.run_io import Limits
from sandbox.rundir.label import SELF_TEST
from sandbox.rundir.uid_pool import UidLease
from sandbox.runner import gvisor, root_directory
from sandbox.shim import signals as shim_signals
from sandbox.storage import json_cache

# An older self-test is repeated, so that silent changes of a machine are found within a day.
VALID_MS = 86_400_000


class SelfTestKey(Struct, frozen=True):
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
        about = [self.policy, facts.arch, facts.kernel, cgroup, structs.asdict(facts.runsc), flags, self.uplink]
        return hashlib.sha256(json.dumps([code_digest.digest(), *about], sort_keys=True).encode()).hexdigest()


def _record(state: Path) -> Path:
    return state / "closures" / "canaries.json"


class _Seen:
    """The events of a self-test (run_io.RunObserver). It has no rows of its own."""

    def __init__(self) -> None:
        self.drift: list[live.Layer] = []
        self.refused: Counter[denials.Denial] = Counter()

    def denied(self, denial: denials.Denial, *, count: int = 1) -> None:
        self.refused[denial] += count

    def drifted(self, layer: live.Layer) -> None:
        self.drift.append(layer)

    def starting(self) -> None:
        """Nothing is written: the test has its rows already."""

    def ending(self, error: errors.RunError) -> None:
        """The error is in the outcome."""


def passed(state: Path, key: SelfTestKey, *, now_ms: int) -> bool:
    """Whether this test passed within the last day. A time in the future does not count."""
    when = (json_cache.read(_record(state)) or {}).get(key.digest())
    return type(when) is int and 0 <= now_ms - when < VALID_MS


def remember(state: Path, key: SelfTestKey, *, now_ms: int) -> None:
    """Remember that the test passed now, and forget results older than a day."""
    held = json_cache.read(_record(state)) or {}
    young = {name: when for name, when in held.items() if type(when) is int and 0 <= now_ms - when < VALID_MS}
    json_cache.write(_record(state), {**young, key.digest(): now_ms})


def closure(config: Config, arch: str) -> Closure:
    """Return the canary program as one more closure of a root directory."""
    files = {probe_program.PATH: probe_program.program(arch)}
    mode = closure_files.PROGRAM_MODE
    return closure_files.derived(config.state / "closures", "canary", files, entry=probe_program.PATH, mode=mode)


def attempt(job: gvisor.SandboxSpec, closures: Sequence[Closure], *, runs: Path, uids: UidLease) -> tuple[str, ...]:
    """Run the canary in place of the agent of ``job``. Returns all differences from the policy.

    ``closures`` are those of the agent's root directory.

    Raises:
        errors.MachineError: Raised when the sandbox cannot be set up.
    """
    artefacts = job.artefacts
    tried = denial_probes.plan(artefacts)
    seen = _Seen()
    own = closure(job.config, artefacts.json("effective.json")["arch"])
    with shim_signals.DeferredSignals() as signals, contextlib.ExitStack() as stack:
        root = root_directory.hold(artefacts, closures, [own], state=job.config.state, stack=stack)
        signals.hold()
        run_id = str(uuid.uuid4())
        throw_away = structs.replace(
            job,
            run_id=run_id,
            files=structs.replace(job.files, rootfs=root.path, tries=None, check_root=root.check, root_file=root.file),
            intent=tried.message(),
            # A handful of system calls takes milliseconds; a gate that does not answer is a failure in the end.
            limits=Limits(job.limits.start_seconds, job.limits.start_seconds, SELF_TEST, 0.0),
            label={**job.label, SELF_TEST: "yes"},
            claim=lambda: None,
            # Refusals of a canary are no denials of an agent, and its accesses teach nothing (`covenant learn`).
            observer=seen,
            observe=None,
            rounds=(),
            watches={},
            arguments=(probe_program.PATH,),
            broker=None,
            services=None,
            publish=None,
            host=None,
            # A kept or resumed workspace is not for the trial.
            workspace=None if job.workspace is None else job.workspace.throw_away(run_id),
            inject=None,
            operations=None,
            contract=contract.LINE,
            later=None,
            tell_agent=None,
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
    if seen.drift:
        return tuple(f"{layer.name}: {layer.found}" for layer in seen.drift)
    if finished.error is not None:
        return (f"the canary ended with `{finished.error.code}`: {finished.error.message}",)
    return tried.faults(finished.stdout, seen.refused)


def error(faults: Sequence[str]) -> errors.SelfTestError:
    """Return the error for a run whose policy failed the test."""
    return errors.SelfTestError(
        f"what the policy forbids is not refused here: {faults[0]}",
        hint="run `covenant doctor`; with self_test = false in the configuration runs go without it, and each says so",
        faults=list(faults),
    )
