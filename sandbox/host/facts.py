"""Read this machine's facts and abilities, as plain values for the pure half (policy/host.py)."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from msgspec import structs

from policy import data, errors
from policy.grants.effective import Effective
from policy.host import CgroupFacts, Closure, GrantedPath, HostFacts, NetworkFacts, RunscFacts, VolumeFacts
from policy.manifest.agent import Manifest
from sandbox.config import Config, file_of, trusted_binary
from sandbox.host import memory as host_memory
from sandbox.host import started
from sandbox.kernel import small_files
from sandbox.kernel.cgroup import cgroup
from sandbox.network.service import providers
from sandbox.rootfs import closure, host_paths, loader_patch
from sandbox.storage import json_cache

if TYPE_CHECKING:
    from policy.explain.other_host import HostDocument

_VERSION_SECONDS = 15
_MIB = 1024 * 1024
# By cgroup version: the file of the memory limit, the file of the usage, and the name of inactive file pages in
# memory.stat. Version 1 writes a number for no limit that is larger than any machine's memory.
_MEMORY_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
_NO_LIMIT = 1 << 60
_NET = Path("/proc/sys/net")
_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}


def probe(config: Config) -> HostFacts:
    """Return the facts about this machine that no manifest changes. Without root the cgroup facts may be weaker.

    ``runsc`` is None if there is no usable one; ``covenant doctor`` shows the reason.

    Raises:
        errors.HostError: Raised when nothing can be enforced: another architecture, no /proc.
    """
    try:
        memory = host_memory.read()
        operators = _operators(config.state)
        named = operators.providers.items()
        return HostFacts(
            arch=architecture(),
            kernel=os.uname().release,
            audience=config.host,
            cpus=len(os.sched_getaffinity(0)),
            memory_mb=memory.total_mb,
            memory_available_mb=available_mb(memory),
            disk_free_mb=disk_free_mb(config.state),
            pids_free=_pids_free(),
            cgroup=cgroup_facts(),
            runsc=_usable_runsc(config),
            network=network_facts(config),
            providers=tuple(name for name, one in named if one.answers),
            agent_servers=tuple(name for name, one in named if one.has_agents),
            collects=bool(config.export.agents),
            searchers=tuple(name for name, one in named if one.searches),
            publish_ports=config.publish_ports,
            host_ports=config.host_ports,
            proxied=bool(config.proxy.url),
            made_up_providers=tuple(name for name, one in named if one.kind == "mock"),
            made_up_pages=tuple(name for name, one in operators.pages.items() if one.mock),
            isolates_runs=not (config.in_host_network or config.proxy.url),
        )
    except (OSError, KeyError, ValueError) as e:
        raise errors.HostError(f"this host cannot be probed: {e}", hint="is /proc mounted?") from e


def _operators(state: Path) -> providers.Operators:
    """The operator's providers. A caller that may not read the state, as in `policy why`, sees none."""
    try:
        return providers.load_all(state)
    except errors.ConfigError as e:
        if os.geteuid() != 0 and isinstance(e.__cause__, PermissionError):
            return providers.Operators({}, {})
        raise


def for_manifest(
    facts: HostFacts,
    manifest: Manifest,
    *,
    config: Config,
    package: Mapping[str, bytes] | None = None,
    extra_never: Sequence[str] = (),
    effective: Effective | None = None,
    caller: int = 0,
) -> HostFacts:
    """Return the facts with those for this manifest: its runtime, its granted executables, paths and volumes.

    ``package`` maps the package's file names to their verified bytes (for a rust-bin entry). ``extra_never`` are paths
    never granted on this host beside those of the data file, such as COVENANT_HOME. ``effective`` are the grants that a
    parent left of the manifest; their paths may be below the manifest's own. ``caller`` is the uid whose volumes count.

    Raises:
        errors.GrantedPathError, errors.ProgramError: Raised when this host cannot provide something granted; the first
            of all that it cannot (``errors.each``).
        errors.HostError: Raised when the runtime is missing or another user may change it.
    """
    never = never_granted(config, extra_never)
    permissions = manifest.permissions
    found: dict[str, GrantedPath] = {}
    refused: list[errors.CovenantError] = []
    own = tuple(path for _, path in permissions.filesystem.write_paths)
    written = own if effective is None else effective.filesystem.write
    for table, trees in (("read", never), ("write", {**never, **data.never_grantable().write_trees})):
        listed = permissions.filesystem.write_paths if table == "write" else enumerate(permissions.filesystem.read)
        asked = {path: f"[{i}]" for i, path in listed}
        if effective is not None:
            # What a granted directory covers is looked at too: a link in it may lead out of what is granted.
            inner = [path for path in asked if table == "read" and effective.filesystem.readable().covers(path)]
            asked = {path: asked.get(path, "") for path in (*getattr(effective.filesystem, table), *inner)}
        for path, index in asked.items():
            where = manifest.where(f"permissions.filesystem.{table}{index}")
            try:
                found[path] = host_paths.look_up(
                    path,
                    owners=config.path_owners,
                    never=trees,
                    where=where,
                    writing=table == "write",
                    beside=() if table == "write" else tuple(written),
                    follow=table == "read",
                )
            except (errors.GrantedPathError, errors.NeverGrantableError) as e:
                refused.append(e)
    programs: dict[str, Closure] = {}
    for i, entry in permissions.executables.programs:
        where = manifest.where(f"permissions.executables.allow[{i}]")
        try:
            layered = started.of_layers(manifest.root.stack, entry.path, config)
            programs[entry.path] = layered or _executable(entry.path, config, never, where)
            _check_content(programs[entry.path], entry.sha256, where)
        except (errors.GrantedPathError, errors.NeverGrantableError, errors.ProgramError) as e:
            refused.append(e)
    if refused:
        raise errors.together(refused)
    runtime = _runtime(manifest, config, package or {}, never)
    tools = _tools(package or {}) if manifest.permissions.skills.allow else frozenset[str]()
    return structs.replace(
        facts,
        runtimes={**facts.runtimes, **runtime},
        executables={**facts.executables, **programs},
        granted={**facts.granted, **found},
        volumes={**facts.volumes, **_volumes(manifest, config, caller)},
        tools=tools,
    )


def for_export(
    config: Config, manifests: Sequence[tuple[Manifest, Mapping[str, bytes]]], extra_never: Sequence[str]
) -> HostDocument:
    """Return what another machine needs to answer for this one: the facts, with the interpreters that are here and what
    some packages are granted. Each package is its manifest and files.

    Raises:
        errors.CovenantError: nothing can be enforced here, or this host cannot provide something granted.
    """
    from policy.explain.other_host import HostDocument

    facts = probe(config)
    for name in ("python3", "node"):
        with contextlib.suppress(errors.HostError):
            facts = structs.replace(facts, runtimes={**facts.runtimes, name: closure.of_runtime(name, config)})
    for manifest, files in manifests:
        # The closure of a package's own program is that package's alone.
        own = for_manifest(facts, manifest, config=config, package=files, extra_never=extra_never)
        facts = structs.replace(own, runtimes=facts.runtimes, tools=frozenset())
    return HostDocument(1, facts, never_granted(config, extra_never))


def _tools(package: Mapping[str, bytes]) -> frozenset[str]:
    # Imported only here: most manifests name no tool, and a cold start pays for each import.
    from policy.manifest.tools import document

    return document.served(package)


def _volumes(manifest: Manifest, config: Config, caller: int) -> dict[str, VolumeFacts]:
    """Return the volumes that the manifest names, of those that the caller may use."""
    found = {}
    for key, one in manifest.volumes:
        # Imported only here: most manifests name none, and a cold start pays for each import.
        from sandbox.volumes import session

        if (volume := session.facts(config.state, one.name, caller, manifest.where(key))) is not None:
            found[one.name] = volume
    return found


def never_granted(config: Config, extra: Sequence[str] = ()) -> dict[str, str]:
    """Return the paths never granted on this host with reasons: the data file's, the state, our code, ``extra``."""
    out = dict.fromkeys(_own_code(), "it is the supervisor's own code")
    own = {str(config.state), *config.vault.private_files(), *extra}
    out.update({os.path.realpath(p): "it is Covenant's own" for p in own})
    return {**out, **data.never_grantable().trees}


@functools.cache
def _own_code() -> tuple[str, ...]:
    """Return the directories that the code of this process was loaded from. They do not change while it lives."""
    own = {str(Path(__file__).resolve().parents[2] / name) for name in ("policy", "sandbox", "covenant")}
    if sys.prefix != sys.base_prefix:
        # Otherwise it is installed into the machine's own Python, whose prefix /usr contains other software.
        own.add(os.path.realpath(sys.prefix))
    return tuple(sorted(own))


def architecture() -> Literal["x86_64", "aarch64"]:
    """Return the machine's architecture.

    Raises:
        errors.HostError: Raised when it is not supported.
    """
    machine = os.uname().machine
    if machine == "x86_64":
        return "x86_64"
    if machine == "aarch64":
        return "aarch64"
    raise errors.HostError(f"architecture `{machine}` is not supported", hint="x86_64 and aarch64 are")


def cgroup_facts(hierarchies: cgroup.Hierarchies | None = None) -> CgroupFacts:
    """Return the cgroup version and controllers, and whether swap is counted."""
    found = hierarchies or cgroup.Hierarchies.read()
    version: Literal[0, 1, 2] = 1 if found.version == 1 else 2 if found.version == 2 else 0
    if version == 0:
        return CgroupFacts(0, frozenset())
    memory = found.mounts["memory"]
    if version == 1:
        return CgroupFacts(1, frozenset(found.mounts), (memory / "memory.memsw.limit_in_bytes").exists())
    controllers = frozenset((memory / "cgroup.controllers").read_text().split())
    # The root cgroup has no such file. Any other cgroup with the memory controller shows whether swap is counted.
    return CgroupFacts(2, controllers, any(memory.glob("*/memory.swap.max")))


def network_facts(config: Config) -> NetworkFacts:
    """Check the needs of a gateway: nft, IPv6 (which it must have to refuse it), and the operator's uplink or proxy."""
    try:
        trusted_binary(config.nft)
    except errors.HostError as e:
        return NetworkFacts(f"nft ({e.message})", e.hint or "apt-get install nftables")
    if not _NET.joinpath("ipv6").is_dir():
        return NetworkFacts("IPv6, which a gateway must have to refuse it", "boot without ipv6.disable=1")
    stack = config.runsc_network
    if config.proxy.url:
        return NetworkFacts("", "", stack, links=True)
    if not config.uplink:
        mend = f'write uplink = "NAME" in {file_of(config.state)}, an interface that `ip link` shows'
        return NetworkFacts("an uplink", mend, stack, links=True)
    if not _NET.joinpath("ipv4", "conf", config.uplink).is_dir():
        mend = "name an interface that `ip link` shows"
        return NetworkFacts(f"the uplink `{config.uplink}`", mend, stack, links=True)
    return NetworkFacts("", "", stack, links=True)


def runsc_facts(config: Config) -> RunscFacts:
    """Return the configured runsc with its version and digest. Its owner is checked; a binary is hashed only once.

    Raises:
        errors.HostError: Raised when runsc is missing, another user may change it, or it does not answer.
    """
    path = trusted_binary(config.runsc)
    info = path.stat()
    seen = [info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns]
    held = json_cache.read(config.state / "closures" / "runsc.json")
    if held is not None and held.get("path") == str(path) and held.get("seen") == seen:
        return RunscFacts(str(path), str(held["version"]), str(held["sha256"]))
    version = _version(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    record = {"path": str(path), "seen": seen, "version": version, "sha256": digest}
    json_cache.write(config.state / "closures" / "runsc.json", record)
    return RunscFacts(str(path), version, digest)


def capacity_mb(hierarchies: cgroup.Hierarchies | None = None) -> int:
    """Return the memory for all runs together in MiB: the machine's, or less by the cgroups above this process."""
    return min([host_memory.read().total_mb, *(most for most, _ in _memory_limits(hierarchies))])


def available_mb(memory: host_memory.Memory, hierarchies: cgroup.Hierarchies | None = None) -> int:
    """Return the memory available to a new process in MiB, within the cgroups above this process."""
    return min([memory.available_mb, *(max(most - used, 0) for most, used in _memory_limits(hierarchies))])


def _memory_limits(hierarchies: cgroup.Hierarchies | None = None) -> Iterator[tuple[int, int]]:
    """Yield limit and usage in MiB of each cgroup above this process that has a memory limit.

    The usage leaves out inactive file pages, which the kernel reclaims first
    (Documentation/admin-guide/cgroup-v2.rst).
    """
    found = hierarchies or cgroup.Hierarchies.read()
    place = found.mounts.get("memory")
    own = next((one for one in _own_cgroups() if one[0] in ("memory", "")), None)
    if place is None or own is None:
        return
    most, used, old = _MEMORY_FILES[found.version]
    for part in (own[1], *Path(own[1]).parents):
        directory = f"{place}/{str(part).lstrip('/')}"
        # The root of a hierarchy has no such file, and no limit.
        with contextlib.suppress(OSError, ValueError):
            limit = int(small_files.whole(f"{directory}/{most}"))
            if limit < _NO_LIMIT:
                yield limit // _MIB, _used_mb(directory, used, old, limit)


def _used_mb(directory: str, used: str, old: str, limit: int) -> int:
    """Return the usage of a cgroup in MiB, or the whole limit if it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        stat = dict(line.split() for line in small_files.text(f"{directory}/memory.stat").splitlines())
        taken = int(small_files.whole(f"{directory}/{used}")) - int(stat.get(old, "0"))
        return -(-min(max(taken, 0), limit) // _MIB)
    return limit // _MIB


def _own_cgroups() -> list[tuple[str, str]]:
    """Return controller and path of each cgroup of this process (cgroups(7)). The name is empty for version 2."""
    out = []
    for line in small_files.text("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        out += [(name, path) for name in controllers.split(",")]
    return out


def disk_free_mb(path: Path) -> int:
    """Return the free MiB of the file system where ``path`` is or would be made."""
    while not path.exists():
        path = path.parent
    info = os.statvfs(path)
    return info.f_bavail * info.f_frsize // _MIB


def _usable_runsc(config: Config) -> RunscFacts | None:
    with contextlib.suppress(errors.HostError):
        return runsc_facts(config)
    return None


def _version(path: Path) -> str:
    try:
        done = subprocess.run(
            [path, "--version"],
            env=_ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_VERSION_SECONDS,
            check=False,
            cwd="/",
            start_new_session=True,  # Ctrl-C must reach only this process; it is no fault of the machine
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise errors.HostError(f"`{path} --version` does not answer", where=str(path)) from e
    first = done.stdout.decode("ascii", "replace").splitlines()[:1]
    if done.returncode != 0 or not first or not first[0].startswith("runsc version "):
        raise errors.HostError(f"`{path} --version` failed with status {done.returncode}", where=str(path))
    return first[0].removeprefix("runsc version ").strip()


def _runtime(
    manifest: Manifest, config: Config, package: Mapping[str, bytes], never: Mapping[str, str]
) -> dict[str, Closure]:
    runtime, entry = manifest.agent.runtime, manifest.agent.entry
    if runtime == started.COMMAND:
        where = manifest.where("agent.entry")
        of_host = functools.partial(_executable, config=config, never=never, where=where)
        return {runtime: started.command(manifest, config, package, of_host)}
    if runtime in closure.RUNTIMES:
        return {runtime: closure.of_runtime(runtime, config, libraries=closure.needed_by(package))}
    if runtime == "rust-bin" and entry in package:
        libraries = {os.path.basename(n): b for n, b in package.items() if ".so" in os.path.basename(n)}
        return {runtime: closure.of_elf(package[entry], config, entry=f"/workspace/{entry}", siblings=libraries)}
    return {}


def _executable(path: str, config: Config, never: Mapping[str, str], where: str) -> Closure:
    try:
        loader = loader_patch.LOADERS[architecture()]
        loader_patch.patch(Path(loader).read_bytes(), name=loader)
    except (errors.NotEnforceableError, OSError) as e:
        raise errors.NotEnforceableError(
            f"executable `{path}` cannot be granted on this host: {e}",
            hint="leave permissions.executables out",
            where=where,
        ) from e
    # Root must own it: a user who may replace a program controls what it does.
    looked = host_paths.look_up(path, never=never, where=where, follow=True)
    if looked.kind != "file":
        raise errors.GrantedPathError(f"executable `{path}` is a directory", where=where)
    try:
        found = closure.of_elf(Path(path), config)
    except errors.ProgramError as e:
        e.where = where
        raise
    if found.entry != looked.place:
        # The closure follows links for itself: the program that is checked must be the one that is started.
        message = f"executable `{path}` led to `{looked.place}` and leads to `{found.entry}` now"
        raise errors.GrantedPathError(message, hint="run it again", where=where)
    return found


def _check_content(found: Closure, sha256: str | None, where: str) -> None:
    program = next(f for f in found.files if f.path == found.entry)
    if sha256 is not None and program.sha256 != sha256:
        raise errors.ProgramError(
            f"executable `{found.name}` has digest {program.sha256}, the manifest wants {sha256}",
            hint="sign the digest of the program that this host has",
            where=where,
        )


def _pids_free() -> int:
    limits = [int(small_files.whole(f"/proc/sys/kernel/{name}")) for name in ("pid_max", "threads-max")]
    # loadavg(5): the fourth field is runnable/existing scheduling entities.
    existing = int(small_files.text("/proc/loadavg").split()[3].partition("/")[2])
    return max(0, min(limits) - existing)
