"""Check the hierarchy of each controller, and the writes of a leaf, on plain files that look like the kernel's."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest

from policy import errors
from sandbox.kernel.cgroup import delegation
from sandbox.kernel.cgroup.cgroup import Hierarchies, Leaf, Limit
from sandbox.kernel.cgroup.delegation import NEEDED

V1 = "\n".join(
    f"{30 + i} 29 0:{i} / /sys/fs/cgroup/{name} rw,relatime - cgroup cgroup rw,{name}"
    for i, name in enumerate(("cpu", "cpuacct", "memory", "pids", "freezer"))
)


def _tree(tmp_path: Path, *, enabled: str = "cpu memory pids", has: str = "cpuset cpu io memory pids") -> str:
    """Make a unified hierarchy of plain files; return the mount table that shows it."""
    (tmp_path / "cgroup.controllers").write_text(has)
    (tmp_path / "cgroup.subtree_control").write_text(enabled)
    (tmp_path / "covenant").mkdir()
    (tmp_path / "covenant" / "cgroup.subtree_control").write_text("")
    return f"40 29 0:40 / {tmp_path} rw,relatime - cgroup2 cgroup2 rw"


@pytest.fixture(autouse=True)
def _no_systemd(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(delegation, "SYSTEMD", tmp_path / "no-systemd")
    delegation.base.cache_clear()


def test_version_1_is_found_per_controller() -> None:
    found = Hierarchies.read(V1)
    assert found.version == 1
    assert found.mounts["memory"] == Path("/sys/fs/cgroup/memory")
    assert "freezer" in found.mounts


def test_hybrid_machine_is_version_1(tmp_path: Path) -> None:
    assert Hierarchies.read(V1 + "\n" + _tree(tmp_path, has="hugetlb")).version == 1


def test_unified_machine_is_version_2(tmp_path: Path) -> None:
    found = Hierarchies.read(_tree(tmp_path))
    assert found.version == 2
    assert set(found.mounts) == {*NEEDED, "io"}


@pytest.mark.parametrize("missing", ["memory", "pids", "cpu"])
def test_missing_controller_is_no_version(tmp_path: Path, missing: str) -> None:
    has = " ".join({"cpu", "memory", "pids"} - {missing})
    found = Hierarchies.read(_tree(tmp_path, has=has))
    assert found.version == 0
    with pytest.raises(errors.NotEnforceableError), Leaf(found, "run"):
        pass


def test_controllers_that_machine_has_not_enabled_are_refused_and_not_enabled(tmp_path: Path) -> None:
    found = Hierarchies.read(_tree(tmp_path, enabled="cpu"))
    with pytest.raises(errors.NotEnforceableError, match="memory"), Leaf(found, "run"):
        pass
    assert (tmp_path / "cgroup.subtree_control").read_text() == "cpu"


def _leaf(tmp_path: Path) -> Leaf:
    leaf = Leaf(Hierarchies.read(_tree(tmp_path)), "run")
    leaf.__enter__()
    return leaf


def test_leaf_lies_below_covenant_and_delegates_there_alone(tmp_path: Path) -> None:
    leaf = _leaf(tmp_path)
    assert (tmp_path / "covenant" / "run").is_dir()
    assert (tmp_path / "covenant" / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"
    assert leaf.join_files() == (str(tmp_path / "covenant" / "run" / "cgroup.procs"),)


def test_limit_is_written_and_one_that_does_not_hold_is_error(tmp_path: Path) -> None:
    leaf = _leaf(tmp_path)
    path = tmp_path / "covenant" / "run" / "pids.max"
    path.write_text("")
    leaf.apply([Limit("pids", "pids.max", "7")])
    assert path.read_text() == "7"
    path.unlink()
    path.symlink_to("/dev/null")
    with pytest.raises(errors.KernelError, match="the kernel holds"):
        leaf.apply([Limit("pids", "pids.max", "8")])


def test_required_file_not_there_is_refused_and_optional_one_is_reported(tmp_path: Path) -> None:
    leaf = _leaf(tmp_path)
    leaf.paths.pop("cpu")
    for controller, file in (("cpu", "cpu.max"), ("memory", "memory.nothing")):
        with pytest.raises(errors.NotEnforceableError, match=file):
            leaf.apply([Limit(controller, file, "1 2")])
        leaf.apply([Limit(controller, file, "1 2", required=False)])
    assert leaf.reported == ["cpu.max: not on this host", "memory.nothing: not on this host"]
    assert not (leaf.paths["memory"] / "memory.nothing").exists()


@pytest.mark.parametrize(("text", "kills"), [("low 0\noom 3\noom_kill 2\n", 2), ("oom_kill 0", 0), ("", 0)])
def test_oom_kills_are_read_from_counter(tmp_path: Path, text: str, kills: int) -> None:
    leaf = _leaf(tmp_path)
    (tmp_path / "covenant" / "run" / "memory.events").write_text(text)
    assert leaf.oom_kills() == kills


def _v1_leaf(tmp_path: Path, *, state: str) -> Leaf:
    directory = tmp_path / "freezer" / "covenant" / "run"
    directory.mkdir(parents=True)
    (directory / "freezer.state").write_text(state)
    return Leaf(Hierarchies(1, {"freezer": tmp_path / "freezer"}), "run", paths={"freezer": directory})


@pytest.mark.parametrize(("says", "frozen"), [("FROZEN\n", True), ("FREEZING\n", False), ("THAWED\n", False)])
def test_leaf_that_still_freezes_is_not_frozen(tmp_path: Path, says: str, frozen: bool) -> None:
    assert _v1_leaf(tmp_path, state=says).frozen() is frozen


def test_leaf_that_does_not_freeze_in_time_is_thawed_again_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaf = _v1_leaf(tmp_path, state="THAWED\n")
    monkeypatch.setattr(leaf, "_freezer_says", lambda: None)
    monkeypatch.setattr(leaf, "pids", lambda: [4242])
    with pytest.raises(errors.KernelError, match=r"not frozen after 0\.01 s"):
        leaf.freeze(0.01)
    assert (leaf.paths["freezer"] / "freezer.state").read_text() == "THAWED"


def test_leaf_in_which_nobody_is_left_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that killed them while they were frozen has thawed the leaf."""
    leaf = _v1_leaf(tmp_path, state="THAWED\n")
    monkeypatch.setattr(leaf, "_freezer_says", lambda: False)
    monkeypatch.setattr(leaf, "pids", list)
    leaf.freeze(deadline_seconds=60)


def test_one_to_stand_all_same_is_not_thawed_where_it_did_not_freeze_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stands() -> NoReturn:
        raise errors.RunRevokedError("it leaks")

    leaf = _v1_leaf(tmp_path, state="THAWED\n")
    monkeypatch.setattr(leaf, "_freezer_says", lambda: None)
    monkeypatch.setattr(leaf, "pids", lambda: [4242])
    with pytest.raises(errors.RunRevokedError, match="it leaks"):
        leaf.freeze(0.01, allow_thaw=stands)
    assert (leaf.paths["freezer"] / "freezer.state").read_text() == "FROZEN"


def test_version_2_says_it_by_its_events(tmp_path: Path) -> None:
    leaf = _leaf(tmp_path)
    place = tmp_path / "covenant" / "run"
    (place / "cgroup.events").write_text("populated 1\nfrozen 1\n")
    leaf.freeze()
    assert (place / "cgroup.freeze").read_text() == "1"
    assert leaf.frozen()
    (place / "cgroup.events").write_text("populated 1\nfrozen 0\n")
    leaf.thaw()
    assert (place / "cgroup.freeze").read_text() == "0"


def test_without_freezer_nothing_is_frozen_and_it_says_so(tmp_path: Path) -> None:
    leaf = Leaf(Hierarchies(1, {}), "run", paths={"memory": tmp_path})
    assert not leaf.freezable
    for act in (leaf.freeze, leaf.thaw, leaf.frozen):
        with pytest.raises(errors.NotEnforceableError, match="freezer"):
            act()


def test_leaf_gone_is_error_and_not_thawed(tmp_path: Path) -> None:
    leaf = _v1_leaf(tmp_path, state="FROZEN\n")
    (leaf.paths["freezer"] / "freezer.state").unlink()
    with pytest.raises(errors.KernelError, match="cannot be read"):
        leaf.frozen()
