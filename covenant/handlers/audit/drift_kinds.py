"""Every kind of drift between the stores, with the check that it fails and its mend.

``KINDS`` is the closed table; docs/drift.md shows it, and tests/unit/covenant/handlers/audit/test_drift.py provokes
each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from covenant.wire.parts import Drift


@dataclass(frozen=True, slots=True)
class Kind:
    """``check`` is the one that fails; ``orphan``: something stands without what it belongs to."""

    check: str
    repair: str
    orphan: bool = False


_DELETE: Final = "look at it, then: covenant memory repair delete <id> --reason TEXT --apply"
_DETACH: Final = "covenant memory repair detach-parent <id> --reason TEXT --apply"
_BACKFILL: Final = "covenant settlement backfill-receipts --dry-run, then without --dry-run"
_CORRELATE: Final = "covenant memory backfill-receipt-correlation --dry-run, then without --dry-run"
_REVOKE: Final = "covenant capabilities revoke <id>"
_LOG: Final = "rows are never changed: covenant audit verify, and look for who wrote it"
_BATCH: Final = "compare with the chain: covenant chain receipt-batches; receipts in a batch are never changed"
_RECEIPT: Final = "receipts are never taken back: compare receipts/working.jsonl with its last backup"

KINDS: Final[Mapping[str, Kind]] = {
    "memory_row_invalid": Kind("memory_rows", _DELETE),
    "memory_nan_embedding": Kind("memory_rows", _DELETE),
    "memory_empty_text": Kind("memory_rows", _DELETE),
    "memory_id_nil": Kind("memory_rows", _DELETE),
    "memory_created_at_zero": Kind("memory_rows", _DELETE),
    "memory_owner_pubkey_zeroed": Kind("memory_rows", _DELETE),
    "memory_stale_parent": Kind("memory_parents", _DETACH, orphan=True),
    "memory_self_parent": Kind("memory_parents", _DETACH),
    "memory_parent_cycle": Kind("memory_parents", _DETACH),
    "memory_without_audit": Kind("memory_audit", _DELETE, orphan=True),
    "audit_without_memory": Kind(
        "memory_audit", "restore memory.db from a backup; the log says what was kept", orphan=True
    ),
    "intent_dispatched_duplicate": Kind("memory_audit", _LOG),
    "memory_without_receipt": Kind("memory_receipts", _CORRELATE, orphan=True),
    "memory_receipt_mismatch": Kind("memory_receipts", _CORRELATE),
    "receipt_without_memory_record": Kind("memory_receipts", _BACKFILL, orphan=True),
    "memory_receipt_duplicate": Kind("memory_receipts", _RECEIPT),
    "memory_receipt_owner_mismatch": Kind("memory_receipts", _RECEIPT),
    "memory_receipt_resource_mismatch": Kind("memory_receipts", _RECEIPT),
    "memory_receipt_settled_before_created": Kind("memory_receipts", _RECEIPT),
    "receipt_id_nil": Kind("receipts", _RECEIPT),
    "receipt_settled_at_zero": Kind("receipts", _RECEIPT),
    "receipt_confirmed_at_zero": Kind("receipts", _BATCH),
    "receipt_payer_pubkey_zeroed": Kind("receipts", _RECEIPT),
    "receipt_credits_zero": Kind("receipts", _RECEIPT),
    "receipt_chain_partial": Kind("receipts", _BATCH),
    "receipt_confirmed_without_chain": Kind("receipts", _BATCH),
    "receipt_tx_sig_onchain_sig_diverged": Kind("receipts", _BATCH),
    "capability_without_audit": Kind("capabilities", _REVOKE, orphan=True),
    "capability_action_empty": Kind("capabilities", _REVOKE),
    "capability_expires_at_zero": Kind("capabilities", _REVOKE),
    "capability_signature_zeroed": Kind("capabilities", _REVOKE),
    "capability_subject_pubkey_zeroed": Kind("capabilities", _REVOKE),
    "capability_granted_by_pubkey_zeroed": Kind("capabilities", _REVOKE),
    "audit_id_nil": Kind("audit_rows", _LOG),
    "audit_timestamp_at_zero": Kind("audit_rows", _LOG),
    "audit_issuer_pubkey_zeroed": Kind("audit_rows", _LOG),
    "audit_intent_id_nil": Kind("audit_rows", _LOG),
    "audit_intent_id_empty": Kind("audit_rows", _LOG),
    "audit_status_empty": Kind("audit_rows", _LOG),
    "audit_result_hash_hex_empty": Kind("audit_rows", _LOG),
    "audit_agent_id_empty": Kind("audit_rows", _LOG),
    "audit_action_empty": Kind("audit_rows", _LOG),
    "audit_signature_b58_empty": Kind("audit_rows", _LOG),
    "audit_subject_display_empty": Kind("audit_rows", _LOG),
    "audit_memory_id_empty": Kind("audit_rows", _LOG),
    "audit_matched_pattern_empty": Kind("audit_rows", _LOG),
    "audit_reason_empty": Kind("audit_rows", _LOG),
    "audit_task_id_empty": Kind("audit_rows", _LOG),
    "audit_tool_empty": Kind("audit_rows", _LOG),
}
CHECKS: Final = tuple(dict.fromkeys(kind.check for kind in KINDS.values()))


def drift(kind: str, identity: str | None, message: str) -> Drift:
    """One drift, with the mend of its kind."""
    mend = KINDS[kind].repair
    return Drift(kind=kind, id=identity, message=message, repair=mend.replace("<id>", identity or "<id>"))
