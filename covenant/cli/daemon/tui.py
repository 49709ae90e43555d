"""``covenant tui``: the terminal screens, over the same connections that the other verbs use."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from covenant.cli import common, terminal
from covenant.cli.daemon import client
from policy import errors

if TYPE_CHECKING:
    from covenant.tui.sources import Sources

# A daemon that is alive answers a list sooner; an intent takes as long as its agent.
_ANSWER_SECONDS = 15.0
_UNBOUNDED = ("submit_intent", "resume_intent")


@click.command(epilog=client.examples("covenant tui", "NO_COLOR=1 covenant tui"))
def tui() -> None:
    """Watch and steer agents in the terminal: runs, denials, memory, audit, grants, approvals and more.

    `?` shows the keys. It shows what the daemon and the supervisor say, and either one without the other.
    """
    if not terminal.on_terminal():
        raise errors.UsageError("the screens are for a terminal", hint="use the verbs: covenant ps --json")
    if importlib.util.find_spec("textual") is None:
        raise errors.ScreensMissingError(
            "the screens need the package `textual`, which is not installed",
            hint='pip install "textual>=8.2"',
        )
    from covenant.tui.app import TerminalApp

    # No mouse: the terminal's own selection works on, also over ssh.
    TerminalApp(sources()).run(mouse=False)


def sources() -> Sources:
    """Return what the screens ask: the daemon and the supervisor of this user."""
    from covenant.tui.sources import Sources

    return Sources(ask_daemon, ask_supervisor, explain, attach, grant)


def ask_daemon(kind: str, /, **fields: Any) -> dict[str, Any]:
    """Ask the daemon once.

    Raises:
        errors.CovenantError: it refused, or none answers in time.
    """
    with client.daemon(answer_seconds=None if kind in _UNBOUNDED else _ANSWER_SECONDS) as one:
        return one.ask(kind, **fields)


def ask_supervisor(kind: str, /, **fields: Any) -> dict[str, Any]:
    """Ask the supervisor once.

    Raises:
        errors.CovenantError: it refused, or none listens.
    """
    from covenant.cli.run import supervisor_client
    from sandbox.serve.api import client as api

    with supervisor_client.supervisor() as sock:
        if sock is None:
            raise errors.NoSupervisorError(
                "no supervisor listens, or not for this user",
                hint=f"{supervisor_client.start()}, and name this uid in `callers` of its configuration",
            )
        return api.ask(sock, kind, **fields)


def explain(denial: Mapping[str, Any], directory: str) -> list[str]:
    """Return the lines that explain a denial; with the line to add, where the package is in this home."""
    from covenant.cli.policy import denials

    return denials.explained(denial, common.home() / "agents" / directory if directory else None)


def grant(held: Mapping[str, Any], duration: str) -> str:
    """Give a lease to a request, signed with the operator's only key, which asks for no passphrase on this screen.

    Raises:
        errors.CovenantError: no such key signs, or the lease is refused.
    """
    from covenant.cli.run import approvals

    return approvals.grant_unasked(dict(held), duration)


def attach(run_id: str) -> int:
    """Run ``covenant attach`` on this terminal and return its exit status."""
    return subprocess.run([sys.executable, "-m", "covenant", "attach", run_id], check=False).returncode
