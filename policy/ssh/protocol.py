"""Messages of the agent protocol (RFC 9987) that are answered: a list of keys, a signature, a binding of a session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from policy.ssh import wire

FAILURE: Final = b"\x05"
SUCCESS: Final = b"\x06"
LIST, SIGN, EXTENSION = 11, 13, 27
_LISTED, _SIGNED = b"\x0c", b"\x0e"
BIND: Final = "session-bind@openssh.com"
# Longer messages of a client are none that is answered: those of a binding have two keys of 8192 bits at most.
MESSAGE_BYTES: Final = 16_384
REQUEST_REFUSED: Final = "request_refused"
_NAMES: Final = {
    **dict.fromkeys((7, 17, 25), "add identity"),
    **dict.fromkeys((8, 9, 18, 19), "remove identity"),
    **dict.fromkeys((20, 21, 26), "smartcard"),
    22: "lock",
    23: "unlock",
}


def framed(message: bytes) -> bytes:
    """Return a message with its length."""
    return wire.string(message)


def listed(found: Sequence[tuple[bytes, str]]) -> bytes:
    """Return the answer to a list: public keys with their comments."""
    rows = b"".join(wire.string(blob) + wire.string(comment) for blob, comment in found)
    return _LISTED + len(found).to_bytes(4, "big") + rows


def signed(signature: bytes) -> bytes:
    """Return the answer to a request for a signature."""
    return _SIGNED + wire.string(signature)


def named(kind: int, fields: wire.Reader) -> str:
    """Return the name of a refused request, as its denial shows it."""
    if kind != EXTENSION:
        return _NAMES.get(kind, f"message {kind}")
    try:
        return f"extension {fields.word()[:64]}"
    except wire.WireError:
        return "extension"
