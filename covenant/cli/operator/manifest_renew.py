"""``covenant manifest renew``: sign packages again, unchanged, so that their signatures end later."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from covenant.cli import common, terminal, times
from covenant.cli.operator import trust_update_steps
from policy import errors

if TYPE_CHECKING:
    from covenant.keys.cosigning import SignaturePlan
    from covenant.keys.keystore import StoredKey
    from covenant.keys.signers import Signer
    from policy.package import Package

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
    for package in common.packages(directories):
        row = _planned(package, door, _typed(name, agent), lifetime_ms=lifetime_ms, now_ms=now_ms)
        if within_ms is None or row.ended_ms is None or row.ended_ms - now_ms < within_ms:
            rows.append(row)
    if planned := [row.plan.statement for row in rows if row.plan is not None]:
        trust_update_steps.warn_of_refusals(door, planned, agent=agent)
    # All are signed before one is written: a key that does not sign leaves every package as it was.
    signed = [None if row.plan is None else row.plan.signed_by(door) for row in rows]
    rows = [row if raw is None else _written(row, raw) for row, raw in zip(rows, signed, strict=True)]
    _report(rows, as_json=as_json)
    if any(row.error is not None for row in rows):
        ctx.exit(common.EXIT_FAILED)


def _typed(name: str | None, agent: str | None) -> str:
    """Return the option that names the key, as typed in a command."""
    return f"--key {shlex.quote(name)}" if name is not None else f"--ssh-agent {shlex.quote(agent or '')}"


def _written(row: _Row, raw: bytes) -> _Row:
    """Write a new envelope. Returns the row, refused where it cannot be written: the other packages are not."""
    from covenant.keys import signing

    try:
        with signing.opened(row.package) as directory:
            signing.write_envelope(directory, raw)
    except errors.PackageError as e:
        e.hint = e.hint or f"make `{row.package}` writable for uid {os.geteuid()}, then renew it again"
        return replace(row, plan=None, error=e)
    return row


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
            "refused" if row.plan is None else times.utc(row.plan.statement.expires_at),
        )
        for row in rows
    ]
    terminal.print_table(("AGENT", "END", "NEW END"), table, nothing="no package to renew")
    for row in rows:
        if row.plan is not None and row.plan.why:
            common.say(f"note: {common.visible(row.agent_id)}: {common.visible(row.plan.why)}", err=True)
        if row.error is not None:
            common.say(f"refused: {common.visible(f'{row.package}: {row.error}')} [{row.error.code}]", err=True)
            common.say(f"  fix: {common.visible(row.error.hint)}", err=True)


def _planned(package: Path, door: Signer, option: str, *, lifetime_ms: int | None, now_ms: int) -> _Row:
    """Plan the renewal of one package. ``option`` names the key in the commands of the fixes."""
    from covenant.keys import signing
    from policy.manifest import parse
    from sandbox.storage import package_reader as reader

    try:
        with signing.opened(package) as directory:
            signing.discard_unfinished(directory)
            read = reader.read(directory)
        manifest = parse.parse(read.manifest)
    except errors.CovenantError as e:
        e.hint = e.hint or f"mend it, then: covenant manifest check {shlex.quote(str(package))}"
        return _Row(package, "", None, None, e)
    from covenant.keys import cosigning

    agent_id, ended = manifest.agent.id, cosigning.ends_at(read)
    try:
        plan = cosigning.renewal(read, manifest, door.key, now_ms=now_ms, lifetime_ms=lifetime_ms)
    except errors.CovenantError as e:
        sign = f"covenant manifest sign {shlex.quote(str(package))} {option}"
        e.hint = _fix(e, read, sign) or e.hint or f"mend it, then: {sign}"
        return _Row(package, agent_id, ended, None, e)
    return _Row(package, agent_id, ended, plan)


def _fix(error: errors.CovenantError, read: Package, sign: str) -> str:
    """Return the fix of a refusal, with the commands as they are typed."""
    if isinstance(error, errors.UnsignedError):
        return sign
    if isinstance(error, errors.DigestMismatchError):
        return f"look at its files, then: {sign}"
    if isinstance(error, errors.UnknownKeyError):
        from covenant.keys import cosigning

        listed = trust_update_steps.listed()
        # A signature by a key that the trust root does not list any more helps no one.
        count = None if listed is None else {one.key.keyid for one in listed}
        signed = (one for one in _own_keys() if cosigning.signed_with(read, one.file.key))
        by = [one.name for one in signed if count is None or one.file.key.keyid in count]
        return f"give a key that signed it: --key {by[0]}" if by else f"{sign} --fresh"
    return ""


def _own_keys() -> tuple[StoredKey, ...]:
    """Return the key files of this home; none where one of them is unsafe, which is no reason to refuse a package."""
    from covenant.keys import keystore

    try:
        return keystore.entries(common.home())
    except errors.CovenantError:
        return ()
