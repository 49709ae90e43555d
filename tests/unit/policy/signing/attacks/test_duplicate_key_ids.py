"""Attack: make one key look like two, by names, ids, spellings or repetition, and meet a threshold with it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec import structs

from policy import errors
from policy.signing import envelope
from policy.signing import root as roots
from tests import signing_kit as kit

NOW = kit.NOW
op = kit.operator
BOTH = kit.root(op(1, threshold=2), op(2, threshold=2))
ID, SIG = kit.public(1).keyid, envelope.decode(kit.signed(1).envelope or b"").signatures[0].sig


def _with(*signatures: envelope.Signature) -> bytes:
    return structs.replace(envelope.decode(kit.signed(1).envelope or b""), signatures=signatures).encode()


def test_control_two_people_are_two() -> None:
    assert len(kit.verify(kit.signed(1, 2), BOTH).signers) == 2


@pytest.mark.parametrize(
    "second",
    [ID, "", ID.upper(), f" {ID}", f"{ID}0", "op2", "op1", kit.public(2).keyid, kit.public(3).keyid, "x" * 128],
)
def test_one_signature_under_two_ids_is_one(second: str) -> None:
    made = kit.signed().with_envelope(_with(envelope.Signature(ID, SIG), envelope.Signature(second, SIG)))
    with pytest.raises(errors.SignatureError, match="1 operators signed and 2 are needed"):
        kit.verify(made, BOTH)
    with pytest.raises(errors.SignatureError, match="1 operators signed and 2 are needed"):
        kit.verify(kit.signed().with_envelope(_with(*[envelope.Signature(ID, SIG)] * 16)), BOTH)


def test_id_that_another_claims_gives_nothing() -> None:
    # The key of an outsider, under the ids of both operators.
    by_another = envelope.decode(kit.signed(3).envelope or b"").signatures[0].sig
    for ids in ((ID,), (ID, kit.public(2).keyid)):
        made = kit.signed().with_envelope(_with(*(envelope.Signature(i, by_another) for i in ids)))
        with pytest.raises(errors.SignatureError, match="does not fit the payload"):
            kit.verify(made, BOTH)


@pytest.mark.parametrize(
    "second",
    [
        op(1, name="another"),
        op(1, name="another", scope=kit.scope(agents=("a*",))),
        op(1, name="another", not_before=5),
    ],
)
def test_one_key_is_not_listed_under_two_names(second: dict[str, Any]) -> None:
    with pytest.raises(errors.TrustError, match="one key is listed twice"):
        roots.TrustRoot.load(kit.root_bytes(kit.root_document(op(1), second, threshold=2)), NOW)
    assert len(kit.root(op(1), op(2), threshold=2).keys) == 2


@pytest.mark.parametrize("spelled", [str.upper, str.title, lambda h: f" {h}", lambda h: f"0x{h}", lambda h: h + "\n"])
def test_one_key_has_one_spelling(spelled: Any) -> None:
    other = spelled(kit.public(1).raw.hex())
    with pytest.raises(errors.TrustError, match="malformed"):
        roots.TrustRoot.load(kit.root_bytes(kit.root_document(op(1), op(2, public=other))), NOW)


def test_two_keys_do_not_share_name() -> None:
    with pytest.raises(errors.TrustError, match="two keys have one name"):
        roots.TrustRoot.load(kit.root_bytes(kit.root_document(op(1), op(2, name="op1"))), NOW)


def test_id_beside_key_is_not_read_because_it_is_refused() -> None:
    listed = {**op(2), "keyid": ID}
    with pytest.raises(errors.TrustError, match="malformed"):
        roots.TrustRoot.load(kit.root_bytes(kit.root_document(op(1), listed)), NOW)


def test_other_sign_of_point_is_another_key_and_verifies_nothing() -> None:
    # The negated point differs in the top bit only; a sloppy comparison would take it for the same key, or both.
    mirrored = bytearray(kit.public(1).raw)
    mirrored[31] ^= 0x80
    twin = op(2, name="twin", public=bytes(mirrored).hex(), threshold=2)
    root = kit.root(op(1, threshold=2), op(3), twin)
    with pytest.raises(errors.SignatureError, match="1 operators signed and 2 are needed"):
        kit.verify(kit.signed(1), root)
    kit.verify(kit.signed(1, 3), root)


def test_root_counts_key_once_as_well() -> None:
    document = kit.root_document(op(1), op(2), version=2, threshold=2)
    present = kit.root(op(1), op(2), threshold=2)
    made = json.loads(kit.root_bytes(document, 1))
    made["signatures"] *= 2
    made["signatures"][1]["keyid"] = kit.public(2).keyid
    with pytest.raises(errors.TrustError, match="is not signed by the keys of version 1"):
        present.successor(json.dumps(made).encode(), NOW)
    assert present.successor(kit.root_bytes(document, 1, 2), NOW).version == 2
