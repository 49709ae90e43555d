"""DSSE envelopes with Ed25519: encode, decode, sign, and which keys signed.

Source: DSSE v1.0.2 (protocol.md, envelope.md) and in-toto's use of it. The payload is bytes here and stays
bytes: nothing in this module looks inside it, so that it cannot be parsed before it is verified.

Where DSSE leaves a choice:
    base64       either alphabet is read (DSSE requires that), never mixed, always padded, no stray bits
    keyid        a hint. When present it must be the id that we compute from the key; when absent, every
                 key is tried (for one signature at most). A key counts once, however many signatures it made.
    other keys   of the JSON objects are refused: nothing may stand beside the payload and look signed
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
from collections.abc import Iterable
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from msgspec import Struct

from policy import package
from policy.signing import strict_json

IN_TOTO_PAYLOAD_TYPE = "application/vnd.in-toto+json"

MAX_BYTES = package.MAX_ENVELOPE_BYTES
MAX_SIGNATURES = 16
SIGNATURE_BYTES = 64
KEY_BYTES = 32

_P = 2**255 - 19
# The y coordinates of the eight points of small order (RFC 8032, section 8.8 and Chalkias et al., "Taming the
# many EdDSAs"): with such a key one signature fits many messages. tests/unit proves the table by arithmetic.
_ORDER_8_Y = 0x7A03AC9277FDC74EC6CC392CFA53202A0F67100D760B3CBA4FD84D3D706A17C7
SMALL_ORDER_Y = frozenset({0, 1, _P - 1, _ORDER_8_Y, _P - _ORDER_8_Y})


class Signature(Struct, frozen=True):
    """One signature as it stands in an envelope; ``keyid`` is empty when the envelope names none."""

    keyid: str
    sig: bytes


class Envelope(Struct, frozen=True):
    """A decoded envelope. Nothing about it has been verified."""

    payload: bytes
    payload_type: str
    signatures: tuple[Signature, ...]

    def pae(self) -> bytes:
        """The bytes that are signed."""
        return pae(self.payload_type, self.payload)

    def sign(self, key: Ed25519PrivateKey) -> Signature:
        """This key's signature over the payload and its type."""
        return Signature(PublicKey.of(key).keyid, key.sign(self.pae()))

    def signed_by(self, signature: Signature) -> Envelope:
        """With one more signature; one under the same key id is replaced."""
        others = tuple(s for s in self.signatures if s.keyid != signature.keyid)
        return Envelope(self.payload, self.payload_type, (*others, signature))

    def encode(self) -> bytes:
        """The envelope as compact JSON and a newline."""
        signatures = [
            {"keyid": s.keyid, "sig": _b64encode(s.sig)} if s.keyid else {"sig": _b64encode(s.sig)}
            for s in self.signatures
        ]
        document = {
            "payload": _b64encode(self.payload),
            "payloadType": self.payload_type,
            "signatures": signatures,
        }
        return strict_json.dumps(document) + b"\n"


class PublicKey:
    """An Ed25519 public key and its id.

    Raises:
        ValueError: not 32 bytes, not the canonical encoding of a coordinate, or a point of small order.
    """

    __slots__ = ("_key", "keyid", "raw")

    def __init__(self, raw: bytes) -> None:
        if len(raw) != KEY_BYTES:
            raise ValueError("an Ed25519 public key has 32 bytes")
        y = int.from_bytes(raw, "little") & ((1 << 255) - 1)
        if y >= _P or y in SMALL_ORDER_Y:
            raise ValueError("the Ed25519 public key is not canonical or has small order")
        self.raw = bytes(raw)
        self.keyid = keyid_of(self.raw)
        self._key = Ed25519PublicKey.from_public_bytes(self.raw)

    @classmethod
    def of(cls, private: Ed25519PrivateKey) -> PublicKey:
        """The public half of a private key."""
        return cls(private.public_key().public_bytes_raw())

    def verifies(self, signature: bytes, message: bytes) -> bool:
        """Whether ``signature`` is this key's over ``message``. OpenSSL refuses S outside the group order."""
        try:
            self._key.verify(signature, message)
        except InvalidSignature:
            return False
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PublicKey) and other.raw == self.raw

    def __hash__(self) -> int:
        return hash(self.raw)

    def __repr__(self) -> str:
        return f"PublicKey({self.keyid})"


def keyid_of(raw: bytes) -> str:
    """Hex SHA-256 of the key's canonical JSON, as securesystemslib and TUF compute it."""
    canonical = f'{{"keytype":"ed25519","keyval":{{"public":"{raw.hex()}"}},"scheme":"ed25519"}}'
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


@functools.lru_cache(maxsize=256)
def public_key(raw: bytes) -> PublicKey:
    """``PublicKey(raw)``, kept: a warm process verifies with the same few keys again and again."""
    return PublicKey(raw)


def pae(payload_type: str, payload: bytes) -> bytes:
    """DSSE's pre-authentication encoding; lengths are in bytes."""
    kind = payload_type.encode("utf-8")
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def decode(raw: bytes) -> Envelope:
    """The envelope in ``raw``; its payload is not looked at.

    Raises:
        strict_json.MalformedJsonError: not one closed DSSE document within the limits.
    """
    document = _closed(strict_json.loads(raw, max_bytes=MAX_BYTES), {"payload", "payloadType", "signatures"})
    entries = document["signatures"]
    if not isinstance(entries, list) or not 0 < len(entries) <= MAX_SIGNATURES:
        raise strict_json.MalformedJsonError(f"`signatures` has not between 1 and {MAX_SIGNATURES} entries")
    signatures = tuple(_signature(entry) for entry in entries)
    # Without an id every key of the root is tried, each time over the whole payload: one such signature is
    # what interchange needs, sixteen would be a way to keep a verifier busy.
    if sum(not s.keyid for s in signatures) > 1:
        raise strict_json.MalformedJsonError("more than one signature has no `keyid`")
    payload_type = _text(document, "payloadType", 255)
    payload = _b64decode(_text(document, "payload", MAX_BYTES), "payload")
    return Envelope(payload, payload_type, signatures)


def sign(payload: bytes, payload_type: str, keys: Iterable[Ed25519PrivateKey]) -> Envelope:
    """An envelope over ``payload`` with one signature by each key."""
    unsigned = Envelope(payload, payload_type, ())
    return Envelope(payload, payload_type, tuple(unsigned.sign(key) for key in keys))


def signers(envelope: Envelope, keys: Iterable[PublicKey]) -> tuple[PublicKey, ...]:
    """The distinct keys of ``keys`` that signed the envelope, in their order there.

    A signature of a key that is not listed, or one that does not verify, does not count and does no harm.
    """
    message = envelope.pae()
    return tuple(
        key
        for key in dict.fromkeys(keys)
        if any(key.verifies(s.sig, message) for s in envelope.signatures if not s.keyid or s.keyid == key.keyid)
    )


def _closed(value: Any, required: set[str], optional: frozenset[str] = frozenset()) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise strict_json.MalformedJsonError("an object is missing")
    for key in value:
        if key not in required and key not in optional:
            raise strict_json.MalformedJsonError(f"unknown key `{strict_json.shown(key)}`")
    for key in sorted(required):
        if key not in value:
            raise strict_json.MalformedJsonError(f"the key `{key}` is missing")
    return value


def _signature(entry: Any) -> Signature:
    document = _closed(entry, {"sig"}, frozenset({"keyid"}))
    keyid = _text(document, "keyid", 128) if "keyid" in document else ""
    sig = _b64decode(_text(document, "sig", 1024), "sig")
    if len(sig) != SIGNATURE_BYTES:
        raise strict_json.MalformedJsonError(f"`sig` has not {SIGNATURE_BYTES} bytes")
    return Signature(keyid, sig)


def _text(document: dict[str, Any], key: str, limit: int) -> str:
    value = document[key]
    if not isinstance(value, str) or len(value) > limit:
        raise strict_json.MalformedJsonError(f"`{key}` is not a text of at most {limit} characters")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise strict_json.MalformedJsonError(f"`{key}` holds half a surrogate pair") from None
    return value


def _b64encode(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _b64decode(text: str, key: str) -> bytes:
    """Base64 in either alphabet, in the one spelling that encoding the bytes again would give."""
    plain = text
    if "-" in text or "_" in text:
        if "+" in text or "/" in text:
            raise strict_json.MalformedJsonError(f"`{key}` mixes the two base64 alphabets")
        plain = text.translate(_TO_STANDARD)
    try:
        data = base64.b64decode(plain, validate=True)
    except (binascii.Error, ValueError):
        raise strict_json.MalformedJsonError(f"`{key}` is not base64") from None
    if base64.b64encode(data).decode("ascii") != plain:
        raise strict_json.MalformedJsonError(f"`{key}` is not canonical base64")
    return data


_TO_STANDARD = str.maketrans("-_", "+/")
