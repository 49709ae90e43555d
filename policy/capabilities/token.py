"""A capability and the exact bytes that its grantor signs.

    subject key (32) | action length (u32) | action | scope length (u32) | scope as RFC 8785 JSON
    | grantor key (32) | whether it ends (1 or 0) | when it ends (u64, 0 if never)

All numbers big-endian. Display names are not signed. INVARIANT: these are version 1's bytes; no other message of the
same key may be readable as them (``covenant.keys.identity``), which ``parse`` decides.
"""

from __future__ import annotations

import json
import struct
from typing import Any, Final

import rfc8785
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from msgspec import Struct

from policy import base58
from policy.capabilities import actions
from policy.signing import envelope

MAX_SCOPE_BYTES: Final = 64 * 1024
KEY_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64

_U64_END: Final = 2**64
_INT_END: Final = 2**53
_END: Final = struct.Struct(">BQ")


class MalformedTokenError(ValueError):
    """The input is no capability. The text says why, in one lower-case line."""


class Token(Struct, frozen=True):
    """A capability. Keys in base58; ``expires_at`` in Unix milliseconds, None for never."""

    subject: str
    action: str
    scope: Any
    granted_by: str
    expires_at: int | None

    def expired(self, now_ms: int) -> bool:
        """Whether it has ended: one that ends at t still holds at t."""
        return self.expires_at is not None and now_ms > self.expires_at

    def message(self) -> bytes:
        """The canonical bytes.

        Raises:
            MalformedError: a field that has none.
        """
        action = self.action.encode("utf-8", "surrogatepass")
        if not actions.well_formed(self.action):
            raise MalformedTokenError("the action is not dot-separated names")
        scope = canonical_scope(self.scope)
        ends = self.expires_at
        if ends is not None and not (type(ends) is int and 0 <= ends < _U64_END):
            raise MalformedTokenError("the end is no time")
        return b"".join(
            (
                key_bytes(self.subject),
                len(action).to_bytes(4),
                action,
                len(scope).to_bytes(4),
                scope,
                key_bytes(self.granted_by),
                _END.pack(ends is not None, ends or 0),
            )
        )

    def verifies(self, signature: str) -> bool:
        """Whether the signature (base58) is its grantor's over the canonical bytes."""
        try:
            made = base58.decode(signature, length=SIGNATURE_BYTES)
            Ed25519PublicKey.from_public_bytes(key_bytes(self.granted_by)).verify(made, self.message())
        except (InvalidSignature, ValueError):
            return False
        return True


def key_bytes(key: str) -> bytes:
    """Return the 32 bytes of a public key that can name a peer.

    Raises:
        MalformedError: not base58 of 32 bytes, or a point of small order.
    """
    try:
        raw = base58.decode(key, length=KEY_BYTES)
    except ValueError:
        raise MalformedTokenError("the key is not base58 of 32 bytes") from None
    try:
        # For a point of small order there are signatures that hold over any message, so it can name no peer.
        return envelope.PublicKey(raw).raw
    except ValueError:
        raise MalformedTokenError("the key is a point of small order, or not in its one form") from None


def canonical_scope(scope: Any) -> bytes:
    """The scope's RFC 8785 bytes.

    Raises:
        MalformedError: it has none: NaN, an integer beyond 2^53, half a character; or it is too large.
    """
    try:
        raw = rfc8785.dumps(scope)
    except (ValueError, TypeError, RecursionError, AttributeError) as e:
        raise MalformedTokenError(f"the scope has no canonical form: {type(e).__name__}") from None
    if len(raw) > MAX_SCOPE_BYTES:
        raise MalformedTokenError(f"the scope is longer than {MAX_SCOPE_BYTES} bytes")
    return raw


def normal_scope(scope: Any) -> Any:
    """The scope as its canonical bytes say it (1.0 becomes 1), so that what is kept is what is signed.

    Raises:
        MalformedError: as ``canonical_scope``.
    """
    return _READER.decode(canonical_scope(scope).decode())


def parse(message: bytes) -> Token | None:
    """Return the capability of these canonical bytes; None where there is none: the inverse of ``message``."""
    try:
        view = memoryview(message)
        subject, view = bytes(view[:KEY_BYTES]), view[KEY_BYTES:]
        action, view = _counted(view)
        scope, view = _counted(view)
        granted_by, (flag, ends) = bytes(view[:KEY_BYTES]), _END.unpack(view[KEY_BYTES:])
        token = Token(
            base58.encode(subject),
            action.decode("ascii"),
            _READER.decode(scope.decode()),
            base58.encode(granted_by),
            ends if flag else None,
        )
        return token if token.message() == message else None
    except (ValueError, struct.error, RecursionError):
        return None


def _integer(text: str) -> int | float:
    value = int(text)
    # RFC 8785 writes 2^53 and more like an integer, but takes it as a fraction alone.
    return value if abs(value) < _INT_END else float(text)


_READER: Final = json.JSONDecoder(parse_int=_integer)


def _counted(view: memoryview) -> tuple[bytes, memoryview]:
    end = 4 + int.from_bytes(view[:4])
    if end > len(view) or len(view) < 4:
        raise ValueError("cut off")
    return bytes(view[4:end]), view[end:]
