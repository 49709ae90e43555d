"""``covenant memory``: read, search, write and purge it. Upkeep is in ``memory_upkeep``."""

from __future__ import annotations

from typing import Any

import click

from covenant.cli import common, terminal, times
from covenant.cli.daemon import client
from covenant.cli.daemon.memory_maintenance import UPKEEP

_TIERS = ("working", "episodic", "longterm", "long-term", "long_term")


def _slug(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Return the only name of a tier that documents have."""
    return "longterm" if value in ("long-term", "long_term") else value


_tier = click.option("--tier", type=click.Choice(_TIERS), callback=_slug, help="This tier alone.")


@click.group()
def memory() -> None:
    """Read, search and write memory, and keep it in order."""


@memory.command(
    epilog=client.examples("covenant memory recent --tier working -n 5", "covenant memory recent --stream --json")
)
@_tier
@client.limit(10)
@click.option("--stream", is_flag=True, help="Have the records in parts; with --json, one document a line.")
@client.as_json
def recent(tier: str | None, limit: int, stream: bool, as_json: bool) -> None:
    """Show the newest records."""
    with client.daemon() as daemon:
        if stream:
            _stream(daemon.stream("recent_memory", tier=tier, limit=limit), as_json=as_json)
            return
        response = daemon.ask("recent_memory", tier=tier, limit=limit)
    _show(response["records"], "recent", as_json=as_json, tier=tier, limit=limit)


@memory.command(
    epilog=client.examples(
        'covenant memory search "what did I ask about ships"', "covenant memory search ships --min-relevance 0.3"
    )
)
@click.argument("words", metavar="QUERY...", nargs=-1, required=True)
@_tier
@client.limit(10)
@click.option("--min-relevance", type=click.FloatRange(0.0, 1.0), help="At least so near in meaning.")
@client.as_json
def search(words: tuple[str, ...], tier: str | None, limit: int, min_relevance: float | None, as_json: bool) -> None:
    """Find records by the meaning and the words of QUERY, the best first."""
    query = " ".join(words)
    response = client.ask("search_memory", query=query, tier=tier, limit=limit, min_relevance=min_relevance)
    asked = {"query": query, "tier": tier, "limit": limit, "min_relevance": min_relevance}
    _show(response["records"], "search", as_json=as_json, **asked)


@memory.command(epilog=client.examples('covenant memory put --tier longterm "the harbour opens at six"'))
@click.argument("text")
@click.option("--tier", type=click.Choice(_TIERS), default="working", show_default=True, help="Where to.")
@click.option("--metadata", metavar="JSON", help="What is kept beside it.")
@click.option("--parent", metavar="ID", help="The record that it comes from.")
@client.as_json
def put(text: str, tier: str, metadata: str | None, parent: str | None, as_json: bool) -> None:
    """Write a record of your own."""
    about = None if metadata is None else client.document(metadata, option="--metadata")
    response = client.ask("put_memory", tier=tier, text=text, metadata=about, parent=parent)
    _say(response, "memory_stored", as_json=as_json)


@memory.command(epilog=client.examples("covenant memory promote 6f0c3c2e-5f4b-4d0a-9a54-1c1f6e0f7a11 --tier longterm"))
@click.argument("record_id")
@click.option("--tier", type=click.Choice(_TIERS), required=True, help="Where to.")
@client.as_json
def promote(record_id: str, tier: str, as_json: bool) -> None:
    """Put the record RECORD_ID into another tier."""
    _say(client.ask("promote_memory", id=record_id, tier=tier), "memory_promoted", as_json=as_json)


@memory.command(epilog=client.examples("covenant memory purge --tier working --older-than-ms 86400000"))
@_tier
@client.cut_off("Records")
@client.as_json
def purge(tier: str | None, before_ms: int | None, older_than_ms: int | None, as_json: bool) -> None:
    """Delete old records: of one tier, or of all."""
    cut = client.moment(before_ms, older_than_ms)
    response = client.ask("purge_memory", tier=tier, before_ms=cut)
    if as_json:
        common.emit(client.envelope("memory_purged", response, tier=tier, before_ms=cut))
    else:
        common.say(f"{response['purged']} records deleted")


def _show(records: list[dict[str, Any]], mode: str, *, as_json: bool, **asked: Any) -> None:
    if as_json:
        asked = {"tier": None, "limit": None, "query": None, "min_relevance": None, **asked}
        common.emit({"kind": "memory_read", "mode": mode, **asked, "records": records})
        return
    rows = [_row(one) for one in records]
    terminal.print_table(("TIER", "MADE", "ID", "TEXT"), rows, nothing="no records")


def _row(record: dict[str, Any]) -> tuple[str, str, str, str]:
    return record["tier"], times.utc(record["created_at"]), record["id"], record["text"]


def _stream(parts: Any, *, as_json: bool) -> None:
    for part in parts:
        if as_json:
            common.emit(part)
        elif part["kind"] == "stream_chunk":
            common.say(common.visible("  ".join(_row(part["chunk"]))))
        elif part["kind"] == "memories":
            _show(part["records"], "recent", as_json=False)


def _say(response: dict[str, Any], kind: str, *, as_json: bool) -> None:
    if as_json:
        common.emit(client.envelope(kind, response))
    else:
        common.say(common.visible(f"{response['record']['id']} in {response['record']['tier']}"))


for _command in UPKEEP:
    memory.add_command(_command)
