"""One golden import: a configuration of another tool in a JSON file, and the manifest and the losses that it gives.

``tests/golden/importing/NAME.json`` holds ``inputs``, written by hand, and ``outputs``, which this module computes:

    about       the property that the case shows
    from        the format
    source      the lines of the configuration
    context     what the caller says: entry, base, home
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

from msgspec import structs

from policy import decide, errors, package
from policy.host import GrantedPath, HostFacts
from policy.importing import formats
from policy.importing.vocabulary import Context
from policy.manifest import parse
from policy.manifest.agent import Manifest
from tests.golden import decisions_kit
from tests.unit.policy.compile import sample

HERE = pathlib.Path(__file__).resolve().parent / "importing"
TOOLS = "tools.json"


def names() -> list[str]:
    """The cases, sorted."""
    return sorted(path.stem for path in HERE.glob("*.json"))


def read(name: str) -> dict[str, Any]:
    """The document of a case."""
    document: dict[str, Any] = json.loads((HERE / f"{name}.json").read_text())
    return document


def raw(inputs: dict[str, Any]) -> bytes:
    """The bytes of the configuration."""
    return ("\n".join(inputs["source"]) + "\n").encode()


def written(inputs: dict[str, Any]) -> str:
    """The document of a case with its outputs computed anew."""
    return json.dumps({"inputs": inputs, "outputs": outputs(inputs)}, indent=1, ensure_ascii=True) + "\n"


def outputs(inputs: dict[str, Any]) -> dict[str, Any]:
    """The manifest and its losses, or the error."""
    context = Context("imported", **inputs.get("context", {}))
    try:
        made = formats.read(inputs["from"], raw(inputs), context)
    except errors.ImportSourceError as e:
        return {"refused": e.message, "where": e.where, "hint": e.hint}
    return {"manifest": made.manifest_text.splitlines(), "losses": [loss.to_json() for loss in made.losses]}


def decided(manifest_text: str) -> tuple[Manifest, decide.Decision]:
    """The decision on a host that has all that the manifest names: (3) to (6), without a signature."""
    manifest = parse.parse(manifest_text.encode())
    made = package.Package({"agent.toml": manifest_text.encode()})
    return manifest, decide.compile_unsigned(made, manifest, host=_host(manifest))


def _host(manifest: Manifest) -> HostFacts:
    files = manifest.permissions.filesystem
    granted = [*files.read, *(path for _, path in files.write_paths)]
    programs = [one.path for one in manifest.permissions.executables.allow if one.path]
    entry = manifest.agent.entry if manifest.agent.entry.startswith("/") else "/usr/bin/main"
    host = decisions_kit.HOSTS["x86_64-v2"]
    return structs.replace(
        host,
        cpus=64,
        memory_mb=1 << 20,
        memory_available_mb=1 << 20,
        disk_free_mb=1 << 20,
        pids_free=1 << 20,
        runtimes={**host.runtimes, "command": sample.closure("command", entry)},
        granted={path: GrantedPath(path, "dir", 8) for path in granted},
        executables={path: sample.closure(path, path) for path in programs},
        tools=frozenset(manifest.permissions.skills.allow),
    )
