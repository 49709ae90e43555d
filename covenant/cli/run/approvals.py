"""The command line about requests that wait for an operator: list them, grant one by a lease, deny one.

The supervisor answers where one listens; as root the same code answers in this process.
"""

from __future__ import annotations

import os
from typing import Any, Final

import click

from covenant.cli import common, terminal, times
from policy import errors

_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
# The longest life of a lease that names no time: for one use, and for the run.
_ONCE_MS: Final = 3_600_000
_RUN_MS: Final = 29 * 86_400_000
_TARGET: Final = 60


@click.group()
def approvals() -> None:
    """See what agents wait for, grant it for a time, or deny it."""


@approvals.command("list", epilog=common.examples("covenant approvals list"))
@_JSON
def list_(as_json: bool) -> None:
    """List what waits for an operator, and the leases that were given."""
    answer = ask("list")
    if as_json:
        common.emit({"kind": "approvals", **answer})
        return
    now_ms = answer["now_ms"]
    rows = [
        (one["id"], one["run_id"][:8], one["agent_id"], one["kind"], one["target"][:_TARGET], _left(one, now_ms))
        for one in answer["requests"]
    ]
    terminal.print_table(("REQUEST", "RUN", "AGENT", "KIND", "TARGET", "WAITS"), rows, nothing="nothing waits")
    if answer["leases"]:
        leases = [
            (one["run_id"][:8], one["kind"], one["target"][:_TARGET], one["duration"], times.utc(one["ends_ms"]))
            for one in answer["leases"]
        ]
        common.say("")
        terminal.print_table(("RUN", "KIND", "LEASED", "FOR", "ENDS"), leases, nothing="no lease")


@approvals.command(
    epilog=common.examples(
        "covenant approvals grant 3f9c --once --key ann", "covenant approvals grant 3f9c --until 10m --key ann"
    )
)
@click.argument("request")
@click.option("--once", is_flag=True, help="Grant one use.")
@click.option("--run", "for_run", is_flag=True, help="Grant it for as long as the run lives.")
@click.option("--until", metavar="TIME", help="Grant it for so long, such as 10m, at most 30d.")
@click.option("--key", "name", metavar="NAME", help="The operator key to sign with.")
@click.option("--ssh-agent", "agent", metavar="KEY", help="Sign with a key of ssh-agent: its comment or fingerprint.")
@click.option("--passphrase-file", metavar="FILE", help="Read the passphrase from FILE (- for stdin).")
@_JSON
def grant(
    request: str,
    once: bool,
    for_run: bool,
    until: str | None,
    name: str | None,
    agent: str | None,
    passphrase_file: str | None,
    as_json: bool,
) -> None:
    """Grant REQUEST by a lease that an operator signs: for one use, for the run, or for a time.

    The lease holds for the very target of the request in its run, and for nothing else.
    """
    from covenant.keys import leasing

    if once + for_run + (until is not None) != 1:
        raise errors.UsageError(
            "a lease is for one use, for the run or for a time", hint="give --once, --run or --until"
        )
    duration = "once" if once else "run" if for_run else "until"
    lasts_ms = _ONCE_MS if once else _RUN_MS if until is None else times.duration_ms(until, option="--until")
    held = _held(request)
    now_ms = times.now_ms()
    door = common.door(name, agent, passphrase_file)
    raw, _ = leasing.lease_of(held, door, duration=duration, expires_ms=now_ms + lasts_ms, now_ms=now_ms)
    lease = ask("grant", request=held["id"], lease=raw.decode("ascii"))["lease"]
    if as_json:
        common.emit({"kind": "approval_granted", **lease})
        return
    how = {"once": "for one use", "run": "for the run", "until": f"until {times.utc(lease['ends_ms'])}"}[duration]
    common.say(common.visible(f"granted {lease['target']} to run {held['run_id'][:8]} {how}"))


@approvals.command(epilog=common.examples("covenant approvals deny 3f9c"))
@click.argument("request")
@_JSON
def deny(request: str, as_json: bool) -> None:
    """Deny REQUEST. The same target is denied for a minute without a question."""
    denied = ask("deny", request=request)["denied"]
    if as_json:
        common.emit({"kind": "approval_denied", **denied})
        return
    common.say(common.visible(f"denied {denied['target']}"))


def ask(verb: str, **fields: Any) -> dict[str, Any]:
    """Return the answer of the supervisor, or of this process where there is none.

    Raises:
        errors.PrivilegeError: there is none, and this is not root.
        errors.CovenantError: it was refused.
    """
    from covenant.cli.run import supervisor_client

    with supervisor_client.supervisor() as sock:
        if sock is not None:
            from sandbox.serve.api import client

            return client.ask(sock, "approvals", verb=verb, **fields)
    if os.geteuid() != 0:
        raise errors.PrivilegeError("runs are root's to look at where no supervisor listens", hint="run it with sudo")
    from sandbox.control import approvals as control
    from sandbox.control import manager

    return control.VERBS[verb](common.state(), manager.Requester("operator@local", root=True), **fields)


def _held(request: str) -> dict[str, Any]:
    found = [one for one in ask("list")["requests"] if request and one["id"].startswith(request)]
    if len(found) != 1:
        how = f"{len(found)} requests begin with" if found else "no request begins with"
        raise errors.NoApprovalError(f"{how} `{request[:64]}`", hint="covenant approvals list shows what waits")
    held: dict[str, Any] = found[0]
    return held


def _left(one: dict[str, Any], now_ms: int) -> str:
    return f"{max(0, one['ends_ms'] - now_ms) // 1000} s more"
