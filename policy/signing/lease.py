"""An operator's lease: a signed, expiring addition to the policy of one run, for one request that was held (ADR 0108).

The statement is closed: an unknown key is refused, and no key has a default. Its payload type is its own, so that no
signature over a package, a trust root or an approval is one of a lease. Times are Unix milliseconds.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import pydantic
from msgspec import Struct

from policy.signing import word
from policy.signing.root import TrustRoot

PAYLOAD_TYPE: Final = "application/vnd.covenant.lease.v1+json"
MAX_LIFETIME_MS: Final = word.MAX_LIFETIME_MS
MAX_BYTES: Final = 12_288
TARGET_CHARACTERS: Final = 512
_KIND: Final = word.WordKind("lease", PAYLOAD_TYPE, MAX_BYTES, "covenant approvals grant REQUEST")

Kind = Literal["network", "tool", "inject"]
# For one use, for as long as the run lives, or until a time. Each ends at ``expires_at`` at the latest.
Duration = Literal["once", "run", "until"]


class LeaseStatement(word.RunStatement):
    """Grant ``target`` to the request of a run that asked for it, until ``expires_at``. A ``nonce`` counts once."""

    request_id: Annotated[str, pydantic.Field(pattern=r"^[0-9a-f]{16}$")]
    kind: Kind
    target: Annotated[str, pydantic.Field(min_length=1, max_length=TARGET_CHARACTERS)]
    duration: Duration
    nonce: Annotated[str, pydantic.Field(pattern=r"^[0-9a-f]{32}$")]


class SignedLease(Struct, frozen=True):
    """A verified lease. ``signers`` are the names of the keys that count, ``sha256`` is that of the payload."""

    statement: LeaseStatement
    signers: tuple[str, ...]
    sha256: str


def verify(raw: bytes, root: TrustRoot, *, role: str | None, now_ms: int, greatest_time_ms: int = 0) -> SignedLease:
    """Verify a lease: by the keys that may sign the agent's manifest, for the role of the run.

    Raises:
        errors.CovenantError: as ``word.verify``.
    """
    return SignedLease(
        *word.verify(raw, root, _KIND, LeaseStatement, role=role, now_ms=now_ms, greatest_time_ms=greatest_time_ms)
    )
