"""Debian packages: what is there, what apt could install, and installing exactly what is missing."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Sequence

from scripts.machine import console
from scripts.machine.record import Record

SOURCES = pathlib.Path("/etc/apt")

_ENV = {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C", "NEEDRESTART_MODE": "l"}
_GET = ["apt-get", "-y", "-o", "DPkg::Lock::Timeout=300", "-o", "APT::Keep-Downloaded-Packages=false"]


def installed() -> dict[str, str]:
    """Versions of all installed Debian packages by name."""
    status, out = console.quiet(["dpkg-query", "-W", "-f", "${db:Status-Status} ${Package} ${Version}\n"])
    if status != 0:
        return {}
    rows = (line.split() for line in out.splitlines())
    return {row[1]: row[2] for row in rows if len(row) == 3 and row[0] == "installed"}


def candidate(package: str) -> str | None:
    """The version that apt would install now, or None when no source has one."""
    _, out = console.quiet(["env", "LC_ALL=C", "apt-cache", "policy", package])
    match = re.search(r"^\s*Candidate:\s*(\S+)", out, re.MULTILINE)
    return None if match is None or match[1] == "(none)" else match[1]


def at_least(version: str | None, oldest: str) -> bool:
    """Whether a Debian version is `oldest` or newer; None is not."""
    if version is None:
        return False
    return console.quiet(["dpkg", "--compare-versions", version, "ge", oldest])[0] == 0


def source_files() -> dict[str, str]:
    """The machine's apt sources: file name to text."""
    paths = [SOURCES / "sources.list", *sorted((SOURCES / "sources.list.d").glob("*"))]
    return {
        str(path): path.read_text(errors="replace")
        for path in paths
        if path.is_file() and path.suffix in (".list", ".sources")
    }


def update() -> None:
    """Refresh apt's package lists (network)."""
    console.change("refresh the package lists: apt-get update")
    console.run([*_GET, "update"], env=_ENV)


def install(record: Record, packages: Sequence[str], *, release: str = "") -> None:
    """Install `packages` (from `release` when given) without recommendations, and record what came with them.

    Packages that were there before stay as they are where apt lets them; those that it had to upgrade on the
    way are recorded as such, since undo does not put old versions back.

    Raises:
        SetupError: apt-get failed; its last lines are in the message.
    """
    options = ["--no-install-recommends", "--no-upgrade", "--no-remove"]
    target = ["-t", release] if release else []
    arguments = ["install", *options, *target, *packages]
    if console.quiet(["env", "LC_ALL=C", *_GET, "--download-only", *arguments])[0] != 0:
        update()  # lists older than the mirror name archives that are gone
    plan = console.run([*_GET, "-s", *arguments], env=_ENV)
    coming = re.findall(r"^Inst (\S+)", plan, re.MULTILINE)
    before = installed()
    new = sorted({name for name in coming if name not in before})
    raised = sorted({name for name in coming if name in before})
    origin = f" from {release}" if release else ""
    console.change(f"install Debian packages{origin}: {' '.join(packages)}")
    if others := [name for name in new if name not in packages]:
        console.change(f"install Debian packages that those need: {' '.join(others)}")
    if raised:
        console.change(f"upgrade Debian packages that those need: {' '.join(raised)}")
    record.add("packages", *new)
    record.add("upgraded", *(f"{name} {before[name]}" for name in raised))
    console.run([*_GET, *arguments], env=_ENV)


def removal(packages: Sequence[str]) -> list[str]:
    """Return the packages that apt would remove if `packages` were purged (a simulation)."""
    plan = console.run([*_GET, "-s", "purge", *packages], env=_ENV)
    return re.findall(r"^(?:Purg|Remv) (\S+)", plan, re.MULTILINE)


def purge(packages: Sequence[str]) -> None:
    """Remove `packages` with their configuration."""
    console.run([*_GET, "purge", *packages], env=_ENV)
