"""Rule 2: check that an operator signed this package for this host. This module does no input or output.

``verify`` alone makes a ``TrustedPackage``; ``again`` renews it, and ``part`` cuts one out of it. Code that acts on a
package takes that type, so that code without the check does not pass mypy. ``policy.signing.root`` says which keys may
sign.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import InitVar, dataclass
from typing import Protocol

from msgspec import Struct

from policy import errors
from policy import package as packages
from policy.signing import envelope as envelopes
from policy.signing import statement as statements
from policy.signing import strict_json, threshold
from policy.signing.revoked import revoked
from policy.signing.root import OperatorKey, Scope, Signer, TrustRoot

__all__ = [
    "AHEAD_MS",
    "Accepted",
    "NoSerials",
    "OperatorKey",
    "Scope",
    "SerialState",
    "Signer",
    "TrustRoot",
    "TrustedPackage",
    "again",
    "approves_unlimited",
    "authorise",
    "check_operator",
    "check_rollback",
    "listed",
    "part",
    "revoked",
    "verify",
]

# decisions.md, Serials: a signer whose clock runs wild must not lock all later serials out.
MAX_SERIAL_AHEAD_MS = statements.DAY_MS
# A record that is further ahead of the clock than this was made while the clock was wrong: clocks are corrected by
# seconds.
AHEAD_MS = 5 * 60_000

_WHERE = packages.ENVELOPE_NAME
_SIGN = "covenant manifest sign PACKAGE --key NAME --fresh"
_CLOCK_HINT = (
    "the clock was ahead once: look at it; if it is right now: covenant state clock (as root), and then: " + _SIGN
)
_SCOPE_HINT = (
    "covenant trust show lists which agents and roles each key may sign: sign with another key, or change that by "
    "covenant trust set NAME"
)
_REVOKED_HINT = f"sign the package again: {_SIGN}, by a key that `covenant trust show` lists"


class Accepted(Struct, frozen=True):
    """The highest serial accepted for an agent id, and the payload that carried it."""

    serial: int
    payload_digest: str


class SerialState(Protocol):
    """The accepted serials and times; ``sandbox.storage.trust_state.State`` is the durable one."""

    def accepted(self, agent_id: str) -> Accepted | None:
        """The last accepted serial of an agent id, None when there was none."""


class NoSerials(Struct, frozen=True):
    """Nothing was accepted before: for checks that decide nothing (``manifest verify`` without a state)."""

    def accepted(self, agent_id: str) -> Accepted | None:
        """None."""


_TOKEN = object()


@dataclass(frozen=True, slots=True)
class TrustedPackage:
    """A package whose files are those that an operator signed. Only ``verify`` makes one.

    ``signers`` count for the agent id; whether they do for the role is known once the manifest is parsed:
    ``authorise``. ``payload_digest`` is the hex SHA-256 of the signed payload; ``root_version`` and ``root_digest``
    the root's number and the same of its payload.
    """

    package: packages.Package
    statement: statements.Statement
    signers: tuple[Signer, ...]
    manifest_bytes: bytes
    payload_digest: str
    root_version: int
    root_digest: str
    token: InitVar[object]

    def __post_init__(self, token: object) -> None:
        if token is not _TOKEN:
            raise TypeError("only policy.signing.trust.verify makes a TrustedPackage")


def verify(
    package: packages.Package,
    root: TrustRoot,
    *,
    now_ms: int,
    audience: str,
    serials: SerialState,
    greatest_time_ms: int = 0,
) -> TrustedPackage:
    """Decide whether the package is one that may be run on this host now: rule 2.

    ``audience`` is this host's name; ``greatest_time_ms`` the greatest time that this host has ever accepted.

    Each bound is judged by the stricter of the two times, so that setting the clock back revives nothing:
    (1) the trust root is valid;
    (2) there is an envelope, it is one DSSE document, and its payload type is in-toto's;
    (3) at least one key that the root lists signed these bytes;
    (4) the payload is one closed statement;
    (5) the signers are valid now and may sign this agent id, and they are enough;
    (6) the root revokes neither this payload nor its serial;
    (7) the statement is valid now;
    (8) it was made for this host, or for any;
    (9) its serial is not ahead of the clock, not older than the highest accepted, and not reused;
    (10) the files are exactly its subjects, byte for byte.

    Raises:
        errors.TrustError: (1)
        errors.UnsignedError: (2), no envelope
        errors.SignatureError: (2), (3) for a listed key whose signature is wrong, (4), (5) too few signers
        errors.UnknownKeyError: (3), (5) no signer whose scope covers the agent id
        errors.RevokedError: (3) the only keys that it names are revoked, (6)
        errors.ExpiredError: (5), (7)
        errors.AudienceError: (8)
        errors.SerialError: (9)
        errors.DigestMismatchError: (10)
    """
    latest_ms = max(now_ms, greatest_time_ms)

    # (1) the trust root
    root.check_time(now_ms)
    root.check_time(latest_ms)

    # (2) the envelope
    signed = _decode(package.envelope)

    # (3) signatures over the payload's bytes
    keys = signing_keys(root, signed)

    # (4) the payload, parsed only now
    payload_digest = hashlib.sha256(signed.payload).hexdigest()
    try:
        statement = statements.parse(signed.payload)
    except strict_json.MalformedJsonError as e:
        raise errors.SignatureError(f"the statement is malformed: {e}", where=_WHERE) from None

    # (5) signers
    signers = _signers(keys, statement.agent_id, now_ms=now_ms, latest_ms=latest_ms)

    # (6) revocation
    taken_back = root.document.revoked.package(payload_digest, statement.agent_id, statement.serial)
    if taken_back is not None:
        hint = root.document.revoked.retired(statement.agent_id, now_ms=now_ms) or _REVOKED_HINT
        raise errors.RevokedError(taken_back, hint=hint, where=_WHERE)

    # (7) to (9)
    _check_now(statement, payload_digest, serials, audience, now_ms=now_ms, latest_ms=latest_ms)

    # (10) digests
    _check_digests(package, statement.subjects)

    return TrustedPackage(
        package, statement, signers, package.manifest, payload_digest, root.version, root.payload_digest, token=_TOKEN
    )


def again(
    trusted: TrustedPackage,
    root: TrustRoot,
    *,
    now_ms: int,
    audience: str,
    serials: SerialState,
    greatest_time_ms: int = 0,
) -> TrustedPackage:
    """``verify`` of what it made before, later and under the very same trust root: what no time and no other run can
    have changed is not computed again. The bytes are those that were verified, no signature on them is another now,
    and what this root revokes it revoked then. The numbers are those of ``verify``.

    A key that signed and was not valid yet is no signer here: the stricter of the two answers. One that counted then
    and does not now refuses the whole: for the role, or for a lifetime without an end, it may have been the only one.

    Raises:
        errors.TrustError: (1), or this is another root
        errors.SignatureError, errors.ExpiredError: (5), (7)
        errors.AudienceError: (8)
        errors.SerialError: (9)
    """
    latest_ms, statement = max(now_ms, greatest_time_ms), trusted.statement
    if root.payload_digest != trusted.root_digest:
        raise errors.TrustError(f"trust root version {root.version} is another than the package was verified under")
    # (1) the trust root
    root.check_time(now_ms)
    root.check_time(latest_ms)
    # (5) signers
    made = {one.keyid for one in trusted.signers}
    keys = [key for key in root.keys if key.key.keyid in made]
    signers = _signers(keys, statement.agent_id, now_ms=now_ms, latest_ms=latest_ms)
    # (7) to (9)
    _check_now(trusted.statement, trusted.payload_digest, serials, audience, now_ms=now_ms, latest_ms=latest_ms)
    # After all that ``verify`` refuses as well, so that the answer is the same wherever both refuse.
    if signers != trusted.signers:
        lost = next(one.name for one in trusted.signers if one not in signers)
        raise errors.ExpiredError(f"the key of `{lost}`, which counted, is not valid now", where=_WHERE)
    return dataclasses.replace(trusted, signers=signers, token=_TOKEN)


def part(trusted: TrustedPackage, package: packages.Package, agent_id: str) -> TrustedPackage:
    """Return a package that was cut out of a trusted one, under an agent id of its own.

    The caller made it of the trusted package's files, and of a manifest that those files determine. It rests on the
    same signed payload: a revocation of the whole is one of the part.
    """
    scope = Scope(agents=(agent_id,), roles=("*",), approve_unlimited=False)
    return dataclasses.replace(
        trusted,
        package=package,
        statement=trusted.statement.model_copy(update={"agent_id": agent_id}),
        signers=tuple(Signer(one.name, one.keyid, scope, one.threshold) for one in trusted.signers),
        manifest_bytes=package.manifest,
        token=_TOKEN,
    )


def authorise(trusted: TrustedPackage, *, agent_id: str, role: str | None, operator: str | None) -> tuple[Signer, ...]:
    """The signers that count for the manifest that was parsed from the trusted bytes: the rest of rule 2.

    (1) the manifest's id is the statement's;
    (2) the signers whose scope covers the role are enough; those of them that count are returned;
    (3) ``agent.operator``, when written, names one of them.

    Raises:
        errors.SignatureError: (1), (2) too few, (3)
        errors.UnknownKeyError: (2) no signer may sign for the role
    """
    if agent_id != trusted.statement.agent_id:
        raise errors.SignatureError(
            f"the manifest is of agent `{agent_id}`, the signed statement of `{trusted.statement.agent_id}`",
            where=packages.MANIFEST_NAME,
        )
    signers = _covering(trusted.signers, role)
    check_operator(operator, signers)
    return signers


def approves_unlimited(trusted: TrustedPackage, *, role: str | None) -> bool:
    """Whether the statement approves a lifetime without an end, and a signer that counts for the role may do so."""
    signers = threshold.counting(s for s in trusted.signers if s.scope.covers_role(role))
    return trusted.statement.approve_unlimited and any(s.scope.approve_unlimited for s in signers)


def listed(root: TrustRoot, agent_id: str, *, now_ms: int) -> frozenset[str]:
    """Return the ids of the keys that the root lets sign for an agent id now, alone or with others."""
    return frozenset(
        one.key.keyid
        for one in root.keys
        if one.scope.covers_agent(agent_id) and one.not_before <= now_ms < one.expires_at
    )


def check_operator(operator: str | None, signers: Iterable[Signer]) -> None:
    """``agent.operator``, when written, is the trust root's name of a key that signed.

    Raises:
        errors.SignatureError: it is not.
    """
    if operator is not None and operator not in {s.name for s in signers}:
        raise errors.SignatureError(
            f"`agent.operator` names `{operator}`, who did not sign",
            hint="sign with that operator's key, or take the field out",
            where=packages.MANIFEST_NAME,
        )


def _decode(raw: bytes | None) -> envelopes.Envelope:
    if raw is None:
        raise errors.UnsignedError(
            f"the package has no `{packages.ENVELOPE_NAME}`",
            hint="covenant manifest sign PACKAGE --key NAME",
            where=_WHERE,
        )
    try:
        signed = envelopes.decode(raw)
    except strict_json.MalformedJsonError as e:
        raise errors.SignatureError(f"the envelope is malformed: {e}", where=_WHERE) from None
    if signed.payload_type != envelopes.IN_TOTO_PAYLOAD_TYPE:
        raise errors.SignatureError(f"the payload type is `{strict_json.shown(signed.payload_type)}`", where=_WHERE)
    return signed


def signing_keys(root: TrustRoot, signed: envelopes.Envelope, *, where: str = _WHERE) -> tuple[OperatorKey, ...]:
    """Return the keys of the root that signed an envelope; there is at least one.

    Raises:
        errors.SignatureError: a listed key's signature is wrong.
        errors.UnknownKeyError: no key of the root signed.
        errors.RevokedError: the only keys that it names are revoked.
    """
    made = {k.keyid for k in envelopes.signers(signed, (k.key for k in root.keys))}
    if made:
        return tuple(k for k in root.keys if k.key.keyid in made)
    claimed = {s.keyid for s in signed.signatures}
    for entry in root.document.revoked.keys:
        # The id is a hint, and a true one or not, nothing here is accepted.
        if entry.keyid in claimed:
            whose = f"of `{entry.name}` " if entry.name else ""
            raise errors.RevokedError(
                f"the key {whose}that signed was revoked: {entry.reason}", hint=_REVOKED_HINT, where=where
            )
    named = [k.name for k in root.keys if k.key.keyid in claimed]
    if named:
        raise errors.SignatureError(
            f"the signature of `{named[0]}` does not fit the payload", hint="sign again", where=where
        )
    raise errors.UnknownKeyError(
        "no signature is by a key of the trust root",
        hint="covenant manifest sign PACKAGE --key NAME --fresh, by a key that `covenant trust show` lists; "
        "to add the key that signed: covenant trust add NAME --sign-with ROOTKEY",
        where=where,
    )


def signers_of(
    keys: Iterable[OperatorKey], agent_id: str, role: str | None, *, now_ms: int, latest_ms: int, where: str
) -> tuple[Signer, ...]:
    """Return those of the keys that are valid now and count for an agent id and its role.

    Raises:
        errors.UnknownKeyError: no signer may sign for them.
        errors.ExpiredError: no such key is valid now.
        errors.SignatureError: the signers are too few.
    """
    signers = _signers(keys, agent_id, now_ms=now_ms, latest_ms=latest_ms, where=where)
    return _covering(signers, role, where)


def _covering(signers: Iterable[Signer], role: str | None, where: str = _WHERE) -> tuple[Signer, ...]:
    covering = tuple(s for s in signers if s.scope.covers_role(role))
    if not covering:
        wanted = f"role `{role}`" if role is not None else "a manifest without a role"
        raise errors.UnknownKeyError(f"no signer may sign for {wanted}", hint=_SCOPE_HINT, where=where)
    return _enough(covering, where)


def _signers(
    keys: Iterable[OperatorKey], agent_id: str, *, now_ms: int, latest_ms: int, where: str = _WHERE
) -> tuple[Signer, ...]:
    covering = [k for k in keys if k.scope.covers_agent(agent_id)]
    if not covering:
        raise errors.UnknownKeyError(f"no signer may sign for agent `{agent_id}`", hint=_SCOPE_HINT, where=where)
    valid = [k for k in covering if k.not_before <= now_ms and latest_ms < k.expires_at]
    if not valid:
        raise errors.ExpiredError(
            f"the key of `{covering[0].name}` is not valid now",
            hint="covenant trust show has its times; covenant trust set NAME --expires TIME changes its end",
            where=where,
        )
    return _enough(tuple(Signer(k.name, k.key.keyid, k.scope, k.threshold) for k in valid), where)


def _enough(signers: tuple[Signer, ...], where: str = _WHERE) -> tuple[Signer, ...]:
    """Those that count; there is at least one."""
    counting = threshold.counting(signers)
    if not counting:
        # One more at least: the lowest demand of a key may be met, while the other keys demand more.
        least = max(min(s.threshold for s in signers), len(signers) + 1)
        raise errors.SignatureError(
            f"{len(signers)} operators signed and {least} are needed",
            hint="another operator of the trust root has to sign as well",
            where=where,
        )
    return counting


def _check_now(
    statement: statements.Statement,
    payload_digest: str,
    serials: SerialState,
    audience: str,
    *,
    now_ms: int,
    latest_ms: int,
) -> None:
    # (7) validity
    if now_ms < statement.not_before:
        raise errors.ExpiredError("the envelope is not valid yet", hint="check this machine's clock", where=_WHERE)
    if latest_ms >= statement.expires_at:
        hint = "sign the package again: covenant manifest sign"
        if now_ms + AHEAD_MS < statement.expires_at:
            hint = _CLOCK_HINT
        raise errors.ExpiredError("the envelope has expired", hint=hint, where=_WHERE)
    # (8) audience
    if statement.audience is not None and statement.audience != audience:
        raise errors.AudienceError(
            f"the envelope was signed for host `{statement.audience}`, this is `{audience}`", where=_WHERE
        )
    # (9) serial
    _check_serial(statement, payload_digest, serials, now_ms)


def _check_serial(statement: statements.Statement, payload_digest: str, serials: SerialState, now_ms: int) -> None:
    if statement.serial > now_ms + MAX_SERIAL_AHEAD_MS:
        raise errors.SerialError(
            f"serial {statement.serial} is more than a day ahead of this machine's clock",
            hint="check this machine's clock, or sign again with --serial",
            where=_WHERE,
        )
    last = serials.accepted(statement.agent_id)
    check_rollback(statement.agent_id, statement.serial, payload_digest, last, now_ms=now_ms)


def check_rollback(
    agent_id: str, serial: int, payload_digest: str, last: Accepted | None, *, now_ms: int | None = None
) -> None:
    """The ratchet: a serial never goes down, and one serial has one payload.

    With ``now_ms`` the error names the clock where the accepted serial is ahead of it: no new signature is higher then.

    Raises:
        errors.SerialError: it does, or it has two.
    """
    if last is None or (serial == last.serial and payload_digest == last.payload_digest):
        return
    if serial < last.serial:
        raise errors.SerialError(
            f"serial {serial} of agent `{agent_id}` is older than {last.serial}, which was accepted",
            hint=_CLOCK_HINT if now_ms is not None and last.serial > now_ms + AHEAD_MS else "sign the package again",
            where=_WHERE,
        )
    if serial == last.serial:
        raise errors.SerialError(
            f"serial {serial} of agent `{agent_id}` was accepted for another package",
            hint="sign the package again with a higher serial",
            where=_WHERE,
        )


def _check_digests(package: packages.Package, subjects: Mapping[str, str]) -> None:
    if dict(package.digests) == dict(subjects):
        return
    for path in sorted(package.digests.keys() | subjects.keys()):
        if path not in subjects:
            fault, hint = f"`{path}` is not in the signed statement", "take the file away, or sign again"
        elif path not in package.digests:
            fault, hint = f"`{path}` was signed and is missing", "put the file back, or sign again"
        elif package.digests[path] != subjects[path]:
            kind = "link" if subjects[path].startswith(packages.LINK_PREFIX) else "file"
            fault, hint = f"`{path}` is not the {kind} that was signed", "put the file back, or sign again"
        else:
            continue
        raise errors.DigestMismatchError(fault, hint=hint, where=path)
    raise AssertionError("two different listings without a difference")
