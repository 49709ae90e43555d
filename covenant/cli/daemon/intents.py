"""``covenant intent`` and ``covenant intents``: have something done, and go on with what waited for credits."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

import click

from covenant.cli import common, spinner
from covenant.cli.daemon import client
from policy import errors

# So many of the newest rows about intents that waited or were resumed are looked through for one that waits still.
_WINDOW = 1024
# As the daemon answers where no agent matched; it is version 1's answer.
_UNMATCHED = "phase 0 echo (no agent matched): "
_ABOUT_WAITING = ["budget_exhausted", "intent_resumed"]


def _agents(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """The ids that complete ``--agent``; none where no daemon runs."""
    try:
        listed = client.ask("list_agents")["agents"]
    except errors.CovenantError:
        return []
    return [one["id"] for one in listed if one["routable"] and one["id"].startswith(incomplete)]


@click.command(
    epilog=client.examples(
        'covenant intent "count the words of this sentence"',
        'covenant intent --agent wordcount "count these words"',
        'covenant intent --stream --json "count these words"',
    )
)
@click.argument("words", metavar="TEXT...", nargs=-1, required=True)
@click.option("--agent", metavar="ID", shell_complete=_agents, help="Who is to do it; otherwise its words decide.")
@click.option("--priority", type=click.Choice(["low", "normal", "high"]), help="At most the manifest's.")
@click.option("--key", metavar="KEY", help="The same key again has the same answer, without a second run.")
@click.option("--stream", is_flag=True, help="Have the answer in parts; with --json, one document a line.")
@client.as_json
@click.pass_context
def intent(
    ctx: click.Context,
    words: tuple[str, ...],
    agent: str | None,
    priority: str | None,
    key: str | None,
    stream: bool,
    as_json: bool,
) -> None:
    """Have an agent do what TEXT says, and print its answer. Status 3 if no agent's words match."""
    text = " ".join(words)
    fields = {"text": text, "agent": agent, "priority": priority, "idempotency_key": key}
    with client.daemon() as daemon:
        if stream:
            if not _streamed(daemon.stream("submit_intent", **fields), text, as_json=as_json):
                ctx.exit(common.EXIT_NO)
            return
        with spinner.shown("an agent works on it", quiet=as_json):
            answer = daemon.ask("submit_intent", **fields)
    if answer["status"] == "ok" and not answer.get("agent_id") and answer["text"] == f"{_UNMATCHED}{text}":
        if as_json:
            common.emit(client.envelope("intent_result", answer, code=errors.NoAgentMatchedError.code))
        else:
            _say_unmatched()
        ctx.exit(common.EXIT_NO)
    _show(answer, as_json=as_json)


def _say_unmatched() -> None:
    said = "no word of the intent is one of an agent's"
    fix = "covenant agents list shows the agents; name one: --agent ID"
    common.report(errors.NoAgentMatchedError(said, hint=fix))


def _show(answer: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        common.emit(client.envelope("intent_result", answer))
        return
    if answer["status"] == "ignored":
        common.say("ignored: a rule of .covenantignore matches it; `covenant ignore check` says which", err=True)
        return
    common.say(common.visible(answer["text"], newlines=True))
    for source in answer.get("sources", ()):
        common.say(common.visible(f"source: {source}"))
    common.say(common.visible(f"{answer.get('agent_id') or 'no agent'}, intent {answer['intent_id']}"), err=True)


def _streamed(parts: Iterable[dict[str, Any]], text: str, *, as_json: bool) -> bool:
    """Print the parts of the answer to the intent ``text``. Returns whether an agent matched it."""
    matched = True
    # An agent may answer the same as the daemon without an agent. The end of the stream says which it was.
    echoes: list[dict[str, Any]] = []
    for part in parts:
        if part["kind"] == "stream_chunk" and part["chunk"]["text"] == f"{_UNMATCHED}{text}":
            echoes.append(part)
            continue
        if echoes and part["kind"] == "stream_end":
            matched = bool(part["summary"].get("agent_id"))
        for one in (*echoes, part):
            _show_part(one, matched=matched, as_json=as_json)
        echoes = []
    return matched


def _show_part(part: dict[str, Any], *, matched: bool, as_json: bool) -> None:
    if as_json:
        ends = part["kind"] == "stream_end" and not matched
        code = {"code": errors.NoAgentMatchedError.code}
        common.emit({**part, "summary": {**code, **part["summary"]}} if ends else part)
    elif not matched:
        if part["kind"] == "stream_end":
            _say_unmatched()
    elif part["kind"] == "stream_chunk":
        common.say(common.visible(part["chunk"]["text"], newlines=True))
        for source in part["chunk"].get("sources", ()):
            common.say(common.visible(f"source: {source}"))
    elif part["kind"] == "stream_end":
        about = part["summary"]
        common.say(common.visible(f"{about.get('agent_id') or 'no agent'}, intent {about['intent_id']}"), err=True)
    elif part["kind"] == "intent_result":
        _show(part, as_json=False)


@click.group()
def intents() -> None:
    """Go on with intents that waited, and see what came of one."""


@intents.command(epilog=client.examples("covenant intents result 6f0c3c2e-5f4b-4d0a-9a54-1c1f6e0f7a11"))
@click.argument("intent_id")
@client.as_json
def result(intent_id: str, as_json: bool) -> None:
    """Show what came of the intent INTENT_ID."""
    _show(client.ask("get_intent_result", intent_id=intent_id), as_json=as_json)


class _ResumeError(errors.CovenantError):
    """Why nothing was resumed, under version 1's names."""

    def __init__(self, reason: str, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.reason = reason


@intents.command(epilog=client.examples("covenant intents resume latest", "covenant intents resume --latest --json"))
@click.argument("which", metavar="INTENT_ID|latest", required=False)
@click.option("--latest", is_flag=True, help="The one that waited last.")
@client.as_json
@click.pass_context
def resume(ctx: click.Context, which: str | None, latest: bool, as_json: bool) -> None:
    """Start an intent again that waited for credits. Ends with status 1 on every error."""
    mode = "latest" if latest or which == "latest" else "explicit"
    try:
        answer = _resume(which, latest)
    except errors.CovenantError as e:
        reason = e.reason if isinstance(e, _ResumeError) else "daemon_error"
        if as_json:
            named = None if which == "latest" else which
            about = {"code": reason, "message": e.message, "daemon_code": e.code, "hint": e.hint or None}
            common.emit({"kind": "intents_resume", "ok": False, "mode": mode, "intent_id": named, "error": about})
        else:
            common.say(f"covenant: {common.visible(e.message)} [{reason}]", err=True)
            if e.hint:
                common.say(f"  fix: {common.visible(e.hint)}", err=True)
        ctx.exit(common.EXIT_FAILED)
    if as_json:
        common.emit(client.envelope("intents_resume", answer, ok=True, mode=mode))
    else:
        _show(answer, as_json=False)


def _resume(which: str | None, latest: bool) -> dict[str, Any]:
    if latest and which not in (None, "latest"):
        raise _ResumeError("conflicting_flags", "an intent and --latest are two", hint="give one")
    if which is None and not latest:
        raise _ResumeError("missing_intent_id", "which intent is to be resumed", hint="an id, or latest")
    with client.daemon() as daemon:
        if which in (None, "latest"):
            which = _waiting(daemon.ask("recent_audit", limit=_WINDOW, types=_ABOUT_WAITING)["events"])
        assert which is not None
        try:
            uuid.UUID(which)
        except ValueError:
            raise _ResumeError(
                "invalid_intent_id", f"`{which}` is no id of an intent", hint="give a whole id, or latest"
            ) from None
        answer = daemon.ask("resume_intent", intent_id=which)
    if answer["kind"] != "intent_result":
        raise _ResumeError("unexpected_response", f"the daemon answered `{answer['kind']}`")
    return answer


def _waiting(events: list[dict[str, Any]]) -> str:
    """The intent that waited last and was not resumed since; the newest rows come first."""
    resumed: set[str] = set()
    for event in events:
        kind = event["kind"]
        if kind["type"] == "intent_resumed":
            resumed.add(str(kind.get("resumed_from")))
        if kind["type"] == "budget_exhausted" and kind["intent_id"] not in resumed:
            return str(kind["intent_id"])
    said = "no intent of yours waits for credits"
    raise _ResumeError("no_budget_exhausted_row", said, hint="submit one again: covenant intent TEXT")
