"""Facts of another machine: a document of them, and what is assumed about a manifest where they are silent.

A build machine has neither the paths nor the programs of the host that will run an agent. Its answers about a policy
stand on that host's facts, or on none, and name what they could not know.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Final, Literal

import msgspec
from msgspec import Struct, structs

from policy import errors, json_bounds
from policy.grants.effective import Effective
from policy.host import (
    CgroupFacts,
    Closure,
    ClosureFile,
    GrantedPath,
    HostFacts,
    NetworkFacts,
    RunscFacts,
    VolumeFacts,
)
from policy.manifest import text
from policy.manifest.agent import Manifest
from policy.manifest.process import WORKSPACE
from policy.manifest.services import LOOPBACK
from policy.manifest.tools import document

# A closure of Python or Node has some 2,000 files of six values each.
_MOST_VALUES: Final = 1 << 20
_PLENTY: Final = 1 << 30
_NO_DIGEST: Final = "0" * 64
_PROGRAM_MODE: Final = 0o755
# What is assumed of a place for writing, in MiB: it fits any disk_mb.
_ROOM_MB: Final = 1
_PROGRAMS: Final = "/usr/bin"
_INTERPRETERS: Final = {"python3": "/usr/bin/python3", "node": "/usr/bin/node"}


class HostDocument(Struct, frozen=True, forbid_unknown_fields=True, tag="host_facts", tag_field="kind"):
    """The document of `covenant doctor --export`. ``never`` maps each tree never granted there to its reason."""

    version: Literal[1]
    facts: HostFacts
    never: Mapping[str, str]


def encode(facts: HostDocument) -> bytes:
    """Return a document as JSON. Equal facts give equal bytes."""
    return msgspec.json.format(msgspec.json.encode(facts, order="deterministic"), indent=1) + b"\n"


def decode(raw: bytes, where: str) -> HostDocument:
    """Read a document.

    Raises:
        errors.HostFactsError: it is none.
    """
    hint = "make it on that host: covenant doctor --export FILE"
    if json_bounds.exceeds(raw, _MOST_VALUES):
        raise errors.HostFactsError(f"it has more than {_MOST_VALUES} values", hint=hint, where=where)
    try:
        return msgspec.json.decode(raw, type=HostDocument)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as e:
        raise errors.HostFactsError(f"it holds no facts of a host: {text.quote(str(e))}", hint=hint, where=where) from e


def nothing_known(manifest: Manifest) -> HostFacts:
    """Return the facts of a machine that has and enforces what a manifest asks of any machine."""
    ports = (one.to.removeprefix(LOOPBACK) for one in manifest.publish if one.to.startswith(LOOPBACK))
    return HostFacts(
        arch="x86_64",
        kernel="",
        audience="",
        cpus=_PLENTY,
        memory_mb=_PLENTY,
        memory_available_mb=_PLENTY,
        disk_free_mb=_PLENTY,
        pids_free=_PLENTY,
        cgroup=CgroupFacts(2, frozenset({"memory", "pids", "cpu", "io"}), swap_accounting=True),
        runsc=RunscFacts("/usr/bin/runsc", "unknown", _NO_DIGEST),
        network=NetworkFacts("", "", links=True),
        providers=tuple(one.provider for one in manifest.services.models.allow),
        searchers=tuple(manifest.services.search.allow),
        agent_servers=("a2a",) if manifest.services.agents.allow else (),
        collects=bool(manifest.services.telemetry.signals),
        publish_ports=tuple(int(port) for port in ports),
        host_ports=tuple(port for _, port in manifest.permissions.host_ports),
    )


class Completed(Struct, frozen=True):
    """Facts that have all that a manifest grants, and a line for each that was assumed."""

    facts: HostFacts
    unknown: tuple[str, ...]


def complete(
    facts: HostFacts, manifest: Manifest, files: Mapping[str, bytes], effective: Effective | None = None
) -> Completed:
    """Add what a manifest grants and the facts do not have, as a host would have it.

    ``files`` are the package's. ``effective`` are the grants that a parent left of the manifest.

    Raises:
        errors.ToolsError: tools.json is malformed.
    """
    assumed = _Assumed(manifest, facts, [])
    programs = {path: assumed.program(path, sha256) for path, sha256 in _programs(manifest)}
    runtime = {manifest.agent.runtime: assumed.runtime(files)}
    granted = {path: assumed.path(path, write=write) for path, write in _paths(manifest, effective)}
    volumes = {one.name: assumed.volume(one.name) for _, one in manifest.volumes}
    tools = document.served(files) if manifest.permissions.skills.allow else frozenset[str]()
    done = structs.replace(
        facts,
        runtimes={**facts.runtimes, **runtime} if manifest.agent.runtime != "hermes" else facts.runtimes,
        executables={**facts.executables, **programs},
        granted={**facts.granted, **granted},
        volumes={**facts.volumes, **volumes},
        tools=tools,
    )
    return Completed(done, tuple(assumed.unknown))


def _programs(manifest: Manifest) -> Iterator[tuple[str, str | None]]:
    for _, entry in manifest.permissions.executables.programs:
        yield entry.path, entry.sha256


def _paths(manifest: Manifest, effective: Effective | None) -> Iterator[tuple[str, bool]]:
    """Yield each host path of the grants, and whether it is written: those for writing last, which then hold."""
    asked = manifest.permissions.filesystem
    yield from ((path, False) for path in asked.read)
    if effective is not None:
        yield from ((path, False) for path in effective.filesystem.read)
    yield from ((path, True) for _, path in asked.write_paths)
    if effective is not None:
        yield from ((path, True) for path in effective.filesystem.write)


class _Assumed(Struct, frozen=True):
    """Takes each thing from the facts, or assumes it and adds a line to ``unknown``."""

    manifest: Manifest
    facts: HostFacts
    unknown: list[str]

    def program(self, path: str, sha256: str | None) -> Closure:
        found = self.facts.executables.get(path)
        if found is not None:
            return found
        self.unknown.append(f"program {text.quote(path)}: assumed to be there, without the libraries that it needs")
        return _closure(path, path, sha256 or _NO_DIGEST)

    def runtime(self, files: Mapping[str, bytes]) -> Closure:
        agent, layered = self.manifest.agent, bool(self.manifest.root.stack)
        found = self.facts.runtimes.get(agent.runtime)
        # The closure of these two is that of the package's own program.
        own = agent.runtime in ("rust-bin", "command")
        if found is not None and not own:
            return found
        if agent.runtime in _INTERPRETERS:
            entry = _INTERPRETERS[agent.runtime]
        elif agent.runtime == "rust-bin" or agent.entry.removeprefix("./") in files:
            entry = f"{WORKSPACE}/{agent.entry.removeprefix('./')}"
        else:
            entry = agent.entry if agent.entry.startswith("/") else f"{_PROGRAMS}/{agent.entry}"
        of_layer = layered and agent.runtime == "command"
        if entry.startswith(f"{WORKSPACE}/"):
            self.unknown.append(f"program {entry}: the libraries of the host that it needs")
            return Closure(agent.runtime, entry, ())
        where = "in a layer" if of_layer else "on the host, without the libraries that it needs"
        self.unknown.append(f"runtime {agent.runtime}: assumed to be {entry} {where}")
        found = _closure(agent.runtime, entry, _NO_DIGEST)
        return dataclasses.replace(found, layered=of_layer)

    def path(self, path: str, *, write: bool) -> GrantedPath:
        found = self.facts.granted.get(path)
        if found is not None and (found.room_mb or not write):
            return found
        kind = "a file system of its own of at most disk_mb" if write else "a directory that no link leads to"
        self.unknown.append(f"path {text.quote(path)}: assumed to be {kind}")
        return GrantedPath(path, "dir", room_mb=_ROOM_MB if write else 0)

    def volume(self, name: str) -> VolumeFacts:
        found = self.facts.volumes.get(name)
        if found is not None:
            return found
        self.unknown.append(f"volume {name}: assumed to be there, of at most disk_mb")
        return VolumeFacts(_ROOM_MB)


def _closure(name: str, entry: str, sha256: str) -> Closure:
    """Return a program without its libraries."""
    return Closure(name, entry, (ClosureFile(entry, "file", _PROGRAM_MODE, 0, sha256),))
