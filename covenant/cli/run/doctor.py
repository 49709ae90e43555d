"""``covenant doctor``: what this host can enforce, and the exact mend for what it cannot."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from covenant.cli import common, spinner, times
from policy import errors

if TYPE_CHECKING:
    from policy.signing.expiry import Expiry
    from sandbox.doctor import Check

# As many are named; the metrics have all of them.
_MOST_NAMED = 8
# As covenant.stores.clock.BEHIND_MS.
_BEHIND_MS = 60_000
_MARKS = {"ok": "ok", "degraded": "DEGRADED", "missing": "MISSING", "unknown": "UNKNOWN"}


@click.command(epilog=common.examples("covenant doctor", "covenant doctor --export facts.json --for agents/librarian"))
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.option(
    "--deadline",
    type=click.IntRange(1, 3600),
    help="Seconds for each of the three starts of a sandbox; else the start deadline of the configuration.",
)
@click.option(
    "--export",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write this host's facts instead, for `policy diff --host FILE` and the like on another machine.",
)
@click.option(
    "--for",
    "packages",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="PACKAGE",
    help="With --export: with the paths, programs and volumes that PACKAGE is granted.",
)
@click.pass_context
def doctor(
    ctx: click.Context, as_json: bool, deadline: int | None, export: Path | None, packages: tuple[Path, ...]
) -> None:
    """Probe this host. Exit status 0 when linux-gvisor can be enforced here, else 1.

    Without root it says what could not be probed. Nothing that it starts or makes is left behind.
    """
    if export is not None:
        _export(export, packages, as_json=as_json)
        return
    if packages:
        raise errors.UsageError("--for goes with --export")
    from sandbox import config as configuration
    from sandbox import doctor as sandbox_doctor

    config = configuration.load(common.readable_state())
    with spinner.shown("checking this host", quiet=as_json):
        report = sandbox_doctor.examine(config, deadline_seconds=deadline or config.start_deadline_seconds)
        report = sandbox_doctor.Report((*report.checks, *of_the_home()))
    if as_json:
        common.emit(report.to_json())
    else:
        _print(report.to_json())
    if not report.enforceable:
        ctx.exit(common.EXIT_FAILED)


def _export(out: Path, packages: tuple[Path, ...], *, as_json: bool) -> None:
    """Write the facts of this host. They hold no secret: paths, sizes, digests, and names of providers."""
    from covenant.cli.policy import artefact_view
    from policy import decide
    from policy.explain import other_host
    from sandbox import config as configuration
    from sandbox.host import facts
    from sandbox.storage import package_reader

    config = configuration.load(common.readable_state())
    for path in packages:
        common.check_package(path)
    read = [package_reader.read(path) for path in packages]
    document = facts.for_export(
        config, [(decide.manifest_of(one), one.files) for one in read], artefact_view.own_places(config)
    )
    try:
        out.write_bytes(other_host.encode(document))
    except OSError as e:
        raise errors.UsageError(f"`{out}` cannot be written: {e.strerror}", hint="name another file") from e
    told = {"kind": "host_facts_exported", "out": str(out), "packages": [str(path) for path in packages]}
    if as_json:
        common.emit(told)
    else:
        common.say(f"{common.visible(str(out))}: the facts of this host, for {len(packages)} packages")


def of_the_home() -> list[Check]:
    """Return the checks of the daemon's home: its clock, and what ends within two weeks."""
    from policy.signing import expiry
    from sandbox.doctor import Check, Status

    now_ms = times.now_ms()
    checks, ending, behind_ms = [*_of_the_services()], *_ending(common.home())
    if behind_ms:
        found = f"the daemon's latest time is {times.age(behind_ms)} ahead of the clock"
        fix = "look at this machine's clock; if it is right now: covenant state clock"
        checks.append(Check("daemon's clock", Status.DEGRADED, "that expired grants and tokens stay so", found, fix))
    if soon := expiry.soon(ending, now_ms):
        more = f"; and {len(soon) - _MOST_NAMED} more" if len(soon) > _MOST_NAMED else ""
        words = "; ".join(one.line(now_ms) for one in soon[:_MOST_NAMED]) + more
        about = "nothing: what ends within 14 days stops to work then"
        fix = "covenant manifest renew DIR --key NAME; grant or enrol again"
        checks.append(Check("daemon's expiry", Status.DEGRADED, about, words, fix))
    return [*checks, *_of_the_agents()]


def _of_the_agents() -> Iterator[Check]:
    """Yield a check if a live daemon lists packages that it routes no intent to."""
    from covenant.cli.daemon import client
    from sandbox.doctor import Check, Status

    # Without a daemon nothing is routed.
    with contextlib.suppress(errors.CovenantError):
        lost = [one for one in client.ask("list_agents")["agents"] if not one["routable"]]
        if lost:
            more = f"; and {len(lost) - _MOST_NAMED} more" if len(lost) > _MOST_NAMED else ""
            words = "; ".join(f"{one['id'] or one['directory']}: {one['error']}" for one in lost[:_MOST_NAMED]) + more
            fixes = dict.fromkeys(one["fix"] for one in lost[:_MOST_NAMED] if one.get("fix"))
            about = "nothing: no intent is routed to these packages"
            fix = "; ".join(fixes) or "covenant agents list"
            yield Check("daemon's agents", Status.DEGRADED, about, words, fix)


def _of_the_services() -> Iterator[Check]:
    """Yield a check for each service of this home that lives and has read files that have changed since."""
    from sandbox.config import AT_START
    from sandbox.doctor import Check, Status
    from sandbox.storage import files_read

    late = ", ".join(AT_START)
    for service, place, lock, fix in (
        ("supervisor", common.state, "supervisor.lock", f"reload covenant-supervisor, or restart it for {late}"),
        ("daemon", common.home, "daemon.lock", "restart covenantd"),
    ):
        # Another user's directory is not looked into.
        with contextlib.suppress(OSError, errors.CovenantError):
            if found := files_read.changed(place(), lock):
                words = f"changed since the {service} read it: {', '.join(found)}"
                about = "nothing: the service goes on with what it read"
                yield Check(f"{service}'s files", Status.DEGRADED, about, words, f"systemctl {fix}")


def _ending(home: Path) -> tuple[list[Expiry], int]:
    """Return what ends, and how far the daemon's clock is behind. Grants and tokens only if a daemon runs."""
    from covenant.cli.daemon import client
    from covenant.keys import cosigning, left_unsigned
    from policy.signing.expiry import Expiry
    from sandbox.storage import package_reader

    with contextlib.suppress(errors.CovenantError):
        told = client.ask("list_expiries")
        rows = [Expiry(one["what"], one["name"], one["expires_at"]) for one in told["expiries"]]
        return rows, told["clock_behind_ms"] if told["clock_behind_ms"] >= _BEHIND_MS else 0
    found = []
    for path in left_unsigned.packages_below([home / "agents"]):
        with contextlib.suppress(errors.CovenantError):
            if (ends := cosigning.ends_at(package_reader.read(path))) is not None:
                found.append(Expiry("envelope", path.name, ends))
    return found, 0


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
