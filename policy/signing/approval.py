"""An operator's approval of one apply: signed over the run, its policy and the digest of the changes (ADR 0085).

The approval is closed: an unknown key is refused, and no key has a default. Its payload type is its own, so that no
signature over a package or a trust root is one of an approval. Times are Unix milliseconds.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from policy.signing import statement as statements
from policy.signing import word
from policy.signing.root import TrustRoot

PAYLOAD_TYPE: Final = "application/vnd.covenant.workspace-approval.v1+json"
DEFAULT_LIFETIME_MS: Final = statements.DAY_MS
MAX_LIFETIME_MS: Final = word.MAX_LIFETIME_MS
MAX_BYTES: Final = 16_384
_KIND: Final = word.WordKind("approval", PAYLOAD_TYPE, MAX_BYTES, "covenant workspace approve RUN")


class ApprovalStatement(word.RunStatement):
    """The changes of a run that an operator approves, until ``expires_at``."""

    changes_sha256: statements.Sha256


class Approval(Struct, frozen=True):
    """A verified approval. ``signers`` are the names of the keys that count, ``sha256`` is that of the payload."""

    statement: ApprovalStatement
    signers: tuple[str, ...]
    sha256: str


def verify(raw: bytes, root: TrustRoot, *, role: str | None, now_ms: int, greatest_time_ms: int = 0) -> Approval:
    """Verify an approval: by the keys that may sign the agent's manifest, for the role of the run.

    Raises:
        errors.CovenantError: as ``word.verify``.
    """
    return Approval(
        *word.verify(raw, root, _KIND, ApprovalStatement, role=role, now_ms=now_ms, greatest_time_ms=greatest_time_ms)
    )
