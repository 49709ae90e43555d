"""Sign an operator's approval of the changes of a workspace, or add a signature to one (policy.signing.approval)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from covenant.keys.signers import Signer
from covenant.keys.signing import BACKDATE_MS
from policy import errors
from policy.signing import approval, envelope, strict_json
from policy.signing.approval import ApprovalStatement


def approval_of(
    shown: Mapping[str, Any], door: Signer, file: Path, *, lifetime_ms: int, now_ms: int
) -> tuple[bytes, ApprovalStatement]:
    """Return the bytes of an approval of the changes that were ``shown`` (the answer to `diff`), and its statement.

    Where ``file`` has an approval of the same changes that goes on, the signature is added to it.

    Raises:
        errors.UsageError: the lifetime is too long.
        errors.KeyFileError, errors.AgentError: the key did not sign.
    """
    fields = {
        "agent_id": shown["agent_id"],
        "run_id": shown["run_id"],
        "policy_digest": shown["policy_digest"],
        "changes_sha256": shown["digest"],
    }
    earlier = _earlier(file, fields, now_ms)
    if earlier is not None:
        signed, statement = earlier
    else:
        begin = max(now_ms - BACKDATE_MS, 0)
        try:
            statement = strict_json.validate(
                ApprovalStatement, {**fields, "not_before": begin, "expires_at": now_ms + lifetime_ms}
            )
        except strict_json.MalformedJsonError as e:
            raise errors.UsageError(f"the approval cannot be made: {e}", hint="--expires 1d") from None
        signed = envelope.Envelope(statement.encode(), approval.PAYLOAD_TYPE, ())
    return signed.signed_by(door.signature(signed)).encode(), statement


def _earlier(file: Path, fields: Mapping[str, str], now_ms: int) -> tuple[envelope.Envelope, ApprovalStatement] | None:
    """Return the approval in a file, None for one of other changes, one that has ended, or none."""
    try:
        with file.open("rb") as stream:
            signed = envelope.decode(stream.read(approval.MAX_BYTES + 1))
        if signed.payload_type != approval.PAYLOAD_TYPE:
            return None
        value = strict_json.loads(signed.payload, max_bytes=approval.MAX_BYTES)
        statement = strict_json.validate(ApprovalStatement, value)
    except (OSError, strict_json.MalformedJsonError):
        return None
    same = all(getattr(statement, name) == fields[name] for name in fields)
    return (signed, statement) if same and now_ms < statement.expires_at else None
