"""The manifest that an author has after writing the lines of a suggestion.

Suggestions are judged by this manifest and not by the lines alone: what a line means depends on what stands beside it.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from policy.manifest import parse, text
from policy.manifest.agent import Manifest
from policy.rules import command_calls

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def amended(manifest: Manifest, lines: Sequence[str]) -> Manifest:
    """Return the manifest with the lines in it: a list or a table gets more items, another value is replaced.

    Raises:
        errors.ManifestError: Raised when the lines and the manifest contradict each other.
    """
    return parse.parse(document(manifest.source.text, lines).encode(), file=manifest.source.file)


def standing(manifest: Manifest, lines: Sequence[str]) -> tuple[str, ...]:
    """Say where the manifest has a section or a key of the lines already: TOML takes neither of them twice."""
    return tuple(_standing(manifest, frozenset(lines), tomllib.loads("\n".join(lines)), ()))


def _standing(manifest: Manifest, lines: Set[str], table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    section = ".".join(map(_key, path))
    for name, value in table.items():
        dotted = ".".join(map(_key, (*path, name)))
        if isinstance(value, dict):
            yield from _standing(manifest, lines, value, (*path, name))
        elif f"[[{dotted}]]" in lines:
            continue
        elif manifest.wrote(dotted):
            act = "put the new items into its list" if isinstance(value, list) else "replace its value"
            yield f"{manifest.where(dotted)} has {name} of [{section}]: {act}"
        elif path and manifest.wrote(section):
            yield f"{manifest.where(section)} has [{section}]: write {name} below it"


def document(text: str, lines: Sequence[str]) -> str:
    """Return the text of agent.toml with the lines in it, without its comments and without unknown sections."""
    known = {name: value for name, value in tomllib.loads(text).items() if name in Manifest.model_fields}
    added = tomllib.loads("\n".join(lines))
    for row in known.get("tools", {}).get("command", ()):
        if command_calls.below(row["name"]) in lines:
            row["rule"] = [*row.get("rule", ()), *added.pop("tools")["command"]["rule"]]
    return "\n".join((*_table(_joined(known, added), ()), ""))


def _joined(old: Any, new: Any) -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{name: _joined(old[name], value) if name in old else value for name, value in new.items()}}
    if isinstance(old, list) and isinstance(new, list):
        # To Python, false is 0.
        there = {json.dumps(one, sort_keys=True, default=str) for one in old}
        return [*old, *(one for one in new if json.dumps(one, sort_keys=True, default=str) not in there)]
    return new


def _table(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    within = {name: value for name, value in table.items() if isinstance(value, dict)}
    rows = {name: value for name, value in table.items() if _is_rows(value)}
    for name, value in table.items():
        if name not in within and name not in rows:
            yield f"{_key(name)} = {_value(value)}"
    for name, value in within.items():
        yield f"[{'.'.join(map(_key, (*path, name)))}]"
        yield from _table(value, (*path, name))
    for name, value in rows.items():
        for row in value:
            yield f"[[{'.'.join(map(_key, (*path, name)))}]]"
            yield from _table(row, (*path, name))


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else json.dumps(name)


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return text.toml(value)
