"""The views of what people asked for: intents with their drafts, and approvals that wait for an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

from covenant.tui import view
from covenant.tui.sources import Sources, either
from covenant.tui.view import Choice, Column, Form, Loaded, Question, Row, View, ViewRequest
from policy import errors

# Version 1 keeps as many.
MOST_DRAFTS: Final = 64
_ID = 8
_ROWS: Final = ("intent_dispatched", "intent_failed", "intent_ignored", "budget_exhausted", "intent_resumed")
_STATUS: Final = {
    "intent_failed": "failed",
    "intent_ignored": "ignored",
    "budget_exhausted": "waits",
    "intent_resumed": "resumed",
}


class IntentsView(View):
    """Drafts, intents whose runs live, and intents that ended, by the rows of the log."""

    key, name, title = "I", "intents", "intents, and drafts of them"
    columns = (Column("TIME", 14), Column("INTENT", 8), Column("AGENT", 16), Column("STATUS", 8), Column("TEXT"))
    acts: ClassVar[Mapping[str, str]] = {"f": "resume one that waits"}

    def __init__(self) -> None:
        self.drafts: list[tuple[str, str, str]] = []

    def load(self, sources: Sources, asked: ViewRequest) -> Loaded:
        notes: list[str] = []
        events = sources.daemon("recent_audit", limit=asked.limit, types=_ROWS)["events"]
        ended = [_ended(one) for one in events]
        known = {str(row.data.get("intent_id")) for row in ended}
        drafts = [
            Row(f"draft {number}", ("", "draft", agent, "draft", view.first_line(text)), data={"text": text})
            for number, (text, agent, _) in enumerate(self.drafts)
        ]
        live = [one for one in self._live(sources, notes) if str(one.data["intent_id"]) not in known]
        return Loaded((*reversed(drafts), *live, *ended), tuple(notes), more=len(events) >= asked.limit)

    def _live(self, sources: Sources, notes: list[str]) -> list[Row]:
        runs = either(notes, "supervisor", lambda: sources.supervisor("ps")).get("runs", [])
        return [
            Row(
                f"run {one['run_id']}",
                (
                    view.moment(one["started_ms"]),
                    one["intent_id"][:_ID],
                    str(one["agent_id"]),
                    str(one["state"]),
                    f"run {one['run_id'][:_ID]}",
                ),
                data=one,
            )
            for one in runs
            if one.get("intent_id")
        ]

    def whole(self, sources: Sources, row: Row) -> list[str]:
        lines = super().whole(sources, row)
        if not row.data.get("intent_id") or row.cells[3] not in ("ok", "failed", "waits"):
            return lines
        answer = sources.daemon("get_intent_result", intent_id=row.data["intent_id"])
        return [*lines, "", f"result: {answer['status']}", *_answered(answer)]

    def form(self) -> Form:
        """Return the fields of a draft."""

        def then(texts: Sequence[str]) -> None:
            text, agent, priority = (one.strip() for one in texts)
            if text:
                self.drafts = [*self.drafts, (text, agent, priority)][-MOST_DRAFTS:]

        return Form(
            "a draft of an intent", ("text", "agent (empty: its words decide)", "priority (low, normal, high)"), then
        )

    def submit(self) -> Question:
        """Return the question before the latest draft is submitted.

        Raises:
            errors.UsageError: there is none.
        """
        if not self.drafts:
            raise errors.UsageError("there is no draft to submit", hint="press i and write one")
        text, agent, priority = draft = self.drafts[-1]

        def act(given: Sources) -> list[str]:
            answer = given.daemon("submit_intent", text=text, agent=agent or None, priority=priority or None)
            self.drafts = [one for one in self.drafts if one is not draft]
            return [f"{answer['status']}: intent {answer['intent_id']} by {answer.get('agent_id') or 'no agent'}",
                    *_answered(answer)]  # fmt: skip

        who = agent or "the agent that its words fit"
        lines = (f"for {who}, priority {priority or 'of its manifest'}:", "", *view.quoted(text))
        return Question("submit this intent?", lines, (Choice("y", "yes", act),))

    def ask(self, sources: Sources, act: str, row: Row | None) -> Question | None:
        if row is None or row.cells[3] != "waits":
            return None
        intent_id = str(row.data["intent_id"])

        def resume(given: Sources) -> list[str]:
            answer = given.daemon("resume_intent", intent_id=intent_id)
            return [f"{answer['status']}: intent {answer['intent_id']}", *_answered(answer)]

        lines = (f"intent {intent_id} waited for credits:", "", *view.quoted(row.data.get("intent_text", "")))
        return Question("start this intent again?", lines, (Choice("y", "yes", resume),))


def _answered(answer: Mapping[str, Any]) -> list[str]:
    return [*view.quoted(answer.get("text", "")), *(f"source: {one}" for one in answer.get("sources", ()))]


def _ended(event: Mapping[str, Any]) -> Row:
    kind = event["kind"]
    status = _STATUS.get(kind["type"]) or str(kind.get("status"))
    if kind["type"] == "intent_dispatched" and kind.get("matched_agent") is None:
        status = "no agent"  # version 1's log has ok: the daemon answered by itself
    text = kind.get("intent_text") or kind.get("message") or kind.get("resumed_from") or ""
    agent = kind.get("matched_agent") or str(kind.get("agent_display") or "-").partition("@")[0]
    cells = (view.moment(event["timestamp_ms"]), str(kind["intent_id"])[:_ID], agent, status, view.first_line(text))
    about = {**kind, "by": event["issuer"]["display"]}
    return Row(event["id"], cells, alarm=status in ("failed", "waits"), data=about)


class ApprovalsView(View):
    """Runs that wait for the operator's word: for a lease here, or for a choice at a Hermes API."""

    key, name, title = "o", "approvals", "what waits for an operator's answer"
    columns = (Column("SINCE", 14), Column("AGENT", 16), Column("WHAT"), Column("CHOICES", 18))
    acts: ClassVar[Mapping[str, str]] = {"y": "answer"}

    def load(self, sources: Sources, asked: ViewRequest) -> Loaded:
        notes: list[str] = []
        found = either(notes, "daemon", lambda: sources.daemon("list_approvals")).get("approvals", [])
        held = either(notes, "supervisor", lambda: sources.supervisor("approvals", verb="list")).get("requests", [])
        return Loaded((*(_held(one) for one in held), *(_waiting(one) for one in found)), tuple(notes))

    def ask(self, sources: Sources, act: str, row: Row | None) -> Question | None:
        if row is None:
            return None
        one = row.data
        if "choices" not in one:
            return _lease(one)

        def answers(word: str) -> view.Act:
            def act(given: Sources) -> list[str]:
                done = given.daemon("resolve_approval", approval_id=one["id"], choice=word)
                return [f"answered with {done['choice']}, {done['resolved']} waiting requests resolved"]

            return act

        choices = [Choice(str(at), word, answers(word)) for at, word in enumerate(one["choices"][:9], 1)]
        more = "" if len(one["choices"]) <= len(choices) else " It has more choices: covenant approvals list."
        lines = (
            f"agent {one['agent_id']}, run {one['run_id']}, intent {one['intent_id']}",
            "",
            *view.quoted(one["description"]),
            *view.quoted(one["command"]),
            "",
            "The log has the answer with your name." + more,
        )
        return Question("answer this run?", lines, tuple(choices))


def _lease(one: Mapping[str, Any]) -> Question:
    """Return the question about a request that a run here is held for."""

    def granted(duration: str) -> view.Act:
        return lambda given: [given.grant(one, duration)]

    def denied(given: Sources) -> list[str]:
        return [f"denied {given.supervisor('approvals', verb='deny', request=one['id'])['denied']['target']}"]

    lines = (
        f"agent {one['agent_id']}, run {one['run_id']}, wants:",
        "",
        *view.quoted(f"{one['kind']} {one['target']}"),
        *(view.quoted(f"side effect: {one['side_effect']}") if one.get("side_effect") else ()),
        *(view.quoted(one["arguments"]) if one.get("arguments") else ()),
        "",
        *(("agent.toml would say:", *view.quoted("\n".join(one["add"])), "") if one.get("add") else ()),
        "A grant is a lease for this alone, signed with your key.",
    )
    choices = (
        Choice("1", "once", granted("once")),
        Choice("2", "for the run", granted("run")),
        Choice("3", "deny", denied),
        Choice("4", "for 10 minutes", granted("until")),
    )
    return Question("let this run have it?", lines, choices)


def _held(one: Mapping[str, Any]) -> Row:
    what = view.first_line(f"{one['kind']} {one['target']}")
    cells = (view.moment(one["asked_ms"]), str(one["agent_id"]), what, "once run 10m deny")
    return Row(one["id"], cells, alarm=True, data=one)


def _waiting(one: Mapping[str, Any]) -> Row:
    what, choices = view.first_line(one["command"] or one["description"]), " ".join(one["choices"])
    return Row(one["id"], (view.moment(one["requested_at"]), str(one["agent_id"]), what, choices), alarm=True, data=one)
