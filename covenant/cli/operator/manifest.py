"""``covenant manifest``: make, check, sign, verify and show a package's manifest. None of it needs root."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import click

from covenant.cli import common, times
from covenant.cli.operator import manifest_renew, trust_update_steps
from covenant.cli.operator import manifest_report as told
from covenant.cli.policy import artefact_view, manifest_import
from policy import errors

if TYPE_CHECKING:
    from covenant.keys import signers
    from policy.manifest.agent import Manifest
    from policy.package import Package
    from policy.signing.trust import Signer, TrustedPackage

_PACKAGE = click.argument("package", type=click.Path(path_type=Path))
_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


@click.group()
def manifest() -> None:
    """Check, sign, verify and show a package's manifest."""


manifest.add_command(manifest_renew.renew)
manifest.add_command(manifest_import.import_)


@manifest.command(epilog=common.examples("covenant manifest new mine", "covenant manifest new mine --runtime node"))
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--runtime", type=click.Choice(("python3", "node", "rust-bin")), default="python3", show_default=True)
@click.option("--id", "agent_id", metavar="ID", help="The agent's id; DIR's own name when left out.")
@click.option("--binary", type=click.Path(path_type=Path), help="Copy this ELF program in, for rust-bin.")
@_JSON
def new(directory: Path, runtime: str, agent_id: str | None, binary: Path | None, as_json: bool) -> None:
    """Make a package in DIR, new or empty, that checks, signs and runs."""
    from covenant import scaffold

    name = directory.absolute().name if agent_id is None else agent_id
    made = scaffold.plan(name, runtime, binary=None if binary is None else scaffold.read_binary(binary))
    scaffold.write(directory, made)
    if as_json:
        common.emit(
            {
                "kind": "manifest_created",
                "package": str(directory),
                "agent_id": made.agent_id,
                "files": sorted(made.files),
                "missing_entry": made.missing_entry or None,
            }
        )
        return
    shown = common.visible(str(directory))
    common.say(f"made {shown}: {', '.join(sorted(made.files))}")
    if made.missing_entry:
        common.say(f"put the program at {shown}/{made.missing_entry}: src/main.rs says how to build one")
    common.say("then:")
    for step in ("manifest check {}", "manifest sign {} --key NAME", "run {} 'hello'"):
        common.say(f"  covenant {step.format(shown)}")


@manifest.command(epilog=common.examples("covenant manifest check agents/hello"))
@_PACKAGE
@artefact_view.HOST
@_JSON
def check(package: Path, host: str | None, as_json: bool) -> None:
    """Check PACKAGE's files and agent.toml, and say what `run` would refuse here. Signatures are not looked at."""
    from policy import data
    from policy.manifest import names

    read, parsed = _read(package)
    names.check(parsed, profiles=data.profile_names(), syscalls=data.syscall_names())
    refusals, unknown = artefact_view.judged(read, parsed, artefact_view.OtherHost.of(host))
    notes = told.notes(read, parsed)
    if as_json:
        common.emit(
            {
                "kind": "manifest_checked",
                "agent_id": parsed.agent.id,
                "package_digest": read.digest,
                "files": len(read.files),
                "grants": told.grants(parsed),
                "defaults": told.defaults(parsed),
                "unknown_sections": list(parsed.unknown_sections),
                "notes": notes,
                "refusals": [refusal.to_json() for refusal in refusals],
                **({"unknown": list(unknown)} if unknown else {}),
            }
        )
        return
    common.say(f"{parsed.agent.id}: {len(read.files)} files, {told.verdict(refusals, host)}")
    told.say_grants(parsed)
    told.say_defaults(parsed)
    for note in notes:
        common.say(f"note: {common.visible(note)}", err=True)
    artefact_view.say_errors(refusals)
    artefact_view.say_unknown(unknown)


@manifest.command(
    epilog=common.examples(
        "covenant manifest sign agents/hello --key operator --expires 90d",
        "covenant manifest sign agents/hello --ssh-agent ann@laptop",
    )
)
@_PACKAGE
@click.option("--key", "name", metavar="NAME", help="The operator key to sign with.")
@click.option("--ssh-agent", "agent", metavar="KEY", help="Sign with a key of ssh-agent: its comment or fingerprint.")
@click.option("--serial", type=click.IntRange(0, 2**53 - 1), help="Default: the time in Unix milliseconds.")
@click.option("--expires", metavar="TIME", help="When the signature ends.  [default: 90d]")
@click.option("--audience", metavar="HOST", help="The one host that may run it; any when left out.")
@click.option("--approve-unlimited", is_flag=True, help="Approve a lifetime without an end.")
@click.option("--fresh", is_flag=True, help="Make a new statement, without the signatures that are there.")
@click.option("--passphrase-file", metavar="FILE", help="Read the passphrase from FILE (- for stdin).")
@_JSON
def sign(
    package: Path,
    name: str | None,
    agent: str | None,
    serial: int | None,
    expires: str | None,
    audience: str | None,
    approve_unlimited: bool,
    fresh: bool,
    passphrase_file: str | None,
    as_json: bool,
) -> None:
    """Sign every file of PACKAGE as it is now, and write agent.dsse.json beside the manifest.

    Where another operator signed these very files, the signature is added to the same statement.
    """
    from covenant.keys import cosigning, signing
    from policy import package as packages
    from policy.signing import envelope

    common.check_package(package)
    lifetime_ms = None if expires is None else times.duration_ms(expires, option="--expires")
    wanted = cosigning.Wanted(serial, lifetime_ms, audience, approve_unlimited)
    door = common.door(name, agent, passphrase_file)
    with signing.opened(package) as directory:
        signing.discard_unfinished(directory)
        read, parsed = _read(directory)
        # Everything that can be refused is refused before a passphrase is asked for.
        known = None if read.envelope is None else trust_update_steps.listed()
        plan = cosigning.plan(read, parsed, wanted, door.key, now_ms=times.now_ms(), fresh=fresh, known=known)
        raw = plan.signed_by(door)
        signing.write_envelope(directory, raw)
    statement, count = plan.statement, len(envelope.decode(raw).signatures)
    if as_json:
        common.emit(
            {
                "kind": "manifest_signed",
                "how": plan.how,
                "signatures": count,
                "envelope": str(package / packages.ENVELOPE_NAME),
                "key": door.name,
                "keyid": door.key.keyid,
                "package_digest": read.digest,
                "statement": told.statement(statement),
                "grants": told.grants(parsed),
                "defaults": told.defaults(parsed),
            }
        )
        return
    what = {"new": "signed", "added": "added a signature to", "replaced": "made a new statement and signed"}[plan.how]
    signer = f"{common.visible(door.name)} {door.key.keyid}"
    common.say(f"{what} {len(statement.subjects)} files of {statement.agent_id} with {signer}")
    if plan.why:
        common.say(f"  {plan.why}")
    for path in statement.subjects:
        common.say(f"  {statement.subjects[path][:16]}  {common.visible(path)}")
    common.say(f"serial {statement.serial}, until {times.utc(statement.expires_at)}, {told.audience(statement)}")
    if statement.approve_unlimited:
        common.say("approves an unlimited lifetime")
    told.say_grants(parsed)
    told.say_defaults(parsed)
    trust_update_steps.warn_of_refusals(door, (statement,), agent=agent)
    if statement.audience is None:
        _warn_of_signers(package, door)
        _warn_of_refusals(read, parsed)


@manifest.command(
    epilog=common.examples("covenant manifest verify agents/hello", "covenant manifest verify agents/hello --json")
)
@_PACKAGE
@_JSON
def verify(package: Path, as_json: bool) -> None:
    """Verify PACKAGE's signature, digests and manifest against the trust root, as `run` would."""
    from sandbox.storage import package_reader as reader

    common.check_package(package)
    read = reader.read(package)
    parsed, trusted, signers, source = _verify(read)
    statement = trusted.statement
    if as_json:
        common.emit(
            {
                "kind": "manifest_verified",
                "agent_id": parsed.agent.id,
                "package_digest": read.digest,
                "payload_digest": trusted.payload_digest,
                "signers": [{"name": s.name, "keyid": s.keyid} for s in signers],
                "trust_root": {"version": trusted.root_version, "source": source},
                "statement": told.statement(statement),
            }
        )
        return
    common.say(f"{parsed.agent.id}: verified, signed by {', '.join(s.name for s in signers)}")
    common.say(f"serial {statement.serial}, until {times.utc(statement.expires_at)}, {told.audience(statement)}")
    common.say(f"trust root version {trusted.root_version}, {common.visible(source)}")
    told.say_unknown(parsed)


@manifest.command(epilog=common.examples("covenant manifest show agents/hello"))
@_PACKAGE
@_JSON
def show(package: Path, as_json: bool) -> None:
    """Show PACKAGE's manifest, and what its signature says when it verifies."""
    read, parsed = _read(package)
    statement, refusal = None, None
    try:
        # INVARIANT: what is shown and what was verified are one reading of the files.
        _, trusted, signers, _ = _verify(read)
        statement = trusted.statement
    except errors.OperatorError as e:
        signers, refusal = (), e
    if as_json:
        common.emit(
            {
                "kind": "manifest",
                "manifest": parsed.model_dump(mode="json"),
                "written": sorted(parsed.written),
                "unknown_sections": list(parsed.unknown_sections),
                "package_digest": read.digest,
                "signers": [s.name for s in signers],
                "statement": told.statement(statement) if statement else None,
                "refusal": refusal.to_json() if refusal else None,
            }
        )
        return
    for section, values in parsed.model_dump(mode="json").items():
        tables = isinstance(values, list)
        for table in values if tables else [values]:
            common.say(f"[[{section}]]" if tables else f"[{section}]")
            for key, value in table.items():
                if value is not None:
                    mark = "" if tables or parsed.wrote(f"{section}.{key}") else "  (default)"
                    common.say(f"  {key} = {common.visible(str(value))}{mark}")
    told.say_unknown(parsed)
    if statement:
        common.say(f"signed by {', '.join(s.name for s in signers)}, until {times.utc(statement.expires_at)}")
    elif refusal:
        common.say(f"not verified: {common.visible(str(refusal))} [{refusal.code}]")


@manifest.command(
    epilog=common.examples("covenant manifest schema > agent.schema.json", "covenant manifest schema --tools")
)
@click.option("--statement", "which", flag_value="statement", help="Of the signed statement instead of agent.toml.")
@click.option("--tools", "which", flag_value="tools", help="Of tools.json instead of agent.toml.")
@_JSON
def schema(which: str | None, as_json: bool) -> None:
    """Print the JSON Schema of agent.toml, for editors and other programs."""
    from policy.manifest.reference import json_schema

    make = {"statement": json_schema.for_statement, "tools": json_schema.for_tools}.get(
        which or "", json_schema.for_agent
    )
    document = make()
    if as_json:
        common.emit({"kind": "manifest_schema", "schema": document})
        return
    common.say(json_schema.text(document).rstrip("\n"))


def _read(path: Path | int) -> tuple[Package, Manifest]:
    from policy.manifest import parse
    from sandbox.storage import package_reader as reader

    if isinstance(path, Path):
        common.check_package(path)
    read = reader.read(path)
    return read, parse.parse(read.manifest)


def _warn_of_signers(package: Path, door: signers.Signer) -> None:
    """Say on stderr if the trust root of this host lists the key, and does not count its signature or needs more."""
    from sandbox.storage import package_reader as reader

    if all(one.key.keyid != door.key.keyid for one in trust_update_steps.listed() or ()):
        return
    try:
        counting = _verify(reader.read(package))[2]
    except (errors.UnknownKeyError, errors.SignatureError) as e:
        common.say(f"warning: runs on this host refuse the package for now: {common.visible(e.message)}", err=True)
        if e.hint:
            common.say(f"  fix: {common.visible(e.hint)}", err=True)
        return
    except errors.CovenantError:
        return
    if all(one.keyid != door.key.keyid for one in counting):
        name = common.visible(door.name)
        common.say(f"warning: the signature of `{name}` does not count for this agent id and role", err=True)
        common.say("  fix: covenant trust show lists what it may sign; covenant trust set changes that", err=True)


def _warn_of_refusals(read: Package, parsed: Manifest) -> None:
    """Say on stderr why a run of the signed package would be refused on this host, where this can be known."""
    with contextlib.suppress(errors.CovenantError):  # this machine may only sign
        artefact_view.say_errors(artefact_view.judged(read, parsed, None)[0])


def _verify(read: Package) -> tuple[Manifest, TrustedPackage, tuple[Signer, ...], str]:
    """Verify as `run` does, with the root, the serials and the clock of the state where it is ours to read."""
    from covenant.cli.operator import trust as trust_cli
    from policy.manifest import parse
    from policy.signing import trust
    from sandbox import config

    with trust_cli.opened() as held:
        host = config.load(held.state.path if held.state else common.home() / "supervisor").host
        trusted = trust.verify(
            read,
            held.root,
            now_ms=times.now_ms(),
            audience=host,
            serials=held.state or trust.NoSerials(),
            greatest_time_ms=held.state.greatest_time_ms() if held.state else 0,
        )
        source = held.source
    # INVARIANT: parsed only after the bytes were verified, and from those bytes.
    parsed = parse.parse(trusted.manifest_bytes)
    signers = trust.authorise(trusted, agent_id=parsed.agent.id, role=parsed.agent.role, operator=parsed.agent.operator)
    return parsed, trusted, signers, source
