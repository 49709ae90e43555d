"""Decide if a signature is added to the existing statement, or a new statement is made.

Two operators sign one payload in two calls; a second payload would count as a second package to every ratchet. So the
second call reuses the first one's serial and dates unless the operator asks for others. Another operator's signature is
never discarded silently.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from covenant.keys import signing
from covenant.keys.signers import Signer
from policy import errors
from policy import package as packages
from policy.manifest.agent import Manifest
from policy.signing import envelope as envelopes
from policy.signing import statement as statements
from policy.signing import strict_json
from policy.signing.root import OperatorKey

How = Literal["new", "added", "replaced"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """The terms that the operator asks for; None for those not given."""

    serial: int | None = None
    lifetime_ms: int | None = None
    audience: str | None = None
    approve_unlimited: bool = False


@dataclass(frozen=True, slots=True)
class SignaturePlan:
    """A planned signature: the statement, the envelope to add to, and how that compares with the existing one."""

    statement: statements.Statement
    envelope: envelopes.Envelope
    how: How
    why: str

    def signed_by(self, door: Signer) -> bytes:
        """Return the envelope's bytes with this key's signature.

        Raises:
            errors.KeyFileError, errors.AgentError: the key did not sign.
            errors.PackageError: too large for a verifier.
        """
        return signing.encoded(self.envelope.signed_by(door.signature(self.envelope)))


def plan(
    package: packages.Package,
    manifest: Manifest,
    wanted: Wanted,
    key: envelopes.PublicKey,
    *,
    now_ms: int,
    fresh: bool = False,
    known: Collection[OperatorKey] | None = None,
) -> SignaturePlan:
    """Plan the signature of the package with this key, without signing.

    ``known`` are the keys of the trust root at hand; None without one, so existing signatures have unknown signers.

    (1) make the new statement; refuse one that must not be signed;
    (2) if there is nothing to add to (no readable envelope, other files, an expired one, or ``fresh``): a new
        statement;
    (3) if only this key signed the existing one: a new statement in its place;
    (4) refuse if this key signed it already, no known key did, or it differs from the terms asked for; others'
        signatures stay;
    (5) otherwise add this key's signature to the same bytes.

    Raises:
        errors.CovenantError: (1) as ``signing.statement``.
        errors.SignatureError: (4)
    """
    # (1) the new statement
    terms = signing.Terms(
        serial=now_ms if wanted.serial is None else wanted.serial,
        lifetime_ms=statements.DEFAULT_LIFETIME_MS if wanted.lifetime_ms is None else wanted.lifetime_ms,
        audience=wanted.audience,
        approve_unlimited=wanted.approve_unlimited,
    )
    new = signing.statement(package, manifest, terms, now_ms=now_ms)

    # (2) nothing to add to
    if package.envelope is None:
        return _new(new, "new", "")
    present = _readable(package.envelope)
    if present is None:
        return _new(new, "replaced", "the envelope that was there could not be read")
    envelope, old = present
    if fresh:
        return _new(new, "replaced", "a new statement was asked for")
    if dict(old.subjects) != dict(new.subjects):
        return _new(new, "replaced", "the files are not those that were signed")
    if now_ms >= old.expires_at:
        return _new(new, "replaced", "the statement that was there has ended")

    # (3) no other signatures
    others = [s for s in envelope.signatures if s.keyid != key.keyid]
    if not others:
        return _new(new, "replaced", "this key alone had signed the one before")

    # (4) an addition
    theirs = None
    if known is not None:
        theirs = _known(envelope, [k for k in known if k.key != key and _may_sign(k, manifest, now_ms)])
    _check_addition(envelope, key, others=len(others), theirs=theirs, differs=_differences(old, new, wanted, now_ms))

    # (5) the same bytes
    beside = f"{len(others)} others, whom no trust root here could tell" if theirs is None else " and ".join(theirs)
    return SignaturePlan(old, envelope, "added", f"beside {beside}, over the same statement")


def _check_addition(
    envelope: envelopes.Envelope,
    key: envelopes.PublicKey,
    *,
    others: int,
    theirs: Sequence[str] | None,
    differs: Sequence[str],
) -> None:
    """Refuse to add a signature by ``key`` beside those of ``others``.

    ``theirs`` are the known keys that signed, None without a trust root; ``differs`` names the terms that differ.
    """
    # Only a signature that verifies counts as this key's: a false one under our key id blocks no signing.
    if envelopes.signers(envelope, [key]):
        raise errors.SignatureError(
            f"this key and {others} more have signed the package already",
            hint="nothing is missing from this key; --fresh makes a new statement without the others",
            where=packages.ENVELOPE_NAME,
        )
    # A key id is no signature: without a valid one, the serial and the dates could be an attacker's.
    if theirs is not None and not theirs:
        raise errors.SignatureError(
            "the statement that is there was signed by no other key of the trust root that may sign it",
            hint="--fresh makes a new one; or import the trust root that lists who signed it",
            where=packages.ENVELOPE_NAME,
        )
    if differs:
        raise errors.SignatureError(
            f"the statement that {others} others signed says something else: {', '.join(differs)}",
            hint="ask for the same to add a signature, or --fresh for a statement without the others' signatures",
            where=packages.ENVELOPE_NAME,
        )
    if others >= envelopes.MAX_SIGNATURES:
        raise errors.SignatureError(f"the envelope holds {others} signatures already", hint="sign with --fresh")


def renewal(
    package: packages.Package,
    manifest: Manifest,
    key: envelopes.PublicKey,
    *,
    now_ms: int,
    lifetime_ms: int | None = None,
) -> SignaturePlan:
    """Plan a new statement over the files that this key signed before, with the same audience and approvals.

    ``lifetime_ms``: None for as long as before.

    Raises:
        errors.UnsignedError: it was never signed.
        errors.UnknownKeyError: this key has not signed it.
        errors.DigestMismatchError: its files are not those that were signed.
    """
    if package.envelope is None:
        raise errors.UnsignedError("it was never signed", hint="covenant manifest sign PACKAGE --key NAME")
    present = _readable(package.envelope)
    if present is None:
        hint = "covenant manifest sign PACKAGE --key NAME --fresh"
        raise errors.UnknownKeyError("its envelope cannot be read", hint=hint, where=packages.ENVELOPE_NAME)
    if key not in envelopes.signers(present[0], [key]):
        raise errors.UnknownKeyError(
            "this key has not signed it", hint="give the key that signed it, or sign it: covenant manifest sign"
        )
    envelope, old = present
    if dict(old.subjects) != dict(package.digests):
        raise errors.DigestMismatchError(
            "its files are not those that were signed", hint="look at them, then: covenant manifest sign"
        )
    before = old.expires_at - old.not_before - signing.BACKDATE_MS
    terms = signing.Terms(
        serial=now_ms,
        lifetime_ms=max(before, 1000) if lifetime_ms is None else lifetime_ms,
        audience=old.audience,
        approve_unlimited=old.approve_unlimited,
    )
    others = sum(one.keyid != key.keyid for one in envelope.signatures)
    why = f"{others} signatures of others are missing now; they sign it again too" if others else ""
    return _new(signing.statement(package, manifest, terms, now_ms=now_ms), "replaced", why)


def ends_at(package: packages.Package) -> int | None:
    """Return when the statement of a package says that it ends, unverified; None without a readable one."""
    present = None if package.envelope is None else _readable(package.envelope)
    return None if present is None else present[1].expires_at


def signed_with(package: packages.Package, key: envelopes.PublicKey) -> bool:
    """Whether the envelope of a package has a signature of this key that verifies."""
    present = None if package.envelope is None else _readable(package.envelope)
    return present is not None and key in envelopes.signers(present[0], [key])


def _may_sign(key: OperatorKey, manifest: Manifest, now_ms: int) -> bool:
    agent, scope = manifest.agent, key.scope
    return scope.covers_agent(agent.id) and scope.covers_role(agent.role) and key.not_before <= now_ms < key.expires_at


def _known(envelope: envelopes.Envelope, keys: Collection[OperatorKey]) -> list[str]:
    """Return the names of the keys whose signatures are on the envelope."""
    made = set(envelopes.signers(envelope, (k.key for k in keys)))
    return [k.name for k in keys if k.key in made]


def _new(statement: statements.Statement, how: How, why: str) -> SignaturePlan:
    return SignaturePlan(
        statement, envelopes.Envelope(statement.encode(), envelopes.IN_TOTO_PAYLOAD_TYPE, ()), how, why
    )


def _readable(raw: bytes) -> tuple[envelopes.Envelope, statements.Statement] | None:
    """Return the envelope and its statement if their bytes are exactly what this code would write."""
    try:
        envelope = envelopes.decode(raw)
        if envelope.payload_type != envelopes.IN_TOTO_PAYLOAD_TYPE:
            return None
        statement = statements.parse(envelope.payload)
    except strict_json.MalformedJsonError:
        return None
    return (envelope, statement) if statement.encode() == envelope.payload else None


def _differences(old: statements.Statement, new: statements.Statement, wanted: Wanted, now_ms: int) -> list[str]:
    """Return the fields in which the existing statement differs from, or exceeds, the terms asked for: a further
    signature confirms all of it."""
    fields = ["agent_id", "roles_version", "deny_version", "parent_digest", "approve_unlimited", "unknown_sections"]
    fields += ["audience"] if wanted.audience is not None else []
    # A future serial would lock out all statements until then; a future start differs from one that starts now.
    ahead = now_ms + signing.BACKDATE_MS
    fields += ["serial"] if wanted.serial is not None or old.serial > ahead else []
    fields += ["not_before"] if old.not_before > now_ms else []
    # An earlier end than asked for, or than the default, grants nothing more.
    fields += ["expires_at"] if old.expires_at > new.expires_at else []
    return [
        f"{name} {_text(old, name)}, not {_text(new, name)}"
        for name in fields
        if getattr(old, name) != getattr(new, name)
    ]


def _text(statement: statements.Statement, name: str) -> str:
    value = getattr(statement, name)
    return "none" if value in (None, ()) else str(value)
