"""Attack: replay an old document that was once valid: a package, or a trust root without a later revocation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from policy import errors
from policy.signing import trust
from sandbox.storage.trust_state import State
from tests import signing_kit as kit

NOW = kit.NOW
op = kit.operator
FIRST = kit.root_bytes(kit.root_document(op(1), op(2)), 1)
# The second version removes key 2 and revokes it.
LISTS = kit.revoked(keys=[kit.revoked_key(2)])
SECOND = kit.root_bytes(kit.root_document(op(1), version=2, revoked=LISTS), 1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "state").mkdir(mode=0o700)
    with State(tmp_path / "state") as state:
        state.init_root(FIRST, NOW)
    return tmp_path / "state"


def _verify(state: State, signer: int, **changes: Any) -> trust.TrustedPackage:
    return kit.verify(kit.signed(signer, **changes), state.trust_root(NOW), serials=state)


def test_older_package_does_not_come_back(path: Path) -> None:
    with State(path) as state:
        state.accept(_verify(state, 1, serial=10), now_ms=NOW)
        state.accept(_verify(state, 1, serial=11), now_ms=NOW)
    # Another process on another day: the ratchet is on disk.
    with State(path) as state:
        with pytest.raises(errors.SerialError, match="older than 11"):
            _verify(state, 1, serial=10)
        _verify(state, 1, serial=12)


def test_older_package_by_another_operator_does_not_either(path: Path) -> None:
    with State(path) as state:
        state.accept(_verify(state, 1, serial=11), now_ms=NOW)
        with pytest.raises(errors.SerialError):
            _verify(state, 2, serial=10)


def test_older_root_is_not_installed_over_newer_one(path: Path) -> None:
    with State(path) as state:
        _verify(state, 2)
        state.replace_root(SECOND, NOW)
        for old in (FIRST, SECOND):
            with pytest.raises(errors.TrustError, match="cannot follow 2"):
                state.replace_root(old, NOW)
        with pytest.raises(errors.TrustError, match="installed already"):
            state.init_root(FIRST, NOW)
        with pytest.raises(errors.RevokedError):
            _verify(state, 2)


def test_root_that_was_taken_away_is_missed(path: Path) -> None:
    with State(path) as state:
        state.replace_root(SECOND, NOW)
        assert state.trust_root(NOW).version == 2
    newest = path / "trust" / "root-00000002.json"
    kept = newest.read_bytes()
    newest.unlink()
    with State(path) as state:
        with pytest.raises(errors.TrustError, match="version 2 was installed and is gone"):
            state.trust_root(NOW)
        # Nor can another version 2 take its place: it would have to follow the present version.
        with pytest.raises(errors.TrustError, match="is gone"):
            state.replace_root(SECOND, NOW)
    newest.write_bytes(kept)
    newest.chmod(0o600)
    with State(path) as state:
        assert state.trust_root(NOW).version == 2


def test_clock_set_back_revives_no_package_and_no_root(path: Path) -> None:
    with State(path) as state:
        state.accept(_verify(state, 1, serial=10), now_ms=NOW + kit.DAY)
        seen = state.greatest_time_ms()
    assert seen == NOW + kit.DAY
    short = kit.signed(expires_at=NOW + 5)
    kit.verify(short, now_ms=NOW)
    with pytest.raises(errors.ExpiredError):
        kit.verify(short, now_ms=NOW, greatest_time_ms=seen)
    ending = kit.root(expires_at=NOW + 5)
    kit.verify(kit.signed(), ending, now_ms=NOW)
    with pytest.raises(errors.TrustError, match="has ended"):
        kit.verify(kit.signed(), ending, now_ms=NOW, greatest_time_ms=seen)
