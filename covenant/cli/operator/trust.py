"""``covenant trust``: make the first trust root, show it, and hand versions on; the changes are in ``trust_change``."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from covenant.cli import common, times
from covenant.cli.operator import trust_update, trust_update_steps
from covenant.cli.operator.trust_update_steps import opened
from policy import errors

if TYPE_CHECKING:
    from policy.signing.proposal import Proposal
    from policy.signing.root import OperatorKey, TrustRoot

__all__ = ["opened", "trust"]

_FILE = click.argument("file", type=click.Path(path_type=Path, allow_dash=True))


@click.group()
def trust() -> None:
    """The trust root: who may sign what."""


for _command in trust_update.COMMANDS:
    trust.add_command(_command)


@trust.command(
    epilog=common.examples(
        "covenant trust init --key operator", "covenant trust init --ssh-agent ann@laptop --expires 180d"
    )
)
@click.option("--key", "name", metavar="NAME", help="The operator key to trust.")
@click.option("--ssh-agent", "agent", metavar="KEY", help="A key of ssh-agent to trust: its comment or fingerprint.")
@click.option("--name", "listed", metavar="NAME", help="The name in the trust root.  [default: that of the key]")
@click.option("--agents", multiple=True, default=("*",), metavar="PATTERN", help="Agent ids: exact, or PREFIX*.")
@click.option("--roles", multiple=True, default=("*",), metavar="ROLE", help="Roles that the key may sign, or *.")
@click.option("--no-approve-unlimited", is_flag=True, help="The key approves no lifetime without an end.")
@click.option("--expires", default="365d", metavar="TIME", help="How long the trust root holds.  [default: 365d]")
@click.option("--passphrase-file", metavar="FILE", help="Read the passphrase from FILE (- for stdin).")
@trust_update_steps.JSON
def init(
    name: str | None,
    agent: str | None,
    listed: str | None,
    agents: tuple[str, ...],
    roles: tuple[str, ...],
    no_approve_unlimited: bool,
    expires: str,
    passphrase_file: str | None,
    as_json: bool,
) -> None:
    """Make version 1 of the trust root, with one key.

    It is written to $COVENANT_HOME/trust/root.json, and as root to the supervisor's state, where it decides.
    """
    from covenant.keys import signing, trust_root
    from sandbox.storage.trust_state import State

    home, now_ms = common.home(), times.now_ms()
    lifetime_ms = times.duration_ms(expires, option="--expires")
    door = common.door(name, agent, passphrase_file)
    supervisor = common.state() if trust_update_steps.running_as_root() else None
    with contextlib.ExitStack() as stack:
        state = stack.enter_context(State(supervisor)) if supervisor else None
        raw = trust_root.read(home, trust_root.WORKING_COPY)
        if (state is None and raw is not None) or (state is not None and state.has_root()):
            raise errors.TrustError(
                "there is a trust root already",
                hint="covenant trust show prints it; it is replaced only by version N + 1",
                where=str(home / "trust" if state is None else state.path),
            )
        trust_root.refuse_identity(home, door.key)
        made = signing.first_root(
            trust_update_steps.check_name(listed or door.name),
            door.key,
            now_ms=now_ms,
            lifetime_ms=lifetime_ms,
            agents=agents,
            roles=roles,
            approve_unlimited=not no_approve_unlimited,
        )
        if raw is not None:
            # It was made before the state, or for a state elsewhere: reuse the document instead of making a second one.
            signing.check_first_root(raw, made.document)
        else:
            raw = made.signed_by(door.signature(made.envelope)).encode()
        signers = [made.document.keys[0].name]
        root = trust_root.first(home, state, raw, signers, now_ms=now_ms, when=times.utc)
    _say_first(root, home / trust_root.DIRECTORY / trust_root.WORKING_COPY, supervisor, as_json=as_json)


def _say_first(root: TrustRoot, path: Path, supervisor: Path | None, *, as_json: bool) -> None:
    if as_json:
        shown = trust_update_steps.document(root, str(path))
        common.emit(shown | {"kind": "trust_created", "state": str(supervisor) if supervisor else None})
        return
    common.say(f"trust root version {root.version}: {common.visible(str(path))}")
    if supervisor:
        common.say(f"installed in the supervisor's state: {common.visible(str(supervisor))}")
    else:
        common.say("not installed in the supervisor's state: that takes root", err=True)


@trust.command(epilog=common.examples("covenant trust show", "covenant trust show --json"))
@trust_update_steps.JSON
def show(as_json: bool) -> None:
    """Print the trust root that holds: its keys, what each may sign, what is revoked, and what waits."""
    with opened() as held:
        root = held.root
        waiting = _waiting(root)
        sides = waiting.sides(root, times.now_ms()) if waiting else ()
    if as_json:
        rows = [trust_update_steps.side_document(side) for side in sides]
        pending = {"payload_digest": waiting.payload_digest, "sides": rows} if waiting else None
        common.emit(trust_update_steps.document(root, held.source) | {"pending": pending})
        return
    document = root.document
    common.say(f"trust root version {root.version}, {common.visible(held.source)}")
    common.say(f"digest {root.payload_digest}")
    common.say(f"valid until {times.utc(document.expires_at)}, next version takes {document.threshold} signature(s)")
    if times.now_ms() >= document.expires_at:
        common.say("it has ended: nothing is run until the next version is installed", err=True)
    for key in root.keys:
        _say_key(key)
    for entry in document.revoked.keys:
        common.say(f"revoked key {entry.keyid} {entry.name or ''}: {common.visible(entry.reason)}")
    for manifest in document.revoked.manifests:
        common.say(f"revoked manifest {manifest.payload_digest}: {common.visible(manifest.reason)}")
    for row in document.revoked.serials:
        common.say(f"revoked serials of {row.agent_id} up to {row.serial_at_most}: {common.visible(row.reason)}")
    if waiting:
        common.say(f"version {waiting.document.version} waits for signatures:")
        trust_update_steps.say_missing(sides)


def _waiting(root: TrustRoot) -> Proposal | None:
    from covenant.keys import trust_root

    try:
        found = trust_root.pending(common.home())
    except errors.TrustError as e:
        # It decides nothing, so an error in it does not hide the root in force.
        common.say(f"note: the version that waits cannot be read: {common.visible(str(e))}", err=True)
        return None
    return found if found is not None and found.document.version == root.version + 1 else None


def _say_key(key: OperatorKey) -> None:
    common.say(f"  {key.name}  {key.key.keyid}")
    says = [f"agents {' '.join(key.scope.agents) or 'none'}", f"roles {' '.join(key.scope.roles) or 'none'}"]
    says += ["approves unlimited lifetimes"] if key.scope.approve_unlimited else []
    says += ["signs the trust root"] if key.root else []
    says += [f"{key.threshold} signer(s) needed", f"until {times.utc(key.expires_at)}"]
    common.say(f"    {'; '.join(says)}")


@trust.command(
    epilog=common.examples("covenant trust export asked.json", "covenant trust export present.json --present")
)
@_FILE
@click.option("--present", is_flag=True, help="The version that holds, though another waits for signatures.")
@click.option("--version", type=click.IntRange(1, 99_999_999), help="An earlier version, for a host that is behind.")
@trust_update_steps.JSON
def export(file: Path, present: bool, version: int | None, as_json: bool) -> None:
    """Write the version that waits for signatures to FILE (- for stdout), or else the trust root that holds."""
    from policy.signing import proposal

    if present and version is not None:
        raise errors.UsageError("--present and --version exclude each other")
    if as_json and str(file) == "-":
        raise errors.UsageError("with --json the trust root goes to a file", hint="covenant trust export FILE --json")
    with opened() as held:
        waiting = None if present or version is not None else _waiting(held.root)
        if waiting is not None:
            raw, complete = waiting.encode(), False
        elif version is None or version == held.root.version:
            raw, complete = held.root.raw, True
        else:
            raw, complete = _version(held, version), True
    _write(file, raw)
    written = proposal.decode(raw)
    if as_json:
        common.emit(
            {
                "kind": "trust_exported",
                "file": str(file),
                "version": written.document.version,
                "payload_digest": written.payload_digest,
                "complete": complete,
            }
        )
    elif str(file) != "-":
        what = "" if complete else ", which still lacks signatures"
        common.say(f"version {written.document.version}{what}: {common.visible(str(file))}")
        common.say(f"digest {written.payload_digest}")


def _version(held: Any, version: int) -> bytes:
    from covenant.keys import trust_root

    if held.state is not None:
        raw: bytes = held.state.root_bytes(version)
        return raw
    kept = trust_root.read(common.home(), trust_root.version_name(version))
    if kept is None:
        raise errors.TrustError(
            f"trust root version {version} is not here",
            hint=f"give one up to {held.root.version}, or ask for it where it was installed",
            where=held.source,
        )
    return kept


@trust.command(
    "import",
    epilog=common.examples(
        "covenant trust import present.json --first DIGEST", "covenant trust import asked.json --key bob"
    ),
)
@_FILE
@click.option("--first", metavar="DIGEST", help="Take it as the first trust root here; its digest, learnt elsewhere.")
@click.option("--key", "keys", multiple=True, metavar="NAME", help="As --sign-with.")
@trust_update_steps.signing
def import_(file: Path, first: str | None, keys: tuple[str, ...], **options: Any) -> None:
    """Verify the next version in FILE (- for stdin), sign it, and install it when nothing is missing.

    Without a key it is only looked at, and installed if it is complete.
    """
    from covenant.keys import trust_root
    from policy.signing import proposal
    from policy.signing import root as roots

    options["sign_with"] += keys
    as_json, by = options.pop("as_json"), trust_update_steps.signed_by(options)
    raw = _read(file)
    home, now_ms = common.home(), times.now_ms()
    if first is not None:
        if by.names or by.agents:
            raise errors.UsageError("a first trust root is signed already")
        with _about(file):
            root = roots.TrustRoot.parse(raw)
        _import_first(root, raw, first, home, now_ms, as_json=as_json)
        return
    with _about(file):
        wanted = proposal.decode(raw)
    places = [home / "agents", *by.places()]
    fix = "by the digest that its operator tells you: covenant trust import FILE --first DIGEST"
    with trust_update_steps.changing(home, fix=fix) as held:
        if _is_there(held.root, wanted):
            _say_there(held.root, as_json=as_json)
            return
        doors = by.doors()
        trust_root.prepared(held, home, wanted, doors, now_ms=now_ms, discard=by.discard)
        # A version that is signed elsewhere is installed by scripts on many hosts: it is held up by no former run. A
        # revocation is meant to leave packages unsigned.
        revokes = wanted.document.revoked != held.root.document.revoked
        ran = () if revokes else trust_update_steps.concerned_runs(held, wanted)
        asked, named = (ran, ()) if by.names or by.agents else ((), ran)
        trust_update_steps.ask_unsigned(held, wanted, places, asked, named=named, yes=by.yes, as_json=as_json)
        outcome = trust_root.advance(
            held,
            home,
            wanted,
            doors,
            now_ms=now_ms,
            when=times.utc,
            discard=by.discard,
            before_signing=_show_first,
        )
    trust_update_steps.report(outcome, as_json=as_json)


@contextlib.contextmanager
def _about(file: Path) -> Iterator[None]:
    """Have a refusal of what the file contains name the file, and where such a file comes from."""
    try:
        yield
    except errors.TrustError as e:
        e.where = e.where or str(file)
        e.hint = e.hint or "give the file that covenant trust export wrote"
        raise


def _show_first(version: int, changes: Sequence[str]) -> None:
    """Print the changes of a version that another party wrote, and ask at a terminal before signing it."""
    common.say(f"signing version {version}, which", err=True)
    for line in changes:
        common.say(f"  {common.visible(line)}", err=True)
    if _somebody_there():
        common.confirmed("Sign it?")


def _somebody_there() -> bool:
    return sys.stdin.isatty()


def _is_there(root: TrustRoot, wanted: Proposal) -> bool:
    return wanted.document.version == root.version and wanted.payload_digest == root.payload_digest


def _say_there(root: TrustRoot, *, as_json: bool) -> None:
    if as_json:
        common.emit({"kind": "trust_unchanged", "version": root.version, "payload_digest": root.payload_digest})
    else:
        common.say(f"trust root version {root.version} is installed already")


def _import_first(root: TrustRoot, raw: bytes, digest: str, home: Path, now_ms: int, *, as_json: bool) -> None:
    """Import a first root that another party made: it is trusted here by its digest, not by its place."""
    from covenant.keys import trust_root
    from policy.signing import root as roots
    from sandbox.storage.trust_state import State

    if root.payload_digest != digest:
        raise errors.TrustError(
            f"the digest of this trust root is {root.payload_digest}, not {digest}",
            hint="compare with the operator who exported it: covenant trust show prints the digest there",
        )
    supervisor = common.state() if trust_update_steps.running_as_root() else None
    with contextlib.ExitStack() as stack:
        state = stack.enter_context(State(supervisor)) if supervisor else None
        held = trust_root.read(home, trust_root.WORKING_COPY)
        if (state is not None and state.has_root()) or (state is None and held is not None):
            raise errors.TrustError("there is a trust root already", hint="import the next version without --first")
        document, signed = roots.decode(raw)
        signers = [k.name for k in roots.made(document.root_keys, signed)]
        trust_root.first(home, state, raw, signers, now_ms=now_ms, when=times.utc)
    _say_first(root, home / trust_root.DIRECTORY / trust_root.WORKING_COPY, supervisor, as_json=as_json)


def _read(file: Path) -> bytes:
    from policy.signing import root as roots

    if str(file) == "-":
        return common.typed(roots.MAX_BYTES + 1)
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        with os.fdopen(fd, "rb") as stream:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise errors.TrustError(f"`{file}` is no plain file", where=str(file))
            return stream.read(roots.MAX_BYTES + 1)
    except OSError as e:
        hint = "give the file that covenant trust export wrote"
        raise errors.TrustError(f"`{file}` cannot be read: {e.strerror}", hint=hint, where=str(file)) from e


def _write(file: Path, raw: bytes) -> None:
    if str(file) == "-":
        common.write(raw)
        return
    try:
        # Never overwrite a file: it may still have to be signed.
        with open(file, "xb") as stream:
            stream.write(raw)
    except FileExistsError:
        raise errors.TrustError(f"`{file}` is there already", hint="choose another name", where=str(file)) from None
    except OSError as e:
        hint = "name a file in a directory that is there and yours to write"
        raise errors.TrustError(f"`{file}` cannot be written: {e.strerror}", hint=hint, where=str(file)) from e
