"""``covenant state``: repair the state that decides what may start, and the daemon's home."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from covenant.cli import common, times
from policy import errors

if TYPE_CHECKING:
    from sandbox.storage.trust_state import ClockAhead

_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


@click.group()
def state() -> None:
    """Repair the state: records of a clock that was wrong, modes of files."""


@state.command(epilog=common.examples("covenant state clock", "covenant state clock --yes"))
@click.option("--yes", is_flag=True, help="Do not ask whether this machine's clock is right.")
@_JSON
def clock(yes: bool, as_json: bool) -> None:
    """Take back what was recorded while this machine's clock was ahead.

    Look at the clock first: serials and expiry dates are compared with it from now on. A package that was signed while
    the clock was ahead has to be signed again. The daemon is asked too, if it runs.
    """
    now_ms = times.now_ms()
    if not yes and not as_json:
        common.confirmed(f"This machine's clock says {times.utc(now_ms)}. Is it right?")
    taken, asked = _of_the_state(now_ms), _of_the_daemon()
    if as_json:
        common.emit(
            {
                "kind": "state_clock",
                "now_ms": now_ms,
                "state": None if taken is None else {"from_ms": taken.greatest_time_ms, "agents": list(taken.agents)},
                "daemon": asked,
            }
        )
        return
    if taken is not None:
        common.say(f"the supervisor's record of {times.utc(taken.greatest_time_ms)} is taken back")
        for agent in taken.agents:
            common.say(f"  sign the package again: {common.visible(agent)}")
    if asked is not None and asked["changed"]:
        common.say(f"the daemon's record of {times.utc(asked['from_ms'])} is taken back")
    if taken is None and (asked is None or not asked["changed"]):
        common.say("no record is ahead of the clock")


@state.command(epilog=common.examples("covenant state modes", "covenant state modes --apply"))
@click.option("--apply", is_flag=True, help="Take the access of others away.")
@_JSON
@click.pass_context
def modes(ctx: click.Context, apply: bool, as_json: bool) -> None:
    """Name the files of COVENANT_HOME that other users can access, as version 1 left them, and close them.

    Exit status 3 when there are some and --apply was not given.
    """
    from covenant import homes

    home = Path(os.environ.get("COVENANT_HOME") or common.home()).absolute()
    found = list(homes.open_to_others(home))
    for path, _, needs in found if apply else ():
        homes.close_to_others(path, needs)
    if as_json:
        rows = [{"path": str(path), "mode": f"{mode:04o}", "needs": f"{needs:04o}"} for path, mode, needs in found]
        common.emit({"kind": "state_modes", "home": str(home), "open": rows, "applied": apply})
    else:
        for path, mode, needs in found:
            common.say(f"{mode:04o} {'->' if apply else 'needs'} {needs:04o}  {common.visible(str(path))}")
        if not found:
            common.say(f"nothing of {common.visible(str(home))} is open to other users")
    if found and not apply:
        if not as_json:
            common.say("covenant state modes --apply closes them", err=True)
        ctx.exit(common.EXIT_NO)


def _of_the_state(now_ms: int) -> ClockAhead | None:
    """Take back the records of the supervisor's state, with a row in its log; another user's state is left alone."""
    from covenant.cli.operator import trust_update_steps
    from covenant.keys import identity, trust_root
    from sandbox.storage.trust_state import State

    home = common.home()
    place = trust_update_steps.supervisor(home)
    if not place.exists() or not trust_root.is_ours(place):
        return None
    with State(place) as held:

        def before(ahead: ClockAhead) -> None:
            fields = {
                "operator": None,
                "from_ms": ahead.greatest_time_ms,
                "to_ms": now_ms,
                "agents": list(ahead.agents),
            }
            with trust_root.open_ledger(held) as ledger:
                ledger.append("clock_set", fields, issuer=identity.issuer(home), now_ms=now_ms)

        return held.set_clock(now_ms, before=before)


def _of_the_daemon() -> dict[str, Any] | None:
    """Ask the daemon of this home to do the same; None if none runs."""
    from covenant.cli.daemon import client

    with contextlib.suppress(errors.DaemonSilentError):
        answer = client.ask("set_clock")
        return {name: answer[name] for name in ("changed", "from_ms", "to_ms")}
    return None
