"""Check the registry: the live runs by their directories, and that only one of many rivals gets the last place."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from sandbox.rundir import directory, lock, registry
from sandbox.rundir import label as rundir_label


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path


def _label(agent: str, *ancestors: str, **more: str) -> dict[str, str]:
    parent = ancestors[-1] if ancestors else ""
    return {
        "agent_id": agent,
        "parent": parent,
        "ancestors": " ".join(ancestors),
        "depth": str(len(ancestors)),
        "display": "operator@local",
        "pubkey": "p",
        **more,
    }


def test_what_label_says_is_what_entry_has(runs: Path) -> None:
    numbers = {"memory_mb": "64", "pids_max": "8", "cpu_millis": "500", "host_memory_mb": "130", "started_ms": "7"}
    label = _label("a", "root", "above", signers="k1 k2", max_depth="2", max_descendants="3", **numbers)
    with directory.RunDirectory(runs / "one", label):
        (runs / "one" / registry.STATE).write_text("Running\n")
        (entry,) = registry.live(runs)
        assert (entry.run_id, entry.path, entry.agent_id) == ("one", runs / "one", "a")
        assert (entry.parent, entry.ancestors, entry.depth) == ("above", ("root", "above"), 2)
        assert (entry.memory_mb, entry.pids_max, entry.cpu_millis, entry.host_memory_mb) == (64, 8, 500, 130)
        assert (entry.max_depth, entry.max_descendants, entry.started_ms) == (2, 3, 7)
        assert (entry.signers, entry.on_parent_exit, entry.self_test) == (("k1", "k2"), "terminate", False)
        assert (entry.keeper, entry.state, entry.cgroups) == (os.getpid(), "Running", {})
        assert entry.issuer == {"display": "operator@local", "pubkey": "p"}
    assert registry.live(runs) == []
    assert (entry.keeper, entry.state) == (0, "")


def test_no_directory_of_runs_is_no_run(tmp_path: Path) -> None:
    assert registry.live(tmp_path / "none") == []


def test_subtree_is_run_and_all_below_it(runs: Path) -> None:
    with contextlib.ExitStack() as stack:
        above: dict[str, tuple[str, ...]] = {
            "root": (),
            "left": ("root",),
            "right": ("root",),
            "leaf": ("root", "left"),
        }
        for name, ancestors in above.items():
            stack.enter_context(directory.RunDirectory(runs / name, _label(name, *ancestors)))
        test = _label("leaf", "root", "left") | {rundir_label.SELF_TEST: "yes"}
        stack.enter_context(directory.RunDirectory(runs / "test", test))
        entries = registry.live(runs)
        found = {name: {one.run_id for one in registry.subtree(entries, name)} for name in above}
        assert found == {
            "root": {"root", "left", "right", "leaf", "test"},
            "left": {"left", "leaf", "test"},
            "right": {"right"},
            "leaf": {"leaf"},
        }
        assert registry.subtree(entries, "root")[0].run_id == "root"
        assert {one.run_id for one in registry.held_under(entries, "root")} == {"left", "right"}
        orphaned = [one for one in entries if one.run_id != "left" and not one.self_test]
        assert {one.run_id for one in registry.held_under(orphaned, "root")} == {"right", "leaf"}
        assert {one.run_id for one in registry.agents(entries)} == set(above)


def test_run_whose_keeper_was_killed_is_not_counted(runs: Path) -> None:
    """Its directory remains until it is recovered, but its place is free at once."""
    code = (
        "import os, pathlib, signal, sys\nfrom sandbox.rundir import directory as bundle\n"
        "bundle.RunDirectory(pathlib.Path(sys.argv[1]), {'agent_id': 'a'}).__enter__()\n"
        "print('made', flush=True)\nsignal.pause()\n"
    )
    environment = {"PYTHONPATH": str(Path(directory.__file__).parents[2])}
    place = runs / str(uuid.uuid4())
    arguments = [sys.executable, "-c", code, str(place)]
    with subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE) as keeper:
        assert keeper.stdout is not None
        assert keeper.stdout.readline() == b"made\n"
        assert [(one.run_id, one.keeper) for one in registry.live(runs)] == [(place.name, keeper.pid)]
        keeper.kill()
    assert registry.live(runs) == []
    assert place.is_dir()


def test_whoever_asks_for_others_is_not_looked_at_itself(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    label_of = rundir_label.label_of

    def look(path: Path) -> dict[str, str] | None:
        looked.append(path.name)
        return label_of(path)

    monkeypatch.setattr(rundir_label, "label_of", look)
    made = (directory.RunDirectory(runs / name, _label("a")) for name in ("one", "two"))
    with next(made), next(made), lock.gate(runs):
        assert [one.run_id for one in registry.seen(runs, but="one")] == ["two"]
        assert looked == ["two"]
        assert {one.run_id for one in registry.seen(runs)} == {"one", "two"}


def test_refused_claim_leaves_nothing(runs: Path) -> None:
    def refuse() -> None:
        assert registry.seen(runs) == []  # behind the gate: asking again must not wait for itself
        raise ValueError("no place")

    with pytest.raises(ValueError, match="no place"):
        directory.RunDirectory(runs / "one", _label("a"), claim=refuse).__enter__()
    assert [path.name for path in runs.iterdir()] == [".gate"]
