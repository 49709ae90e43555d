"""The lines of ``peers/registry.jsonl``.

    {type: registered, token_sha256, token_prefix, agent_id, registered_at, expires_at}
    {type: revoked, token_sha256, revoked_at}

Version 1 has ``token``, in clear, in place of ``token_sha256`` and ``token_prefix``.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final

import pydantic

from covenant.stores.peers.interface import PREFIX_LENGTH, PeerToken, digest
from covenant.wire.types import AgentId
from policy import errors, wire_json

_HEX64: Final = re.compile(r"[0-9a-f]{64}\Z")


@dataclass(frozen=True, slots=True)
class Revoked:
    """Record that a token was revoked."""

    digest: bytes
    at_ms: int


@dataclass(frozen=True, slots=True)
class PeerRow:
    """A parsed line; ``clear``: it contained the token itself."""

    what: PeerToken | Revoked
    clear: bool


def line(what: PeerToken | Revoked) -> bytes:
    """Return the line of an entry or of a revocation."""
    if isinstance(what, Revoked):
        return _dump({"type": "revoked", "token_sha256": what.digest.hex(), "revoked_at": what.at_ms})
    agent = what.agent_id
    return _dump(
        {
            "type": "registered",
            "token_sha256": what.digest.hex(),
            "token_prefix": what.token_prefix,
            "agent_id": {"display": agent.display, "pubkey": agent.pubkey},
            "registered_at": what.registered_at_ms,
            "expires_at": what.expires_at_ms,
        }
    )


def read(raw: bytes) -> PeerRow:
    """Parse a line.

    Raises:
        errors.StoreError: the line is invalid. Tokens are never guessed from a damaged registry.
    """
    try:
        row = wire_json.read(raw, wire_json.MAX_STORED)
        token_digest, prefix, clear = _token(row)
        if row["type"] == "revoked":
            return PeerRow(Revoked(token_digest, _number(row["revoked_at"])), clear)
        if row["type"] != "registered":
            raise ValueError(row["type"])
        ends = row.get("expires_at")
        entry = PeerToken(
            digest=token_digest,
            token_prefix=prefix,
            agent_id=AgentId.model_validate(row["agent_id"]),
            registered_at_ms=_number(row["registered_at"]),
            expires_at_ms=None if ends is None else _number(ends),
        )
        return PeerRow(entry, clear)
    except (errors.MalformedRequestError, pydantic.ValidationError, KeyError, TypeError, ValueError, AttributeError):
        raise errors.StoreError("a line of `registry.jsonl` is none of a registry of peers") from None


def _token(row: dict[str, Any]) -> tuple[bytes, str, bool]:
    if "token_sha256" not in row:
        token = row["token"]
        if type(token) is not str or len(token) < PREFIX_LENGTH:
            raise ValueError("no token")
        return digest(token), token[:PREFIX_LENGTH], True
    if not _HEX64.match(row["token_sha256"]):
        raise ValueError("no digest")
    prefix = row["token_prefix"] if row["type"] == "registered" else ""
    if type(prefix) is not str or len(prefix) > PREFIX_LENGTH:
        raise ValueError("no prefix")
    return bytes.fromhex(row["token_sha256"]), prefix, False


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**64:
        raise ValueError("no number")
    return value


def _dump(row: dict[str, Any]) -> bytes:
    return json.dumps(row, separators=(",", ":"), ensure_ascii=False).encode()
