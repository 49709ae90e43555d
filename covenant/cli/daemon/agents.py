"""``covenant agents`` and ``covenant ignore``: which packages the daemon knows, and what it does not act on."""

from __future__ import annotations

from typing import Any

import click

from covenant.cli import common, terminal, times
from covenant.cli.daemon import client

# As policy.signing.expiry.SOON_MS, without what that imports.
_SOON_MS = 14 * 86_400_000


@click.group()
def agents() -> None:
    """See the packages below COVENANT_HOME/agents, and look at them anew."""


@agents.command("list", epilog=client.examples("covenant agents list", "covenant agents list --json"))
@client.as_json
def list_agents(as_json: bool) -> None:
    """Show every package: routable, or with the error that keeps it from being so."""
    _show(client.ask("list_agents", signatures=True), as_json=as_json)


@agents.command(epilog=client.examples("covenant agents reload"))
@client.as_json
def reload(as_json: bool) -> None:
    """Have the daemon look at the packages anew."""
    with client.daemon() as daemon:
        response = daemon.ask("reload_agents", signatures=True)
    _show(response, as_json=as_json)


def _show(response: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        common.emit(client.envelope("agents", response))
        return
    rows = []
    for one in response["agents"]:
        state = _state(one)
        budget = one["budget_credits_per_hour"] or "-"
        about = one.get("description") or "-"
        rows.append((one["id"] or one["directory"], one["version"] or "-", one["runtime"] or "-", budget, state, about))
    nothing = f"no packages in {common.visible(str(common.home() / 'agents'))}; `covenant manifest new` makes one"
    terminal.print_table(("AGENT", "VERSION", "RUNTIME", "CREDITS/H", "STATE", "DESCRIPTION"), rows, nothing=nothing)
    # A daemon of before says nothing of it.
    if response.get("truncated"):
        common.say("there are more packages than one answer has room for", err=True)


def _state(one: dict[str, Any]) -> str:
    """Return what a package is worth now: whether it is routed to, and whether its signature would let it run."""
    if not one["routable"]:
        fix = f" (fix: {one['fix']})" if one.get("fix") else ""
        return f"{one['error'] or 'not routable'}{fix}"
    signature, ends = one.get("signature"), one.get("expires_at")
    if signature == "unknown":
        return "routable, signature not verified"
    if signature not in (None, "ok"):
        return f"{signature}: {one.get('signature_error')}"
    if ends is not None and ends - times.now_ms() < _SOON_MS:
        return f"routable, signature ends {times.utc(ends)}"
    return "routable"


@click.group()
def ignore() -> None:
    """Ask what .covenantignore keeps the daemon from acting on."""


@ignore.command(epilog=client.examples('covenant ignore check "read /srv/app/.env"'))
@click.argument("words", metavar="TEXT...", nargs=-1, required=True)
@client.as_json
@click.pass_context
def check(ctx: click.Context, words: tuple[str, ...], as_json: bool) -> None:
    """Say whether TEXT would be ignored, and by which rule. Status 1 where it would."""
    report = client.ask("ignore_check", text=" ".join(words))
    if as_json:
        common.emit(client.envelope("ignore_report", report))
    elif report["ignored"]:
        common.say(common.visible(f"ignored by `{report['matched_pattern']}`"))
    else:
        common.say(f"not ignored by any of {report['rules_loaded']} rules")
    if report["ignored"]:
        ctx.exit(common.EXIT_FAILED)
