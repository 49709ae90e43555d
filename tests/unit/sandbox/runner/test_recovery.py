"""Check recovery of a run whose shim was killed, and the cleanup that needs the host's network."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from policy import contract, errors
from sandbox.kernel.cgroup.cgroup import Hierarchies, Leaf
from sandbox.network import uplink
from sandbox.rundir import directory, registry
from sandbox.runner import limits, recovery


def _leaf(place: Path, **files: str) -> Leaf:
    names = {"cpu": "cpuacct.usage", "peak": "memory.max_usage_in_bytes"}
    for what, content in files.items():
        (place / names[what]).write_text(content)
    return Leaf(Hierarchies(1, {}), "leaf", dict.fromkeys(("memory", "cpu", "cpuacct"), place))


@pytest.mark.parametrize("expected", [False, True], ids=["no file", "an empty file"])
def test_one_that_was_never_given_its_intent_has_used_nothing(tmp_path: Path, *, expected: bool) -> None:
    if expected:
        (tmp_path / limits.METER).touch()
    assert recovery.used_by(_leaf(tmp_path, cpu="5000000", peak="4096"), tmp_path) == contract.NOTHING_USED


@pytest.mark.parametrize(
    ("noted", "files", "usage"),
    [
        ("5000", {"cpu": "48000000", "peak": "4096"}, contract.Usage(43, 4096, None)),
        ("5000", {"peak": "4096"}, contract.Usage(None, 4096, None)),
        ("-", {"cpu": "48000000", "peak": "4096"}, contract.Usage(None, 4096, None)),
        ("-", {}, contract.Usage(None, None, None)),
    ],
    ids=["counted", "its cgroup is gone", "nothing counted at its intent", "nothing at all"],
)
def test_what_is_not_known_of_one_that_was_given_it_is_not_said_to_be_nothing(
    tmp_path: Path, noted: str, files: dict[str, str], usage: contract.Usage
) -> None:
    (tmp_path / limits.METER).write_text(noted)
    assert recovery.used_by(_leaf(tmp_path, **files), tmp_path) == usage


@pytest.mark.parametrize("isolated", [True, False])
def test_whoever_is_not_in_host_s_network_leaves_note_of_what_lies_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, isolated: bool
) -> None:
    """A shim outside the host's network must keep the note.

    If the uplink was removed from the configuration before its fork, it finds no device to remove. Without the note no
    process could find the device again.
    """
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
    (tmp_path / "with" / "network.json").write_text("{}")
    taken, used = list[str](), list[str]()
    monkeypatch.setattr(uplink, "recover", lambda runs, binary: taken.extend(runs))
    monkeypatch.setattr(recovery, "trusted_binary", Path)
    found = recovery.recover(
        tmp_path,
        hierarchies=Hierarchies(0, {}),
        used=lambda run_id, usage: used.append(run_id),
        isolated=isolated,
    )
    assert used == ["with", "without"]  # any process that finds them can write their ends
    assert (taken, found) == (([], ["without"]) if isolated else (["with"], ["with", "without"]))
    assert (tmp_path / "with").exists() is isolated


def test_one_that_cannot_be_ended_keeps_no_other_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in an agent's sandbox that waits for a hung disk cannot be killed."""
    for name in ("hangs", "other"):
        (tmp_path / name).mkdir()
    killed = list[str]()

    def kill(leaf: Leaf) -> None:
        if leaf.name == "hangs":
            raise errors.KernelError("processes [7] survive SIGKILL")
        killed.append(leaf.name)

    monkeypatch.setattr(Leaf, "kill", kill)
    with pytest.raises(errors.KernelError, match="survive"):
        recovery.recover(tmp_path, hierarchies=Hierarchies(0, {}))
    assert killed == ["other"]
    # Its remains are still there for the next recovery.
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["hangs"]


def test_of_one_that_was_over_and_whose_end_was_not_written_nobody_says_that_it_used_nothing(tmp_path: Path) -> None:
    """Its cgroup and its counters are removed, but its network is not yet."""
    used = dict[str, contract.Usage]()
    with directory.RunDirectory(tmp_path / "one", {"agent_id": "a"}) as one:
        one.note_cgroups({})
        (one.path / limits.METER).write_text("5000")
        assert registry.under_way(one.path)
        one.vacate(limits.METER)
        assert not registry.under_way(one.path)
        assert registry.held(one.path)
        assert [path.name for path in tmp_path.iterdir() if path.name != ".gate"] == ["one"]
        left = tmp_path / "two"
        shutil.copytree(one.path, left)
    recovery.recover(tmp_path, hierarchies=Hierarchies(0, {}), used=used.__setitem__)
    assert used == {"two": contract.Usage(None, None, None)}
    assert not left.exists()
