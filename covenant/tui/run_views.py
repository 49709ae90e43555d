"""The views of what runs: agents with their runs as a tree, and sessions to attach to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from covenant.tui import view
from covenant.tui.sources import Sources, either
from covenant.tui.view import Attach, Choice, Column, Loaded, Question, Row, View, ViewRequest

_ID = 8
_REASON = "asked for in covenant tui"
_WORDS = {
    "suspend": ("suspend", "It stops where it is, its sandbox included; its clocks run on."),
    "resume": ("resume", "It goes on where it was suspended."),
    "kill": ("kill", "Its processes are killed and its sandbox is removed. This cannot be undone."),
}


def operation(kind: str, row: Row, *, tree: bool = False) -> Question:
    """Return the question before an operation on a run, and with ``tree`` on all below it."""
    run_id, (verb, effect) = str(row.data["run_id"]), _WORDS[kind]

    def act(given: Sources) -> list[str]:
        done = given.supervisor("operate", operation=kind, run=run_id, tree=tree, reason=_REASON)["runs"]
        return [f"done: {verb} {one}" for one in done] or ["nothing was to be done"]

    lines = (
        f"run {run_id}" + (" and every run below it" if tree else ""),
        f"of agent {row.data.get('agent_id')}, {row.data.get('state')}",
        "",
        effect,
        f"The log has it with the reason: {_REASON}.",
    )
    return Question(f"{verb} this run{' and its tree' if tree else ''}?", lines, (Choice("y", "yes", act),))


class RunsView(View):
    """Agents, and below each its live runs with what they use; a child is below its parent."""

    key, name, title = "t", "runs", "agents and their runs as a tree"
    columns = (
        Column("AGENT / RUN"),
        Column("STATE", 11),
        Column("AGE", 4, right=True),
        Column("CPU%", 5, right=True),
        Column("MEMORY", 6, right=True),
        Column("TASKS", 5, right=True),
        Column("DENIED", 6, right=True),
    )
    seconds = 1.5
    acts: ClassVar[Mapping[str, str]] = {"k": "kill", "K": "kill the tree", "z": "suspend", "f": "resume"}

    def __init__(self) -> None:
        self._cpu: dict[str, int] = {}
        self._at_ms = 0

    def load(self, sources: Sources, asked: ViewRequest) -> Loaded:
        notes: list[str] = []
        listed = either(notes, "daemon", lambda: sources.daemon("list_agents"))
        agents = listed.get("agents", [])
        runs = either(notes, "supervisor", lambda: sources.supervisor("top")).get("runs", [])
        under: dict[str, list[Row]] = {one["id"]: [] for one in agents if one.get("id")}
        root = ""
        for run in runs:  # parents come before their children
            root = root if run["depth"] and root else str(run["agent_id"])
            under.setdefault(root, []).append(self._run(run, asked.now_ms))
        self._cpu = {run["run_id"]: run["cpu_ms"] or 0 for run in runs}
        self._at_ms = asked.now_ms
        known = {one["id"]: one for one in agents if one.get("id")}
        heads = [(name, _agent(name, known.get(name), "not listed" if listed else "")) for name in under]
        heads.sort(key=lambda item: (not under[item[0]], item[0]))
        broken = [_agent("", one, "") for one in agents if not one.get("id")]
        return Loaded((*(row for name, head in heads for row in (head, *under[name])), *broken), tuple(notes))

    def _run(self, run: Mapping[str, Any], now_ms: int) -> Row:
        run_id, cpu, passed = run["run_id"], run["cpu_ms"], now_ms - self._at_ms
        known = cpu is not None and run_id in self._cpu and passed > 0
        cells = (
            f"{run_id[:_ID]} {run['agent_id']}",
            str(run["state"]),
            view.age(max(0, now_ms - run["started_ms"])),
            f"{100 * max(0, cpu - self._cpu[run_id]) / passed:.0f}" if known else "-",
            view.size(run["memory_bytes"]),
            "-" if run["processes"] is None else str(run["processes"]),
            str(run["denied"] or ""),
        )
        return Row(run_id, cells, depth=1 + run["depth"], alarm=bool(run["denied"]), data=run)

    def whole(self, sources: Sources, row: Row) -> list[str]:
        if "run_id" not in row.data:
            return super().whole(sources, row)
        logs = sources.supervisor("logs", run=row.data["run_id"], offset=0, stream="stderr")
        return [*super().whole(sources, row), "", "stderr of the agent:", *view.quoted(logs["text"])]

    def ask(self, sources: Sources, act: str, row: Row | None) -> Question | None:
        if row is None or "run_id" not in row.data:
            return None
        kind = {"k": "kill", "K": "kill", "z": "suspend", "f": "resume"}[act]
        return operation(kind, row, tree=act == "K")


def _agent(name: str, one: Mapping[str, Any] | None, unknown: str) -> Row:
    if one is None:
        return Row(f"agent {name}", (name, unknown, *[""] * 5), data={"agent": name})
    state = "routable" if one["routable"] else "broken"
    label = name or str(one["directory"])
    about = {"agent": label, **{key: value for key, value in one.items() if key != "id" and value not in ([], None)}}
    cells = (f"{label} {one.get('version') or ''}".rstrip(), state, *[""] * 5)
    return Row(f"agent {one['directory']}", cells, alarm=not one["routable"], data=about)


class SessionsView(View):
    """Live runs with a terminal, to which this terminal can be connected."""

    key, name, title = "S", "sessions", "sessions with a terminal"
    columns = (Column("RUN", 8), Column("AGENT"), Column("STATE", 11), Column("AGE", 4, right=True), Column("BY", 20))
    acts: ClassVar[Mapping[str, str]] = {"j": "attach", "k": "kill"}

    def load(self, sources: Sources, asked: ViewRequest) -> Loaded:
        # A supervisor of an earlier version does not say which runs have a terminal.
        found = [one for one in sources.supervisor("ps")["runs"] if one.get("contract", "terminal") == "terminal"]
        return Loaded(tuple(_session(one, asked.now_ms) for one in found))

    def ask(self, sources: Sources, act: str, row: Row | None) -> Question | Attach | None:
        if row is None:
            return None
        return Attach(row.key) if act == "j" else operation("kill", row)


def _session(one: Mapping[str, Any], now_ms: int) -> Row:
    cells = (one["run_id"][:_ID], str(one["agent_id"]), str(one["state"]), view.age(max(0, now_ms - one["started_ms"])),
             str(one["issuer"]))  # fmt: skip
    return Row(one["run_id"], cells, data=one)
