"""The host's side of learning: the ceiling of an observed session, facts about what it opened, and what it taught."""

from __future__ import annotations

import contextlib
import datetime
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import structs

from covenant.session import typed
from covenant.session.package import Learnt, Options
from covenant.visible import visible
from policy import layers
from policy.layers import LayerRef
from policy.learn import presets
from policy.learn.ceiling import Ceiling, Directory, HostPlace, below, parts, place_of, target
from policy.learn.observed import Observed
from policy.learn.propose import LearntProposal, Line
from policy.manifest import process

# A directory with more paths below it is looked at no further, and never proposed as a whole.
_LARGEST: Final = 20_000
# So many directories are looked at, the highest first.
_MOST_FOLDERS: Final = 1_000
_OTHERS_READ, _OTHERS_ENTER = 0o004, 0o005
_SHOWN_NAMES: Final = 3
# As long as the kernel reads the first line of a script.
_FIRST_LINE: Final = 254


def ceiling(
    options: Options, observed: Observed, never: Mapping[str, str], *, programs: Sequence[str], reach: bool
) -> Ceiling:
    """Return the ceiling of a session with these options, with facts about the directories of what it opened."""
    project = options.workspace
    found = Ceiling(
        reads=options.read,
        volumes=tuple(place_of(one.path) for one in options.write),
        workspace=None if project is None else HostPlace(project.directory, project.place),
        hosts=tuple(target(one.host, one.port) for one in options.net),
        programs=bool(programs),
        trees=frozenset(programs),
        reach=reach,
        never=never,
    )
    opened = _opened(found, observed)
    kept = "" if project is None else _kept(project.directory, opened)
    return with_facts(structs.replace(found, kept=kept), observed)


def with_facts(found: Ceiling, observed: Observed) -> Ceiling:
    """Return the ceiling with facts about the links and directories of what the run opened."""
    paths = _opened(found, observed)
    links = {path: real for path in paths if (real := os.path.realpath(path)) != path}
    tops = [links.get(path, path) for path in paths]
    return structs.replace(found, links=links, directories=_directories(tops, found))


def _opened(found: Ceiling, observed: Observed) -> list[str]:
    hosts = {found.host_path(path): None for path, _ in observed.succeeded("open", "look", "exec")}
    return [path for path in hosts if path is not None]


def _kept(directory: str, paths: Iterable[str]) -> str:
    """Return why no single file of a workspace can be granted: read grants are at their own place, by another uid."""
    from sandbox.layers import sources

    if (directory + "/").startswith(sources.COVERED):
        return "every sandbox has a directory of its own at its place"
    for path in paths:
        if below(path, directory):
            try:
                info = os.stat(path)
            except OSError:
                continue
            needed = _OTHERS_ENTER if stat.S_ISDIR(info.st_mode) else _OTHERS_READ
            if info.st_mode & needed != needed:
                return "files that their owner alone may read were opened"
    return ""


def _directories(paths: Iterable[str], found: Ceiling) -> dict[str, Directory]:
    wanted: set[str] = set()
    for path in paths:
        top, folder = found.root_of(path), path
        while top is not None and below(folder, top) and folder not in wanted:
            wanted.add(folder)
            folder = os.path.dirname(folder)
    folders = [path for path in sorted(wanted, key=lambda one: (one.count("/"), one)) if os.path.isdir(path)]
    # The rest is not looked at, and so never proposed as a whole.
    rest = dict.fromkeys(folders[_MOST_FOLDERS:], Directory(0, sensitive=True))
    return {**{path: _directory(path, found.never) for path in folders[:_MOST_FOLDERS]}, **rest}


def _directory(path: str, never: Mapping[str, str]) -> Directory:
    seen, entries = 0, 0
    if any(below(one, path) for one in never):
        return Directory(0, sensitive=True)
    for folder, names, files in os.walk(path, onerror=None):
        if folder == path:
            entries = len(names) + len(files)
        seen += len(names) + len(files)
        if seen > _LARGEST or any(presets.is_sensitive(os.path.join(folder, name)) for name in (*names, *files)):
            return Directory(entries, sensitive=True)
    return Directory(entries)


class Root:
    """The union of a session's layers: which layer has a place, and where a link leads."""

    def __init__(self, state: Path, refs: Sequence[LayerRef], held: contextlib.ExitStack) -> None:
        """The layers stay in the store until ``held`` is closed."""
        from sandbox.layers.store import LayerStore

        store = LayerStore(state)
        self._union, self._names = layers.Union(), [ref.name for ref in refs]
        self._trees = [store.hold(ref, held) for ref in refs]
        for tree in self._trees:
            self._union.lay(tree.entries)

    def links(self, paths: Iterable[str]) -> dict[str, str]:
        """Return the file that each of these places leads to."""
        found = {path: self._union.resolve(path) for path in paths}
        return {path: one.path for path, one in found.items() if one is not None}

    def interpreters(self, paths: Iterable[str], found: Ceiling) -> dict[str, str]:
        """Return the programs that the first lines of these scripts name."""
        named = {}
        for path in paths:
            placed, host = self._union.resolve(path), found.host_path(path)
            if placed is not None:
                named[path] = _first_line(str(self._trees[placed.source].root) + placed.entry.path)
            elif host is not None:
                named[path] = _first_line(host)
        return {path: program for path, program in named.items() if program.startswith("/")}

    def trees(self, paths: Iterable[str]) -> dict[str, str]:
        """Return the tree of programs, as a manifest names it, of each of these places that a layer has."""
        found = {path: self._union.resolve(path) for path in paths}
        return {path: process.LAYER_TREE + self._names[one.source] for path, one in found.items() if one is not None}

    def used(self, paths: Iterable[str]) -> frozenset[int]:
        """Return the layers that have a file at one of these places."""
        found = (self._union.resolve(path) for path in paths)
        return frozenset(one.source for one in found if one is not None and one.entry.kind != "dir")


def _first_line(path: str) -> str:
    """Return the interpreter that a script names, empty for another file.

    Only a regular file is opened: to open a device may change it, and a writer of a fifo notices.
    """
    with contextlib.ExitStack() as stack:
        try:
            place = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
            stack.callback(os.close, place)
            if not stat.S_ISREG(os.fstat(place).st_mode):
                return ""
            # By /proc: the file that was looked at. Another file may have its name by now.
            file = stack.enter_context(open(f"/proc/self/fd/{place}", "rb"))
        except OSError:
            return ""
        if file.read(2) != b"#!":
            return ""
        words = file.readline(_FIRST_LINE).split()
    return words[0].decode("utf-8", "surrogateescape") if words else ""


def narrowed(options: Options, found: LearntProposal, used: frozenset[int], about: Sequence[str]) -> Options:
    """Return the options of the session that the proposal grants. ``used`` are its layers, the base is 0."""
    project = options.workspace
    inside = project is not None and any(below(line.value, project.directory) for line in found.reads)
    written = {line.value for line in found.volumes}
    programs = tuple(line.value for line in found.programs)
    notes = {(line.key, line.value.replace("[", "").replace("]:", ":")): evidence(line) for line in found.hosts}
    notes |= {(line.key, line.value): evidence(line) for line in found.lines}
    return structs.replace(
        options,
        layers=tuple(ref for index, ref in enumerate(options.layers, 1) if index in used),
        net=tuple(typed.Destination(*parts(line.value)) for line in found.hosts),
        read=tuple(line.value for line in found.reads),
        write=tuple(one for one in options.write if place_of(one.path) in written),
        workspace=project if found.workspace is not None else None,
        cwd=project.directory if project is not None and inside else options.cwd,
        learnt=Learnt(programs, exec=found.workspace_programs is not None, notes=notes, about=tuple(about)),
    )


def evidence(line: Line) -> str:
    """Return the evidence of a line as a comment: count, first time, and the names of processes."""
    by = [visible(name) for name in line.by]
    names = ", ".join(by[:_SHOWN_NAMES]) + (", ..." if len(by) > _SHOWN_NAMES else "")
    said = [f"{line.count} times" if line.count != 1 else "once", f"first {when(line.first_ns)}"]
    if line.paths > 1:
        said.append(f"{line.paths} paths")
    return ", ".join([*said, *([f"by {names}"] if names else []), *([line.note] if line.note else [])])


def when(at_ns: int) -> str:
    """Return a time as text, in UTC."""
    with contextlib.suppress(OverflowError, ValueError, OSError):
        return datetime.datetime.fromtimestamp(at_ns / 1e9, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return "at a time that is none"


def document(found: LearntProposal, facts: Mapping[str, Any]) -> bytes:
    """Return evidence.json: every line and every refusal with its evidence."""
    body = {
        "version": 1,
        **facts,
        "lines": [structs.asdict(line) for line in found.lines],
        "left_out": [structs.asdict(one) for one in found.left_out],
    }
    return msgspec.json.format(msgspec.json.encode(_plain(body)), indent=2) + b"\n"


def _plain(value: Any) -> Any:
    """Return a value whose texts can be encoded: a path may have bytes that are not UTF-8."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value
