"""``covenant audit show``: everything that the logs have of one intent or run, as a tree in time order."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from policy import errors

Row = dict[str, Any]

_ID = re.compile(r"[0-9a-f-]{4,36}")
# The fields by which a row belongs to a run or an intent, and by which a run names the one that started it.
_RUN, _INTENT, _PARENT = "run_id", "intent_id", "parent"
# Rows that the daemon writes too, from what the supervisor answered, and the fields that show that they are the same.
_IN_BOTH = {"denied": (_RUN, "denial"), "intent_dispatched": (_RUN, "status", "result_hash_hex")}


@dataclass
class Node:
    """One intent or run: its rows in time order, and the runs that it started."""

    name: str
    rows: list[Row] = field(default_factory=list)
    children: list[str] = field(default_factory=list)


def once(rows: Iterable[Row], copied: Callable[[Row], Row | None], *, unwrap: bool = False) -> list[Row]:
    """Return the rows in time order, each once.

    A copy is left out if its row is there; otherwise it stays, with ``unwrap`` as the row that it holds. The daemon's
    own row of a denial or a result is left out if the supervisor's is there.
    """
    found: list[Row] = []
    copies: list[tuple[Row, Row]] = []
    for row in rows:
        kind = row.get("kind")
        original = copied(kind) if isinstance(kind, dict) else None
        if original is None:
            found.append(row)
        else:
            copies.append((row, {**original, "origin": "supervisor"}))
    there = {row.get("id") for row in found if isinstance(row.get("id"), str)}
    told = {_in_both(row) for row in (*found, *(original for _, original in copies)) if _is_supervisors(row)}
    found = [row for row in found if _is_supervisors(row) or (key := _in_both(row)) is None or key not in told]
    for row, original in copies:
        if original.get("id") not in there:
            there.add(original.get("id"))
            found.append(original if unwrap else row)
    return sorted(found, key=moment)


def _is_supervisors(row: Row) -> bool:
    return row.get("origin") == "supervisor"


def _in_both(row: Row) -> tuple[str, ...] | None:
    """Return what two rows share that say the same; None for a row of a kind that only one log has."""
    fields = row.get("kind")
    kind = fields.get("type") if isinstance(fields, dict) else None
    if not isinstance(fields, dict) or not isinstance(kind, str) or kind not in _IN_BOTH or not fields.get(_RUN):
        return None
    return (kind, *(str(fields.get(name)) for name in _IN_BOTH[kind]))


def moment(row: Row) -> int:
    """Return the time of a row in Unix milliseconds; 0 for a row without one."""
    value = row.get("timestamp_ms")
    return value if isinstance(value, int) else 0


def kind_of(row: Row) -> str | None:
    """Return the name of a row's kind; None for a row without one."""
    kind = row.get("kind")
    name = kind.get("type") if isinstance(kind, dict) else None
    return name if isinstance(name, str) else None


def tree(rows: Iterable[Row], named: str) -> tuple[str, dict[str, Node]]:
    """Return the id that begins with ``named``, and the nodes below it.

    Raises:
        errors.NoRunError: no intent or run of the logs has such an id, or several have.
    """
    if not _ID.fullmatch(named):
        raise errors.UsageError(
            f"`{named[:40]}` is no id", hint="give an id of an intent or a run, or 4 of its first characters"
        )
    nodes = _nodes(rows)
    found = sorted({name for name in nodes if name.startswith(named)})
    if len(found) > 1:
        found = [name for name in found if not any(name in nodes[other].children for other in found)]
    if len(found) != 1:
        how = "no intent or run has" if not found else f"{len(found)} intents or runs have"
        raise errors.NoRunError(f"{how} an id that begins with `{named}`", hint="covenant audit recent shows ids")
    (root,) = found
    kept: dict[str, Node] = {}
    waiting = [root]
    while waiting:
        name = waiting.pop()
        if name not in kept and name in nodes:
            kept[name] = nodes[name]
            waiting += nodes[name].children
    return root, kept


def _nodes(rows: Iterable[Row]) -> dict[str, Node]:
    """Sort rows by the run that they are about, else by the intent; link runs to their intents and parents."""
    nodes: dict[str, Node] = {}
    parents: dict[str, str] = {}
    for row in rows:
        kind = row.get("kind")
        if not isinstance(kind, dict):
            continue
        run, intent = kind.get(_RUN), kind.get(_INTENT)
        name = run if isinstance(run, str) and run else intent
        if not isinstance(name, str) or not name:
            continue
        nodes.setdefault(name, Node(name)).rows.append(row)
        above = kind.get(_PARENT) if kind.get("type") == "run_started" else None
        if isinstance(above, str) and above and above != name:
            # The run that started it, even if earlier rows only named the intent.
            parents[name] = above
        elif isinstance(intent, str) and intent and intent != name:
            parents.setdefault(name, intent)
    for name, above in parents.items():
        nodes.setdefault(above, Node(above)).children.append(name)
    return nodes


def lines(root: str, nodes: Mapping[str, Node], line: Callable[[Row], str]) -> Iterator[str]:
    """Yield the tree as text: the rows of a node, and each child below the first row that is later than its start.

    A node begins with its id and a summary. Its rows leave out ids that the lines above them have.
    """
    yield from _lines(root, nodes, line, "", {}, set())


def _lines(
    name: str,
    nodes: Mapping[str, Node],
    line: Callable[[Row], str],
    indent: str,
    above: Mapping[str, Any],
    seen: set[str],
) -> Iterator[str]:
    seen.add(name)
    node = nodes[name]
    about = summary(node)
    yield f"{indent}{name}{f': {about}' if about else ''}"
    started = _fields(node, "run_started")
    said = {**above, _RUN: name, _PARENT: above.get(_RUN), "agent_id": started[-1].get("agent_id") if started else None}
    # A child's run has an intent of its own.
    said[_INTENT] = started[-1].get(_INTENT) if started else name
    waiting = sorted(
        (one for one in node.children if one in nodes and one not in seen), key=lambda one: _begin(nodes[one])
    )
    for row in node.rows:
        while waiting and _begin(nodes[waiting[0]]) <= moment(row):
            yield from _lines(waiting.pop(0), nodes, line, f"{indent}  ", said, seen)
        yield f"{indent}  {line(_without(row, said))}"
    for one in waiting:
        yield from _lines(one, nodes, line, f"{indent}  ", said, seen)


def _without(row: Row, said: Mapping[str, Any]) -> Row:
    """Return a row without the fields that the lines above it have; the first row of a run keeps its intent."""
    kind = row["kind"]
    keeps = (_INTENT,) if kind.get("type") == "run_started" else ()
    return {**row, "kind": {k: v for k, v in kind.items() if k in keeps or k not in said or said[k] != v}}


def summary(node: Node) -> str:
    """Return what became of a node in a few words: agent, result, time, cost, models, number of denials."""
    started, ended = _fields(node, "run_started"), _fields(node, "run_ended")
    charged = sum(_number(one, "credits") for one in _fields(node, "run_usage" if started else "receipt_written"))
    parts = [f"{charged} credit{'s' if charged > 1 else ''}"] if charged else []
    if not started:
        return ", ".join(parts)
    if ended:
        last = ended[-1]
        code = f" ({last['code']})" if last.get("code") else ""
        # A run whose shim was killed has no duration.
        took = f" after {ms / 1000:.1f} s" if (ms := _number(last, "duration_ms")) else ""
        parts = [
            f"{last.get('status')}{code}{took}",
            f"CPU {_number(last, 'cpu_ms')} ms",
            f"memory {_number(last, 'memory_peak_bytes') >> 20} MiB",
            *parts,
        ]
    else:
        parts = ["no end in the logs", *parts]
    if models := _fields(node, "model_asked"):
        tokens = sum(_number(one, name) for one in models for name in ("input_tokens", "output_tokens"))
        parts.append(f"models asked {len(models)} times for {tokens} tokens")
    if denials := sum(_number(one, "count") for one in _fields(node, "denied")):
        parts.append(f"{denials} denied")
    return f"{started[-1].get('agent_id')}, {', '.join(parts)}"


def _fields(node: Node, kind: str) -> list[Row]:
    return [row["kind"] for row in node.rows if row["kind"].get("type") == kind]


def _number(fields: Row, name: str) -> int:
    value = fields.get(name)
    return value if isinstance(value, int) else 0


def _begin(node: Node) -> int:
    return min(map(moment, node.rows), default=0)


def document(name: str, nodes: Mapping[str, Node], seen: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return the tree for ``--json``."""
    below = [one for one in nodes[name].children if one in nodes and one not in seen]
    path = seen | {name}
    return {
        "id": name,
        "events": nodes[name].rows,
        "children": [document(one, nodes, path) for one in sorted(below, key=lambda one: _begin(nodes[one]))],
    }


def of_runs(fields: Iterable[Row]) -> dict[str, Row]:
    """Return the agent and the intent of each run, by the row of its start. ``fields`` are the kinds of rows."""
    return {
        one[_RUN]: {name: one[name] for name in ("agent_id", _INTENT) if isinstance(one.get(name), str)}
        for one in fields
        if one.get("type") == "run_started" and isinstance(one.get(_RUN), str)
    }


def with_run(row: Row, runs: Mapping[str, Row]) -> Row:
    """Return a row with the agent and the intent of its run, where it names none itself."""
    kind = row.get("kind")
    if not isinstance(kind, dict) or not isinstance(kind.get(_RUN), str):
        return row
    return {**row, "kind": {**runs.get(kind[_RUN], {}), **{k: v for k, v in kind.items() if v is not None}}}


@dataclass(frozen=True, slots=True)
class Filter:
    """The rows to show; None or empty for all."""

    run: str | None = None
    agent: str | None = None
    intent: str | None = None
    kinds: tuple[str, ...] = ()
    since_ms: int | None = None

    def admits(self, row: Row) -> bool:
        """Whether a row is to be shown; ids may be the beginning of one."""
        kind = row.get("kind")
        fields = kind if isinstance(kind, dict) else {}
        if self.since_ms is not None and moment(row) < self.since_ms:
            return False
        if self.kinds and fields.get("type") not in self.kinds:
            return False
        agents = (fields.get("agent_id"), fields.get("matched_agent"), fields.get("agent_display"))
        if self.agent is not None and not {self.agent, f"{self.agent}@agent"} & set(agents):
            return False
        wanted = ((self.run, fields.get(_RUN)), (self.intent, fields.get(_INTENT)))
        return all(asked is None or (isinstance(has, str) and has.startswith(asked)) for asked, has in wanted)
