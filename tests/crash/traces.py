"""Search for remains of runs wherever a run makes something, by the ids and the state of this world only."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from policy.compile.mounts import CREDENTIALS
from sandbox.kernel.cgroup import cgroup
from sandbox.kernel.cgroup.delegation import BASE
from sandbox.kernel.fs import secret_files
from sandbox.rundir import directory

# Names that a kill may leave in a state: evidence, locks, and the one place of a half-made file, which the next writer
# overwrites.
_ALLOWED = re.compile(
    r"supervisor/(audit/events(\.chain)?\.jsonl\.aside-[0-9]+-[0-9a-f]{16}|uids/[0-9]+|archive/(\.[0-9a-f-]{36}\.json\.new|[0-9a-f-]{36}\.json)|"
    r"((serials|audit|audit-head|closures|network|unended|standby-retries)/)?\.[A-Za-z0-9_.-]+\.new|unended/\.settled|standby-retries(/[0-9a-f]{64}\.json)?|supervisor\.(lock|sock))"
)

# How mountinfo(5) shows a file system that credentials lie in: where runs have it, or by what it is made with.
_CREDENTIALS = re.compile(rf" {CREDENTIALS} .* - (tmpfs|ramfs) | - tmpfs .*\bnr_inodes={secret_files._INODES}\b")


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
    return {path.name for path in paths} | {one.name for path in paths for one in directory.cgroups_of(path).values()}


def cgroups(ids: Collection[str]) -> list[str]:
    """The cgroups of these runs that are there."""
    places = set(cgroup.Hierarchies.read().mounts.values())
    return [str(place / BASE / one) for place in places for one in ids if (place / BASE / one).exists()]


def mounts(home: Path) -> list[str]:
    """Return the mounts below the home, in every mount namespace that has a process."""
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


def held(home: Path) -> set[str]:
    """Return nameless objects of our processes that live as long as a process holds them.

    These are network namespaces (held by a thread, a descriptor or a mount), detached file systems, and file systems of
    credentials. Only our processes count (``_ours``): others on this machine make and leave such objects as well.
    """
    found: set[str] = set()
    for pid in _ours(home):
        with contextlib.suppress(OSError):  # it is just ending
            table = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
            found |= _mounted(table) | _opened(pid, {line.split()[0] for line in table})
            found |= {os.readlink(f"/proc/{pid}/task/{thread}/ns/net") for thread in os.listdir(f"/proc/{pid}/task")}
    return found


def _ours(home: Path) -> Iterator[int]:
    """Yield this process, its descendants, and every process that holds something of the home, under any parent."""
    children: dict[int, list[int]] = {}
    waiting, seen = [os.getpid()], set[int]()
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            parent = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(pid)
            if _names(pid, os.fsencode(home)):
                waiting.append(pid)
    while waiting:
        if (pid := waiting.pop()) not in seen:
            seen.add(pid)
            waiting += children.get(pid, [])
            yield pid


def _names(pid: int, home: bytes) -> bool:
    """Whether a process has the home in its words, its environment, or open."""
    if any(home in Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ")):
        return True
    return any(os.fsencode(link).startswith(home) for _, link in _descriptors(pid))


def _descriptors(pid: int) -> Iterator[tuple[str, str]]:
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            yield number, os.readlink(f"/proc/{pid}/fd/{number}")


def _mounted(table: Sequence[str]) -> set[str]:
    """Return the network namespaces, by number, and the file systems of credentials in a process's mountinfo(5)."""
    spaces = {line.split()[3] for line in table if " - nsfs " in line and line.split()[3].startswith("net:[")}
    return spaces | {f"file system {line.split()[2]} of credentials" for line in table if _CREDENTIALS.search(line)}


def _opened(pid: int, mounted: Collection[str]) -> set[str]:
    """Return a process's open network namespaces, and its open directories on mounts outside its mount namespace."""
    found = set()
    for number, link in _descriptors(pid):
        if link.startswith("net:["):
            found.add(link)
        with contextlib.suppress(OSError):
            info = os.stat(f"/proc/{pid}/fd/{number}")
            said = Path(f"/proc/{pid}/fdinfo/{number}").read_text()
            if stat.S_ISDIR(info.st_mode) and said.partition("mnt_id:")[2].split()[0] not in mounted:
                found.add(f"file system {os.major(info.st_dev)}:{os.minor(info.st_dev)} detached")
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
