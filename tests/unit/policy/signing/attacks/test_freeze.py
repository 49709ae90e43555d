"""Attack: withhold updates from a host, so that no revocation reaches it. All documents expire, so the host stops."""

from __future__ import annotations

import pytest

from policy import errors
from policy.signing import root as roots
from policy.signing import statement, strict_json
from tests import signing_kit as kit

NOW, DAY = kit.NOW, kit.DAY
op = kit.operator


def test_root_that_nobody_renewed_stops_everything() -> None:
    frozen = kit.root(expires_at=NOW + DAY)
    forever = kit.signed(expires_at=statement.MAX_TIME_MS)
    kit.verify(forever, frozen, now_ms=NOW + DAY - 1)
    for late in (NOW + DAY, NOW + 400 * DAY):
        with pytest.raises(errors.TrustError, match="has ended"):
            kit.verify(forever, frozen, now_ms=late)


def test_package_that_nobody_signed_again_stops_by_itself() -> None:
    made = kit.signed(expires_at=NOW + DAY)
    kit.verify(made, now_ms=NOW + DAY - 1)
    with pytest.raises(errors.ExpiredError):
        kit.verify(made, now_ms=NOW + DAY)


def test_key_that_nobody_renewed_signs_no_more() -> None:
    root = kit.root(op(1, expires_at=NOW + DAY), op(2))
    kit.verify(kit.signed(1), root, now_ms=NOW + DAY - 1)
    with pytest.raises(errors.ExpiredError, match="the key of `op1`"):
        kit.verify(kit.signed(1), root, now_ms=NOW + DAY)
    kit.verify(kit.signed(2), root, now_ms=NOW + DAY)


def test_frozen_host_is_thawed_by_next_version_alone() -> None:
    frozen = roots.TrustRoot.parse(kit.root_bytes(kit.root_document(expires_at=NOW)))
    with pytest.raises(errors.TrustError, match="has ended"):
        frozen.successor(kit.root_bytes(kit.root_document(version=2, expires_at=NOW + 1), 1), NOW + 1)
    thawed = frozen.successor(kit.root_bytes(kit.root_document(version=2, expires_at=NOW + DAY), 1), NOW + 1)
    kit.verify(kit.signed(), thawed, now_ms=NOW + 1)


@pytest.mark.parametrize("end", [None, -1, 2**53, "never", 0])
def test_nothing_can_be_written_that_never_ends(end: object) -> None:
    with pytest.raises(errors.TrustError, match="malformed"):
        roots.TrustRoot.load(kit.root_bytes(kit.root_document(expires_at=end)), NOW)
    with pytest.raises(errors.TrustError, match="malformed"):
        roots.TrustRoot.load(kit.root_bytes(kit.root_document(op(1, expires_at=end))), NOW)
    with pytest.raises(errors.SignatureError):
        kit.signed(expires_at=end)
    # Control: the largest time that can be written is valid.
    assert strict_json.dumps(kit.root(expires_at=statement.MAX_TIME_MS).document.expires_at) == b"9007199254740991"


def test_end_of_root_revives_no_key_that_ended_before() -> None:
    guest = op(2, expires_at=NOW - 5 * DAY)
    later = op(3, not_before=NOW + 1)
    frozen = roots.TrustRoot.parse(kit.root_bytes(kit.root_document(op(1), guest, later, expires_at=NOW), 1))
    after = NOW + DAY
    for by in ((2,), (3,), (2, 3)):
        own = kit.root_document(*(op(n) for n in by), version=2)
        with pytest.raises(errors.TrustError, match="is not signed by the keys of version 1"):
            frozen.successor(kit.root_bytes(own, *by), after)
    # Control: a key that was valid when the root expired can sign the next one, though the key has expired since.
    for end in (NOW, NOW + 1):
        ended = roots.TrustRoot.parse(kit.root_bytes(kit.root_document(op(1, expires_at=end), expires_at=NOW), 1))
        assert ended.successor(kit.root_bytes(kit.root_document(version=2), 1), after).version == 2
