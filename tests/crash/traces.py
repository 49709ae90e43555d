"""What runs leave behind, wherever a run makes something: looked for by the ids and the state of this world alone."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection
from pathlib import Path

from sandbox import bundle
from sandbox.kernel import cgroupfs
from sandbox.kernel.delegation import BASE

# What may lie in a state after a kill that did not before: evidence, locks, the one place of a half-made file, which
# the next writer overwrites, and whole parts of runs' directories for the next run (sandbox.spare).
_ALLOWED = re.compile(
    r"supervisor/(audit/events(\.chain)?\.jsonl\.aside-[0-9]+-[0-9a-f]{16}|uids/[0-9]+|archive/(\.[0-9a-f-]{36}\.json\.new|[0-9a-f-]{36}\.json)|"
    r"((serials|audit|audit-head|closures|network|unended|standby-retries)/)?\.[A-Za-z0-9_.-]+\.new|unended/\.settled|standby-retries(/[0-9a-f]{64}\.json)?|supervisor\.(lock|sock)|"
    r"spare(/[0-9a-f]{64}\.(bundle|place|policy)\.[0-9a-f]{32}(/.*)?)?)"
)


def tree(home: Path) -> set[str]:
    """Every name below the home; of what is named by its content and copied as a whole, only the name."""
    found = set()
    for place, directories, files in os.walk(home):
        inside = os.path.relpath(place, home)
        if inside in ("supervisor/packages", "supervisor/rootfs", "supervisor/closures"):
            found |= {f"{inside}/{name}" for name in (*directories, *files)}
            directories.clear()
            continue
        found |= {os.path.normpath(f"{inside}/{name}") for name in (*directories, *files)}
    return found


def run_ids(home: Path) -> set[str]:
    """The names of the runs whose directory is there, and of the cgroups that they were to have."""
    runs = home / "supervisor" / "runs"
    paths = [path for path in runs.iterdir() if path.is_dir()] if runs.exists() else []
    return {path.name for path in paths} | {one.name for path in paths for one in bundle.cgroups_of(path).values()}


def cgroups(ids: Collection[str]) -> list[str]:
    """The cgroups of these runs that are there."""
    places = set(cgroupfs.Hierarchies.read().mounts.values())
    return [str(place / BASE / one) for place in places for one in ids if (place / BASE / one).exists()]


def mounts(home: Path) -> list[str]:
    """What is mounted below the home, in every mount namespace that somebody is in."""
    found = {}
    for entry in ("self", *filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            space = os.readlink(f"/proc/{entry}/ns/mnt")
            if space not in found:
                found[space] = Path(f"/proc/{entry}/mountinfo").read_text().splitlines()
    return [line for lines in found.values() for line in lines if f"{home}/" in line]


def processes(home: Path) -> list[str]:
    """Processes of anybody that name what lies in this home."""
    mine, found = os.fsencode(home / "supervisor"), []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path(f"/proc/{entry}/cmdline").read_bytes()
        except OSError:
            continue
        if mine in command and b"tests.crash" not in command:
            found.append(f"process {entry}: {command!r}")
    return found


def unknown(home: Path, before: set[str]) -> list[str]:
    """Every name in the home that was not there ``before``: said once, and known from then on."""
    new = {name for name in tree(home) - before if not _ALLOWED.fullmatch(name)}
    before |= new
    return sorted(new)


def holding(place: Path, secrets: Collection[bytes]) -> list[str]:
    """The files below a place in which one of these lies in the clear."""
    found: list[str] = []
    for folder, directories, names in os.walk(place):
        if os.path.relpath(folder, place) == "supervisor":
            # Copies of programs, in which nothing is written: a new name there is told (``unknown``).
            directories[:] = [one for one in directories if one not in ("rootfs", "closures", "packages")]
        paths = [Path(folder, name) for name in names]
        paths = [path for path in paths if path.is_file() and not path.is_symlink()]
        found += [str(path) for path in paths if any(one in path.read_bytes() for one in secrets)]
    return found


def left(home: Path, before: set[str], ids: Collection[str], *, named: Path | None = None) -> list[str]:
    """Everything of these runs that is still there, and every name in the home that was not there ``before``: said
    once, and known from then on. ``named`` is the home as the runs' own processes name it, where that differs."""
    new = unknown(home, before)
    return [
        *(f"cgroup {one}" for one in cgroups(ids)),
        *(f"mount {one}" for one in mounts(home)),
        *processes(named or home),
        *(f"file {one}" for one in new),
    ]
