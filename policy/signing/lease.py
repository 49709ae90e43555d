"""An operator's lease: a signed, expiring addition to the policy of one run, for one request that was held (ADR 0108).

The statement is closed: an unknown key is refused, and no key has a default. Its payload type is its own, so that no
signature over a package, a trust root or an approval is one of a lease. Times are Unix milliseconds.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Final, Literal

import pydantic
from msgspec import Struct

from policy import errors
from policy.signing import envelope as envelopes
from policy.signing import statement as statements
from policy.signing import strict_json, trust
from policy.signing.root import TrustRoot

PAYLOAD_TYPE: Final = "application/vnd.covenant.lease.v1+json"
MAX_LIFETIME_MS: Final = 30 * statements.DAY_MS
MAX_BYTES: Final = 12_288
TARGET_CHARACTERS: Final = 512
_WHERE: Final = "lease"

Kind = Literal["network", "tool"]
# For one use, for as long as the run lives, or until a time. Each ends at ``expires_at`` at the latest.
Duration = Literal["once", "run", "until"]


class LeaseStatement(pydantic.BaseModel):
    """Grant ``target`` to the request of a run that asked for it, until ``expires_at``. A ``nonce`` counts once."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True, regex_engine="rust-regex")

    agent_id: Annotated[str, pydantic.Field(pattern=statements.AGENT_ID_PATTERN)]
    run_id: Annotated[str, pydantic.Field(pattern=r"^[0-9a-f-]{1,64}$")]
    policy_digest: statements.Sha256
    request_id: Annotated[str, pydantic.Field(pattern=r"^[0-9a-f]{16}$")]
    kind: Kind
    target: Annotated[str, pydantic.Field(min_length=1, max_length=TARGET_CHARACTERS)]
    duration: Duration
    nonce: Annotated[str, pydantic.Field(pattern=r"^[0-9a-f]{32}$")]
    not_before: statements.TimeMs
    expires_at: statements.TimeMs

    @pydantic.model_validator(mode="after")
    def _ordered(self) -> LeaseStatement:
        if not self.not_before < self.expires_at <= self.not_before + MAX_LIFETIME_MS:
            raise ValueError("`expires_at` is not within 30 days after `not_before`")
        return self

    def encode(self) -> bytes:
        """Return the payload to sign: compact JSON with sorted keys."""
        return strict_json.dumps(self.model_dump(mode="json"))


class SignedLease(Struct, frozen=True):
    """A verified lease. ``signers`` are the names of the keys that count, ``sha256`` is that of the payload."""

    statement: LeaseStatement
    signers: tuple[str, ...]
    sha256: str


def verify(raw: bytes, root: TrustRoot, *, role: str | None, now_ms: int, greatest_time_ms: int = 0) -> SignedLease:
    """Verify a lease: by the keys that may sign the agent's manifest, for the role of the run.

    Each bound is judged by the stricter of the two times, as a package's (policy.signing.trust.verify).

    Raises:
        errors.TrustError: the trust root is not valid now.
        errors.SignatureError: it is no lease, a signature does not fit, or too few operators signed.
        errors.UnknownKeyError: no signer is a key of the root that may sign for the agent id and the role.
        errors.RevokedError: the only keys that it names are revoked.
        errors.ExpiredError: it, or the key that signed, is not valid now.
    """
    latest_ms = max(now_ms, greatest_time_ms)
    root.check_time(now_ms)
    root.check_time(latest_ms)
    try:
        if len(raw) > MAX_BYTES:
            raise strict_json.MalformedJsonError(f"it has more than {MAX_BYTES} bytes")
        signed = envelopes.decode(raw)
        if signed.payload_type != PAYLOAD_TYPE:
            raise strict_json.MalformedJsonError(f"its payload type is `{strict_json.shown(signed.payload_type)}`")
        keys = trust.signing_keys(root, signed, where=_WHERE)
        value = strict_json.loads(signed.payload, max_bytes=MAX_BYTES)
        statement = strict_json.validate(LeaseStatement, value)
    except strict_json.MalformedJsonError as e:
        raise errors.SignatureError(
            f"the lease is malformed: {e}", hint="covenant approvals grant REQUEST makes one", where=_WHERE
        ) from None
    signers = trust.signers_of(keys, statement.agent_id, role, now_ms=now_ms, latest_ms=latest_ms, where=_WHERE)
    if not statement.not_before <= now_ms or latest_ms >= statement.expires_at:
        raise errors.ExpiredError(
            "the lease is not valid now", hint="covenant approvals grant REQUEST makes a new one", where=_WHERE
        )
    return SignedLease(statement, tuple(one.name for one in signers), hashlib.sha256(signed.payload).hexdigest())
