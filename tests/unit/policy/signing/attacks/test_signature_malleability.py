"""Attack: other bytes that some verifier takes for the same signature or key.

With distinct keys counted once, a second form of a signature gains nothing here; it is refused all the same, so that
one envelope has one reading everywhere. The curve arithmetic is RFC 8032, section 5.1, written for these tests alone.
"""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from msgspec import structs

from policy import errors
from policy.signing import envelope
from policy.signing import root as roots
from tests import signing_kit as kit

P = 2**255 - 19
L = 2**252 + 27742317777372353535851937790883648493
D = -121665 * pow(121666, -1, P) % P
ORDER_8 = bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a")

MADE = envelope.decode(kit.signed(1).envelope or b"")
SIG = MADE.signatures[0].sig
R, S = SIG[:32], int.from_bytes(SIG[32:], "little")

Point = tuple[int, int]


def _add(a: Point, b: Point) -> Point:
    k = D * a[0] * b[0] * a[1] * b[1] % P
    return (a[0] * b[1] + a[1] * b[0]) * pow(1 + k, -1, P) % P, (a[1] * b[1] + a[0] * b[0]) * pow(1 - k, -1, P) % P


def _times(n: int, point: Point) -> Point:
    out: Point = (0, 1)
    while n:
        if n & 1:
            out = _add(out, point)
        point, n = _add(point, point), n >> 1
    return out


def _decode(raw: bytes) -> Point:
    y = int.from_bytes(raw, "little") & (2**255 - 1)
    square = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
    x = pow(square, (P + 3) // 8, P)
    if x * x % P != square:
        x = x * pow(2, (P - 1) // 4, P) % P
    assert x * x % P == square
    return (x if x & 1 == raw[31] >> 7 else P - x), y


def _encode(point: Point) -> bytes:
    return (point[1] | (point[0] & 1) << 255).to_bytes(32, "little")


BASE = _decode(bytes([0x58]) + bytes([0x66]) * 31)


def _refused(sig: bytes) -> None:
    assert sig != SIG
    assert not kit.public(1).verifies(sig, MADE.pae())
    made = structs.replace(MADE, signatures=(envelope.Signature(kit.public(1).keyid, sig),))
    with pytest.raises(errors.SignatureError):
        kit.verify(kit.signed().with_envelope(made.encode()))


def test_control_signature_itself_and_arithmetic() -> None:
    kit.verify(kit.signed(1))
    secret = hashlib.sha512(bytes([1]) * 32).digest()[:32]
    scalar = (int.from_bytes(secret, "little") & (2**254 - 8)) | 2**254
    assert _encode(_times(scalar, BASE)) == kit.public(1).raw
    challenge = int.from_bytes(hashlib.sha512(R + kit.public(1).raw + MADE.pae()).digest(), "little") % L
    assert _add(_decode(R), _times(challenge, _decode(kit.public(1).raw))) == _times(S, BASE)


@pytest.mark.parametrize("multiple", [1, 2, 7, 14])
def test_s_plus_multiple_of_order(multiple: int) -> None:
    _refused(R + (S + multiple * L).to_bytes(32, "little"))


def test_negated_s_and_negated_r() -> None:
    _refused(R + (L - S).to_bytes(32, "little"))
    _refused(bytes([*R[:31], R[31] ^ 0x80]) + SIG[32:])


def test_r_with_part_of_small_order() -> None:
    # A verifier that multiplies by the cofactor takes R + T for R, for each T of small order.
    torsion = _decode(ORDER_8)
    for n in range(1, 8):
        moved = _add(_decode(R), _times(n, torsion))
        _refused(_encode(moved) + SIG[32:])


def test_r_in_encoding_not_canonical() -> None:
    # y + p fits into 255 bits only for y below 19, and no honest R has such a y; the forged ones are refused.
    for y in range(19):
        for sign in (0, 1):
            _refused(((y + P) | sign << 255).to_bytes(32, "little") + SIG[32:])
    _refused(bytes(32) + SIG[32:])
    _refused((1).to_bytes(32, "little") + bytes(32))


def test_key_with_part_of_small_order_signs_at_most_for_itself() -> None:
    # A + T is another 32 bytes, so another key with another id: it is not listed, and what it signs is unknown.
    mixed = _encode(_add(_decode(kit.public(1).raw), _decode(ORDER_8)))
    assert envelope.PublicKey(mixed).keyid != kit.public(1).keyid
    assert not envelope.PublicKey(mixed).verifies(SIG, MADE.pae())


@pytest.mark.parametrize("y", [0, 1, P - 1, P, P + 1, int.from_bytes(ORDER_8, "little")])
def test_key_of_small_order_cannot_be_listed(y: int) -> None:
    for sign in (0, 1):
        public = (y | sign << 255).to_bytes(32, "little").hex()
        with pytest.raises(errors.TrustError, match="malformed"):
            roots.TrustRoot.load(kit.root_bytes(kit.root_document(kit.operator(1), kit.operator(2, public=public))), 0)


def test_why_key_of_small_order_must_not_be_listed() -> None:
    identity = (1).to_bytes(32, "little")
    for message in (b"one", b"another"):
        Ed25519PublicKey.from_public_bytes(identity).verify(identity + bytes(32), message)


@pytest.mark.parametrize("extra", [b"", b"\0", SIG[:1], SIG])
def test_more_or_fewer_bytes(extra: bytes) -> None:
    sig = SIG + extra if extra else SIG[:-1]
    document: dict[str, Any] = json.loads(kit.signed(1).envelope or b"")
    document["signatures"][0]["sig"] = base64.b64encode(sig).decode()
    with pytest.raises(errors.SignatureError, match="64 bytes"):
        kit.verify(kit.signed().with_envelope(json.dumps(document).encode()))


def test_signature_in_base64_has_one_spelling_alphabet() -> None:
    document: dict[str, Any] = json.loads(kit.signed(1).envelope or b"")
    text = document["signatures"][0]["sig"]
    assert text.endswith("==")
    stray = text[:-3] + chr(ord(text[-3]) + 1) + "=="
    assert base64.b64decode(stray) == SIG
    for other in (
        stray,
        text.rstrip("="),
        text + "=",
        text + "\n",
        text[:4] + "\n" + text[4:],
        text + "AAAA",
        SIG.hex(),
    ):
        document["signatures"][0]["sig"] = other
        with pytest.raises(errors.SignatureError, match="malformed"):
            kit.verify(kit.signed().with_envelope(json.dumps(document).encode()))
    # The other alphabet that DSSE allows is read: the bytes are the same, and so is what counts.
    document["signatures"][0]["sig"] = base64.urlsafe_b64encode(SIG).decode()
    kit.verify(kit.signed().with_envelope(json.dumps(document).encode()))


def test_bytes_after_envelope() -> None:
    raw = kit.signed(1).envelope or b""
    kit.verify(kit.signed().with_envelope(raw.rstrip()))
    for after in (b"{}", b"\0", raw, b"x", b"]"):
        with pytest.raises(errors.SignatureError, match="malformed"):
            kit.verify(kit.signed().with_envelope(raw + after))
