"""Where leaves may lie on a unified hierarchy, on trees of plain files that carry systemd's mark.

What systemd itself does was seen in a virtual machine (docs/adr/0016); here are the decisions around it.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from policy import errors
from sandbox.kernel.cgroup import delegation


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hierarchy whose root has the controllers switched off for its children, on a machine without systemd."""
    (tmp_path / "cgroup.subtree_control").write_text("memory pids")
    monkeypatch.setattr(delegation, "SYSTEMD", tmp_path / "no-systemd")
    monkeypatch.setattr(delegation, "_own", lambda root: root / "some.slice" / "unit.scope" / "below")
    delegation.base.cache_clear()
    return tmp_path


def _unit(root: Path, *, controllers: str = "cpuset cpu io memory pids", marked: bool = True) -> Path:
    unit = root / "some.slice" / "unit.scope"
    (unit / "below").mkdir(parents=True)
    (unit / "cgroup.controllers").write_text(controllers)
    (unit / "cgroup.procs").write_text("")
    if marked:
        os.setxattr(unit, "user.delegate", b"1")
    return unit


def test_delegated_unit_is_base_and_its_processes_step_aside(root: Path) -> None:
    unit = _unit(root)
    assert delegation.base(root) == unit
    assert (unit / "supervisor").is_dir()
    assert (unit / "cgroup.subtree_control").read_text() == "+memory +pids +cpu +io"


def test_unit_that_nobody_delegated_is_not_ours(root: Path) -> None:
    unit = _unit(root, marked=False)
    with pytest.raises(errors.NotEnforceableError, match="cpu"):
        delegation.base(root)
    assert not (unit / "supervisor").exists()
    assert not (root / "covenant").exists()
    assert (root / "cgroup.subtree_control").read_text() == "memory pids"


def test_mark_on_root_itself_does_not_make_machine_ours(root: Path) -> None:
    _unit(root, marked=False)
    os.setxattr(root, "user.delegate", b"1")
    with pytest.raises(errors.NotEnforceableError):
        delegation.base(root)


def test_delegated_unit_without_controller_is_refused(root: Path) -> None:
    _unit(root, controllers="memory pids")
    with pytest.raises(errors.NotEnforceableError, match="not delegated"):
        delegation.base(root)


def test_without_systemd_machine_must_have_switched_controllers_on(root: Path) -> None:
    (root / "cgroup.subtree_control").write_text("cpu memory pids")
    assert delegation.base(root) == root / "covenant"


def _with_systemd(root: Path, monkeypatch: pytest.MonkeyPatch, answer: Any) -> list[list[str]]:
    """systemd is there and busctl gives ``answer``; the commands that were asked."""
    asked: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        asked.append(command)
        return subprocess.CompletedProcess(command, *answer())

    monkeypatch.setattr(delegation, "SYSTEMD", root)
    monkeypatch.setattr(delegation, "DEADLINE_SECONDS", 0.1)
    monkeypatch.setattr(subprocess, "run", run)
    return asked


def test_systemd_is_asked_for_delegated_scope(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def moved() -> tuple[int, bytes, bytes]:
        _unit(root)
        return 0, b"", b""

    asked = _with_systemd(root, monkeypatch, moved)
    assert delegation.base(root).name == "unit.scope"
    (command,) = asked
    assert command[0] == "/usr/bin/busctl"
    assert command[command.index("Delegate") + 2] == "true"
    assert str(os.getpid()) in command


@pytest.mark.parametrize(
    ("answer", "message"), [((1, b"", b"Access denied\n"), "Access denied"), ((0, b"", b""), "did not move")]
)
def test_systemd_that_does_not_help_is_error_that_says_so(
    root: Path, monkeypatch: pytest.MonkeyPatch, answer: tuple[int, bytes, bytes], message: str
) -> None:
    _unit(root, marked=False)
    _with_systemd(root, monkeypatch, lambda: answer)
    with pytest.raises(errors.NotEnforceableError, match=message):
        delegation.base(root)
