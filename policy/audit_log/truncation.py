"""The record that begins a log which was cut: what stood before, in the hashes that stand for it.

Its chain begins anew, as version 1's does after a purge. What version 1 lacks is this first line: how many records
were ever cut, the chain's root before, and the roots of the complete subtrees over all that was cut (RFC 6962). So the
Merkle tree goes on as if nothing were missing: a checkpoint of any size from the cut on, signed before or after it,
still holds against the rows that are left. The line is signed by the log's key and is no leaf of the tree itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from msgspec import Struct

from policy.audit_log import chain, event_kinds, merkle

KIND: Final = "audit_rebased"
# How such a line is found: quotes within a value are escaped, so that no value can hold these bytes.
NEEDLE: Final = b'"kind":{"type":"audit_rebased",'

# INVARIANT: no other signing door of this project uses this prefix (decisions.md, signing doors).
_DOMAIN: Final = b"covenant.audit.rebase.v1\n"
_FIELDS: Final = tuple(event_kinds.OURS[KIND])


class Cut(Struct, frozen=True):
    """A cut: its rows, and the whole log before it.

    ``tree`` is the frontier over everything that was ever cut, this included.
    """

    rows: int
    first: chain.ChainRow
    last: chain.ChainRow
    root_before_hex: str
    tree_before: merkle.Frontier
    tree: merkle.Frontier
    previous_rebase_hex: str | None


def fields(cut: Cut, key: Ed25519PrivateKey) -> dict[str, Any]:
    """The fields of the record, signed."""
    body: dict[str, Any] = {
        "cut": cut.tree.size,
        "cut_now": cut.rows,
        "first_event_id": cut.first.event_id,
        "last_event_id": cut.last.event_id,
        "last_timestamp_ms": cut.last.timestamp_ms,
        "root_before_hex": cut.root_before_hex,
        "tree_size_before": cut.tree_before.size,
        "tree_root_before_hex": cut.tree_before.root().hex(),
        "subtrees": [value.hex() for value in cut.tree.hashes],
        "previous_rebase_hex": cut.previous_rebase_hex,
        "key_id": chain.key_id(key.public_key()),
    }
    return {**body, "signature_hex": key.sign(_signed(body)).hex()}


def frontier(line: bytes, public_key: Ed25519PublicKey | None) -> merkle.Frontier | None:
    """Read the re-base record of a cut from the first line of a log.

    The result is empty when the line is no re-base record, and None when the record does not hold.

    Without a key the signature is not looked at.
    """
    if NEEDLE not in line:
        return merkle.Frontier()
    try:
        kind: Mapping[str, Any] = json.loads(line)["kind"]
        body = {name: kind[name] for name in _FIELDS if name != "signature_hex"}
        if kind["type"] != KIND or set(kind) != {"type", *_FIELDS}:
            return None
        if public_key is not None:
            if body["key_id"] != chain.key_id(public_key):
                return None
            public_key.verify(bytes.fromhex(kind["signature_hex"]), _signed(body))
        return merkle.Frontier(body["cut"], [bytes.fromhex(value) for value in body["subtrees"]])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, InvalidSignature):
        return None


def _signed(body: Mapping[str, Any]) -> bytes:
    ordered = {name: body[name] for name in _FIELDS if name != "signature_hex"}
    return _DOMAIN + json.dumps(ordered, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")
