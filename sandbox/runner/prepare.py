"""From a decision to what the gVisor runner starts: the package's copy, the root directory, open granted paths."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from policy import decide, denials, errors
from policy.host import Closure, HostFacts
from policy.package import Package
from policy.prove import live
from sandbox.broker.server import Broker
from sandbox.config import Config
from sandbox.host import facts as host_facts
from sandbox.host import runsc_network
from sandbox.network import addresses, gateway
from sandbox.probes import preload
from sandbox.rootfs import host_paths
from sandbox.rootfs.skeleton import Skeletons
from sandbox.run_io import Limits, PeriodicCheck
from sandbox.runner import gvisor, limits
from sandbox.storage import atomic_file
from sandbox.storage.package_store import PackageStore


@dataclass(frozen=True, slots=True)
class Order:
    """The order of one run, beside the decision: its issuer, its intent, its time limit."""

    run_id: str
    package: Package
    intent: bytes
    limits: Limits
    label: Mapping[str, str]
    claim: Callable[[], None]
    denied: denials.Told
    drifted: Callable[[live.Layer], None]
    rounds: Sequence[PeriodicCheck] = ()
    watches: gateway.Watches = field(default_factory=dict)
    broker: Broker | None = None
    secrets: gvisor.Secrets | None = None


def job(
    order: Order,
    decision: decide.Decision,
    facts: HostFacts,
    *,
    state: Path,
    config: Config,
    never_granted: tuple[str, ...],
    stack: contextlib.ExitStack,
) -> gvisor.SandboxSpec:
    """Prepare everything that is slow or can fail before anything starts; ``stack`` owns what is held open.

    Raises:
        errors.GrantedPathError: a granted path is no longer what was decided about.
        errors.MachineError: a copy could not be made.
    """
    plan = decision.artefacts.json("mounts.json")
    agent = decision.manifest.agent
    executable = agent.entry if agent.runtime == "rust-bin" else ""
    copy = PackageStore(state / "packages").put(order.package, executable=executable)
    points = [(p["path"], p["kind"]) for p in plan["root"]["mount_points"]]
    tries, own = None, []
    if config.self_test and preload.possible(agent.runtime, facts.arch):
        tries = preload.tries(decision.artefacts)
        own.append(preload.closure(state / "closures", tries.object))
    rootfs = stack.enter_context(Skeletons(state / "rootfs").hold([*closures(decision, facts), *own], points))
    never = host_facts.never_granted(config, never_granted)
    sources = {}
    for mount in plan["mounts"]:
        if mount["type"] == "bind" and mount["source"] != gvisor.CREDENTIALS:
            fd = _source(mount, plan["rooms"], copy, state=state, config=config, never=never)
            stack.callback(os.close, fd)
            sources[mount["destination"]] = fd
    disks: tuple[str, ...] = ()
    if any(entry["file"] == "io.max" for entry in decision.artefacts.json("cgroup.json")["v2"]):
        root = os.open(rootfs, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        stack.callback(os.close, root)
        disks = limits.devices([("/", root), *sources.items()])
    assert facts.runsc is not None
    networked = decision.artefacts.json("network.json")["mode"] != "off"
    return gvisor.SandboxSpec(
        run_id=order.run_id,
        artefacts=decision.artefacts,
        runsc_path=facts.runsc.path,
        rootfs=rootfs,
        covered=runsc_network.covered(config, facts) if networked else (),
        sources=sources,
        intent=order.intent,
        limits=order.limits,
        label=order.label,
        claim=order.claim,
        config=config,
        denied=order.denied,
        disks=disks,
        drifted=order.drifted,
        rounds=order.rounds,
        broker=order.broker,
        secrets=order.secrets,
        watches=order.watches,
        tries=tries,
    )


def _source(
    mount: Mapping[str, Any],
    rooms: Mapping[str, int],
    copy: Path,
    *,
    state: Path,
    config: Config,
    never: Mapping[str, str],
) -> int:
    """Open a source of a mount: the ``copy`` of the package, the resolver's file, or a granted path."""
    if mount["source"] == "package":
        return os.open(copy, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    if mount["source"] == "resolver":
        return os.open(_resolver(state), os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW)
    # The descriptor that is mounted is the one that is checked here, not a second look at the name.
    room_mb = rooms.get(mount["destination"])
    writing = room_mb is not None
    fd, fact = host_paths.open_granted(
        mount["source"], owners=config.path_owners, never=never, writing=writing, beside=() if writing else tuple(rooms)
    )
    if fact.room_mb != (room_mb or 0):
        os.close(fd)
        raise errors.GrantedPathError(f"path `{mount['source']}` had {room_mb} MiB and has {fact.room_mb} now")
    return fd


def _resolver(state: Path) -> Path:
    """The file that names the gateway as the one to ask: the same for every run."""
    path = state / "network" / "resolv.conf"
    content = f"nameserver {addresses.GATEWAY4}\n".encode()
    if not path.exists() or path.read_bytes() != content:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with contextlib.ExitStack() as stack:
            directory = atomic_file.open_directory(path.parent, error=errors.HomeError)
            stack.callback(os.close, directory)
            # Of the first two runs that come at once, each would take the other's half-made file away.
            stack.enter_context(atomic_file.locked(directory, where=str(path.parent), error=errors.HomeError))
            atomic_file.replace(directory, path.name, content, mode=0o444)
    return path


def closures(decision: decide.Decision, facts: HostFacts) -> list[Closure]:
    """The closures of the agent's root directory."""
    return [_closure(facts, c["name"]) for c in decision.artefacts.json("mounts.json")["root"]["closures"]]


def _closure(facts: HostFacts, name: str) -> Closure:
    return facts.runtimes[name] if name in facts.runtimes else facts.executables[name]


def redacted(stderr: bytes, state: Path) -> str:
    """stderr as text without the host's paths: runsc's own messages name the bundle and its state."""
    return stderr.decode("utf-8", "replace").replace(str(state), "<state>")
