"""Write the files beside the packages of a release: the wheel, the list of parts (CycloneDX) and the checksums."""

from __future__ import annotations

import hashlib
import json
import pathlib
import shutil

from scripts.machine import console
from scripts.release.environment import PLACE
from scripts.release.recipe import Source


def make(
    source: Source, tree: pathlib.Path, tools: pathlib.Path, wheel: pathlib.Path, out: pathlib.Path
) -> list[pathlib.Path]:
    """Copy the wheel, write the list of parts, and return both.

    Raises:
        SetupError: cyclonedx-py cannot read the environment.
    """
    shutil.copyfile(wheel, out / wheel.name)
    target = out / f"covenant-{source.version}.cdx.json"
    python = tree / PLACE.lstrip("/") / "bin/python"
    command = [str(tools / "cyclonedx-py"), "environment", "--output-reproducible", "--of", "JSON", str(python)]
    document = json.loads(console.run(command, env=source.environment))
    document["metadata"]["component"] = {"type": "application", "name": "covenant", "version": source.version}
    target.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    return [out / wheel.name, target]


def checksums(made: list[pathlib.Path], out: pathlib.Path) -> pathlib.Path:
    """Write SHA256SUMS for what was made, as sha256sum(1) reads it."""
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(made)]
    (out / "SHA256SUMS").write_text("".join(lines))
    return out / "SHA256SUMS"
