"""The views of the audit log: denials with the line to add, and rows with the state of their verification."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from covenant.tui import view
from covenant.tui.sources import Sources
from covenant.tui.view import Choice, Column, Loaded, Question, Row, View, ViewRequest
from policy import errors


class DenialsView(View):
    """Denials of agents, the newest first; a row's own screen has the line of agent.toml that would allow it."""

    key, name, title = "d", "denials", "what was refused to agents, with the line to add"
    columns = (
        Column("TIME", 14),
        Column("AGENT", 16),
        Column("LAYER", 8),
        Column("TARGET"),
        Column("CODE", 14),
        Column("N", 4, right=True),
    )

    def load(self, sources: Sources, asked: ViewRequest) -> Loaded:
        found = sources.daemon("recent_denials", limit=asked.limit)["denials"]
        rows = tuple(
            Row(
                one["event_id"],
                (
                    view.moment(one["timestamp_ms"]),
                    str(one.get("agent_id") or "-"),
                    one["layer"],
                    one["target"],
                    one["code"],
                    str(one["count"]),
                ),
                data=one,
            )
            for one in found
        )
        return Loaded(rows, more=len(rows) >= asked.limit)

    def about(self, row: Row) -> list[tuple[str, str]]:
        one = row.data
        return [
            (str(one["layer"]), str(one["target"])),
            ("denied", f"{one['code']}, {one['count']} times, to {one.get('agent_id')} in run {one.get('run_id')}"),
            ("Enter", "the meaning, and the line of agent.toml that would allow it"),
        ]

    def whole(self, sources: Sources, row: Row) -> list[str]:
        directories = {one["id"]: one["directory"] for one in sources.daemon("list_agents")["agents"] if one.get("id")}
        directory = directories.get(row.data.get("agent_id"), "")
        return [*super().whole(sources, row)[:-1], "", *sources.explain(row.data, directory)]


class AuditView(View):
    """The newest rows of the daemon's log, which has the supervisor's rows about intents too."""

    key, name, title = "a", "audit", "the audit log"
    columns = (Column("TIME", 14), Column("KIND", 22), Column("BY", 16), Column("WHAT"))
    acts: ClassVar[Mapping[str, str]] = {"V": "verify the chain"}

    def __init__(self) -> None:
        self.state = ""
        self._looked = False

    def load(self, sources: Sources, asked: ViewRequest) -> Loaded:
        # The first look is quick; the chain is checked with the second.
        if self._looked and not self.state:
            self.state = self._verified(sources, asked.now_ms)
        self._looked = True
        events = sources.daemon("recent_audit", limit=asked.limit, extended=True)["events"]
        note = self.state or "chain: not checked yet"
        return Loaded(tuple(_event(one) for one in events), (note,), more=len(events) >= asked.limit)

    def _verified(self, sources: Sources, now_ms: int) -> str:
        try:
            report = sources.daemon("verify_audit_integrity")["report"]
        except errors.CovenantError as e:
            return f"! chain: not checked: {e}" + (f"; fix: {e.hint}" if e.hint else "")
        counts = f"{report['events']} rows, root {report['root_hash_hex'][:12]}, checked {view.moment(now_ms)}"
        if report["valid"]:
            return f"chain: holds, {counts}"
        return f"! chain: DOES NOT HOLD, {len(report['failures'])} failures, {counts}; see covenant audit verify"

    def whole(self, sources: Sources, row: Row) -> list[str]:
        lines = super().whole(sources, row)
        proof = sources.daemon("prove_audit_inclusion", event_id=row.key, extended=True)["proof"]
        if proof is None:
            return [*lines, "", "! the log gives no proof that this row is in it"]
        place = f"in the log: row {proof['leaf_index']} of {proof['tree_size']}, root {proof['root_hash_hex']}"
        return [*lines, "", place, f"checkpoint: {'signed' if proof.get('checkpoint') else 'none of this size'}"]

    def ask(self, sources: Sources, act: str, row: Row | None) -> Question | None:
        def verify(given: Sources) -> list[str]:
            self.state = self._verified(given, view.now_ms())
            return [self.state]

        lines = ("Every row is compared with the chain and the signed head.", "It reads the whole log.")
        return Question("verify the audit log?", lines, (Choice("y", "yes", verify),))


def _event(event: Mapping[str, Any]) -> Row:
    kind = dict(event["kind"])
    name = str(kind.pop("type"))
    if name == "supervisor_row":
        name, kind = f"> {kind.get('row_type')}", _inner(kind)
    shown = " ".join(f"{key}={view.words(value)}" for key, value in kind.items() if value not in (None, "", []))
    cells = (view.moment(event["timestamp_ms"]), name, event["issuer"]["display"], view.first_line(shown))
    about = {"id": event["id"], "type": name, "by": event["issuer"]["display"], **kind}
    alarm = name in ("authentication_failed", "budget_exhausted", "intent_failed") or name.endswith("rejected")
    return Row(event["id"], cells, alarm=alarm, data=about)


def _inner(copied: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the supervisor's row that a row of the daemon's is a copy of."""
    try:
        kind = json.loads(copied["line"])["kind"]
        return {key: value for key, value in kind.items() if key != "type"}
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return dict(copied)
