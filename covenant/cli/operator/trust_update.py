"""The verbs that change the trust root, each by one version: add, set, remove, rotate, renew and revoke."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from covenant.cli import common, times
from covenant.cli.operator import trust_update_steps
from policy import errors

if TYPE_CHECKING:
    from covenant.keys.signers import Signer
    from covenant.keys.trust_root import Held
    from policy.signing.envelope import Envelope, PublicKey
    from policy.signing.proposal import Proposal

_Command = TypeVar("_Command", bound=Callable[..., Any])

_ROOT_THRESHOLD = click.option(
    "--root-threshold", type=click.IntRange(1, 8), metavar="N", help="How many root keys sign a version from now on."
)
_EXPIRES = "How long the key holds.  [default: as long as the trust root]"


@click.command(
    epilog=common.examples(
        "covenant trust add bob --public BOB --agents 'team-*' --roles reader --sign-with ann",
        "covenant trust add --ssh-agent ann@laptop --sign-with ann",
    )
)
@click.argument("name", required=False)
@click.option("--public", metavar="HEX", help="Another operator's key: what `covenant keys public` prints.")
@click.option("--ssh-agent", "agent", metavar="KEY", help="A key of ssh-agent: its comment or fingerprint.")
@click.option("--agents", multiple=True, default=("*",), metavar="PATTERN", help="Agent ids: exact, or PREFIX*.")
@click.option("--roles", multiple=True, default=("*",), metavar="ROLE", help="Roles that the key may sign, or *.")
@click.option("--approve-unlimited", is_flag=True, help="The key may approve lifetimes without an end.")
@click.option("--threshold", type=click.IntRange(1, 16), default=1, metavar="N", help="Signers among whom it counts.")
@click.option("--root", is_flag=True, help="The key signs trust roots as well.")
@click.option("--root-only", is_flag=True, help="The key signs trust roots, and no package.")
@click.option("--expires", metavar="TIME", help=_EXPIRES)
@_ROOT_THRESHOLD
@trust_update_steps.signing
def add(name: str | None, public: str | None, agent: str | None, **options: Any) -> None:
    """List one key more: the key file NAME, the key of --ssh-agent, or the key --public as NAME."""
    key, door, listed = _new_key(name, public, agent, options["passphrase_file"])
    root_only, root = options.pop("root_only"), options.pop("root")
    agents, roles = options.pop("agents"), options.pop("roles")
    scope = {
        "agents": () if root_only else agents,
        "roles": () if root_only else roles,
        "approve_unlimited": options.pop("approve_unlimited"),
    }
    fields = {"scope": scope, "root": root or root_only, "threshold": options.pop("threshold")}
    expires, root_threshold = options.pop("expires"), options.pop("root_threshold")

    def build(held: Held, home: Path, now_ms: int) -> Proposal:
        from covenant.keys import signing, trust_root
        from policy.signing import change

        trust_root.refuse_identity(home, key)
        _refuse_keyid(held, home, key)
        end = (
            held.root.document.expires_at
            if expires is None
            else now_ms + times.duration_ms(expires, option="--expires")
        )
        entry = {
            "name": listed,
            "public": key.raw.hex(),
            **fields,
            "not_before": max(now_ms - signing.BACKDATE_MS, 0),
            "expires_at": end,
        }
        return change.add(held.root.document, entry, root_threshold=root_threshold)

    trust_update_steps.step(build, options, spare=lambda: [door] if door else [])


@click.command("set", epilog=common.examples("covenant trust set bob --threshold 2 --sign-with ann"))
@click.argument("name")
@click.option(
    "--agents", multiple=True, metavar="PATTERN", help="Agent ids: exact, or PREFIX*; all that there will be."
)
@click.option("--roles", multiple=True, metavar="ROLE", help="Roles; all that there will be.")
@click.option("--approve-unlimited/--no-approve-unlimited", default=None, help="Whether it approves such lifetimes.")
@click.option("--threshold", type=click.IntRange(1, 16), metavar="N", help="Signers among whom it counts.")
@click.option("--root/--no-root", default=None, help="Whether it signs trust roots.")
@click.option("--expires", metavar="TIME", help="How long from now the key holds.")
@_ROOT_THRESHOLD
@trust_update_steps.signing
def set_(name: str, **options: Any) -> None:
    """Change what the key NAME (or its id) may sign, or among how many it counts."""
    root_threshold, expires = options.pop("root_threshold"), options.pop("expires")
    scope = {
        "agents": options.pop("agents") or None,
        "roles": options.pop("roles") or None,
        "approve_unlimited": options.pop("approve_unlimited"),
    }
    fields = {"threshold": options.pop("threshold"), "root": options.pop("root")}

    def build(held: Held, home: Path, now_ms: int) -> Proposal:
        from policy.signing import change

        old = change.find(held.root.document, name)
        given = {key: value for key, value in fields.items() if value is not None}
        given["scope"] = old.scope.model_dump() | {key: value for key, value in scope.items() if value is not None}
        if expires is not None:
            given["expires_at"] = now_ms + times.duration_ms(expires, option="--expires")
        return change.update(held.root.document, name, given, root_threshold=root_threshold)

    trust_update_steps.step(build, options)


@click.command(epilog=common.examples("covenant trust remove bob --sign-with ann"))
@click.argument("name")
@_ROOT_THRESHOLD
@trust_update_steps.signing
def remove(name: str, **options: Any) -> None:
    """Take the key NAME (or its id) out. It may be listed again: see revoke for one that is lost."""
    root_threshold = options.pop("root_threshold")

    def build(held: Held, home: Path, now_ms: int) -> Proposal:
        from policy.signing import change

        return change.remove(held.root.document, name, root_threshold=root_threshold)

    trust_update_steps.step(build, options)


@click.command(
    epilog=common.examples(
        "covenant trust rotate bob --to bob-2027 --sign-with ann --sign-with bob",
        "covenant trust rotate bob --to bob-2027 --revoke 'laptop lost' --sign-with ann",
    )
)
@click.argument("name")
@click.option("--to", metavar="NAME", help="The key file that takes its place.")
@click.option("--to-agent", metavar="KEY", help="The key of ssh-agent that takes its place.")
@click.option("--to-public", metavar="HEX", help="Another operator's key that takes its place.")
@click.option("--name", "new_name", metavar="NAME", help="A new name in the trust root.  [default: the old one]")
@click.option("--revoke", "reason", metavar="REASON", help="Revoke the old key as well, for this reason.")
@click.option("--expires", metavar="TIME", help="How long the key holds.  [default: as long as the old one]")
@trust_update_steps.signing
def rotate(
    name: str, to: str | None, to_agent: str | None, to_public: str | None, new_name: str | None, **options: Any
) -> None:
    """Put another key in the place of NAME: the same scope, in one version."""
    key, door, _ = _new_key(to, to_public, to_agent, options["passphrase_file"], named=False)
    reason, expires = options.pop("reason"), options.pop("expires")

    def build(held: Held, home: Path, now_ms: int) -> Proposal:
        from covenant.keys import signing, trust_root
        from policy.signing import change

        trust_root.refuse_identity(home, key)
        _refuse_keyid(held, home, key)
        document = held.root.document
        # The new key expires with the old one: replacing a guest's key does not extend its access.
        end = change.find(document, name).expires_at
        if expires is not None:
            end = now_ms + times.duration_ms(expires, option="--expires")
        elif end <= now_ms:
            raise errors.UsageError(
                f"the key `{name}` has ended, and so would the one in its place", hint="say how long: --expires 90d"
            )
        return change.rotate(
            document,
            name,
            key.raw.hex(),
            now_ms=max(now_ms - signing.BACKDATE_MS, 0),
            expires_at=end,
            new_name=new_name,
            reason=reason,
        )

    trust_update_steps.step(build, options, spare=lambda: [door] if door else [])


@click.command(epilog=common.examples("covenant trust renew --expires 500d --sign-with ann"))
@click.option("--expires", default="365d", metavar="TIME", help="How long from now it holds.  [default: 365d]")
@trust_update_steps.signing
def renew(expires: str, **options: Any) -> None:
    """Let the trust root, and the keys that end with it, hold for longer."""
    lifetime_ms = times.duration_ms(expires, option="--expires")

    def build(held: Held, home: Path, now_ms: int) -> Proposal:
        from policy.signing import change

        return change.renew(held.root.document, expires_at=now_ms + lifetime_ms)

    trust_update_steps.step(build, options)


@click.command(
    epilog=common.examples(
        "covenant trust revoke --key bob --reason 'laptop lost' --sign-with ann",
        "covenant trust revoke --package agents/hello --reason 'it leaks' --sign-with ann",
    )
)
@click.option("--key", "lost", metavar="NAME", help="A key, by name or id: what it signed counts no more.")
@click.option("--manifest", metavar="DIGEST", help="One signed manifest, by the SHA-256 of its payload.")
@click.option("--package", type=click.Path(path_type=Path), help="The signed manifest of this package.")
@click.option("--agent", metavar="ID", help="With --serial-at-most: all signed manifests of an agent up to one.")
@click.option("--serial-at-most", type=click.IntRange(0, 2**53 - 1), metavar="N", help="The highest serial revoked.")
@click.option("--reason", required=True, metavar="TEXT", help="Why; shown to whoever is refused.")
@_ROOT_THRESHOLD
@trust_update_steps.signing
def revoke(**options: Any) -> None:
    """Take back a key, a signed manifest, or an agent's serials, for good."""
    given = {name: options.pop(name) for name in ("lost", "manifest", "package", "agent", "serial_at_most")}
    root_threshold, reason = options.pop("root_threshold"), options.pop("reason")
    kind = _one_of(given)

    def build(held: Held, home: Path, now_ms: int) -> Proposal:
        from policy.signing import change

        document = held.root.document
        if kind == "lost":
            made = change.revoke_key(
                document, given["lost"], now_ms=now_ms, reason=reason, root_threshold=root_threshold
            )
            for name in change.never_counting(made.document):
                common.say(f"note: `{name}` waits for other signers, of whom too few are left", err=True)
            return made
        if kind == "agent":
            agent, at_most = given["agent"], given["serial_at_most"]
            made = change.revoke_serials(document, agent, at_most, now_ms=now_ms, reason=reason)
            if fix := made.document.revoked.retired(agent, now_ms=now_ms):
                common.say(common.visible(f"note: no agent is `{agent}` again: {fix}"), err=True)
            return made
        digest = _digest(given["manifest"]) if kind == "manifest" else _payload_digest(given["package"], held)
        return change.revoke_manifest(document, digest, now_ms=now_ms, reason=reason)

    serials = (given["agent"], given["serial_at_most"]) if kind == "agent" else None
    trust_update_steps.step(build, options, serials=serials, ends=True)


@click.command(epilog=common.examples("covenant trust enforce"))
@trust_update_steps.JSON
def enforce(*, as_json: bool) -> None:
    """End the live runs that rest on what the present trust root revokes.

    Every verb that installs a version does so itself; this is for one that was killed, or said that something was left.
    """
    from covenant.keys import trust_root

    home = common.home()
    with trust_update_steps.changing(home) as held:
        if held.state is None:
            raise errors.PrivilegeError(
                "ending what is revoked needs root", hint="run it with sudo, and give COVENANT_HOME"
            )
        enforced = trust_root.enforce(held.state, home, held.root)
    if as_json:
        common.emit(
            {"kind": "trust_enforced", "version": held.root.version, **trust_update_steps.ended_document(enforced)}
        )
    else:
        trust_update_steps.say_ended(enforced)
        if not enforced.ended and not enforced.failed:
            common.say(f"no live run rests on what version {held.root.version} revokes")
    trust_update_steps.check_ended(enforced)


COMMANDS = (add, set_, remove, rotate, renew, revoke, enforce)


def _one_of(given: dict[str, Any]) -> str:
    if (given["agent"] is None) != (given["serial_at_most"] is None):
        raise errors.UsageError(
            "--agent and --serial-at-most go together", hint="covenant manifest verify PACKAGE prints the serial"
        )
    said = [name for name in ("lost", "manifest", "package", "agent") if given[name] is not None]
    if len(said) != 1:
        raise errors.UsageError(
            "one thing is revoked at a time",
            hint="--key NAME, --manifest DIGEST, --package DIR, or --agent ID --serial-at-most N",
        )
    return said[0]


def _new_key(
    name: str | None, public: str | None, agent: str | None, passphrase_file: str | None, *, named: bool = True
) -> tuple[PublicKey, Signer | None, str]:
    """Return a key to list, its door if it is ours, and its name in the root."""
    from policy.signing import envelope

    if public is not None and agent is not None:
        raise errors.UsageError("one key is listed at a time", hint="give --public or --ssh-agent")
    if not named and sum(given is not None for given in (name, public, agent)) != 1:
        raise errors.UsageError("one key takes its place", hint="give --to NAME, --to-agent KEY or --to-public HEX")
    if named and name is None and public is None and agent is None:
        hint = "covenant trust add NAME, covenant trust add NAME --public HEX, or covenant trust add --ssh-agent KEY"
        raise errors.UsageError("which key is to be listed is not said", hint=hint)
    if public is None:
        door = common.door(None if agent else name, agent, passphrase_file)
        return door.key, door, trust_update_steps.check_name(name or door.name) if named else ""
    if named and name is None:
        raise errors.UsageError("a public key has no name of its own", hint="covenant trust add NAME --public HEX")
    try:
        return (
            envelope.PublicKey(bytes.fromhex(public)),
            None,
            trust_update_steps.check_name(name) if named and name else "",
        )
    except ValueError as e:
        why = "it is not 64 hexadecimal digits" if re.fullmatch(r"[0-9A-Fa-f]{64}", public) is None else str(e)
        hint = "covenant keys public NAME prints one"
        raise errors.UsageError(f"`{public}` is no public key: {why}", hint=hint) from None


def _refuse_keyid(held: Held, home: Path, key: PublicKey) -> None:
    """Refuse a public key that is the id of a known key: both are 64 digits, and `keys new` prints the id.

    Raises:
        errors.UsageError: it is the id of a key file or of a key of the trust root.
    """
    from covenant.keys import keystore

    given, stored = key.raw.hex(), list[str]()
    with contextlib.suppress(errors.CovenantError):  # an unsafe or malformed key file is no reason to refuse another
        stored = [one.name for one in keystore.entries(home) if one.file.key.keyid == given]
    listed = [one.name for one in held.root.keys if one.key.keyid == given]
    if stored:
        raise errors.UsageError(
            f"`{given}` is the id of the key `{stored[0]}`, not its public key",
            hint=f"covenant keys public {stored[0]}",
        )
    if listed:
        raise errors.UsageError(
            f"`{given}` is the id of the key `{listed[0]}` of the trust root, which is listed already",
            hint="its operator's `covenant keys public NAME` prints a public key",
        )


def _digest(given: str) -> str:
    if not re.fullmatch("[0-9a-f]{64}", given):
        raise errors.TrustError(
            f"the revocation cannot be made: `{given[:80]}` is no digest",
            hint="64 hexadecimal digits: `payload_digest` of covenant manifest verify PACKAGE --json",
        )
    return given


def _payload_digest(package: Path, held: Held) -> str:
    """Print and return the digest of the signed payload of a package; its files may have changed or be gone."""
    import hashlib

    from policy.signing import root as roots
    from policy.signing import statement, strict_json

    signed = _envelope(package)
    by = [key.name for key in roots.made(held.root.keys, signed)]
    if not by:
        # Otherwise a process that can write to the package could have a different payload revoked than the one that is
        # run.
        raise errors.SignatureError(
            "no key of the trust root signed what lies in this package",
            hint="--manifest DIGEST revokes a payload by its digest; run_started in the audit log has that of each run",
            where=str(package),
        )
    try:
        said = statement.parse(signed.payload)
    except strict_json.MalformedJsonError as e:
        raise errors.SignatureError(f"the statement is malformed: {e}", where=str(package)) from None
    common.say(f"note: that is serial {said.serial} of agent `{said.agent_id}`, signed by {', '.join(by)}", err=True)
    return hashlib.sha256(signed.payload).hexdigest()


def _envelope(package: Path) -> Envelope:
    from policy import package as packages
    from policy.signing import envelope, strict_json

    where = package / packages.ENVELOPE_NAME
    hint = "--manifest DIGEST revokes a payload by its digest; run_started in the audit log has that of each run"
    try:
        with contextlib.ExitStack() as stack:
            fd = os.open(where, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            stream = stack.enter_context(os.fdopen(fd, "rb"))
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise errors.PackageError(f"`{where}` is no plain file", where=str(where))
            raw = stream.read(envelope.MAX_BYTES + 1)
    except OSError as e:
        try:
            common.check_package(package)
        except errors.PackageError as near:
            hint = f"{near.hint}; {hint}"
        raise errors.PackageError(f"`{where}` cannot be read: {e.strerror}", hint=hint, where=str(where)) from e
    try:
        signed = envelope.decode(raw)
    except strict_json.MalformedJsonError as e:
        raise errors.SignatureError(f"the envelope is malformed: {e}", where=str(where)) from None
    if signed.payload_type != envelope.IN_TOTO_PAYLOAD_TYPE:
        raise errors.SignatureError("the envelope is not that of a package", where=str(where))
    return signed
