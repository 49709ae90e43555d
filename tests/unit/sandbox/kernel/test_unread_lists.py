"""Check a cgroup whose process list cannot be read: it is not empty, and no caller may report its processes gone."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from policy import errors
from sandbox.kernel import small_files
from sandbox.kernel.cgroup import kill
from sandbox.kernel.cgroup.cgroup import Hierarchies, Leaf
from sandbox.network import disconnect

UNREADABLE = (errno.EMFILE, errno.ENFILE, errno.EACCES, errno.ENOMEM, errno.EIO)


def _leaf(path: Path) -> Leaf:
    path.mkdir()
    (path / "cgroup.procs").write_text("")
    leaf = Leaf(Hierarchies(1, {"pids": path.parent}), path.name)
    leaf.adopt({"pids": path})
    return leaf


def _failing(patch: pytest.MonkeyPatch, number: int, *, times: int = 1_000_000) -> None:
    """Make opening a list fail ``times`` times."""
    left, real = [times], small_files.whole

    def read(path: str | Path) -> bytes:
        if str(path).endswith("/cgroup.procs") and left[0] > 0:
            left[0] -= 1
            raise OSError(number, os.strerror(number), path)
        return real(path)

    patch.setattr(small_files, "whole", read)


@pytest.mark.parametrize("number", UNREADABLE)
def test_list_that_cannot_be_read_is_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    leaf = _leaf(tmp_path / "one")
    assert leaf.pids() == kill.listed(leaf) == []
    _failing(monkeypatch, number)
    for look in (leaf.pids, lambda: kill.listed(leaf)):
        with pytest.raises(errors.KernelError, match=f"cannot be read: {os.strerror(number)}"):
            look()


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENODEV])
def test_cgroup_gone_has_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    leaf = _leaf(tmp_path / "one")
    _failing(monkeypatch, number)
    assert leaf.pids() == kill.listed(leaf) == []
    leaf.kill()
    kill.kill([leaf])


def test_who_ends_it_says_that_it_could_not_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leaf, other = _leaf(tmp_path / "one"), _leaf(tmp_path / "other")
    with monkeypatch.context() as patch:
        _failing(patch, errno.EMFILE)
        with pytest.raises(errors.KernelError, match=r"cannot be read: Too many open files"):
            leaf.kill(deadline_seconds=0.01)
        with pytest.raises(errors.KernelError, match=r"in the cgroups one \(who is in .* Too many open files\), other"):
            kill.kill([leaf, other], deadline_seconds=0.01)
    kill.kill([leaf, other])


@pytest.mark.parametrize("together", [False, True])
def test_descriptor_free_again_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, together: bool) -> None:
    leaf = _leaf(tmp_path / "one")
    _failing(monkeypatch, errno.EMFILE, times=3)
    if together:
        kill.kill([leaf])
    else:
        leaf.kill()
    assert leaf.pids() == []  # the three failures are used up


def test_network_that_cannot_be_looked_for_is_told_and_that_of_dead_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said, asked = list[str](), os.open

    def opened(path: str, flags: int, *more: Any, **named: Any) -> int:
        if path.endswith(f"/{os.getpid()}/ns/net"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)
        return asked(path, flags, *more, **named)

    gone, here = disconnect.Link("gone", 0, {}), disconnect.Link("here", os.getpid(), {})
    with contextlib.ExitStack() as stack, monkeypatch.context() as patch:
        patch.setattr(os, "open", opened)
        assert disconnect.others([gone], stack, said) == []
        assert said == []
        assert disconnect.others([gone, here], stack, said) == []
    assert said == [f"the network that keeper {os.getpid()} is in cannot be seen: Too many open files"]
