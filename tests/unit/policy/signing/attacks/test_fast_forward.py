"""Attack: jump so far ahead that nothing honest can follow: a root's version, an agent's serial, the time seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from policy import errors
from policy.signing import statement
from sandbox.storage.trust_state import State
from tests import signing_kit as kit

NOW, DAY = kit.NOW, kit.DAY


@pytest.mark.parametrize("version", [3, 4, 2**31])
def test_root_goes_up_by_one(version: int) -> None:
    present = kit.root()
    # Signed by everybody who could: it is the number that is refused.
    with pytest.raises(errors.TrustError, match=f"version {version} cannot follow 1"):
        present.successor(kit.root_bytes(kit.root_document(version=version), 1), NOW)
    assert present.successor(kit.root_bytes(kit.root_document(version=2), 1), NOW).version == 2


@pytest.mark.parametrize("serial", [NOW + DAY + 1, NOW + 1000 * DAY, statement.MAX_TIME_MS])
def test_serial_is_at_most_day_ahead(serial: int) -> None:
    with pytest.raises(errors.SerialError, match="more than a day ahead"):
        kit.verify(kit.signed(serial=serial))
    kit.verify(kit.signed(serial=NOW + DAY))


def test_serial_that_was_refused_moves_no_ratchet(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    with State(tmp_path / "state") as state:
        state.init_root(kit.root_bytes(kit.root_document(), 1), NOW)
        with pytest.raises(errors.SerialError):
            kit.verify(kit.signed(serial=statement.MAX_TIME_MS), state.trust_root(NOW), serials=state)
        honest = kit.verify(kit.signed(serial=NOW), state.trust_root(NOW), serials=state)
        state.accept(honest, now_ms=NOW)
        assert state.accepted("hello") is not None


def test_root_from_future_is_not_installed(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    with State(tmp_path / "state") as state:
        state.init_root(kit.root_bytes(kit.root_document(), 1), NOW)
        later = kit.root_bytes(kit.root_document(version=2, not_before=NOW + 1), 1)
        with pytest.raises(errors.TrustError, match="not valid yet"):
            state.replace_root(later, NOW)
        assert state.root_version() == 1
        assert state.replace_root(later, NOW + 1).version == 2


def test_revocation_of_serials_in_far_future_is_roots_own_word() -> None:
    # It locks the agent out, and only the thresholds of two versions can say it: no one signer of packages can.
    row = {"agent_id": "hello", "serial_at_most": statement.MAX_TIME_MS, "at": NOW, "reason": "withdrawn"}
    raw = kit.root_bytes(kit.root_document(kit.operator(1), version=2, revoked=kit.revoked(serials=[row])), 1)
    present = kit.root(kit.operator(1), kit.operator(2, root=False))
    assert present.successor(raw, NOW).version == 2
    by_another = kit.root_bytes(kit.root_document(kit.operator(1), version=2, revoked=kit.revoked(serials=[row])), 2)
    with pytest.raises(errors.TrustError, match="is not signed by the keys of version 1"):
        present.successor(by_another, NOW)
