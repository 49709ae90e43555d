"""From a decision to what the gVisor runner starts: the package's copy, the root directory, open granted paths."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from policy import decide, denials
from policy.host import Closure, HostFacts
from policy.package import Package
from sandbox import granted, gvisor, host
from sandbox.config import Config
from sandbox.rootfs import Skeletons
from sandbox.runner import Limits, Round
from sandbox.store import PackageStore


@dataclass(frozen=True, slots=True)
class Order:
    """What is asked of one run beside the decision: whose it is, what it is told, how long it may take."""

    run_id: str
    package: Package
    intent: bytes
    limits: Limits
    label: Mapping[str, str]
    claim: Callable[[], None]
    denied: Callable[[denials.Denial], None]
    rounds: Sequence[Round] = ()


def job(
    order: Order,
    decision: decide.Decision,
    facts: HostFacts,
    *,
    state: Path,
    config: Config,
    never_granted: tuple[str, ...],
    stack: contextlib.ExitStack,
) -> gvisor.Job:
    """Prepare everything that is slow or can fail before anything starts; ``stack`` owns what is held open.

    Raises:
        errors.GrantedPathError: a granted path is no longer what was decided about.
        errors.MachineError: a copy could not be made.
    """
    plan = decision.artefacts.json("mounts.json")
    agent = decision.manifest.agent
    executable = agent.entry if agent.runtime == "rust-bin" else ""
    copy = PackageStore(state / "packages").put(order.package, executable=executable)
    closures = [_closure(facts, c["name"]) for c in plan["root"]["closures"]]
    points = [(p["path"], p["kind"]) for p in plan["root"]["mount_points"]]
    rootfs = stack.enter_context(Skeletons(state / "rootfs").hold(closures, points))
    never = host.never_granted(config, never_granted)
    sources = {}
    for mount in plan["mounts"]:
        if mount["type"] != "bind":
            continue
        if mount["source"] == "package":
            fd = os.open(copy, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        else:
            # The descriptor that is mounted is the one that is checked here, not a second look at the name.
            fd, _ = granted.open_granted(mount["source"], owners=config.path_owners, never=never)
        stack.callback(os.close, fd)
        sources[mount["destination"]] = fd
    assert facts.runsc is not None
    return gvisor.Job(
        run_id=order.run_id,
        artefacts=decision.artefacts,
        runsc_path=facts.runsc.path,
        rootfs=rootfs,
        sources=sources,
        intent=order.intent,
        limits=order.limits,
        label=order.label,
        claim=order.claim,
        config=config,
        denied=order.denied,
        rounds=order.rounds,
    )


def _closure(facts: HostFacts, name: str) -> Closure:
    return facts.runtimes[name] if name in facts.runtimes else facts.executables[name]
