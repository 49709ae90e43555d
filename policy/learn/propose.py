"""Make proposals of what was observed: each line with its evidence, and never one beyond the ceiling.

Pure and independent of the order of events. A directory is taken as a whole where more than ``MANY`` entries of it
are proposed, where it is a unit by its name (policy/data/learning.toml), or where it was listed and at least half of
its entries were opened, or none. It never is where a sensitive or never-grantable path is in it
(docs/adr/0116-what-a-run-may-teach.md).
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct
from pydantic_core import PydanticCustomError

from policy import data
from policy.learn import presets
from policy.learn.ceiling import Ceiling, below, narrowest
from policy.learn.observed import Evidence, Observed
from policy.manifest import paths as manifest_paths
from policy.manifest import process

MANY: Final = 8
# Places that every agent has of its own.
_OWN: Final = ("/proc", "/sys", "/dev", "/tmp", "/run", "/workspace")  # noqa: S108
_SCRATCH: Final = ("/tmp", "/dev/shm")  # noqa: S108
# What starts an agent's program in its sandbox (policy.compile.init); it is no grant.
_INIT: Final = "init"
_NO_NAME: Final = "a manifest cannot hold its name: rename it, or grant its directory"
_LOOPBACK: Final = ("127.", "[::1]:")


class Line(Struct, frozen=True):
    """One grant with its evidence. ``paths`` counts what was seen below it, ``note`` is for the reader."""

    key: str
    value: str
    count: int
    first_ns: int
    by: tuple[str, ...]
    paths: int = 1
    note: str = ""


class LeftOut(Struct, frozen=True):
    """Something that the run asked for and that is not proposed, with the reason."""

    what: str
    why: str
    count: int
    first_ns: int
    by: tuple[str, ...]


class LearntProposal(Struct, frozen=True):
    """The lines to grant, and what was left out. ``used`` are the places of the root that were opened or started."""

    reads: tuple[Line, ...] = ()
    volumes: tuple[Line, ...] = ()
    workspace: Line | None = None
    workspace_programs: Line | None = None
    programs: tuple[Line, ...] = ()
    hosts: tuple[Line, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    used: frozenset[str] = frozenset()

    @property
    def lines(self) -> tuple[Line, ...]:
        """Return all lines."""
        one = tuple(line for line in (self.workspace, self.workspace_programs) if line is not None)
        return (*self.reads, *self.volumes, *one, *self.programs, *self.hosts)


def propose(
    observed: Observed, ceiling: Ceiling, links: Mapping[str, str], interpreters: Mapping[str, str] | None = None
) -> LearntProposal:
    """Return the proposal for one run.

    ``links`` maps places of the root to the files that they lead to, ``interpreters`` scripts to their first lines'.
    """
    files, written, root = _sorted(observed, ceiling)
    left: list[LeftOut] = []
    project = _workspace(written, files, ceiling)
    top = "" if ceiling.workspace is None else ceiling.workspace.directory
    read = {path: one for path, one in files.items() if project is None or not below(path, top)}
    started = _started(observed, links, interpreters)
    return LearntProposal(
        reads=_reads(read, ceiling, left),
        volumes=_volumes(written, ceiling),
        workspace=project,
        workspace_programs=None if project is None else _programs_of(started, ceiling),
        programs=_programs(started, ceiling, links, left),
        hosts=_hosts(observed, ceiling, left),
        left_out=tuple(left),
        used=frozenset((*root, *started)),
    )


def _started(
    observed: Observed, links: Mapping[str, str], interpreters: Mapping[str, str] | None
) -> dict[str, Evidence]:
    """Return the programs that were started, but for the entry, with the interpreters of scripts."""
    called = dict(observed.succeeded("exec"))
    started = {path: one for path, one in called.items() if one.by != (_INIT,)}
    for script, program in (interpreters or {}).items():
        if script in called:
            started[program] = _joined(started.get(program), called[script])
    # A call may lead to what the kernel loads by a way that is not known here.
    known = {links.get(path, path) for path in (*called, *started)}
    return {**started, **{path: one for path, one in observed.succeeded("load") if path not in known}}


def _sorted(
    observed: Observed, ceiling: Ceiling
) -> tuple[dict[str, Evidence], dict[str, Evidence], dict[str, Evidence]]:
    """Return what was opened: host paths below the ceiling, places that were written, and places of the root."""
    files: dict[str, Evidence] = {}
    written: dict[str, Evidence] = {}
    root: dict[str, Evidence] = {}
    for path, one in observed.succeeded("open", "look"):
        kept = any(below(path, place) for place in ceiling.volumes)
        if one.writes or kept:
            written[path] = _joined(written.get(path), one)
        if kept:
            continue
        host = ceiling.host_path(path)
        if host is not None:
            files[host] = _joined(files.get(host), one)
        elif not any(below(path, own) for own in _OWN):
            root[path] = _joined(root.get(path), one)
    for path, one in observed.succeeded("exec"):
        host = ceiling.host_path(path)
        if host is not None:
            files[host] = _joined(files.get(host), one)
    return files, written, root


def _joined(before: Evidence | None, one: Evidence) -> Evidence:
    if before is None:
        return one
    by = tuple(dict.fromkeys((*before.by, *one.by)))
    first = min(before.first_ns or one.first_ns, one.first_ns or before.first_ns)
    return Evidence(before.count + one.count, first, by, before.writes or one.writes, before.lists or one.lists)


def _line(key: str, value: str, found: Iterable[Evidence], note: str = "") -> Line:
    """Return a line with the sum of this evidence."""
    several = list(found)
    by = tuple(sorted({name for one in several for name in one.by}))
    first = min(one.first_ns for one in several)
    return Line(key, value, sum(one.count for one in several), first, by, len(several), note)


def _workspace(written: Mapping[str, Evidence], files: Mapping[str, Evidence], ceiling: Ceiling) -> Line | None:
    """Return the workspace where something of it was written: it is the one grant by which a project is written."""
    if ceiling.workspace is None:
        return None
    inside = [one for path, one in files.items() if below(path, ceiling.workspace.directory)]
    changed = sum(below(path, ceiling.workspace.place) for path in written)
    note = f"{changed} of them opened to write" if changed else ceiling.kept
    return _line("workspace", ceiling.workspace.directory, inside, note) if inside and note else None


def _volumes(written: Mapping[str, Evidence], ceiling: Ceiling) -> tuple[Line, ...]:
    found = []
    for place in sorted(ceiling.volumes):
        inside = [one for path, one in written.items() if below(path, place)]
        if inside:
            found.append(_line("write", place, inside))
    return tuple(found)


def _reads(files: Mapping[str, Evidence], ceiling: Ceiling, left: list[LeftOut]) -> tuple[Line, ...]:
    kept: dict[str, Evidence] = {}
    unnamed: dict[str, Evidence] = {}
    for path, one in sorted(files.items()):
        # In the sandbox a link led to a file of the sandbox; a grant of it would lead to one of the host.
        real = path if path in ceiling.reads else ceiling.links.get(path, path)
        why = _why_not(real, ceiling)
        if why:
            left.append(LeftOut(path, why, one.count, one.first_ns, one.by))
        else:
            found = kept if _can_be_written(real) else unnamed
            found[real] = _joined(found.get(real), one)
    tops = _collapsed(kept, ceiling)
    # A name that a manifest cannot hold is granted with its directory, or not at all.
    for path, one in unnamed.items():
        if not any(below(path, top) for top in tops):
            left.append(LeftOut(path, _NO_NAME, one.count, one.first_ns, one.by))
    several = [*kept.items(), *unnamed.items()]
    return tuple(_line("read", top, [one for path, one in several if below(path, top)]) for top in tops)


def _why_not(path: str, ceiling: Ceiling) -> str:
    """Return why a host path is not proposed, empty where it may be."""
    tree = next((one for one in ceiling.never if one != "/" and below(path, one)), None)
    if tree is not None or path == "/":
        return f"never granted: {ceiling.never.get(tree or '/', 'it is the whole machine')}"
    inner = next((one for one in ceiling.never if below(one, path)), None)
    if inner is not None:
        return f"it holds {inner}, which is never granted"
    if ceiling.root_of(path) is None:
        return "a link that leads beyond the ceiling"
    if presets.is_sensitive(path) and path not in ceiling.reads:
        return "sensitive: name the file itself by --read, if the program is to have it"
    return ""


def _can_be_written(path: str) -> bool:
    """Whether a manifest takes a path as it is: no wildcard, no hidden or look-alike character, in one Unicode form."""
    try:
        manifest_paths.absolute(path)
    except PydanticCustomError:
        return False
    return True


def _collapsed(files: Mapping[str, Evidence], ceiling: Ceiling) -> list[str]:
    """Return the paths to grant for these files, the deepest directories first taken as a whole."""
    # A directory can be opened without being listed: to grant it would grant all below it as well.
    listed = {path for path, one in files.items() if one.lists or path in ceiling.directories}
    chosen = files.keys() - listed
    # A named file or directory is the widest of its kind.
    for folder in sorted({*_folders(files, ceiling), *listed}, key=lambda one: (-one.count("/"), one)):
        inside = {path for path in chosen if posixpath.dirname(path) == folder}
        if ceiling.whole(folder) and _wanted(folder, inside, folder in listed, ceiling):
            chosen = {path for path in chosen if not below(path, folder)} | {folder}
    return narrowest(list(chosen))


def _wanted(folder: str, inside: set[str], listed: bool, ceiling: Ceiling) -> bool:
    if len(inside) > MANY or posixpath.basename(folder) in data.learning().units:
        return True
    return listed and (not inside or 2 * len(inside) >= ceiling.directories[folder].entries)


def _folders(files: Mapping[str, Evidence], ceiling: Ceiling) -> set[str]:
    """Return the directories of these files up to the ceiling's own."""
    found: set[str] = set()
    for path in files:
        top, folder = ceiling.root_of(path), posixpath.dirname(path)
        while top is not None and below(folder, top) and folder not in found:
            found.add(folder)
            folder = posixpath.dirname(folder)
    return found


def _programs_of(started: Mapping[str, Evidence], ceiling: Ceiling) -> Line | None:
    """Return the grant of the workspace's own programs, where one was started."""
    place = "" if ceiling.workspace is None else ceiling.workspace.place
    inside = [one for path, one in started.items() if place and below(path, place)]
    return _line("executables", "workspace", inside) if inside else None


def _programs(
    started: Mapping[str, Evidence], ceiling: Ceiling, links: Mapping[str, str], left: list[LeftOut]
) -> tuple[Line, ...]:
    of_root = {path: one for path, one in started.items() if ceiling.host_path(path) is None}
    scratch = [path for path in of_root if any(below(path, place) for place in _SCRATCH)]
    if scratch and process.ROOT_TREE in ceiling.trees:
        # Only the whole root's grant lets files of scratch start.
        return (_line("executables", "root", of_root.values(), "programs of the scratch directory were started"),)
    # INVARIANT: a link of the scratch directory does not widen a list. Its target, which the kernel loads, is seen.
    for path in sorted(scratch):
        one = of_root.pop(path)
        left.append(LeftOut(path, "a link of the scratch directory", one.count, one.first_ns, one.by))
    # The grant of a link is that of its target.
    by_target: dict[str, list[str]] = {}
    for path in sorted(of_root):
        by_target.setdefault(links.get(path, path), []).append(path)
    found = []
    for target, paths in sorted(by_target.items()):
        line = _line("executables", paths[0], [of_root[path] for path in paths])
        if not ceiling.programs:
            left.append(LeftOut(target, "the ceiling starts no programs", line.count, line.first_ns, line.by))
        elif target in ceiling.strange:
            left.append(LeftOut(target, "the ceiling does not start it", line.count, line.first_ns, line.by))
        elif not _can_be_written(paths[0]):
            left.append(LeftOut(target, _NO_NAME, line.count, line.first_ns, line.by))
        elif not any(below(target, own) for own in _OWN):
            found.append(line)
    return tuple(found)


def _hosts(observed: Observed, ceiling: Ceiling, left: list[LeftOut]) -> tuple[Line, ...]:
    found = []
    reached = frozenset(target.rpartition(":")[0] for target in observed.hosts)
    for target, one in sorted(observed.hosts.items()):
        # As `covenant policy why` takes it: HOST:PORT/PROTOCOL.
        host, _, port = target.partition("/")[0].rpartition(":")
        if not ceiling.reach or not host or not port.isdecimal():
            left.append(LeftOut(target, "beyond the ceiling", one.count, one.first_ns, one.by))
        elif not _is_address(host) or f"{host}:{port}" in ceiling.hosts:
            found.append(_line("network", f"{host}:{port}", [one], _group(host, reached)))
    known = {line.value for line in found}
    for target in sorted(set(ceiling.hosts) - known):
        # The kernel counts what it forwards by address; a name is known by its port alone then.
        to = [one for address, one in observed.succeeded("connect") if _is_of(address, target, ceiling.hosts)]
        if to:
            found.append(_line("network", target, to))
    for (layer, target), one in sorted(observed.refused.items()):
        if layer in ("dns", "sni", "packet"):
            left.append(LeftOut(target, f"refused by the {layer} gate", one.count, one.first_ns, one.by))
    return tuple(found)


def _is_of(address: str, target: str, hosts: tuple[str, ...]) -> bool:
    """Whether a connection to this address may be one to a destination of the ceiling."""
    if address == target or address in hosts or address.startswith(_LOOPBACK):
        return address == target
    host, _, port = target.rpartition(":")
    return not _is_address(host) and address.rpartition(":")[2] == port


def _is_address(host: str) -> bool:
    return host.strip("[]").replace(".", "").isdecimal() or ":" in host


def _group(host: str, reached: frozenset[str]) -> str:
    name = presets.group_of(host)
    if name is None:
        return ""
    missing = presets.missing_of(name, reached)
    return f"preset {name}" + (f"; not reached: {', '.join(missing)}" if missing else "")
