"""Write the files beside the packages of a release: the list of parts (CycloneDX) and the checksums."""

from __future__ import annotations

import hashlib
import json
import pathlib
import urllib.parse

from scripts.machine import console
from scripts.release.environment import PLACE
from scripts.release.recipe import Source


def make(
    source: Source, tree: pathlib.Path, tools: pathlib.Path, debian: list[dict[str, str]], out: pathlib.Path
) -> pathlib.Path:
    """Write the list of the parts of `tree`, and of the packages of Debian that the image alone has.

    Raises:
        SetupError: cyclonedx-py cannot read the environment.
    """
    target = out / f"covenant-{source.version}.cdx.json"
    python = tree / PLACE.lstrip("/") / "bin/python"
    command = [str(tools / "cyclonedx-py"), "environment", "--output-reproducible", "--of", "JSON", str(python)]
    document = json.loads(console.run(command, env=source.environment))
    document["metadata"]["component"] = {"type": "application", "name": "covenant", "version": source.version}
    document["components"] += [_of_distribution(**package) for package in debian]
    target.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    return target


def _of_distribution(name: str, version: str) -> dict[str, object]:
    reference = f"pkg:deb/debian/{name}@{urllib.parse.quote(version, safe='')}?arch=amd64"
    part = {"type": "library", "bom-ref": reference, "name": name, "version": version, "purl": reference}
    return {**part, "properties": [{"name": "covenant:only-in", "value": "image of the daemon"}]}


def checksums(made: list[pathlib.Path], out: pathlib.Path) -> pathlib.Path:
    """Write SHA256SUMS for what was made, as sha256sum(1) reads it."""
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(made)]
    (out / "SHA256SUMS").write_text("".join(lines))
    return out / "SHA256SUMS"
