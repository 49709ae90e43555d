"""``covenant peers``: list, admit and revoke the peers of the daemon."""

from __future__ import annotations

from typing import Any

import click

from covenant.cli import common, terminal, times
from covenant.cli.daemon import client
from policy import errors

_WORDS = {
    "revoked": "revoked",
    "already_revoked": "was revoked already",
    "not_found": "no token begins so",
    "ambiguous": "more than one token begins so: give more of it",
    "self_revoke_forbidden": "that is your own token: --force revokes it all the same",
}
_DONE = ("revoked", "already_revoked")
# Of each token the daemon keeps a digest and so many characters.
_KEPT = 6


@click.group()
def peers() -> None:
    """See and change who may connect."""


@peers.command(
    "list", epilog=client.examples("covenant peers list --live-only", "covenant peers list --prefix 7Yk --json")
)
@client.limit(20)
@click.option("--prefix", metavar="KEY", help="Whose public key begins so.")
@click.option("--live-only", is_flag=True, help="Those who are let in.")
@click.option("--revoked-only", is_flag=True, help="Those who are not any more.")
@client.as_json
def list_peers(limit: int, prefix: str | None, live_only: bool, revoked_only: bool, as_json: bool) -> None:
    """Show the newest peers, by the first six characters of their tokens."""
    if live_only and revoked_only:
        raise errors.UsageError("--live-only and --revoked-only leave nobody", hint="give one")
    status = "live" if live_only else "revoked" if revoked_only else None
    response = client.ask("list_peers", limit=limit, pubkey_prefix=prefix, status_filter=status)
    if as_json:
        echo = {"limit": limit, "filter_pubkey_prefix": prefix, "matched_count": len(response["peers"])}
        common.emit(client.envelope("peer_list", response, **echo))
        return
    terminal.print_table(
        ("PEER", "TOKEN", "SINCE", "STATE", "KEY"), [_row(one) for one in response["peers"]], nothing="no peers"
    )
    if response["truncated"]:
        common.say("there are more: --limit", err=True)


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    ends = one.get("expires_at")
    state = "live" if ends is None else f"until {times.utc(ends)}"
    if one["revoked_at"] is not None:
        state = f"revoked {times.utc(one['revoked_at'])}"
    agent = one["agent_id"]
    return agent["display"], one["token_prefix"], times.utc(one["registered_at"]), state, agent["pubkey"]


@peers.command(
    epilog=client.examples(
        "covenant peers enroll ada@laptop --action memory.read --action a2a.recv.operator@local",
        "covenant peers enroll ada@laptop --json",
    )
)
@click.argument("display", metavar="NAME@HOST")
@click.option("--action", "actions", multiple=True, metavar="ACTION", help="What it may do; any number of times.")
@click.option("--expires-at", type=client.MILLISECONDS, metavar="MS", help="Until when, in Unix milliseconds.")
@click.option("--pubkey", metavar="KEY", help="Its public key, if it has one.")
@client.as_json
def enroll(display: str, actions: tuple[str, ...], expires_at: int | None, pubkey: str | None, as_json: bool) -> None:
    """Let NAME@HOST in, and print its token: once, and never again."""
    response = client.ask("enroll_peer", display=display, actions=list(actions), expires_at=expires_at, pubkey=pubkey)
    if as_json:
        common.emit(client.envelope("peer_enrolled", response))
        return
    agent = response["agent_id"]
    common.say(common.visible(f"{agent['display']} is let in, with the key {agent['pubkey']}; its token:"), err=True)
    common.say(common.visible(response["token_b58"]))


@peers.command(
    epilog=client.examples("covenant peers revoke 3mJr7A", "covenant peers revoke 3mJr --limit-matches 5 --json")
)
@click.argument("token_prefix")
@click.option("--force", is_flag=True, help="Even your own.")
@click.option("--limit-matches", type=click.IntRange(1, 1000), help="Show at most so many that begin so.")
@client.as_json
@click.pass_context
def revoke(ctx: click.Context, token_prefix: str, force: bool, limit_matches: int | None, as_json: bool) -> None:
    """Revoke the token that begins with TOKEN_PREFIX. Status 1 where no token, or more than one, begins so."""
    response = client.ask("revoke_peer", token_prefix=token_prefix, force=force, match_limit=limit_matches)
    outcome = response["outcome"]
    if as_json:
        common.emit(client.envelope("peer_revoke", response))
    else:
        who = f"{outcome['agent_id']['display']}: " if outcome.get("agent_id") else ""
        common.say(common.visible(who + _WORDS[outcome["type"]]))
        for one in outcome.get("matches", ()):
            common.say(common.visible(f"  {one['token_prefix']}  {one['agent_id']['display']}"))
        if outcome["type"] == "not_found" and len(token_prefix) > _KEPT:
            common.say(f"  fix: give {_KEPT} characters or the whole token: the daemon keeps no more of it", err=True)
    if outcome["type"] not in _DONE:
        ctx.exit(common.EXIT_FAILED)


@peers.command(epilog=client.examples("covenant peers rotate"))
@client.as_json
def rotate(as_json: bool) -> None:
    """Give the operator a new token, and let the old one in no more. With --json the token is printed."""
    response = client.ask("rotate_operator_token")
    if as_json:
        common.emit(client.envelope("peer_token_rotated", response))
    else:
        place = common.visible(str(common.home() / "peers" / "operator.token"))
        common.say(f"the new token, {response['token_b58'][:6]}..., is in {place}")


@peers.command(epilog=client.examples("covenant peers purge --older-than-ms 2592000000"))
@client.cut_off("What was revoked")
@client.as_json
def purge(before_ms: int | None, older_than_ms: int | None, as_json: bool) -> None:
    """Forget peers that were revoked."""
    cut = client.moment(before_ms, older_than_ms)
    response = client.ask("purge_peers", before_ms=cut)
    if as_json:
        common.emit(client.envelope("peers_purged", response, before_ms=cut))
    else:
        common.say(f"{response['purged']} peers forgotten")
