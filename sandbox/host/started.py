"""Find the programs that an agent starts in its root: those of layers first, then those of the package and the host."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from policy import errors, layers
from policy.compile.oci import SEARCH_PATH
from policy.host import Closure, ClosureFile
from policy.layers import LayerEntry, LayerRef
from policy.manifest.agent import Manifest
from policy.manifest.process import WORKSPACE
from sandbox.config import Config
from sandbox.rootfs import closure
from sandbox.storage import json_cache

COMMAND = "command"


def command(
    manifest: Manifest, config: Config, package: Mapping[str, bytes], of_host: Callable[[str], Closure]
) -> Closure:
    """Return what ``agent.entry`` of the runtime command starts: a path of the root, a name on PATH, or a package file.

    ``of_host`` gives the closure of a program of the host.

    Raises:
        errors.ProgramError: there is no such program.
        errors.LayerError: a layer is not in the store.
    """
    entry, where = manifest.agent.entry, manifest.where("agent.entry")
    if "/" in entry and not entry.startswith("/"):
        return _of_package(entry, config, package, where)
    places = candidates(entry, dict(manifest.process.env).get("PATH", SEARCH_PATH))
    for place in places:
        found = of_layers(manifest.root.stack, place, config)
        if found is not None:
            return dataclasses.replace(found, name=COMMAND)
    on_host = next((place for place in places if os.path.isfile(place)), None)
    if on_host is None or manifest.root.stack:
        searched = "its layers" if manifest.root.stack else "this host"
        raise errors.ProgramError(
            f"program `{entry}` is not in {searched}",
            hint="`covenant layer show NAME --files` lists what a layer has; for a file of the package write `./NAME`"
            if manifest.root.stack
            else "install it, name a layer that has it below [root], or write `./NAME` for a file of the package",
            where=where,
        )
    return dataclasses.replace(of_host(on_host), name=COMMAND)


def of_layers(stack: Sequence[LayerRef], path: str, config: Config) -> Closure | None:
    """Return the program that a path leads to in the union of layers, None where it leads to no program.

    Raises:
        errors.LayerError: a layer is not in the store.
    """
    if not stack:
        return None
    found = _resolved(tuple(stack), path, config)
    if found is None or found.kind != "file" or not found.executable:
        return None
    file = ClosureFile(path, "file", 0o755, found.size, found.sha256)
    return Closure(path, path, (file,), layered=True)


def candidates(program: str, path: str) -> list[str]:
    """Return where a program may be: its absolute path itself, or its name in each absolute directory of PATH."""
    if program.startswith("/"):
        return [program]
    return [f"{folder.rstrip('/')}/{program}" for folder in path.split(":") if folder.startswith("/")]


def _of_package(entry: str, config: Config, package: Mapping[str, bytes], where: str) -> Closure:
    entry = entry.removeprefix("./")
    if entry not in package:
        raise errors.ProgramError(f"program `{entry}` is not in the package", hint="name a file of it", where=where)
    place = f"{WORKSPACE}/{entry}"
    if package[entry][:4] != b"\x7fELF":
        return Closure(COMMAND, place, ())
    libraries = {os.path.basename(name): data for name, data in package.items() if ".so" in os.path.basename(name)}
    found = closure.of_elf(package[entry], config, entry=place, siblings=libraries)
    return dataclasses.replace(found, name=COMMAND)


def _resolved(stack: tuple[LayerRef, ...], path: str, config: Config) -> LayerEntry | None:
    """Resolve a path in the union of layers. The answer is remembered: a union of large layers takes a second."""
    from sandbox.layers.store import LayerStore

    store = LayerStore(config.state)
    for ref in stack:
        store.get(ref)
    key = hashlib.sha256("\0".join([path, *map(str, stack)]).encode()).hexdigest()
    place: Path = config.state / "closures" / f"layered-{key[:32]}.json"
    held = json_cache.read(place)
    if held is not None and held.get("key") == key:
        return LayerEntry(path, **held["entry"]) if held["entry"] else None
    union = layers.Union()
    for ref in stack:
        union.lay(store.listing(ref))
    placed = union.resolve(path)
    entry = None if placed is None else placed.entry
    fields = ("kind", "executable", "size", "sha256")
    found = None if entry is None else {name: getattr(entry, name) for name in fields}
    json_cache.write(place, {"key": key, "entry": found})
    return entry
