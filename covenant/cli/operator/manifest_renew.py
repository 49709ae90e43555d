"""``covenant manifest renew``: sign packages again, unchanged, so that their signatures end later."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from covenant.cli import common, terminal, times
from policy import errors

if TYPE_CHECKING:
    from covenant.keys.cosigning import SignaturePlan
    from policy.signing.envelope import PublicKey

_DAY_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class _Row:
    package: Path
    agent_id: str
    ended_ms: int | None
    plan: SignaturePlan | None
    error: errors.CovenantError | None = None


@click.command(
    epilog=common.examples(
        "covenant manifest renew agents/* --key operator",
        "covenant manifest renew /srv/agents --key operator --within 14d --expires 90d",
    )
)
@click.argument("directories", metavar="DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--key", "name", metavar="NAME", help="The operator key to sign with.")
@click.option("--ssh-agent", "agent", metavar="KEY", help="Sign with a key of ssh-agent: its comment or fingerprint.")
@click.option("--expires", metavar="TIME", help="When the signatures end.  [default: as long as before]")
@click.option("--within", metavar="TIME", help="Only packages whose signature ends within this time.")
@click.option("--passphrase-file", metavar="FILE", help="Read the passphrase from FILE (- for stdin).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def renew(
    ctx: click.Context,
    directories: tuple[Path, ...],
    name: str | None,
    agent: str | None,
    expires: str | None,
    within: str | None,
    passphrase_file: str | None,
    as_json: bool,
) -> None:
    """Sign packages again whose files are exactly those that were signed. DIR is a package, or contains packages.

    Audience and approvals stay. A package whose files were changed is refused: `covenant manifest sign` signs it.
    Signatures of other operators are not kept, and named. Status 1 if a package was refused.
    """
    lifetime_ms = None if expires is None else times.duration_ms(expires, option="--expires")
    within_ms = None if within is None else times.duration_ms(within, option="--within")
    door, now_ms = common.door(name, agent, passphrase_file), times.now_ms()
    rows = []
    for package in _packages(directories):
        row = _planned(package, door.key, lifetime_ms=lifetime_ms, now_ms=now_ms)
        if within_ms is None or row.ended_ms is None or row.ended_ms - now_ms < within_ms:
            rows.append(row)
    from covenant.keys import signing

    for row in rows:
        if row.plan is not None:
            raw = row.plan.signed_by(door)
            with signing.opened(row.package) as directory:
                signing.write_envelope(directory, raw)
    _report(rows, as_json=as_json)
    if any(row.error is not None for row in rows):
        ctx.exit(common.EXIT_FAILED)


def _report(rows: Sequence[_Row], *, as_json: bool) -> None:
    if as_json:
        shown = [
            {
                "package": str(row.package),
                "agent_id": row.agent_id or None,
                "ended_ms": row.ended_ms,
                "expires_at": None if row.plan is None else row.plan.statement.expires_at,
                "error": None if row.error is None else row.error.to_json(),
            }
            for row in rows
        ]
        common.emit({"kind": "manifests_renewed", "packages": shown})
        return
    table = [
        (
            row.agent_id or str(row.package),
            "-" if row.ended_ms is None else times.utc(row.ended_ms),
            f"refused: {row.error}" if row.plan is None else times.utc(row.plan.statement.expires_at),
        )
        for row in rows
    ]
    terminal.print_table(("AGENT", "ENDED", "ENDS"), table, nothing="no package to renew")
    for row in rows:
        if row.plan is not None and row.plan.why:
            common.say(f"note: {common.visible(row.agent_id)}: {common.visible(row.plan.why)}", err=True)


def _packages(directories: Sequence[Path]) -> Iterator[Path]:
    """Yield the packages: each directory with a manifest, or those right below it."""
    for directory in directories:
        if (directory / "agent.toml").exists():
            yield directory
            continue
        below: list[Path] = []
        with contextlib.suppress(OSError):
            below = sorted(path.parent for path in directory.glob("*/agent.toml"))
        if not below:
            raise errors.PackageError(f"`{directory}` is no package and contains none", where=str(directory))
        yield from below


def _planned(package: Path, key: PublicKey, *, lifetime_ms: int | None, now_ms: int) -> _Row:
    from covenant.keys import signing
    from policy.manifest import parse
    from sandbox.storage import package_reader as reader

    try:
        with signing.opened(package) as directory:
            signing.discard_unfinished(directory)
            read = reader.read(directory)
        manifest = parse.parse(read.manifest)
    except errors.CovenantError as e:
        return _Row(package, "", None, None, e)
    from covenant.keys import cosigning

    agent_id, ended = manifest.agent.id, cosigning.ends_at(read)
    try:
        plan = cosigning.renewal(read, manifest, key, now_ms=now_ms, lifetime_ms=lifetime_ms)
    except errors.CovenantError as e:
        return _Row(package, agent_id, ended, None, e)
    return _Row(package, agent_id, ended, plan)
