"""Narrow a manifest to what a run under it used: what stays has its evidence, what was not used is taken out.

The document keeps the author's words and comments. Files, volumes, programs and destinations are narrowed. What no
observer counts stays as it is: services, secrets, tools, children, published ports, destinations that need a lease, and
ports of the host.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import tomlkit
from msgspec import Struct
from tomlkit.items import InlineTable

from policy.grants.executables import ExecutableSet
from policy.learn.ceiling import Ceiling, HostPlace, parts, place_of, target
from policy.learn.propose import LearntProposal, Line
from policy.manifest import process
from policy.manifest.agent import Manifest
from policy.manifest.permissions import NetworkEntry

# So many ports of an entry are told apart; a wider one is known by its host alone.
_PORTS: Final = 64


class TakenOut(Struct, frozen=True):
    """An entry that the run did not use: the key of its list and its value."""

    key: str
    value: str


class NarrowedManifest(Struct, frozen=True):
    """The manifest as TOML, and what was taken out of it."""

    text: str
    taken_out: tuple[TakenOut, ...]


def ceiling(manifest: Manifest, never: Mapping[str, str], workspace: HostPlace | None) -> Ceiling:
    """Return the ceiling of a run under this manifest. ``workspace`` is the caller's directory, where it has one."""
    files, network = manifest.permissions.filesystem, manifest.permissions.network
    return Ceiling(
        reads=files.read,
        volumes=(*(path for _, path in files.write_paths), *(one.place for _, one in files.volumes)),
        workspace=workspace,
        kept="" if workspace is None else "the grant of the workspace stays as it is",
        hosts=tuple(target(one.host, port) for one in network if _is_named(one) for port in _ports(one)),
        programs=bool(manifest.permissions.executables.allow),
        trees=frozenset(manifest.permissions.executables.trees),
        named=tuple(one.path for _, one in manifest.permissions.executables.programs),
        reach=manifest.resources.network != "off",
        never=never,
    )


def narrowed(
    text: str, manifest: Manifest, found: LearntProposal, links: Mapping[str, str], said: Mapping[Line, str]
) -> NarrowedManifest:
    """Return the manifest ``text`` with what was found alone.

    ``links`` maps places of the root to the files that they lead to, and ``said`` each line to its evidence.
    """
    document = tomlkit.parse(text)
    gone: list[TakenOut] = []
    files = manifest.permissions.filesystem
    if files.read:
        _set(document, ("permissions", "filesystem"), "read", [(one.value, said[one]) for one in found.reads])
        gone += _missing("permissions.filesystem.read", files.read, [one.value for one in found.reads])
    if files.write:
        by_place = {one.value: said[one] for one in found.volumes}
        kept = [(one, by_place[place_of(one)]) for one in files.write if place_of(one) in by_place]
        _set(document, ("permissions", "filesystem"), "write", kept)
        gone += _missing("permissions.filesystem.write", files.write, [value for value, _ in kept])
    if manifest.permissions.executables.allow:
        programs = list(_programs(manifest, found, links, said))
        before = [one.tree or one.path for one in manifest.permissions.executables.allow]
        _set(document, ("permissions", "executables"), "allow", programs)
        gone += _missing("permissions.executables.allow", before, [value.partition("@")[0] for value, _ in programs])
    gone += _narrow_network(document, manifest, found, said)
    return NarrowedManifest(tomlkit.dumps(document), tuple(gone))


def _missing(key: str, before: Iterable[str], after: Sequence[str]) -> list[TakenOut]:
    return [TakenOut(key, one) for one in before if one not in after]


def _set(document: Any, path: Sequence[str], key: str, values: Sequence[tuple[str, str]]) -> None:
    table: Any = document
    for name in path:
        table = table[name]
    array = tomlkit.array()
    for value, note in values:
        array.add_line(value, comment=note or None)
    if values:
        array.add_line(indent="")
    table[key] = array


def _programs(
    manifest: Manifest, found: LearntProposal, links: Mapping[str, str], said: Mapping[Line, str]
) -> Iterator[tuple[str, str]]:
    """Yield the entries to keep: named programs as they are, trees as the programs that were started of them."""
    allow = manifest.permissions.executables
    used = {line.value: line for line in found.programs}
    named: set[str] = set()
    for _, one in allow.programs:
        target = links.get(one.path, one.path)
        line = next((line for value, line in used.items() if target in (value, links.get(value, value))), None)
        if line is not None:
            named.add(line.value)
            yield (f"{one.path}@sha256:{one.sha256}" if one.sha256 else one.path), said[line]
    if any(tree != "workspace" for tree in allow.trees):
        yield from ((value, said[line]) for value, line in used.items() if value not in named)
    if "workspace" in allow.trees and found.workspace_programs is not None:
        yield "workspace", said[found.workspace_programs]


def starts_no_more(mine: ExecutableSet, top: ExecutableSet, trees: Mapping[str, str]) -> bool:
    """Whether ``top`` starts all of these programs. ``trees`` names the tree that has a program."""
    left = mine.difference(top)
    if process.ROOT_TREE in top.trees:
        return all(one.startswith(process.LAYER_TREE) for one in left.trees)
    return not left.trees and all(trees.get(one.path) in top.trees for one in left.files)


# --- destinations -------------------------------------------------------------------------------------


def _narrow_network(
    document: Any, manifest: Manifest, found: LearntProposal, said: Mapping[Line, str]
) -> list[TakenOut]:
    entries, gone = manifest.permissions.network, list[TakenOut]()
    if manifest.resources.network == "off":
        return []
    reached = [(*parts(line.value), line) for line in found.hosts]
    if entries:
        tables = document["permissions"]["network"]
        # The last first: the places of those before stay what they are.
        for index in range(len(entries) - 1, -1, -1):
            if not _narrow_entry(tables, index, entries[index], reached, said):
                gone.insert(0, TakenOut("permissions.network", f"{entries[index].host} {entries[index].protocol}"))
        if not tables:
            del document["permissions"]["network"]
    else:
        gone.append(TakenOut("permissions.network", "every other public host"))
        tables = tomlkit.aot()
        for host, port, line in reached:
            table = tomlkit.table()
            table.update({"host": host, "ports": [port], "protocol": "tls"})
            table["host"].comment(said[line])
            tables.append(table)
        if tables:
            document.setdefault("permissions", tomlkit.table(is_super_table=True))["network"] = tables
    if not tables:
        document["resources"]["network"] = "off"
    return gone


def _narrow_entry(
    tables: Any, index: int, entry: NetworkEntry, reached: Sequence[tuple[str, int, Line]], said: Mapping[Line, str]
) -> bool:
    """Put one table for each host that was reached at the place of an entry. Returns False where there is none."""
    if entry.asked or entry.to_host or entry.kind == "cidr" or (entry.kind == "wildcard" and entry.protocol != "tls"):
        return True  # what is reached by it is not counted by name
    by_host: dict[str, list[tuple[int, Line]]] = {}
    for host, port, line in reached:
        if _is_for(entry, host) and any(first <= port <= last for first, last in entry.ports):
            by_host.setdefault(host, []).append((port, line))
    whole = tables[index]
    copies = [whole, *(copy.deepcopy(whole) for _ in range(len(by_host) - 1))]
    for (host, found), table in zip(by_host.items(), copies, strict=False):
        table["host"] = host
        if not isinstance(table, InlineTable):  # which is one line, and has no comment
            table["host"].comment(said[found[0][1]])
        table["ports"] = sorted({port for port, _ in found})
    for table in copies[1:]:
        tables.insert(index + 1, table)
    if not by_host:
        del tables[index]
    return bool(by_host)


def _is_for(entry: NetworkEntry, host: str) -> bool:
    """Whether an entry is the one that let the run reach a host."""
    if entry.kind == "wildcard":
        return host.endswith(entry.host[1:])
    return host == entry.host


def _is_named(entry: NetworkEntry) -> bool:
    return entry.kind in ("name", "address") and not entry.asked and not entry.to_host


def _ports(entry: NetworkEntry) -> Iterator[int]:
    for first, last in entry.ports:
        yield from range(first, min(last, first + _PORTS - 1) + 1)
