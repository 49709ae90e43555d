"""Check small files: a read returns any content whole, and a write leaves exactly the new content."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from sandbox.kernel import small_files


def test_file_of_any_size_is_read_to_its_end(tmp_path: Path) -> None:
    for size in (0, 1, (1 << 16) - 1, 1 << 16, (1 << 17) + 1):
        (tmp_path / "one").write_bytes(raw := bytes(size % 251 for _ in range(size)))
        assert small_files.whole(tmp_path / "one") == raw
    assert small_files.text("/proc/self/status").startswith("Name:")


def test_bytes_no_text_come_back_as_they_were(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"a\xff\n")
    assert small_files.text(str(tmp_path / "one")).encode("utf-8", "surrogateescape") == b"a\xff\n"


def test_what_is_not_there_raises_and_leaves_no_descriptor(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(FileNotFoundError):
        small_files.whole(tmp_path / "none")
    with pytest.raises(IsADirectoryError):
        small_files.whole(tmp_path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_what_is_put_is_all_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "one"
    write = os.write
    # The kernel may write fewer bytes than requested.
    monkeypatch.setattr(os, "write", lambda fd, raw: write(fd, raw[:3]))
    for raw in (b"longer than the next", b"short", b"shor", b"", b"longer again"):
        small_files.put(path, raw)
        assert path.read_bytes() == raw


def test_what_is_put_is_its_owners_alone(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        small_files.put(tmp_path / "one", b"a")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "one").stat().st_mode) == 0o600


def test_nothing_is_put_through_symlink(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"kept")
    (tmp_path / "one").symlink_to("other")
    with pytest.raises(OSError, match="symbolic link"):
        small_files.put(tmp_path / "one", b"a")
    assert (tmp_path / "other").read_bytes() == b"kept"
