"""``covenant audit archive``: cut the oldest rows of the supervisor's log, and keep them as a log of their own."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import click

from covenant.cli import common, times
from policy import errors


@click.command(
    epilog=common.examples(
        "covenant audit archive /var/backups/covenant-2026 --older-than 90d",
        "sudo env COVENANT_STATE=/var/backups/covenant-2026 covenant audit verify",
    )
)
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--older-than", metavar="TIME", required=True, help="Cut rows up to the last that is older: 90d, 12h.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def archive(directory: Path, older_than: str, as_json: bool) -> None:
    """Move the oldest rows of the supervisor's log into DIRECTORY, which is made.

    What is left begins with a signed record of what was cut. DIRECTORY is a log of its own: COVENANT_STATE names it for
    `audit verify`, `recent` and `show`. Stop the supervisor first; runs that live are refused too.
    """
    from covenant.keys import identity
    from sandbox.audit import log_cut, open_runs
    from sandbox.supervisor import open_ledger

    now_ms = times.now_ms()
    before_ms = now_ms - times.duration_ms(older_than, option="--older-than")
    state = common.state()
    if not (state / "audit").is_dir():
        raise errors.LedgerError(f"there is no log of a supervisor below `{state}`", hint="set COVENANT_STATE")
    if os.stat(state / "audit").st_uid != os.geteuid():
        raise errors.LedgerError("the supervisor's log is another user's", hint="repeat with sudo", where=str(state))
    above = directory.absolute().parent
    if not above.is_dir():
        hint = f"make it, in a place of your own: mkdir -p {shlex.quote(str(above))}"
        raise errors.UsageError(f"the archive `{directory}` would be in `{above}`, which is no directory", hint=hint)
    # Opening the log completes what a kill or a power cut left of it.
    open_ledger(state).close()
    try:
        done = log_cut.cut(
            state,
            before_ms,
            directory.absolute(),
            issuer=identity.issuer(common.home()),
            now_ms=now_ms,
            before=lambda: open_runs.forget_settled(state),
        )
    except OSError as e:
        raise errors.LedgerError(f"the log was not cut: {e.strerror}", where=str(state)) from e
    if as_json:
        place = str(directory.absolute()) if done.cut else None
        common.emit({"kind": "audit_archived", "cut": done.cut, "left": done.left, "before_ms": before_ms,
                     "last_ms": done.last_ms, "archive": place})  # fmt: skip
    elif done.cut:
        common.say(f"{done.cut} rows are in {common.visible(str(directory))}; {done.left} are left")
    else:
        common.say("no row is older that can be cut")
