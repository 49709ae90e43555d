"""Decoders as a client of version 1 has them: required fields with their types, closed sets of words, unknown fields
ignored. A field that may be null may be missing too."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from policy.audit_log import event_kinds

Decoder = Callable[[Any], None]
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


def text(value: Any) -> None:
    assert type(value) is str, value


def number(value: Any) -> None:
    assert type(value) is int, value
    assert 0 <= value < 2**64, value


def flag(value: Any) -> None:
    assert type(value) is bool, value


def anything(value: Any) -> None:
    pass


def uuid(value: Any) -> None:
    assert type(value) is str, value
    assert _UUID.fullmatch(value), value


def one_of(*words: str) -> Decoder:
    def decode(value: Any) -> None:
        assert value in words, f"unknown variant `{value}`"

    return decode


def listed(of: Decoder) -> Decoder:
    def decode(value: Any) -> None:
        assert type(value) is list, value
        for item in value:
            of(item)

    return decode


def maybe(of: Decoder) -> Decoder:
    def decode(value: Any) -> None:
        if value is not None:
            of(value)

    decode.optional = True  # type: ignore[attr-defined]
    return decode


def null_or(of: Decoder) -> Decoder:
    """Decode null or ``of``, where the name must be there."""

    def decode(value: Any) -> None:
        if value is not None:
            of(value)

    return decode


def struct(**fields: Decoder) -> Decoder:
    def decode(value: Any) -> None:
        assert type(value) is dict, value
        for name, of in fields.items():
            assert name in value or getattr(of, "optional", False), f"missing field `{name}`"
            of(value.get(name))

    return decode


def tagged(tag: str, **kinds: Decoder) -> Decoder:
    def decode(value: Any) -> None:
        assert value[tag] in kinds, f"unknown variant `{value[tag]}`"
        kinds[value[tag]](value)

    return decode


AGENT = struct(display=text, pubkey=text)
_OUTCOME = struct(
    task_id=text,
    action=one_of("requeued", "forced_error"),
    state=one_of("queued", "in_flight", "result_pending", "resolved"),
    attempt=number,
    result=maybe(anything),
)
_PEER = struct(agent_id=AGENT, token_prefix=text, registered_at=number, revoked_at=maybe(number))
EVENT = struct(id=uuid, timestamp_ms=number, issuer=AGENT, kind=struct(type=one_of(*event_kinds.VERSION_1)))
PROTOCOL = struct(protocol=text, version=number, min_supported=number, max_supported=number)
STREAM = tagged(
    "kind",
    stream_begin=struct(stream_id=uuid, response_kind=text),
    stream_chunk=struct(stream_id=uuid, sequence=number, chunk=anything),
    stream_end=struct(stream_id=uuid, summary=maybe(struct(intent_id=uuid, status=text, settlement=anything))),
    stream_error=struct(stream_id=uuid, message=text),
)
# The rows of covenant-v1-differences.md, section 1.
RESPONSE = tagged(
    "kind",
    audit_events=struct(events=listed(EVENT)),
    chain_status=struct(status=struct(chain=maybe(text), cluster=text, ready=flag, missing=listed(text))),
    capability_usage=struct(
        grants=listed(
            struct(
                signature_b58=text,
                action=text,
                expires_at=maybe(number),
                revoked=flag,
                effective=one_of("live", "revoked", "expired", "exhausted"),
                budget=maybe(struct(max_uses=number, used=number, remaining=number)),
            )
        )
    ),
    a2_a_repaired=struct(outcome=_OUTCOME),
    a2_a_auto_retried=struct(
        report=struct(
            policy=struct(
                enabled=flag, min_lease_age_ms=number, max_attempts=number, max_requeues=number, scan_limit=number
            ),
            considered=number,
            requeued=listed(_OUTCOME),
            skipped=listed(struct(task_id=text, reason=text)),
        )
    ),
    a2_a_result_posted=struct(task_id=text),
    peer_revoked=struct(
        outcome=tagged(
            "type",
            revoked=_PEER,
            already_revoked=_PEER,
            self_revoke_forbidden=_PEER,
            not_found=struct(),
            ambiguous=struct(matches=listed(_PEER), truncated=flag),
        )
    ),
    peer_enrolled=struct(token_b58=text, pubkey_b58=text, display=text, granted=listed(text)),
    audit_inclusion=struct(
        proof=maybe(struct(leaf_index=number, suffix_event_hashes_hex=listed(text), root_hash_hex=text))
    ),
)

_PURGED = struct(purged=number, before_ms=number)
_READ = struct(
    mode=one_of("recent", "search"),
    records=listed(anything),
    tier=null_or(text),
    limit=number,
    query=null_or(text),
    min_relevance=null_or(anything),
)
# The envelopes of the command's --json (section 5), by their `kind`. Names of ours beside these are ignored.
CLI: dict[str, Decoder] = {
    "daemon_ping": struct(status=one_of("ok")),
    "bootstrap_result": struct(granted=listed(struct(action=text, signature_b58=text)), already_granted=listed(text)),
    "memory_read": _READ,
    "memory_purged": _PURGED,
    "capabilities_purged": _PURGED,
    "peers_purged": _PURGED,
    "audit_purged": _PURGED,
    "capability_list": struct(capabilities=listed(anything), limit=number),
    "capability_granted": struct(
        signature_b58=text, subject_display=text, action=text, scope=anything, expires_at=null_or(number)
    ),
    "capability_revoked": struct(signature_b58=text, removed=flag),
    "receipt_list": struct(receipts=listed(anything), limit=number, since_ms=null_or(number)),
    "receipt_batch_list": struct(batches=listed(anything), limit=number),
    "debit_list": struct(debits=listed(anything), limit=number),
    "audit_recent": struct(events=listed(anything), limit=number, since_ms=null_or(number)),
    "a2a_status": struct(
        tasks=listed(anything),
        results=listed(anything),
        limit=number,
        min_lease_age_ms=null_or(number),
        deadline_within_ms=null_or(number),
        state_filter=null_or(one_of("queued", "in_flight")),
    ),
    "peer_list": struct(
        peers=listed(_PEER),
        operator_pubkey_b58=text,
        truncated=flag,
        limit=number,
        filter_pubkey_prefix=null_or(text),
        matched_count=number,
    ),
    "tool_result": struct(name=text, content=listed(anything), is_error=flag),
    "intents_resume": struct(ok=flag, mode=one_of("latest", "explicit"), intent_id=null_or(text)),
}
