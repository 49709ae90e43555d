"""Sign an operator's lease for a request that is held (policy.signing.lease)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from covenant.keys.signers import Signer
from covenant.keys.signing import BACKDATE_MS
from policy import errors
from policy.signing import envelope, lease, strict_json
from policy.signing.lease import LeaseStatement


def lease_of(
    held: Mapping[str, Any], door: Signer, *, duration: str, expires_ms: int, now_ms: int
) -> tuple[bytes, LeaseStatement]:
    """Return the bytes of a lease for the request ``held`` (a row of `approvals`), and its statement.

    Raises:
        errors.UsageError: it would last too long, or has ended.
        errors.KeyFileError, errors.AgentError: the key did not sign.
    """
    fields = {
        **{name: held[name] for name in ("agent_id", "run_id", "policy_digest", "kind", "target")},
        "request_id": held["id"],
        "duration": duration,
        "nonce": os.urandom(16).hex(),
        "not_before": max(now_ms - BACKDATE_MS, 0),
        "expires_at": expires_ms,
    }
    try:
        statement = strict_json.validate(LeaseStatement, fields)
    except strict_json.MalformedJsonError as e:
        raise errors.UsageError(f"the lease cannot be made: {e}", hint="--until 1h") from None
    signed = envelope.Envelope(statement.encode(), lease.PAYLOAD_TYPE, ())
    return signed.signed_by(door.signature(signed)).encode(), statement
