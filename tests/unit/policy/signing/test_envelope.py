"""DSSE: the specification's own vectors, strict decoding, and keys that must not count."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from policy.signing import envelope, strict_json
from tests import signing_kit as kit

TYPE = envelope.IN_TOTO_PAYLOAD_TYPE
P = 2**255 - 19
L = 2**252 + 27742317777372353535851937790883648493
D = -121665 * pow(121666, -1, P) % P


# --- vectors of the specification (protocol.md) -----------------------------------------------------


def test_pae_of_specification() -> None:
    assert (
        envelope.pae("http://example.com/HelloWorld", b"hello world")
        == b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    )


def test_pae_counts_bytes_and_cannot_be_shifted() -> None:
    assert envelope.pae("é", b"") == b"DSSEv1 2 \xc3\xa9 0 "
    assert envelope.pae("", b"") == b"DSSEv1 0  0 "
    assert envelope.pae("a", b"b c") != envelope.pae("a b", b"c")


# --- decoding -----------------------------------------------------------------------------------------


def _document(**changes: Any) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(kit.envelope(b"payload"))
    return made | changes


def _raw(document: Any) -> bytes:
    return json.dumps(document).encode()


def test_what_is_encoded_is_decoded() -> None:
    made = envelope.sign(b"\x00\xff payload", TYPE, [kit.key(1), kit.key(2)])
    assert envelope.decode(made.encode()) == made
    assert envelope.decode(_raw(_document())) == envelope.decode(kit.envelope(b"payload"))


def _without(key: str) -> dict[str, Any]:
    return {k: v for k, v in _document().items() if k != key}


SIG = _document()["signatures"][0]
MALFORMED: list[Any] = [
    [],
    None,
    "x",
    {},
    _without("payload"),
    _without("payloadType"),
    _without("signatures"),
    _document(extra=1),
    _document(signatures=[]),
    _document(signatures={}),
    _document(signatures=[None]),
    _document(signatures=[SIG] * 17),
    _document(signatures=[{**SIG, "cert": "x"}]),
    _document(signatures=[{"sig": SIG["sig"]}, {**SIG, "keyid": ""}]),
    _document(signatures=[{"keyid": SIG["keyid"]}]),
    _document(signatures=[{**SIG, "keyid": None}]),
    _document(signatures=[{**SIG, "keyid": "k" * 129}]),
    _document(signatures=[{**SIG, "sig": ""}]),
    _document(signatures=[{**SIG, "sig": base64.b64encode(b"x" * 63).decode()}]),
    _document(signatures=[{**SIG, "sig": base64.b64encode(b"x" * 65).decode()}]),
    _document(signatures=[{**SIG, "sig": 5}]),
    _document(payload=None),
    _document(payloadType=1),
    _document(payloadType="t" * 256),
    _document(payloadType="\ud800"),
    _document(payload="cGF5bG9hZA"),
    _document(payload="cGF5bG9hZA="),
    _document(payload="cGF5bG9hZB=="),
    _document(payload="cGF5bG9h\nZA=="),
    _document(payload=" cGF5bG9hZA=="),
    _document(payload="cGF5bG9hZA==="),
    _document(payload="cGF5bG9hZA==AAAA"),
    _document(payload="é==="),
    _document(payload="-/+_"),
]


@pytest.mark.parametrize("document", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_envelope_is_refused(document: Any) -> None:
    with pytest.raises(strict_json.MalformedJsonError):
        envelope.decode(_raw(document))


def test_duplicate_key_is_refused() -> None:
    raw = kit.envelope(b"payload").rstrip()
    envelope.decode(raw)
    with pytest.raises(strict_json.MalformedJsonError, match="stands twice"):
        envelope.decode(raw[:-1] + b',"payload":"AAAA"}')


def test_one_signature_may_leave_its_key_id_out() -> None:
    made = envelope.decode(_raw(_document(signatures=[{"sig": SIG["sig"]}, SIG])))
    assert envelope.signers(made, [kit.public(1)]) == (kit.public(1),)


def test_hostile_key_is_shown_short_and_escaped() -> None:
    with pytest.raises(strict_json.MalformedJsonError, match=r"^unknown key `x\\n\\x1by{61}`$"):
        envelope.decode(_raw(_document(**{"x\n\x1b" + "y" * 100_000: 1})))


def test_both_base64_alphabets_are_read_and_never_mixed() -> None:
    payload = b"\xfb\xef\xff"
    assert base64.b64encode(payload) == b"++//"
    for text in ("++//", "--__"):
        assert envelope.decode(_raw(_document(payload=text))).payload == payload
    for one, other in (("+++A", "---A"), ("///A", "___A"), ("AAAA", "AAAA")):
        assert envelope.decode(_raw(_document(payload=one))) == envelope.decode(_raw(_document(payload=other)))
    for text in ("+-AA", "+_AA", "/-AA", "/_AA", "-+AA", "_/AA"):
        with pytest.raises(strict_json.MalformedJsonError, match="mixes the two base64 alphabets"):
            envelope.decode(_raw(_document(payload=text)))


def test_type_of_statement_is_in_totos_and_envelope_has_eight_mebibytes_at_most() -> None:
    assert TYPE == "application/vnd.in-toto+json"
    raw = kit.envelope(b"payload")
    full = raw + b" " * (8 * 1024 * 1024 - len(raw))
    assert envelope.decode(full) == envelope.decode(raw)
    with pytest.raises(strict_json.MalformedJsonError, match="larger than 8388608 bytes"):
        envelope.decode(full + b" ")


def test_key_is_equal_to_itself_alone() -> None:
    one, again, other = (envelope.PublicKey(kit.public(n).raw) for n in (1, 1, 2))
    assert one == again
    assert hash(one) == hash(again)
    assert one != other
    assert one != one.raw


# --- who signed ---------------------------------------------------------------------------------------


def test_only_keys_that_signed_count_and_each_once() -> None:
    made = envelope.sign(b"p", TYPE, [kit.key(1), kit.key(2)])
    keys = [kit.public(3), kit.public(2), kit.public(1), kit.public(1)]
    assert envelope.signers(made, keys) == (kit.public(2), kit.public(1))
    twice = envelope.Envelope(b"p", TYPE, made.signatures[:1] * 5)
    assert envelope.signers(twice, keys) == (kit.public(1),)


def test_key_id_is_hint_that_must_be_true_when_given() -> None:
    good = envelope.sign(b"p", TYPE, [kit.key(1)]).signatures[0]
    cases = {"": True, good.keyid: True, kit.public(2).keyid: False, good.keyid.upper(): False, "op1": False}
    for keyid, counts in cases.items():
        made = envelope.Envelope(b"p", TYPE, (envelope.Signature(keyid, good.sig),))
        assert bool(envelope.signers(made, [kit.public(1), kit.public(2)])) is counts, keyid


def test_payload_type_is_signed() -> None:
    made = envelope.sign(b"p", TYPE, [kit.key(1)])
    other = envelope.Envelope(b"p", "application/x", made.signatures)
    assert envelope.signers(made, [kit.public(1)])
    assert not envelope.signers(other, [kit.public(1)])


def test_signature_beside_wrong_one_counts() -> None:
    made = envelope.sign(b"p", TYPE, [kit.key(1), kit.key(2)])
    broken = envelope.Signature(made.signatures[0].keyid, bytes(64))
    mixed = envelope.Envelope(b"p", TYPE, (broken, made.signatures[1]))
    assert envelope.signers(mixed, [kit.public(1), kit.public(2)]) == (kit.public(2),)


def test_malleable_signature_is_refused() -> None:
    made = envelope.sign(b"p", TYPE, [kit.key(1)])
    sig = made.signatures[0].sig
    s = int.from_bytes(sig[32:], "little")
    shifted = sig[:32] + (s + L).to_bytes(32, "little")
    assert kit.public(1).verifies(sig, made.pae())
    assert not kit.public(1).verifies(shifted, made.pae())
    assert not kit.public(1).verifies(sig + b"\0", made.pae())


# --- keys that fit every message ------------------------------------------------------------------------


def _add(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    k = D * a[0] * b[0] * a[1] * b[1] % P
    x = (a[0] * b[1] + a[1] * b[0]) * pow(1 + k, -1, P) % P
    y = (a[1] * b[1] + a[0] * b[0]) * pow(1 - k, -1, P) % P
    return x, y


def _points(y: int) -> set[tuple[int, int]]:
    """The curve points with this y (RFC 8032, section 5.1.3)."""
    square = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
    root = pow(square, (P + 3) // 8, P)
    if root * root % P != square:
        root = root * pow(2, (P - 1) // 4, P) % P
    assert root * root % P == square
    return {(root, y), (-root % P, y)}


def test_table_of_small_order_is_exactly_eight_points() -> None:
    points = set().union(*(_points(y) for y in envelope.SMALL_ORDER_Y))
    assert len(points) == 8
    for point in points:
        multiple = point
        for _ in range(3):
            multiple = _add(multiple, multiple)
        assert multiple == (0, 1)


def test_key_of_small_order_would_sign_anything_and_is_refused() -> None:
    identity = (1).to_bytes(32, "little")
    forged = identity + bytes(32)
    # The control: without the check, one signature fits every message.
    for message in (b"one", b"two"):
        Ed25519PublicKey.from_public_bytes(identity).verify(forged, message)
    with pytest.raises(ValueError, match="small order"):
        envelope.PublicKey(identity)


@pytest.mark.parametrize("y", [*sorted(envelope.SMALL_ORDER_Y), P, P + 1, 2**255 - 1])
@pytest.mark.parametrize("sign", [0, 1])
def test_small_order_and_non_canonical_keys_are_refused(y: int, sign: int) -> None:
    with pytest.raises(ValueError, match="not canonical or has small order"):
        envelope.PublicKey((y | sign << 255).to_bytes(32, "little"))


@pytest.mark.parametrize("size", [0, 31, 33])
def test_key_has_32_bytes(size: int) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        envelope.PublicKey(b"\x05" * size)
