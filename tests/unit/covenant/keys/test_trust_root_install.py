"""Install a version that revokes a key: the runs that depend on the key end, even if the install then fails."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from covenant.keys import trust_root
from policy import errors
from policy.signing.root import TrustRoot
from sandbox.control import revocation, tree_kill
from sandbox.kernel.cgroup import kill
from sandbox.network import disconnect
from sandbox.rundir import marks
from sandbox.storage import atomic_file
from sandbox.storage.trust_state import State
from tests import signing_kit as kit
from tests.unit.sandbox.control.test_revocation import REASON, live, op

FIRST = kit.root_bytes(kit.root_document(op(1), op(2)), 1)
SECOND = kit.root_bytes(kit.root_document(op(2), version=2, revoked=kit.revoked(keys=[kit.revoked_key(1)])), 1, 2)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[State]:
    monkeypatch.setattr(tree_kill, "STARTING_SECONDS", 0.0)
    monkeypatch.setattr(kill, "stop", lambda leaves: None)
    monkeypatch.setattr(kill, "kill", lambda leaves: None)
    monkeypatch.setattr(disconnect, "cut", lambda links: [])
    path = tmp_path / "state"
    (path / "runs").mkdir(parents=True)
    path.chmod(0o700)
    with State(path) as made:
        made.init_root(FIRST, kit.NOW)
        yield made


@pytest.fixture
def home(tmp_path: Path) -> Path:
    path = tmp_path / "home"
    path.mkdir(mode=0o700)
    return path


def _install(state: State, home: Path, present: TrustRoot) -> revocation.Enforced:
    root = present.successor(SECOND, kit.NOW)
    return trust_root.install(state, home, present, root, ["op1", "op2"], ["revokes op1"], kit.NOW)


def test_whoever_rests_on_it_ends_where_log_takes_no_line(
    state: State, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object, **more: object) -> None:
        raise errors.LedgerError("no space left on device", where="the log")

    with live(state.path / "runs", "one", (1,)) as path:
        with monkeypatch.context() as patch:
            patch.setattr(trust_root, "open_ledger", full)
            with pytest.raises(errors.LedgerError) as refused:
                _install(state, home, state.present_root())
        assert refused.value.message.startswith("no space left on device; the version does not hold")
        assert "the runs that rested on it were ended all the same: one; not done: the log: no" in refused.value.message
        assert (refused.value.hint, refused.value.where) == ("mend it, then repeat the command", "the log")
        assert (marks.revoked_of(path), state.root_version()) == (REASON, 1)
        # Repeat the command after the disk has room.
        assert [one.run_id for one in _install(state, home, state.present_root()).ended] == ["one"]
        assert state.root_version() == 2


def test_version_that_came_too_late_ends_nobody(state: State, home: Path) -> None:
    present = state.present_root()
    state.replace_root(kit.root_bytes(kit.root_document(op(1), op(2), version=2), 1, 2), kit.NOW)
    with live(state.path / "runs", "one", (1,)) as path:
        with pytest.raises(errors.TrustError, match="version 2 holds now, not 1"):
            _install(state, home, present)
        assert marks.revoked_of(path) is None


@pytest.mark.parametrize("rests", [True, False])
def test_version_that_holds_is_not_said_to_be_refused(
    state: State, home: Path, monkeypatch: pytest.MonkeyPatch, *, rests: bool
) -> None:
    """The version was installed, but its time record (clock.json) cannot be written."""
    replace = atomic_file.replace

    def full(directory: int, name: str, *arguments: Any, **more: Any) -> None:
        if name == "clock.json":
            raise OSError(28, os.strerror(28))
        replace(directory, name, *arguments, **more)

    monkeypatch.setattr(atomic_file, "replace", full)
    with live(state.path / "runs", "one", (1 if rests else 2,)):
        if not rests:
            with pytest.raises(errors.StateError, match="the record of versions cannot be written: No space left"):
                _install(state, home, state.present_root())
            return
        done = _install(state, home, state.present_root())
        assert [one.run_id for one in done.ended] == ["one"]
        said = "version 2 holds, but the record of versions cannot be written: No space left on device"
        assert said in done.failed
        assert done.refused is None
