"""``covenant export``: send rows of the audit logs to a collector, a file or stdout, as they are written."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import click

from covenant.cli import common
from covenant.cli.audit import read_logs
from policy import errors

if TYPE_CHECKING:
    from covenant.export import sinks, worker
    from sandbox.export_settings import ExportSettings

# How long `--once` waits for a target that takes nothing: longer than a collector's restart.
_PATIENCE_SECONDS = 60.0


@click.command(
    epilog=common.examples(
        "covenant export --ocsf - --once",
        "covenant export --otlp http://127.0.0.1:4318",
        "covenant export --ocsf /var/lib/covenant-export/ocsf.jsonl --proofs /var/lib/covenant-export/proofs.jsonl",
    )
)
@click.option("--otlp", metavar="URL", help="Post logs, spans and metrics to this collector (OTLP/HTTP, JSON).")
@click.option("--ocsf", metavar="FILE", help="Append OCSF events to this file as JSON lines; - is stdout.")
@click.option("--proofs", metavar="FILE", help="Append a proof for each row that a signed checkpoint covers.")
@click.option("--headers", metavar="FILE", help="A private file of header lines for the collector.")
@click.option("--ca", metavar="FILE", help="The authorities that are trusted for the collector.")
@click.option("--log", "names", multiple=True, type=click.Choice(("supervisor", "daemon")), help="Only this log.")
@click.option(
    "--cursors",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Directory of the positions.  [default: $COVENANT_HOME/export]",
)
@click.option("--once", is_flag=True, help="End when all rows that are there are delivered.")
@click.option(
    "--timeout",
    type=click.FloatRange(0.1, 86_400),
    metavar="SECONDS",
    help="With --once: fail once a target has taken nothing for so long.  [default: 60]",
)
@click.pass_context
def export(
    ctx: click.Context,
    otlp: str | None,
    ocsf: str | None,
    proofs: str | None,
    headers: str | None,
    ca: str | None,
    names: tuple[str, ...],
    cursors: Path | None,
    once: bool,
    timeout: float | None,
) -> None:
    """Send the rows of both audit logs to other systems, each at least once and in order.

    Without --otlp, --ocsf and --proofs the table [export] of config.toml holds. As root a process without rights does
    the work, as uid 64984; it gets rows and no file of a log. An outage loses nothing: the log keeps the rows.
    """
    from covenant.export import worker
    from covenant.export.cursor import opened
    from covenant.export.sinks import About
    from sandbox.audit import follow_process, log_follow

    if timeout is not None and not once:
        raise errors.UsageError("--timeout is for --once", hint="add --once; without it an outage is waited for")
    settings = _settings(otlp=otlp, ocsf=ocsf, proofs=proofs, headers=headers, ca=ca)
    followers = {name: log_follow.Follower(name, path) for name, path in _logs(names)}
    patience = (timeout or _PATIENCE_SECONDS) if once else None
    about = About(os.uname().nodename, metadata.version("covenant-supervisor"), _tell, patience)
    owner = follow_process.WORKER_UID if os.geteuid() == 0 else os.geteuid()
    targets = _targets(settings, about, owner, to_stdout=ocsf == "-")
    place = cursors or common.home() / "export"
    from covenant.export import cursor

    with opened(place, cursor.directory(place, owner)) as kept:
        readers: follow_process.Readers
        if os.geteuid() == 0:
            # Nothing is imported after this: the worker may not be able to read the code.
            found = follow_process.separate(followers)
            if isinstance(found, int):
                ctx.exit(found if found >= 0 else 128 - found)
            readers = found
        else:
            readers = follow_process.LocalReaders(followers)
        worker.run(targets, list(followers), readers, kept, about, once=once)


def _settings(**given: str | None) -> ExportSettings:
    """The options, or the table of the configuration where no target is given.

    Raises:
        errors.UsageError: there is no target.
    """
    import pydantic

    from sandbox import config
    from sandbox.export_settings import ExportSettings

    if any(given[name] for name in ("otlp", "ocsf", "proofs")):
        paths = {name: value for name, value in given.items() if value and value != "-"}
        absolute = {name: value if name == "otlp" else str(Path(value).absolute()) for name, value in paths.items()}
        try:
            return ExportSettings(**absolute)  # type: ignore[arg-type]
        except pydantic.ValidationError as e:
            name = str(e.errors(include_url=False)[0]["loc"][0])
            hint = "https://HOST[:PORT][/PATH], or http:// on this machine alone" if name == "otlp" else ""
            raise errors.UsageError(f"--{name} is not usable: `{given[name]}`", hint=hint) from e
    found = config.load(common.readable_state()).export
    if not (found.otlp or found.ocsf or found.proofs):
        raise errors.UsageError(
            "there is nowhere to export to", hint="give --otlp, --ocsf or --proofs, or [export] in config.toml"
        )
    return found


def _logs(names: tuple[str, ...]) -> list[tuple[str, Path]]:
    found = [(name, path) for name, path in read_logs.places() if not names or name in names]
    # A log that is made later is followed from then on, where another is there.
    there = [(name, path) for name, path in found if os.access(path, os.X_OK)]
    if not there:
        looked = " or ".join(f"`{path}`" for _, path in found)
        raise errors.LedgerError(
            f"no log can be read: {looked}", hint="set COVENANT_HOME or COVENANT_STATE, or repeat with sudo"
        )
    return found if os.geteuid() == 0 else there


def _targets(settings: ExportSettings, about: sinks.About, owner: int, *, to_stdout: bool) -> worker.Targets:
    from covenant.export import collector, worker
    from covenant.export.cursor import directory
    from covenant.export.ocsf_file import Lines
    from sandbox import export_settings

    def lines(path: Path) -> Lines:
        return Lines(path, directory(path.parent, owner), about)

    ocsf = Lines(None, -1, about) if to_stdout else None
    return worker.Targets(
        ocsf=lines(settings.ocsf) if settings.ocsf is not None else ocsf,
        proofs=lines(settings.proofs) if settings.proofs is not None else None,
        otlp=settings.otlp,
        headers={} if settings.headers is None else export_settings.headers(settings.headers),
        tls=None if settings.ca is None else collector.trusted(str(settings.ca)),
    )


def _tell(text: str) -> None:
    common.say(f"covenant export: {common.visible(text)}", err=True)
    sys.stderr.flush()
