"""``covenant attest``: whether what confines a running agent still lies within its manifest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from covenant.cli import common
from policy import errors

if TYPE_CHECKING:
    from sandbox.attest.live_runs import RunAttestation
    from sandbox.rundir.registry import Entry


@click.command(epilog=common.examples("covenant attest 6f1f64c0", "covenant attest --all --json"))
@click.argument("run", metavar="RUN|PACKAGE", required=False)
@click.option("--all", "every", is_flag=True, help="Every agent that runs now.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def attest(run: str | None, every: bool, as_json: bool) -> int:
    """Read the kernel back for RUN (its id, or the beginning of it) and compare it with the manifest.

    Exit status 3 when anything allows more than was granted, or cannot be read. Needs root. With --all, standby
    instances that wait for an intent are listed, and not compared.
    """
    import os

    from covenant.cli import spinner
    from covenant.cli.audit import commands
    from covenant.cli.run import manage
    from sandbox import progress
    from sandbox.attest import live_runs

    if (run is None) is not every:
        raise errors.UsageError("name one run, or say --all", hint="covenant ps lists the runs")
    if os.geteuid() != 0:
        raise errors.PrivilegeError("reading another's processes back needs root", hint="run it with sudo")
    if run is not None:
        run = manage.of_package(run)
    state = common.state()
    # The order matters: an instance that gets its intent between the two readings is in both.
    waiting, live = live_runs.waiting(state / "runs"), live_runs.live(state / "runs")
    waiting = [entry for entry in waiting if entry.run_id not in live]
    ids = _chosen(live, run, waiting)
    started = commands.started_policies() if ids else {}
    answers = list[live_runs.RunAttestation]()
    with spinner.shown("reading the log", quiet=as_json), progress.step("reading the kernel back") as further:
        for number, one in enumerate(ids, 1):
            further(f"reading the kernel back: run {number} of {len(ids)}")
            if (found := live_runs.answer(state, one, started)) is not None:
                answers.append(found)
    if run is not None and not answers:
        raise errors.NoRunError(f"run `{run}` has ended")
    holds = all(found.holds for found in answers)
    if as_json:
        idle = [{"run_id": entry.run_id, "agent_id": entry.agent_id} for entry in waiting if every]
        runs = [found.to_json() for found in answers]
        common.emit({"kind": "attest", "holds": holds, "runs": runs, "waiting": idle})
    else:
        for found in answers:
            _print(found)
        if not answers:
            common.say("no agent is running")
        for entry in waiting if every else ():
            common.say(f"{entry.run_id} {common.visible(entry.agent_id)}: standby instance, waits for its intent")
    return common.EXIT_DONE if holds else common.EXIT_NO


def _chosen(live: list[str], run: str | None, waiting: Sequence[Entry]) -> list[str]:
    if run is None:
        return live
    chosen = [one for one in live if one.startswith(run)]
    if not chosen and any(one.run_id.startswith(run) for one in waiting):
        raise errors.NoRunError(f"`{run}` is a standby instance, and no run yet", hint="give the package an intent")
    if len(chosen) != 1:
        how = "no live run has" if not chosen else f"{len(chosen)} live runs have"
        raise errors.NoRunError(f"{how} an id that begins with `{run}`", hint="covenant attest --all lists them")
    return chosen


def _print(found: RunAttestation) -> None:
    verdict = "held within its manifest" if found.holds else "NOT HELD within its manifest"
    common.say(f"{found.run_id} {common.visible(found.agent_id)}: {verdict} (policy {found.policy_digest[:16]})")
    for layer in found.layers:
        words = "" if layer.holds else f": {layer.found}; expected {layer.expected}"
        common.say(common.visible(f"  {layer.name:<10} {layer.standing}{words}"))
    for line in found.domains:
        common.say(common.visible(f"  manifest   {line}"))
