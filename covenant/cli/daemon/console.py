"""``covenant console``: a link that logs one browser in to the daemon's web console."""

from __future__ import annotations

import click

from covenant.cli import common
from covenant.cli.daemon import client


@click.command(epilog=client.examples("covenant console"))
@client.as_json
def console(as_json: bool) -> None:
    """Print a link to the web console, which logs one browser in, once, within two minutes.

    Keep the link to yourself: for these two minutes it is as good as your token. The session ends after twelve hours,
    with `log out`, when the daemon restarts, and when the operator's token is rotated.
    """
    opened = client.ask("open_console")
    if as_json:
        common.emit(client.envelope("console", opened))
        return
    common.say(opened["url"])
    common.say("it works once, within two minutes; open it in a browser of this machine", err=True)
