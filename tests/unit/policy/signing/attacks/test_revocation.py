"""Attack: use what was revoked: the key's old signatures, the manifest under another signer, or the list itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from policy import errors
from policy.signing import envelope
from policy.signing import root as roots
from sandbox.storage.trust_state import State
from tests import signing_kit as kit

NOW = kit.NOW
op = kit.operator
LISTS = kit.revoked(keys=[kit.revoked_key(2)])
BEFORE = kit.root(op(1), op(2))
AFTER = kit.root(op(1), revoked=LISTS)


def _manifest(payload_digest: str) -> dict[str, Any]:
    return kit.revoked(manifests=[{"payload_digest": payload_digest, "at": NOW, "reason": "it leaks"}])


def _serials(at_most: int, agent_id: str = "hello") -> dict[str, Any]:
    return kit.revoked(serials=[{"agent_id": agent_id, "serial_at_most": at_most, "at": NOW, "reason": "old"}])


# --- keys -------------------------------------------------------------------------------------------


def test_signature_made_before_revocation_does_not_count() -> None:
    made = kit.signed(2, serial=5, not_before=0)
    kit.verify(made, BEFORE)
    with pytest.raises(errors.RevokedError, match="the key of `op2` that signed was revoked: stolen"):
        kit.verify(made, AFTER)


@pytest.mark.parametrize("keyid", ["", kit.public(1).keyid])
def test_neither_does_one_that_hides_its_key_id(keyid: str) -> None:
    signed = envelope.decode(kit.signed(2).envelope or b"")
    hidden = envelope.Envelope(
        signed.payload, signed.payload_type, (envelope.Signature(keyid, signed.signatures[0].sig),)
    )
    with pytest.raises(errors.SignatureError):
        kit.verify(kit.signed().with_envelope(hidden.encode()), AFTER)


def test_revoked_key_makes_up_no_threshold() -> None:
    before = kit.root(op(1, threshold=2), op(2, threshold=2), op(3))
    after = kit.root(op(1, threshold=2), op(3), revoked=LISTS)
    made = kit.signed(1, 2)
    assert len(kit.verify(made, before).signers) == 2
    with pytest.raises(errors.SignatureError, match="1 operators signed and 2 are needed"):
        kit.verify(made, after)
    # Another's signature beside it still counts, and is the only one that does.
    assert [s.name for s in kit.verify(kit.signed(2, 3), after).signers] == ["op3"]


def test_revoked_key_signs_no_root() -> None:
    document = kit.root_document(op(1), op(3), version=2, revoked=LISTS)
    for signers in ((2,), (2, 3)):
        with pytest.raises(errors.TrustError, match="is not signed by the keys of version 1"):
            AFTER.successor(kit.root_bytes(document, *signers), NOW)
    assert AFTER.successor(kit.root_bytes(document, 1), NOW).version == 2


def test_revoked_key_is_never_listed_again() -> None:
    both = kit.root_document(op(1), op(2), version=2, revoked=LISTS)
    with pytest.raises(errors.TrustError, match="the key of `op2` is listed and revoked"):
        AFTER.successor(kit.root_bytes(both, 1), NOW)
    forgotten = kit.root_document(op(1), op(2), version=2)
    with pytest.raises(errors.TrustError, match="takes back a revocation"):
        AFTER.successor(kit.root_bytes(forgotten, 1), NOW)
    renamed = kit.root_document(op(1), op(2, name="another"), version=2, revoked=LISTS)
    with pytest.raises(errors.TrustError, match="the key of `another` is listed and revoked"):
        AFTER.successor(kit.root_bytes(renamed, 1), NOW)


def test_not_even_over_two_versions(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    with State(tmp_path / "state") as state:
        state.init_root(kit.root_bytes(kit.root_document(op(1), op(2))), NOW)
        state.replace_root(kit.root_bytes(kit.root_document(op(1), version=2, revoked=LISTS)), NOW)
        dropped = kit.root_bytes(kit.root_document(op(1), version=3))
        back = kit.root_bytes(kit.root_document(op(1), op(2), version=4))
        for raw in (dropped, back):
            with pytest.raises(errors.TrustError):
                state.replace_root(raw, NOW)
        with pytest.raises(errors.RevokedError):
            kit.verify(kit.signed(2), state.trust_root(NOW))


def test_key_may_sign_its_own_revocation() -> None:
    document = kit.root_document(op(1), version=2, revoked=LISTS)
    assert BEFORE.successor(kit.root_bytes(document, 2, 1), NOW).version == 2


# --- manifests --------------------------------------------------------------------------------------------


def test_revoked_manifest_stays_revoked_under_any_number_of_signatures() -> None:
    digest = kit.verify(kit.signed(1), BEFORE).payload_digest
    root = kit.root(op(1), op(2), revoked=_manifest(digest))
    for signers in ((1,), (2,), (1, 2), (2, 1)):
        kit.verify(kit.signed(*signers), BEFORE)
        with pytest.raises(errors.RevokedError, match="it leaks"):
            kit.verify(kit.signed(*signers), root)
    kit.verify(kit.signed(1, serial=NOW + 1), root)


def test_revoked_serial_takes_all_older_ones_and_other_payloads_with_it() -> None:
    root = kit.root(revoked=_serials(10))
    for serial in (0, 9, 10):
        for more in ({}, {"audience": kit.HOST}, {"approve_unlimited": True}):
            kit.verify(kit.signed(serial=serial, **more))
            with pytest.raises(errors.RevokedError, match="up to 10 were revoked: old"):
                kit.verify(kit.signed(serial=serial, **more), root)
    kit.verify(kit.signed(serial=11), root)
    for other in ("Hello", "hello2", "hell"):
        kit.verify(kit.signed(serial=9, agent_id=other), root)


@pytest.mark.parametrize("lists", [_manifest("0" * 64), _serials(10)])
def test_manifest_is_not_unrevoked(lists: dict[str, Any]) -> None:
    present = kit.root(revoked=lists)
    kept = kit.root_document(version=2, revoked=lists)
    assert present.successor(kit.root_bytes(kept), NOW).version == 2
    for fewer in (kit.revoked(), _manifest("1" * 64), _serials(9), _serials(10, "other")):
        with pytest.raises(errors.TrustError, match="takes back a revocation of version 1"):
            present.successor(kit.root_bytes(kit.root_document(version=2, revoked=fewer)), NOW)


def test_nobody_unrevokes_by_threshold() -> None:
    present = kit.root(op(1), op(2), op(3), threshold=3, revoked=_serials(10))
    with pytest.raises(errors.TrustError, match="takes back"):
        present.successor(kit.root_bytes(kit.root_document(op(1), op(2), op(3), threshold=3, version=2), 1, 2, 3), NOW)
    assert isinstance(present, roots.TrustRoot)
