"""The views of who may do what: capabilities, peers, and the mailbox between agents."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

from covenant.tui import view
from covenant.tui.sources import Sources
from covenant.tui.view import Choice, Column, Form, Loaded, Question, Row, View, ViewRequest
from policy import errors

_UNITS_MS: Final = {"m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION: Final = re.compile(r"([0-9]{1,5})([mhd])\Z")
_OUTCOMES: Final = {
    "revoked": "revoked",
    "already_revoked": "was revoked already",
    "not_found": "! no token begins so",
    "ambiguous": "! more than one token begins so\n  fix: covenant peers revoke with more of the token",
    "self_revoke_forbidden": "! that is your own token\n  fix: covenant peers revoke --force revokes it all the same",
}


class CapabilitiesView(View):
    """Grants to the caller or by it, whether they hold, and what is left of those that are metered."""

    key, name, title = "c", "capabilities", "grants to you and by you"
    columns = (Column("ACTION"), Column("SUBJECT", 18), Column("STATE", 8), Column("USED", 8), Column("ENDS", 14))
    acts: ClassVar[Mapping[str, str]] = {"x": "revoke"}

    def load(self, sources: Sources, asked: ViewRequest) -> Loaded:
        found = sources.daemon("recent_capabilities", limit=asked.limit)["capabilities"]
        uses = sources.daemon("capability_usage", limit=asked.limit)["grants"]
        by_signature = {one["signature_b58"]: one for one in uses}
        rows = tuple(_grant(one, by_signature.get(one["signature"])) for one in found)
        return Loaded(rows, more=len(rows) >= asked.limit)

    def ask(self, sources: Sources, act: str, row: Row | None) -> Question | None:
        if row is None:
            return None
        one, signature = row.data, row.key

        def revoke(given: Sources) -> list[str]:
            done = given.daemon("revoke_capability", signature_b58=signature)
            return ["revoked" if done["removed"] else "! there is no such grant that holds"]

        lines = (
            f"{one['subject']} may {one['action']}",
            f"scope: {one['scope']}",
            f"signature: {signature}",
            "",
            "The grant ends now, and with it each grant that was narrowed from it. A new one can be made with g.",
        )
        return Question("revoke this grant?", lines, (Choice("y", "yes", revoke),))

    def form(self) -> Form:
        """Return the fields of a new grant."""
        fields = ("action", "to (name@host or key; empty: you)", "scope (JSON; empty: {})", "ends in (30m, 12h, 7d)")
        return Form("a new grant", fields, self._question)

    def _question(self, texts: Sequence[str]) -> Question | None:
        action, subject, scope, ends = (one.strip() for one in texts)
        if not action:
            return None
        bounds, lasting = _scope(scope), _lasting(ends)

        def grant(given: Sources) -> list[str]:
            until = None if lasting is None else view.now_ms() + lasting
            done = given.daemon(
                "grant_capability", action=action, scope=bounds, expires_at=until, subject=subject or None
            )
            return [f"{done['subject_display']} may {done['action']}", f"signature: {done['signature_b58']}"]

        lines = (
            f"{subject or 'you'} may {action}",
            f"scope: {view.words(bounds)}",
            f"ends: {'in ' + ends if ends else 'never'}",
            "",
            "The daemon signs it, and the log has it.",
        )
        return Question("make this grant?", lines, (Choice("y", "yes", grant),))


def _scope(text: str) -> Any:
    try:
        return json.loads(text) if text else {}
    except (ValueError, RecursionError) as e:
        raise errors.UsageError(f"the scope is no JSON: {e}", hint='such as {"version": 1, "max_uses": 3}') from None


def _lasting(text: str) -> int | None:
    match = _DURATION.match(text)
    if text and match is None:
        raise errors.UsageError(f"`{text}` is no duration", hint="30m, 12h or 7d; empty for a grant without an end")
    return int(match[1]) * _UNITS_MS[match[2]] if match else None


def _grant(signed: Mapping[str, Any], use: Mapping[str, Any] | None) -> Row:
    one = signed["capability"]
    # A word, or in earlier versions whether it holds.
    effective = None if use is None else {True: "live", False: "over"}.get(use["effective"], use["effective"])
    state = "-" if use is None else "revoked" if use["revoked"] else "holds" if effective == "live" else str(effective)
    budget = (use or {}).get("budget")
    used = f"{budget['used']}/{budget['max_uses']}" if budget else "-"
    ends = "-" if one["expires_at"] is None else view.moment(one["expires_at"])
    about = {
        "action": one["action"],
        "subject": f"{one['subject']['display']} {one['subject']['pubkey']}",
        "scope": view.words(one["scope"]),
        "granted_by": f"{one['granted_by']['display']} {one['granted_by']['pubkey']}",
        "signature": signed["signature"],
    }
    return Row(signed["signature"], (one["action"], one["subject"]["display"], state, used, ends), data=about)


class PeersView(View):
    """The peers that may connect to the daemon, by the first characters of each token."""

    key, name, title = "p", "peers", "who may connect to the daemon"
    columns = (Column("PEER"), Column("TOKEN", 6), Column("SINCE", 14), Column("STATE", 21), Column("KEY", 12))
    acts: ClassVar[Mapping[str, str]] = {"x": "revoke"}

    def load(self, sources: Sources, asked: ViewRequest) -> Loaded:
        answer = sources.daemon("list_peers", limit=asked.limit)
        return Loaded(tuple(_peer(one) for one in answer["peers"]), more=answer["truncated"])

    def ask(self, sources: Sources, act: str, row: Row | None) -> Question | None:
        if row is None:
            return None
        prefix, peer = row.data["token_prefix"], row.data["agent_id"]

        def revoke(given: Sources) -> list[str]:
            outcome: str = given.daemon("revoke_peer", token_prefix=prefix)["outcome"]["type"]
            return _OUTCOMES.get(outcome, f"! {outcome}").split("\n")

        lines = (
            f"{peer['display']}, key {peer['pubkey']}",
            f"token {prefix}...",
            "",
            "It is let in no more: its streams end, and its next connection is refused.",
        )
        return Question("revoke the token of this peer?", lines, (Choice("y", "yes", revoke),))


def _peer(one: Mapping[str, Any]) -> Row:
    ends = one.get("expires_at")
    state = "live" if ends is None else f"until {view.moment(ends)}"
    if one["revoked_at"] is not None:
        state = f"revoked {view.moment(one['revoked_at'])}"
    agent = one["agent_id"]
    cells = (agent["display"], one["token_prefix"], view.moment(one["registered_at"]), state, agent["pubkey"])
    return Row(f"{one['token_prefix']} {agent['pubkey']} {one['registered_at']}", cells, data=one)


class MailboxView(View):
    """Tasks between agents that are queued or leased, and results that were not fetched."""

    key, name, title = "A", "mailbox", "tasks between agents"
    columns = (
        Column("STATE", 9),
        Column("TASK", 10),
        Column("FROM", 16),
        Column("TO", 16),
        Column("TRY", 3, right=True),
        Column("TEXT"),
    )

    def load(self, sources: Sources, asked: ViewRequest) -> Loaded:
        answer = sources.daemon("a2_a_queue", limit=asked.limit)
        rows = (*map(_entry, answer["tasks"]), *map(_outcome, answer["results"]))
        return Loaded(rows, more=max(len(answer["tasks"]), len(answer["results"])) >= asked.limit)


def _entry(one: Mapping[str, Any]) -> Row:
    task = one["task"]
    parties = (task["sender"]["display"], task["recipient"]["display"])
    cells = (one["state"], task["id"], *parties, str(one["attempt"]), view.first_line(task["intent_text"]))
    about = {name: value for name, value in one.items() if name not in ("task", "leased_to")}
    about = {"task": task["id"], "from": parties[0], "to": parties[1], "text": task["intent_text"], **about}
    return Row(f"task {task['id']}", cells, data=about)


def _outcome(one: Mapping[str, Any]) -> Row:
    text = one.get("error_message") or " ".join(str(block.get("text", "")) for block in one["content"])
    cells = (one["status"], one["task_id"], "", "", "", view.first_line(text))
    return Row(f"result {one['task_id']}", cells, alarm=one["status"] == "error", data=one)
