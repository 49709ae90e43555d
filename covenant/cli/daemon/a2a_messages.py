"""The half of ``covenant a2a`` that sends, receives and answers."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

import click

from covenant.cli import common, times
from covenant.cli.daemon import client
from policy import errors

if TYPE_CHECKING:
    from covenant.wire.client import Client

_LOOK_SECONDS = 0.2
_LOOKED_AT = 1000


@click.command(
    epilog=client.examples(
        'covenant a2a send hello@agent "say hello"',
        'covenant a2a send wordcount@agent "count these words" --wait --json',
        'covenant a2a send ada@laptop "look at this" --deadline-in-ms 60000 --idempotency-key look-1',
    )
)
@click.argument("recipient", metavar="NAME@HOST[:KEY]")
@click.argument("text")
@click.option("--id", "task_id", metavar="ID", help="The task's id; otherwise a new one.")
@click.option("--kind", "task_kind", metavar="KIND", help="What kind of task it is.")
@click.option("--parent", metavar="ID", help="The task that it comes from.")
@click.option("--deadline-in-ms", type=client.MILLISECONDS, help="To be done within so many milliseconds.")
@click.option("--idempotency-key", metavar="KEY", help="It may be done twice; the same key again is answered at once.")
@click.option("--unsafe", is_flag=True, help="It must not be done twice, whatever happens.")
@click.option("--sender", metavar="NAME@HOST:KEY", help="Who you are, where you are not the operator.")
@click.option("--wait", is_flag=True, help="Wait for the answer, and leave it to be fetched.")
@click.option("--timeout", type=click.FloatRange(0.1), default=600.0, show_default=True, help="Wait so many seconds.")
@client.as_json
def send(recipient: str, text: str, wait: bool, timeout: float, as_json: bool, **given: Any) -> None:
    """Send a task with TEXT to an agent of this host (<id>@agent) or to a peer."""
    with client.daemon() as daemon:
        task = _task(daemon, recipient, text, given)
        response = daemon.ask("send_a2_a_task", task=task)
        result = _awaited(daemon, task["id"], timeout) if wait else None
    if as_json:
        common.emit(client.envelope("a2a_task_queued", response, **({"result": result} if wait else {})))
    elif result is None:
        common.say(common.visible(response["task_id"]))
    else:
        _say(result)
    if result is not None and result["status"] == "error":
        click.get_current_context().exit(common.EXIT_FAILED)


def _task(daemon: Client, recipient: str, text: str, given: dict[str, Any]) -> dict[str, Any]:
    if given["unsafe"] and given["idempotency_key"] is not None:
        raise errors.UsageError("--unsafe and --idempotency-key say opposite things", hint="give one")
    task = {
        "id": given["task_id"] or str(uuid.uuid4()),
        "sender": _named(given["sender"]) if given["sender"] else _operator(daemon),
        "recipient": _known(daemon, recipient),
        "intent_text": text,
        "task_kind": given["task_kind"],
        "parent": given["parent"],
    }
    if given["deadline_in_ms"] is not None:
        task["deadline_ms"] = times.now_ms() + given["deadline_in_ms"]
    if given["unsafe"] or given["idempotency_key"] is not None:
        safety = "unsafe" if given["unsafe"] else "idempotent"
        task["idempotency"] = {"duplicate_safety": safety, "key": given["idempotency_key"] or ""}
    return {name: value for name, value in task.items() if value is not None}


def _named(text: str) -> dict[str, str]:
    """Parse ``name@host:key``.

    Raises:
        errors.UsageError: it is not of that form.
    """
    display, _, pubkey = text.partition(":")
    if "@" not in display or not pubkey:
        raise errors.UsageError(f"`{text}` is not NAME@HOST:KEY", hint="covenant peers list shows keys")
    return {"display": display, "pubkey": pubkey}


def _operator(daemon: Client) -> dict[str, str]:
    """Return the operator, with the display name of its entry at the daemon."""
    pubkey = daemon.ask("list_peers", limit=1)["operator_pubkey_b58"]
    (entry,) = daemon.ask("list_peers", limit=1, pubkey_prefix=pubkey, status_filter="live")["peers"]
    return {"display": entry["agent_id"]["display"], "pubkey": pubkey}


def _known(daemon: Client, recipient: str) -> dict[str, str]:
    """Return the recipient: an agent of this host, a peer, or the one named with a key.

    Raises:
        errors.UsageError: no peer has that name, or more than one.
    """
    if ":" in recipient:
        return _named(recipient)
    agents = {f"{one['id']}@agent": one for one in daemon.ask("list_agents")["agents"] if one.get("pubkey")}
    if recipient in agents:
        return {"display": recipient, "pubkey": agents[recipient]["pubkey"]}
    if recipient.endswith("@agent"):
        raise errors.UsageError(f"no agent `{recipient.removesuffix('@agent')}` is here", hint="covenant agents list")
    listed = daemon.ask("list_peers", limit=_LOOKED_AT, status_filter="live")["peers"]
    keys = {one["agent_id"]["pubkey"] for one in listed if one["agent_id"]["display"] == recipient}
    if len(keys) != 1:
        word = "more than one peer is" if keys else "no peer is"
        raise errors.UsageError(f"{word} called `{recipient}`", hint="name it with its key: NAME@HOST:KEY")
    return {"display": recipient, "pubkey": keys.pop()}


def _awaited(daemon: Client, task_id: str, seconds: float) -> dict[str, Any]:
    """Wait for the answer and return it. It is read and not fetched: other clients may wait for theirs.

    Raises:
        errors.DaemonSilentError: there is none in time.
    """
    end = time.monotonic() + seconds
    while True:
        # By its id: a list of the newest may have no room for it after longer ones.
        for result in daemon.ask("recent_a2_a_results", limit=1, task_id=task_id)["results"]:
            if result["task_id"] == task_id:
                return dict(result)
        if time.monotonic() >= end:
            raise errors.DaemonSilentError(
                f"task `{task_id}` has no answer after {seconds:g} seconds", hint="covenant a2a result fetches it later"
            )
        time.sleep(_LOOK_SECONDS)


@click.command(epilog=client.examples("covenant a2a recv", "COVENANT_TOKEN_FILE=ada.token covenant a2a recv --json"))
@client.as_json
@click.pass_context
def recv(ctx: click.Context, as_json: bool) -> None:
    """Take the next task for you, under a lease. Status 3 where none waits."""
    response = client.ask("try_recv_a2_a_task")
    task = response["task"]
    if as_json:
        common.emit(client.envelope("a2a_task", response))
    elif task is not None:
        ends = response.get("lease_expires_at_ms")
        until = f", yours until {times.utc(ends)}" if ends is not None else ""
        common.say(common.visible(f"{task['id']} from {task['sender']['display']}{until}"), err=True)
        common.say(common.visible(task["intent_text"], newlines=True))
    else:
        common.say("no task waits for you", err=True)
    if task is None:
        ctx.exit(common.EXIT_NO)


@click.command(
    epilog=client.examples('covenant a2a answer 6f0c3c2e "three words"', 'covenant a2a answer 6f0c3c2e --error "no"')
)
@click.argument("task")
@click.argument("text", required=False)
@click.option("--error", "error_message", metavar="MESSAGE", help="It could not be done.")
@click.option("--partial", is_flag=True, help="It was done in part.")
@client.as_json
def answer(task: str, text: str | None, error_message: str | None, partial: bool, as_json: bool) -> None:
    """Answer TASK with TEXT."""
    if text is None and error_message is None:
        raise errors.UsageError("an answer is a text or an error", hint="TEXT, or --error MESSAGE")
    result = {
        "task_id": task,
        "status": "error" if error_message is not None else "partial" if partial else "ok",
        "content": [] if text is None else [{"type": "text", "text": text}],
    }
    if error_message is not None:
        result["error_message"] = error_message
    response = client.ask("post_a2_a_result", result=result)
    if as_json:
        common.emit(client.envelope("a2a_result_posted", response, task_id=task))
    else:
        common.say("answered")


@click.command("result", epilog=client.examples("covenant a2a result"))
@client.as_json
@click.pass_context
def fetch(ctx: click.Context, as_json: bool) -> None:
    """Fetch the oldest answer to a task of yours; it is not given again. Status 3 where none waits."""
    response = client.ask("try_recv_a2_a_result")
    result = response["result"]
    if as_json:
        common.emit(client.envelope("a2a_result", response))
    elif result is not None:
        common.say(common.visible(f"{result['task_id']}: {result['status']}"), err=True)
        _say(result)
    else:
        common.say("no answer waits for you", err=True)
    if result is None:
        ctx.exit(common.EXIT_NO)


@click.command(epilog=client.examples('covenant a2a cancel 6f0c3c2e --reason "no need"'))
@click.argument("task")
@click.option("--reason", default="", help="Why: it stands in the log.")
@client.as_json
@click.pass_context
def cancel(ctx: click.Context, task: str, reason: str, as_json: bool) -> None:
    """Take TASK back; a run that works on it is ended. Status 1 where it is answered already."""
    response = client.ask("cancel_a2_a_task", task_id=task, reason=reason)
    if as_json:
        common.emit(client.envelope("a2a_cancelled", response))
    else:
        common.say("taken back" if response["cancelled"] else "it is answered already")
    if not response["cancelled"]:
        ctx.exit(common.EXIT_FAILED)


def _say(result: dict[str, Any]) -> None:
    for block in result["content"]:
        shown = block["text"] if block.get("type") == "text" and isinstance(block.get("text"), str) else str(block)
        common.say(common.visible(shown, newlines=True))
    if result.get("error_message"):
        common.say(common.visible(f"error: {result['error_message']}"), err=True)


MAIL: tuple[click.Command, ...] = (send, recv, answer, fetch, cancel)
