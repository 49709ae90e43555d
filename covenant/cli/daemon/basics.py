"""The verbs about the daemon as a whole: is it there, which is it, what may the operator do, and does it all agree."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import click

from covenant.cli import common, terminal
from covenant.cli.daemon import client as daemon_client
from policy import errors


@click.command(epilog=daemon_client.examples("covenant ping", "covenant ping --json"))
@daemon_client.as_json
def ping(as_json: bool) -> None:
    """Ask the daemon whether it is there. Ends with status 1 where none answers."""
    with daemon_client.daemon() as daemon:
        began = time.perf_counter()
        daemon.ask("ping")
        took = int((time.perf_counter() - began) * 1e6)
    if as_json:
        common.emit({"kind": "daemon_ping", "status": "ok"})
    else:
        common.say(f"the daemon of {common.visible(str(common.home()))} answers ({took} µs)")


@click.command(epilog=daemon_client.examples("covenant version"))
@daemon_client.as_json
def version(as_json: bool) -> None:
    """Show the version of this program, and the protocol of the daemon where one runs. No token is needed."""
    import importlib.metadata

    from covenant.wire import client

    ours, protocol = importlib.metadata.version("covenant-supervisor"), None
    try:
        with client.opened(common.home(), answer_seconds=client.CONNECT_SECONDS) as daemon:
            protocol = daemon.ask("protocol_info")["info"]
    except errors.DaemonSilentError:
        pass
    if as_json:
        common.emit({"kind": "version", "version": ours, "daemon": protocol})
        return
    common.say(f"covenant {ours}")
    if protocol is None:
        common.say("no daemon runs here", err=True)
    else:
        spoken = f"versions {protocol['min_supported']} to {protocol['max_supported']}"
        common.say(common.visible(f"daemon: {protocol['protocol']} {protocol['version']}, {spoken}"))


@click.command(epilog=daemon_client.examples("covenant bootstrap", "covenant bootstrap --json"))
@daemon_client.as_json
def bootstrap(as_json: bool) -> None:
    """Grant the operator what every package's manifest requires, and memory.write. Again, it changes nothing."""
    with daemon_client.daemon() as daemon:
        listed = daemon.ask("list_agents")["agents"]
        wanted = sorted({"memory.write"} | {action for one in listed if one["routable"] for action in one["required"]})
        held = _held(daemon.ask("recent_capabilities", limit=daemon_client.MOST)["capabilities"])
        granted = [action for action in wanted if action not in held]
        made = [daemon.ask("grant_capability", action=action, scope={}) for action in granted]
    if as_json:
        kept = [action for action in wanted if action in held]
        now = [{"action": one["action"], "signature_b58": one["signature_b58"]} for one in made]
        common.emit({"kind": "bootstrap_result", "granted": now, "already_granted": kept})
        return
    for action in wanted:
        word = "granted" if action in granted else "held already"
        common.say(common.visible(f"{action}: {word}"))


def _held(capabilities: list[dict[str, Any]]) -> set[str]:
    """The actions of grants without bounds and without an end, that this operator is the subject and grantor of."""
    found = (one["capability"] for one in capabilities)
    return {
        one["action"]
        for one in found
        if one["scope"] in ({}, None) and one["expires_at"] is None and one["subject"] == one["granted_by"]
    }


@click.command(epilog=daemon_client.examples("covenant verify", "covenant verify --window 1000 --json"))
@click.option(
    "--window", type=click.IntRange(1, daemon_client.MOST), default=100, show_default=True, help="Newest of each."
)
@daemon_client.as_json
@click.pass_context
def verify(ctx: click.Context, window: int, as_json: bool) -> None:
    """Hold memory, audit, capabilities and receipts against each other. Status 3 where they disagree."""
    report = daemon_client.ask("verify", window=window)
    if as_json:
        common.emit(daemon_client.envelope("verify_report", report))
    else:
        for check in report["checks"]:
            word = terminal.styled("ok", fg="green") if check["passed"] else terminal.styled("FAILED", fg="red")
            common.say(f"{word}  {common.visible(check['name'])}: {common.visible(check['message'])}")
        for one in report["drift"]:
            about = f" {one['id']}" if one.get("id") else ""
            common.say(common.visible(f"{one['kind']}{about}: {one['message']}"))
            common.say(common.visible(f"  fix: {one['repair']}"))
        common.say(
            f"{len(report['drift'])} disagreements in the last {window} of each; of {report['orphans_total']} of them"
            " the other half is missing"
        )
    if report["drift"] or report["orphans_total"] or not all(check["passed"] for check in report["checks"]):
        ctx.exit(common.EXIT_NO)


@click.command(epilog=daemon_client.examples("covenant daemon", "covenantd --help"))
@click.option("--allow-root", is_flag=True, help="Run as root all the same.")
def daemon(allow_root: bool) -> None:
    """Serve this home in this terminal until Ctrl-C, as covenantd does."""
    program = "from covenant.start import entry; entry()"
    os.execv(sys.executable, [sys.executable, "-c", program, *(["--allow-root"] if allow_root else [])])  # noqa: S606


@click.command(
    epilog=daemon_client.examples(
        'eval "$(covenant completion bash)"', "covenant completion fish > ~/.config/fish/completions/covenant.fish"
    )
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print what completes covenant's words in SHELL."""
    from click import shell_completion

    from covenant.cli import main

    made = shell_completion.get_completion_class(shell)
    assert made is not None
    source = made(main.cli, {}, "covenant", "_COVENANT_COMPLETE").source()
    # Click's script for fish cuts what a word means at its first comma.
    common.say(source.replace('string split ","', 'string split --max 1 ","'))
