"""``covenant doctor``: what this host can enforce, and the exact mend for what it cannot."""

from __future__ import annotations

import click

from covenant.cli import common, spinner

_MARKS = {"ok": "ok", "degraded": "DEGRADED", "missing": "MISSING", "unknown": "UNKNOWN"}


@click.command(epilog=common.examples("covenant doctor", "covenant doctor --json"))
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.option(
    "--deadline",
    type=click.IntRange(1, 3600),
    help="Seconds for each of the three starts of a sandbox; else the start deadline of the configuration.",
)
@click.pass_context
def doctor(ctx: click.Context, as_json: bool, deadline: int | None) -> None:
    """Probe this host. Exit status 0 when linux-gvisor can be enforced here, else 1.

    Without root it says what could not be probed. Nothing that it starts or makes is left behind.
    """
    from sandbox import config as configuration
    from sandbox import doctor as sandbox_doctor

    config = configuration.load(common.readable_state())
    with spinner.shown("checking this host", quiet=as_json):
        report = sandbox_doctor.examine(config, deadline_seconds=deadline or config.start_deadline_seconds)
    if as_json:
        common.emit(report.to_json())
    else:
        _print(report.to_json())
    if not report.enforceable:
        ctx.exit(common.EXIT_FAILED)


def _print(document: dict[str, object]) -> None:
    checks = document["checks"]
    assert isinstance(checks, list)
    width = max(len(c["name"]) for c in checks)
    for c in checks:
        common.say(f"{_MARKS[c['status']]:<9} {c['name']:<{width}}  {common.visible(c['found'])}")
        if c["status"] != "ok":
            common.say(f"{'':<9} {'':<{width}}  enforces: {c['enforces']}")
            common.say(f"{'':<9} {'':<{width}}  fix: {common.visible(c['mend'])}")
    common.say()
    if document["enforceable"]:
        common.say("linux-gvisor can be enforced on this host")
    else:
        wanting = [c["name"] for c in checks if c["required"] and c["status"] in ("missing", "unknown")]
        common.say(f"linux-gvisor cannot be said to be enforced on this host: {', '.join(wanting)}")
