"""The half of ``covenant audit`` that the daemon alone answers: its rows in parts, and who did what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from covenant.cli import common, terminal, times
from covenant.cli.daemon import client


def follow(
    limit: int, since_ms: int | None, line: Callable[[dict[str, Any]], str], *, as_json: bool, extended: bool
) -> None:
    """Print the caller's own rows as they come, the newest first, of all kinds or of version 1's; ``line`` is a row as
    text."""
    with client.daemon() as daemon:
        for part in daemon.stream("recent_audit", limit=limit, since_ms=since_ms, extended=extended):
            if as_json:
                common.emit(part)
            elif part["kind"] == "stream_chunk":
                common.say(line({**part["chunk"], "origin": "daemon"}))
            for row in part.get("events", ()) if not as_json else ():
                common.say(line({**row, "origin": "daemon"}))


@click.command(
    epilog=client.examples(
        "covenant audit provenance --outcome refused", "covenant audit provenance --actor ada@laptop --json"
    )
)
@client.limit(100)
@click.option("--since-ms", type=client.MILLISECONDS, help="From this Unix time on, in milliseconds.")
@click.option("--until-ms", type=client.MILLISECONDS, help="Up to this Unix time, in milliseconds.")
@click.option("--actor", help="Who did it.")
@click.option("--approver", help="By whose leave.")
@click.option("--rule", help="By which rule.")
@click.option("--outcome", help="What came of it.")
@client.as_json
def provenance(limit: int, as_json: bool, **filters: Any) -> None:
    """Show who did what by whose leave, newest first."""
    with client.daemon() as daemon:
        response = daemon.ask("query_provenance", limit=limit, **filters)
    if as_json:
        common.emit(client.envelope("provenance_actions", response))
        return
    rows = [
        (times.utc(one["timestamp_ms"]), one["actor"], one["action"], one.get("approver") or "-", one["outcome"])
        for one in response["actions"]
    ]
    terminal.print_table(("AT", "ACTOR", "ACTION", "APPROVER", "OUTCOME"), rows, nothing="no actions")
