"""Check the record of the files that a service has read."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from sandbox.storage import files_read


def test_changed_files_of_live_service_are_named(tmp_path: Path) -> None:
    there, later = tmp_path / "config.toml", tmp_path / "later.toml"
    there.write_text("a = 1\n")
    files_read.note(tmp_path, files_read.look((there, later)))
    with open(tmp_path / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert files_read.changed(tmp_path, "lock") == ()
        there.write_text("a = 20\n")
        later.touch()
        assert files_read.changed(tmp_path, "lock") == (str(there), str(later))
        files_read.note(tmp_path, files_read.look((there, later)))
        assert files_read.changed(tmp_path, "lock") == ()
        there.unlink()
        assert files_read.changed(tmp_path, "lock") == (str(there),)
    # Without a service the record means nothing.
    assert files_read.changed(tmp_path, "lock") == ()


def test_fifo_in_place_of_the_lock_blocks_no_look(tmp_path: Path) -> None:
    """The owner of a home must not hold up root's doctor."""
    os.mkfifo(tmp_path / "lock")
    look = threading.Thread(target=files_read.changed, args=(tmp_path, "lock"), daemon=True)
    look.start()
    look.join(30)
    assert not look.is_alive()


def test_new_name_of_host_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files_read.note(tmp_path, files_read.look(()))
    with open(tmp_path / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        renamed = SimpleNamespace(nodename="another")
        monkeypatch.setattr(os, "uname", lambda: renamed)
        assert files_read.changed(tmp_path, "lock") == (files_read.HOST,)
