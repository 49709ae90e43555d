"""Removed names are gone at once, and each descriptor is closed, also where no thread can be had."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from sandbox.kernel.fs.freeing import Freeing


def _remove(top: Path, count: int) -> int:
    """Make so many files and remove them. Returns how many descriptors are open more than before."""
    for number in range(count):
        (top / f"f{number}").write_text("x" * 5000)
    fd = os.open(top, os.O_RDONLY)
    before = len(os.listdir("/proc/self/fd"))
    with Freeing() as freeing:
        for number in range(count):
            freeing.unlink(fd, f"f{number}")
            assert not (top / f"f{number}").exists()
    after = len(os.listdir("/proc/self/fd"))
    os.close(fd)
    return after - before


def test_removed_files_leave_no_descriptor(tmp_path: Path) -> None:
    assert _remove(tmp_path, 300) == 0
    assert list(tmp_path.iterdir()) == []


def test_user_without_threads_removes_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    assert _remove(tmp_path, 20) == 0
    assert list(tmp_path.iterdir()) == []


def test_link_is_removed_and_not_its_target(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("kept")
    (tmp_path / "link").symlink_to("target")
    fd = os.open(tmp_path, os.O_RDONLY)
    with Freeing() as freeing:
        freeing.unlink(fd, "link")
    os.close(fd)
    assert [one.name for one in tmp_path.iterdir()] == ["target"]


def test_name_that_cannot_be_removed_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    fd = os.open(tmp_path, os.O_RDONLY)
    before = len(os.listdir("/proc/self/fd"))
    with Freeing() as freeing:
        with pytest.raises(IsADirectoryError):
            freeing.unlink(fd, "directory")
        with pytest.raises(FileNotFoundError):
            freeing.unlink(fd, "missing")
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(fd)
