"""From a decision to the files of a sandbox: the package's copy, the root directory, open granted paths."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from policy import decide, errors
from policy.compile import init
from policy.compile import mounts as compiled_mounts
from policy.explain import own_limits
from policy.host import Closure, HostFacts
from policy.manifest.permissions import HOST_NAME
from policy.package import Package
from sandbox.config import Config
from sandbox.host import erofs_roots, runsc_network
from sandbox.host import facts as host_facts
from sandbox.network import addresses
from sandbox.probes import preload
from sandbox.rootfs import host_paths, identity_files, init_program, local_names, trust_anchors
from sandbox.runner import command_stubs, limits, root_directory
from sandbox.runner.spec import OF_THE_RUN, VOLUMES, SandboxFiles
from sandbox.storage import atomic_file
from sandbox.storage.package_store import PackageStore


def files(
    package: Package,
    decision: decide.Decision,
    facts: HostFacts,
    *,
    state: Path,
    config: Config,
    never_granted: tuple[str, ...],
    stack: contextlib.ExitStack,
) -> SandboxFiles:
    """Prepare the files of a sandbox, which is slow or can fail, before it starts; ``stack`` owns what is held open.

    Raises:
        errors.GrantedPathError: a granted path is no longer what was decided about.
        errors.MachineError: a copy could not be made.
    """
    plan = decision.artefacts.json("mounts.json")
    agent = decision.manifest.agent
    executable = agent.entry.removeprefix("./") if compiled_mounts.started_from_package(decision.manifest) else ""
    copy = PackageStore(state / "packages").put(package, executable=executable)
    points = [(p["path"], p["kind"]) for p in plan["root"]["mount_points"]]
    taken = [*(path for path, _ in points), *(one["path"] for one in plan["root"].get("links", []))]
    gates = decision.artefacts.json("gates.json")
    names = [*gates.get("services", {"names": []})["names"], *([HOST_NAME] if gates.get("host") else [])]
    hosts = tuple((name, addresses.GATEWAY4) for name in names)
    tries, own = None, own_files(state, config, taken, hosts)
    started_by = decision.artefacts.json("config.json")["process"]["args"][:2]
    if started_by[0] == init.PROGRAM:
        own.append(init_program.closure(state / "closures", relay=started_by[1:] == [init.SSH_RELAY]))
    if commands := decision.effective.skills.commands:
        own += command_stubs.closures(state / "closures", [name for name, _ in commands], decision.artefacts)
    if config.self_test and preload.possible(agent.runtime, facts.arch):
        tries = preload.tries(decision.artefacts)
        own.append(preload.closure(state / "closures", tries.object))
    beneath = closures(decision, facts)
    if compiled_mounts.has_anchors(decision.effective.network.mode, decision.manifest):
        beneath += trust_anchors.closures(config, taken)
    root = root_directory.hold(
        decision.artefacts, beneath, own, state=state, stack=stack, packer=lambda: erofs_roots.packer(config, facts)
    )
    never = host_facts.never_granted(config, never_granted)
    sources = {}
    for mount in plan["mounts"]:
        if mount["type"] == "bind" and mount["source"] not in OF_THE_RUN and not mount["source"].startswith(VOLUMES):
            device = facts.granted[mount["source"]].device if mount["destination"] in plan["rooms"] else 0
            waits = bool((decision.artefacts.json("gates.json")["dns"] or {}).get("asked"))
            fd = _source(
                mount, plan["rooms"], copy, state=state, config=config, never=never, device=device, waits=waits
            )
            stack.callback(os.close, fd)
            sources[mount["destination"]] = fd
    disks: tuple[str, ...] = ()
    if any(entry["file"] == "io.max" for entry in decision.artefacts.json("cgroup.json")["v2"]):
        directory = os.open(root.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        stack.callback(os.close, directory)
        disks = limits.devices([("/", directory), *sources.items()])
    networked = decision.artefacts.json("network.json")["gateway"] is not None
    covered = runsc_network.covered(config, facts) if networked else ()
    shown = own_limits.encoded(decision.effective, decision.manifest)
    return SandboxFiles(root.path, covered, sources, disks, tries, root.check, shown, root.file)


def own_files(
    state: Path, config: Config, mounted: Sequence[str], hosts: tuple[tuple[str, str], ...] = ()
) -> list[Closure]:
    """Return the files of our own making that every root has, but for those that a mount covers.

    ``hosts`` are the names of the run's services, with their address.
    """
    uids = range(config.uid_first, config.uid_first + config.uid_count)
    folder = state / "closures"
    return [local_names.closure(folder, mounted, hosts), identity_files.closure(folder, uids, mounted)]


def _source(
    mount: Mapping[str, Any],
    rooms: Mapping[str, int],
    copy: Path,
    *,
    state: Path,
    config: Config,
    never: Mapping[str, str],
    device: int,
    waits: bool,
) -> int:
    """Open a source of a mount: the ``copy`` of the package, the resolver's file, or a granted path.

    ``waits``: the resolver may hold a question for an operator.
    """
    if mount["source"] == "package":
        return os.open(copy, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    if mount["source"] == "resolver":
        return os.open(_resolver(state, waits=waits), os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW)
    # The descriptor that is mounted is the one that is checked here, not a second look at the name.
    room_mb = rooms.get(mount["destination"])
    writing = room_mb is not None
    fd, fact = host_paths.open_granted(
        mount["source"], owners=config.path_owners, never=never, writing=writing, beside=() if writing else tuple(rooms)
    )
    if fact.device != device:
        # By the device other runs are told apart that write the same.
        os.close(fd)
        raise errors.GrantedPathError(f"another file system is mounted at `{mount['source']}` now", hint="run it again")
    if fact.room_mb != (room_mb or 0):
        os.close(fd)
        raise errors.GrantedPathError(f"path `{mount['source']}` had {room_mb} MiB and has {fact.room_mb} now")
    return fd


def _resolver(state: Path, *, waits: bool) -> Path:
    """The file that names the gateway as the one to ask: the same for every run, but for how long clients wait."""
    path = state / "network" / ("resolv-asked.conf" if waits else "resolv.conf")
    content = f"nameserver {addresses.GATEWAY4}\n{_WAITS if waits else ''}".encode()
    if not path.exists() or path.read_bytes() != content:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with contextlib.ExitStack() as stack:
            directory = atomic_file.open_directory(path.parent, error=errors.HomeError)
            stack.callback(os.close, directory)
            # Of the first two runs that come at once, each would take the other's half-made file away.
            stack.enter_context(atomic_file.locked(directory, where=str(path.parent), error=errors.HomeError))
            atomic_file.replace(directory, path.name, content, mode=0o444)
    return path


# For longer than a question may be held (policy.manifest.permissions, MAX_ASK_SECONDS). resolv.conf(5): at most 30.
_WAITS: Final = "options timeout:30 attempts:4\n"


def closures(decision: decide.Decision, facts: HostFacts) -> list[Closure]:
    """The closures of the agent's root directory."""
    return [_closure(facts, c["name"]) for c in decision.artefacts.json("mounts.json")["root"]["closures"]]


def _closure(facts: HostFacts, name: str) -> Closure:
    return facts.runtimes[name] if name in facts.runtimes else facts.executables[name]


def redacted(stderr: bytes, state: Path) -> str:
    """stderr as text without the host's paths: runsc's own messages name the bundle and its state."""
    return stderr.decode("utf-8", "replace").replace(str(state), "<state>")
