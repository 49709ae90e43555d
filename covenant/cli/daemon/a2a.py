"""``covenant a2a``: the mailbox of tasks between agents. Sending and receiving is in ``a2a_mail``."""

from __future__ import annotations

from typing import Any

import click

from covenant.cli import common, terminal, times
from covenant.cli.daemon import client
from covenant.cli.daemon.a2a_messages import MAIL

_lease = click.option("--lease-id", metavar="LEASE", help="Only under this lease.")
_reason = click.option("--reason", required=True, help="Why: it stands in the log.")


@click.group()
def a2a() -> None:
    """Send tasks to agents, receive and answer them, and repair what is stuck."""


@a2a.command(
    epilog=client.examples(
        "covenant a2a status", "covenant a2a status --state in_flight --min-lease-age-ms 300000 --json"
    )
)
@client.limit(20)
@click.option("--min-lease-age-ms", type=client.MILLISECONDS, help="Leased for at least so long.")
@click.option("--deadline-within-ms", type=client.MILLISECONDS, help="To be done within so long.")
@click.option("--state", type=click.Choice(["queued", "in_flight"]), help="These alone.")
@client.as_json
def status(
    limit: int, min_lease_age_ms: int | None, deadline_within_ms: int | None, state: str | None, as_json: bool
) -> None:
    """Show what waits and what is leased, oldest first, and the answers that wait for you."""
    asked = {
        "limit": limit,
        "min_lease_age_ms": min_lease_age_ms,
        "deadline_within_ms": deadline_within_ms,
        "state_filter": state,
    }
    response = client.ask("a2_a_queue", **asked)
    if as_json:
        common.emit(client.envelope("a2a_status", response, **asked))
        return
    terminal.print_table(
        ("TASK", "STATE", "FROM", "TO", "TRIES", "LEASE ENDS", "DEADLINE", "TEXT"),
        [_row(one) for one in response["tasks"]],
        nothing="no tasks",
    )
    for result in response["results"]:
        error = f": {result['error_message']}" if result.get("error_message") else ""
        common.say(common.visible(f"answer to {result['task_id']}: {result['status']}{error}"))


def _row(entry: dict[str, Any]) -> tuple[Any, ...]:
    task = entry["task"]
    ends = entry.get("lease_expires_at_ms")
    deadline = task.get("deadline_ms")
    return (
        task["id"],
        entry["state"],
        task["sender"]["display"],
        task["recipient"]["display"],
        entry["attempt"],
        "-" if ends is None else times.utc(ends),
        "-" if deadline is None else times.utc(deadline),
        task["intent_text"],
    )


@a2a.command(
    epilog=client.examples(
        'covenant a2a requeue 6f0c3c2e --reason "its worker died" --duplicate-risk operator-accepted'
    )
)
@click.argument("task")
@_reason
@click.option(
    "--duplicate-risk",
    type=click.Choice(["idempotent", "operator-accepted"]),
    required=True,
    help="Why it does no harm if it was done already.",
)
@_lease
@client.as_json
def requeue(task: str, reason: str, duplicate_risk: str, lease_id: str | None, as_json: bool) -> None:
    """Put the leased TASK back, to be done again."""
    _repair(task, {"action": "requeue", "lease_id": lease_id, "duplicate_risk": duplicate_risk}, reason, as_json)


@a2a.command(
    "force-error", epilog=client.examples('covenant a2a force-error 6f0c3c2e --reason "stuck" --message "gave up"')
)
@click.argument("task")
@_reason
@click.option("--message", required=True, help="What its sender is told.")
@_lease
@client.as_json
def force_error(task: str, reason: str, message: str, lease_id: str | None, as_json: bool) -> None:
    """End TASK with an error."""
    _repair(task, {"action": "force_error", "lease_id": lease_id, "message": message}, reason, as_json)


def _repair(task: str, command: dict[str, Any], reason: str, as_json: bool) -> None:
    response = client.ask("repair_a2_a_task", request={"task_id": task, "command": command, "reason": reason})
    if as_json:
        common.emit(client.envelope("a2a_repaired", response))
    else:
        outcome = response["outcome"]
        word = "waits again" if outcome["action"] == "requeued" else "is ended"
        common.say(common.visible(f"{outcome['task_id']} {word}, after {outcome['attempt']} tries"))


@a2a.command(
    "retry-stale",
    epilog=client.examples("covenant a2a retry-stale", "covenant a2a retry-stale --enable --max-attempts 5"),
)
@click.option("--enable", is_flag=True, help="Do it; otherwise only say what would be done.")
@click.option(
    "--min-lease-age-ms", type=client.MILLISECONDS, default=300_000, show_default=True, help="Leased so long."
)
@click.option("--max-attempts", type=click.IntRange(0), default=3, show_default=True, help="Tried less often.")
@click.option("--max-requeues", type=click.IntRange(0), default=1, show_default=True, help="Put back so less often.")
@click.option("--scan-limit", type=click.IntRange(0), default=100, show_default=True, help="Look at so many.")
@client.as_json
def retry_stale(
    enable: bool, min_lease_age_ms: int, max_attempts: int, max_requeues: int, scan_limit: int, as_json: bool
) -> None:
    """Put tasks back that are leased for long and may be done twice."""
    policy = {
        "enabled": enable,
        "min_lease_age_ms": min_lease_age_ms,
        "max_attempts": max_attempts,
        "max_requeues": max_requeues,
        "scan_limit": scan_limit,
    }
    response = client.ask("retry_a2_a_stale", policy=policy)
    if as_json:
        common.emit(client.envelope("a2a_auto_retry", response))
        return
    report = response["report"]
    put, left = len(report["requeued"]), sum(report["skipped_by_reason"].values())
    common.say(f"{report['considered']} tasks looked at, {put} put back, {left} left")
    for reason, count in report["skipped_by_reason"].items():
        common.say(common.visible(f"  {count} {reason}"))
    if report["skipped_by_reason"].get("disabled"):
        common.say("nothing was done: --enable does it", err=True)


@a2a.command(epilog=client.examples("covenant a2a compact"))
@client.as_json
def compact(as_json: bool) -> None:
    """Forget tasks whose answers were fetched, or waited for a week."""
    response = client.ask("compact_a2_a")
    if as_json:
        common.emit(client.envelope("a2a_compacted", response))
    else:
        common.say(f"{response['dropped']} tasks forgotten")


for _command in MAIL:
    a2a.add_command(_command)
