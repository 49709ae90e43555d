"""``covenant capabilities``: what you hold and gave, and granting, revoking and forgetting it."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

import click

from covenant.cli import common, terminal, times
from covenant.cli.daemon import client
from policy import errors

# Matches version 1's form of an action about a peer, by its name.
_BY_NAME = re.compile(r"a2a\.(?:send|recv|respond)\.([^@]+@.+)\Z")
_OF_A_NAME = (
    "it is for each peer with the name {name}, later ones too; `peer_pubkey_b58` in --scope binds it to a key,"
    " and `manifest_sha256` to an agent's manifest"
)
# 64 bytes in base58 have at least 86 characters, apart from leading zeros; fewer than 6 identify no grant.
_LEAST_OF_SIGNATURE, _SIGNATURE_CHARACTERS = 6, 80
_LOOKED_AT = 1000
_SCOPE = '{"version": 1, "max_uses": 3}'
_SHORTHAND = re.compile(r"(a2a\.(?:send|recv|respond)\.)([1-9A-HJ-NP-Za-km-z]{4,42})\Z")


@click.group()
def capabilities() -> None:
    """List, grant and revoke capabilities."""


@capabilities.command(
    epilog=client.examples("covenant capabilities recent", "covenant capabilities recent -n 100 --json")
)
@client.limit(10)
@client.as_json
def recent(limit: int, as_json: bool) -> None:
    """Show the newest grants to you or by you."""
    response = client.ask("recent_capabilities", limit=limit)
    if as_json:
        common.emit(client.envelope("capability_list", response, limit=limit))
        return
    rows = []
    for signed in response["capabilities"]:
        one = signed["capability"]
        ends = "-" if one["expires_at"] is None else times.utc(one["expires_at"])
        scope = "" if one["scope"] in ({}, None) else json.dumps(one["scope"], ensure_ascii=False)
        rows.append((one["action"], one["subject"]["display"], ends, signed["signature"], scope))
    terminal.print_table(("ACTION", "SUBJECT", "ENDS", "SIGNATURE", "SCOPE"), rows, nothing="no grants")


@capabilities.command(epilog=client.examples("covenant capabilities usage --json"))
@client.limit(100)
@client.as_json
def usage(limit: int, as_json: bool) -> None:
    """Show your grants, whether they hold, and what is left of those that are metered."""
    response = client.ask("capability_usage", limit=limit)
    if as_json:
        common.emit(client.envelope("capability_usage", response))
        return
    rows = []
    for one in response["grants"]:
        left = one.get("budget")
        uses = f"{left['used']} of {left['max_uses']}" if left else "-"
        state = one["effective"]
        rows.append((one["action"], state, uses, one["signature_b58"]))
    terminal.print_table(("ACTION", "STATE", "USED", "SIGNATURE"), rows, nothing="no grants")


@capabilities.command(
    epilog=client.examples(
        "covenant capabilities grant memory.read",
        'covenant capabilities grant tool.call.echo --scope \'{"version": 1, "max_uses": 3}\'',
        "covenant capabilities grant a2a.send.hello@agent",
    )
)
@click.argument("action")
@click.option("--scope", metavar="JSON", help="Bounds of it.")
@click.option("--expires-at", type=client.MILLISECONDS, metavar="MS", help="Until when, in Unix milliseconds.")
@click.option("--subject", metavar="NAME|KEY", help="To whom; otherwise to you.")
@click.option("--parent", metavar="SIGNATURE", help="Of which grant of yours this is a part.")
@client.as_json
def grant(
    action: str, scope: str | None, expires_at: int | None, subject: str | None, parent: str | None, as_json: bool
) -> None:
    """Grant ACTION.

    In an action about a peer (a2a.send.KEY) the beginning of the peer's key stands for the whole one.
    """
    given = None if scope is None else client.document(scope, option="--scope", example=_SCOPE)
    bounds = {} if given is None else given
    with client.daemon() as daemon:
        action = _whole(daemon, action)
        response = daemon.ask(
            "grant_capability", action=action, scope=bounds, expires_at=expires_at, subject=subject, parent_b58=parent
        )
        _say_unknown(daemon, action)
    _say_notes(action, bounds)
    if as_json:
        common.emit(client.envelope("capability_granted", response, scope=given, expires_at=expires_at))
    else:
        common.say(common.visible(f"{response['subject_display']} may {response['action']}"))
        common.say(common.visible(response["signature_b58"]), err=True)
        if (name := _BY_NAME.match(response["action"])) is not None and not bounds:
            common.say(common.visible(_OF_A_NAME.format(name=name[1])), err=True)


def _say_unknown(daemon: Any, action: str) -> None:
    """Warn on stderr of an action that nothing needs: version 1 grants any, so a misspelt one is granted."""
    from policy.capabilities import actions
    from policy.manifest import text

    if actions.known(action):
        return
    required = set[str]()
    with contextlib.suppress(errors.CovenantError):  # a warning is no reason to refuse
        for one in daemon.ask("list_agents")["agents"]:
            required |= {*one["required"], *one["optional"]}
    near = text.nearest(action, (*actions.may_mean(action), *sorted(required)))
    if action not in required and (near or actions.closed(action)):
        meant = f"; did you mean `{near}`?" if near else ""
        common.say(common.visible(f"warning: no request and no package here needs `{action}`{meant}"), err=True)


def _say_notes(action: str, scope: Any) -> None:
    """Warn on stderr of fields of the scope that bound nothing: a misspelt bound would be none."""
    from policy.capabilities import scopes
    from policy.manifest import text

    for name in scopes.notes(action, scope):
        near = text.nearest(name, tuple(sorted(scopes.known_fields(action))))
        meant = f"; did you mean `{near}`?" if near else ""
        common.say(common.visible(f"warning: `{name}` bounds nothing in a grant of {action}{meant}"), err=True)


def _whole(daemon: Any, action: str) -> str:
    """Return the action with the peer's whole key in place of its prefix.

    Raises:
        errors.UsageError: no peer's key has the prefix, or several have.
    """
    match = _SHORTHAND.match(action)
    if match is None:
        return action
    found = daemon.ask("list_peers", limit=1000, pubkey_prefix=match[2], status_filter="live")["peers"]
    keys = {one["agent_id"]["pubkey"] for one in found}
    if len(keys) != 1:
        many = "more than one peer's key begins" if keys else "no peer's key begins"
        raise errors.UsageError(f"{many} with `{match[2]}`", hint="covenant peers list; or name it as name@host")
    return match[1] + str(keys.pop())


@capabilities.command(epilog=client.examples("covenant capabilities revoke 3mJr7AoUXx2Wqd..."))
@click.argument("signature")
@client.as_json
def revoke(signature: str, as_json: bool) -> None:
    """Take the grant with SIGNATURE back, and what was narrowed from it. How it begins, as in tables, is enough.

    As in version 1 the status is 0 also where no grant that holds is meant: then nothing was revoked.
    """
    with client.daemon() as daemon:
        response = daemon.ask("revoke_capability", signature_b58=whole_signature(daemon, signature))
    if as_json:
        common.emit(client.envelope("capability_revoked", response))
    else:
        common.say("revoked" if response["removed"] else "there is no such grant that holds")


def whole_signature(daemon: Any, begins: str) -> str:
    """Return the signature of the only grant with this prefix; a prefix that is too short or unknown is returned
    unchanged.

    Raises:
        errors.UsageError: more than one may have it.
    """
    begins = begins.rstrip(".\u2026")
    if not _LEAST_OF_SIGNATURE <= len(begins) < _SIGNATURE_CHARACTERS:
        return begins
    shown = daemon.ask("recent_capabilities", limit=_LOOKED_AT)["capabilities"]
    found = {one["signature"] for one in shown if one["signature"].startswith(begins)}
    # There may be another match beyond the list: never revoke the wrong grant.
    if len(found) > 1 or len(shown) >= _LOOKED_AT:
        raise errors.UsageError(
            f"more than one grant may begin with `{begins}`", hint="give the whole: covenant capabilities recent --json"
        )
    return str(found.pop()) if found else begins


@capabilities.command(epilog=client.examples("covenant capabilities purge --older-than-ms 2592000000"))
@client.cut_off("What was revoked")
@client.as_json
def purge(before_ms: int | None, older_than_ms: int | None, as_json: bool) -> None:
    """Forget grants that were revoked or ended."""
    cut = client.moment(before_ms, older_than_ms)
    response = client.ask("purge_capabilities", before_ms=cut)
    if as_json:
        common.emit(client.envelope("capabilities_purged", response, before_ms=cut))
    else:
        common.say(f"{response['purged']} grants forgotten")
