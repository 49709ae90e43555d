"""Check a shim's own look at the trust root: for a revocation whose installer was killed before it enforced it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from policy import errors
from sandbox.control import revocation_watch, tree_kill
from sandbox.rundir import marks, registry
from sandbox.storage.trust_state import State
from tests import signing_kit as kit
from tests.unit.sandbox.control.test_revocation import REASON, live, op


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[State]:
    monkeypatch.setattr(revocation_watch, "VERSION_EVERY", 1)
    path = tmp_path / "state"
    path.mkdir(mode=0o700)
    (path / "runs").mkdir()
    with State(path) as made:
        made.init_root(kit.root_bytes(kit.root_document(op(1), op(2)), 1), kit.NOW)
        yield made


def _revoke(state: State) -> None:
    later = kit.root_document(op(2), version=2, revoked=kit.revoked(keys=[kit.revoked_key(1)]))
    state.replace_root(kit.root_bytes(later, 1, 2), kit.NOW)


def _watch(state: State, path: Path, rows: list[Any], version: int | None = 1) -> revocation_watch.RevocationWatch:
    label = json.loads((path / "label.json").read_bytes())
    return revocation_watch.RevocationWatch(path, label, state, rows.append, version=version)


def test_root_that_came_before_its_first_look_is_seen_as_well(state: State) -> None:
    """The root comes between the last check before the label is visible and the first look."""
    rows: list[Mapping[str, Any]] = []
    with live(state.path / "runs", "one", (1,)) as path:
        _revoke(state)
        watch = _watch(state, path, rows)
        assert watch.look() is None  # the installer is about to enforce it
        assert isinstance(watch.look(), errors.RunRevokedError)
        assert [row["runs"][0]["run_id"] for row in rows] == ["one"]
        assert marks.revoked_of(path) == REASON


def test_who_rests_on_nothing_of_it_goes_on(state: State) -> None:
    rows: list[Mapping[str, Any]] = []
    with live(state.path / "runs", "one", (2,)) as path, live(state.path / "runs", "unsigned", ()) as unsigned:
        _revoke(state)
        for watch in (_watch(state, path, rows), _watch(state, unsigned, rows, None)):
            assert [watch.look() for _ in range(4)] == [None] * 4
        assert rows == []


def test_on_full_disk_it_ends_without_mark(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other process could kill a run without a cgroup."""

    def full(*arguments: object, **more: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(marks, "mark_revoked", full)
    with live(state.path / "runs", "one", (1,)) as path:
        _revoke(state)
        watch = _watch(state, path, [])
        outcomes = [watch.look(), watch.look()]
        assert marks.revoked_of(path) is None
        assert outcomes[0] is None
        assert isinstance(outcomes[1], errors.RunRevokedError)
        assert outcomes[1].message == REASON


def test_keeper_does_not_wait_for_itself(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own run has no cgroup, like a run that is starting, but no other process will end it."""
    waited: list[str] = []

    def outwait(entries: list[registry.Entry]) -> None:
        waited.extend(one.run_id for one in entries)

    monkeypatch.setattr(tree_kill, "outwait", outwait)
    with live(state.path / "runs", "one", (1,)) as path, live(state.path / "runs", "other", (1,)):
        _revoke(state)
        watch = _watch(state, path, [])
        assert watch.look() is None
        assert isinstance(watch.look(), errors.RunRevokedError)
        assert waited == ["other"]


@pytest.mark.parametrize("look", [State.present_root, lambda state: state.still_holds(1)])
@pytest.mark.parametrize("where", ["root_version", "_clock"])
def test_root_that_comes_between_two_reads_was_not_taken_away(
    state: State, monkeypatch: pytest.MonkeyPatch, where: str, look: Callable[[State], object]
) -> None:
    read, other = getattr(State, where), State(state.path)

    def read_then_replace(self: State, **more: Any) -> Any:
        monkeypatch.setattr(State, where, read)
        found = read(self, **more)
        _revoke(other)
        return found

    monkeypatch.setattr(State, where, read_then_replace)
    with other:
        try:
            look(state)
        except errors.TrustError as e:
            assert e.message == "trust root version 2 holds now, not 1"  # noqa: PT017 - it may hold or not
    assert state.present_root().version == 2
