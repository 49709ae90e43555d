"""The views of what agents use: workspaces with their changes, and services (models, tools, published ports)."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from covenant.tui import view
from covenant.tui.sources import Sources, either
from covenant.tui.view import Choice, Column, Loaded, Question, Row, View, ViewRequest

_ID = 8
_SIGNS: Final = {"add": "+", "modify": "~", "delete": "-", "mode": "m"}
_COUNTED: Final = ("input_tokens", "output_tokens", "credits")


class WorkspacesView(View):
    """Workspaces that runs left; their changes are applied to the caller's directory, or thrown away."""

    key, name, title = "w", "workspaces", "what agents changed in directories"
    columns = (
        Column("RUN", 8),
        Column("AGENT", 16),
        Column("CHANGES", 7, right=True),
        Column("SIZE", 6, right=True),
        Column("AGE", 4, right=True),
        Column("APPLY", 8),
        Column("DIRECTORY"),
    )
    seconds: ClassVar[float] = 5.0
    acts: ClassVar[Mapping[str, str]] = {"u": "apply", "x": "discard"}

    def load(self, sources: Sources, asked: ViewRequest) -> Loaded:
        answer = sources.supervisor("workspace", verb="list")
        notes = [f"! damaged: {name}; see covenant workspace list" for name in answer["damaged"]]
        return Loaded(tuple(_workspace(one, asked.now_ms) for one in answer["workspaces"]), tuple(notes))

    def whole(self, sources: Sources, row: Row) -> list[str]:
        answer = sources.supervisor("workspace", verb="diff", run=row.key)
        return [*super().whole(sources, row), "", *_changes(answer)]

    def ask(self, sources: Sources, act: str, row: Row | None) -> Question | None:
        if row is None:
            return None
        run, directory = row.key, row.data["directory"]
        answer = sources.supervisor("workspace", verb="diff", run=run)

        def apply(given: Sources) -> list[str]:
            # The digest holds the act to the changes that were shown.
            done = given.supervisor("workspace", verb="apply", run=run, digest=answer["digest"])
            return [f"applied to {directory}", *(f"{name}: {view.words(value)}" for name, value in done.items())]

        def discard(given: Sources) -> list[str]:
            given.supervisor("workspace", verb="discard", run=run)
            return ["discarded; the directory is as it was"]

        if act == "u":
            head = f"{answer['applicable']} changes are written to {directory}, with the rights of its owner:"
            choice = (Choice("y", "yes", apply),) if answer["applicable"] else ()
            return Question("apply this workspace?", (head, "", *_changes(answer)), choice)
        head = f"the changes of run {run} are thrown away; {directory} stays as it is. This cannot be undone:"
        return Question("discard this workspace?", (head, "", *_changes(answer)), (Choice("y", "yes", discard),))


def _changes(answer: Mapping[str, Any]) -> list[str]:
    lines = []
    for one in answer["changes"]:
        why = one.get("refused") or one.get("conflict")
        word = "refused" if one.get("refused") else "conflict"
        lines.append(f"{_SIGNS.get(one['action'], '?')} {one['path']}" + (f"  {word}: {why}" if why else ""))
    if answer["more"]:
        lines.append(f"and {answer['more']} more")
    return [*lines, f"digest: {answer['digest']}"] if lines else ["no change"]


def _workspace(one: Mapping[str, Any], now_ms: int) -> Row:
    cells = (
        str(one["run_id"])[:_ID],
        str(one["agent_id"]),
        str(one["changes"]),
        view.size(one["bytes"]),
        view.age(max(0, now_ms - one["started_ms"])),
        str(one["apply"]),
        str(one["directory"]),
    )
    return Row(one["run_id"], cells, data=one)


class ServicesView(View):
    """Models that agents asked (by the log), tools of the daemon, and ports that runs publish."""

    key, name, title = "v", "services", "models, tools and ports that agents use"
    columns = (
        Column("KIND", 5),
        Column("AGENT", 16),
        Column("NAME"),
        Column("REQUESTS", 8, right=True),
        Column("IN", 8, right=True),
        Column("OUT", 8, right=True),
        Column("CREDITS", 8, right=True),
    )
    seconds: ClassVar[float] = 5.0

    def load(self, sources: Sources, asked: ViewRequest) -> Loaded:
        notes: list[str] = []
        limit = max(asked.limit, 1000)
        events = either(
            notes, "daemon", lambda: sources.daemon("recent_audit", limit=limit, types=("supervisor_row",))
        ).get("events", [])
        tools = either([], "daemon", lambda: sources.daemon("list_tools")).get("tools", [])
        runs = either(notes, "supervisor", lambda: sources.supervisor("ps")).get("runs", [])
        rows = [*_models(events), *(_tool(one) for one in tools)]
        rows += [_port(run, one) for run in runs for one in run.get("published", ())]
        return Loaded(tuple(rows), tuple(notes), more=len(events) >= limit)


def _models(events: list[dict[str, Any]]) -> list[Row]:
    """Sum the requests of each agent to each model."""
    totals: dict[tuple[str, str, str], list[int]] = {}
    for event in events:
        copied = event["kind"]
        if copied.get("row_type") != "model_asked":
            continue
        with contextlib.suppress(ValueError, RecursionError, KeyError, TypeError):
            kind = json.loads(copied["line"])["kind"]
            key = (str(kind["agent_id"]), str(kind["provider"]), str(kind["model"]))
            counts = [1, *(int(kind[name]) for name in _COUNTED)]
            before = totals.get(key, [0] * len(counts))
            totals[key] = [a + b for a, b in zip(before, counts, strict=True)]
    return [_model(key, counts) for key, counts in sorted(totals.items())]


def _model(key: tuple[str, str, str], counts: list[int]) -> Row:
    agent, provider, name = key
    names = ("requests", "tokens in", "tokens out", "credits")
    about = {"agent": agent, "provider": provider, "model": name, **dict(zip(names, counts, strict=True))}
    return Row(f"model {key}", ("model", agent, f"{provider}/{name}", *map(str, counts)), data=about)


def _tool(one: Mapping[str, Any]) -> Row:
    return Row(f"tool {one['name']}", ("tool", "", one["name"], "", "", "", ""), data=one)


def _port(run: Mapping[str, Any], one: Mapping[str, Any]) -> Row:
    name = f"{one['port']} at {one['to']}"
    data = {"run_id": run["run_id"], "agent_id": run["agent_id"], **one}
    return Row(f"port {run['run_id']} {one['port']}", ("port", str(run["agent_id"]), name, "", "", "", ""), data=data)
