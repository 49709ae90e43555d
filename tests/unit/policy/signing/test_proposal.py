"""A root on its way: who signed, who is missing, and that nothing but enough signatures makes a root of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec import structs

from policy import errors
from policy.signing import envelope, proposal, strict_json
from policy.signing import root as roots
from tests import signing_kit as kit

NOW = kit.NOW
op = kit.operator
PRESENT = kit.root(op(1), op(2), op(3), threshold=2)
NEXT = kit.root_document(op(1), op(2), op(4), threshold=2, version=2)


def _proposal(*signers: int, document: dict[str, Any] = NEXT) -> proposal.Proposal:
    return proposal.decode(kit.root_bytes(document, *signers))


def test_each_side_says_who_signed_and_how_many_are_missing() -> None:
    old, new = _proposal(1).sides(PRESENT, NOW)
    assert (old.version, old.signed, old.open, old.missing) == (1, ("op1",), ("op2", "op3"), 1)
    assert (new.version, new.signed, new.open, new.missing) == (2, ("op1",), ("op2", "op4"), 1)
    for signers, missing in (((1, 2), (0, 0)), ((1, 3), (0, 1)), ((1, 4), (1, 0)), ((3, 4), (1, 1)), ((9,), (2, 2))):
        made = _proposal(*signers)
        assert tuple(side.missing for side in made.sides(PRESENT, NOW)) == missing
        assert made.complete(PRESENT, NOW) is (missing == (0, 0))


def test_complete_is_what_present_root_takes() -> None:
    for signers in ((1,), (1, 2), (1, 3), (2, 4), (1, 3, 4), (3, 4), (2, 3, 4)):
        made = _proposal(*signers)
        try:
            taken = PRESENT.successor(made.encode(), NOW).version == 2
        except errors.TrustError:
            taken = False
        assert made.complete(PRESENT, NOW) is taken, signers


def test_keys_that_ended_cannot_be_asked() -> None:
    present = kit.root(op(1), op(2, expires_at=NOW + 5), threshold=2)
    side, _ = _proposal(1).sides(present, NOW + 5)
    assert (side.open, side.missing) == ((), None)
    assert not _proposal(1, 2).complete(present, NOW + 5)
    assert _proposal(1, 2).complete(present, NOW + 4)


def test_signatures_are_gathered_and_those_of_strangers_left_behind() -> None:
    one, other = _proposal(9, 1, 5), _proposal(2, 8, 1)
    both = one.merged(other, PRESENT, NOW)
    assert {s.keyid for s in both.envelope.signatures} == {kit.public(n).keyid for n in (1, 2)}
    assert both.complete(PRESENT, NOW)
    assert PRESENT.successor(both.encode(), NOW).version == 2
    # One that names no key is found out; one that lies about its key is none.
    bare = structs.replace(
        other.envelope, signatures=tuple(envelope.Signature("", s.sig) for s in other.envelope.signatures)
    )
    assert one.merged(proposal.Proposal(other.document, bare), PRESENT, NOW) == both
    false = tuple(envelope.Signature(kit.public(2).keyid, s.sig) for s in _proposal(8).envelope.signatures)
    lied = proposal.Proposal(other.document, structs.replace(other.envelope, signatures=false))
    assert len(one.merged(lied, PRESENT, NOW).envelope.signatures) == 1


def test_two_proposals_are_not_merged() -> None:
    other = {**NEXT, "threshold": 1}
    with pytest.raises(ValueError, match="two payloads"):
        _proposal(1).merged(_proposal(2, document=other), PRESENT, NOW)
    assert _proposal(1).payload_digest != _proposal(1, document=other).payload_digest
    assert _proposal(1).payload_digest == _proposal(2).payload_digest


def test_signature_is_added_once() -> None:
    made = _proposal(1)
    signature = envelope.Signature(kit.public(2).keyid, kit.key(2).sign(made.envelope.pae()))
    twice = made.signed_by(signature).signed_by(signature)
    assert len(twice.envelope.signatures) == 2
    assert PRESENT.successor(twice.encode(), NOW).version == 2


def test_only_canonical_bytes_are_put_before_signer() -> None:
    for payload in (json.dumps(NEXT).encode(), strict_json.dumps(NEXT) + b" "):
        raw = envelope.sign(payload, roots.PAYLOAD_TYPE, [kit.key(1)]).encode()
        with pytest.raises(errors.TrustError, match="canonical"):
            proposal.decode(raw)
    assert proposal.decode(kit.root_bytes(NEXT, 1)).document.version == 2
    assert proposal.propose(_proposal(1).document).payload_digest == _proposal(1).payload_digest
