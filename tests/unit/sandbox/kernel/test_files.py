"""Small files are read whole, whatever is in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox.kernel import files


def test_a_file_of_any_size_is_read_to_its_end(tmp_path: Path) -> None:
    for size in (0, 1, (1 << 16) - 1, 1 << 16, (1 << 17) + 1):
        (tmp_path / "one").write_bytes(raw := bytes(size % 251 for _ in range(size)))
        assert files.whole(tmp_path / "one") == raw
    assert files.text("/proc/self/status").startswith("Name:")


def test_bytes_that_are_no_text_come_back_as_they_were(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"a\xff\n")
    assert files.text(str(tmp_path / "one")).encode("utf-8", "surrogateescape") == b"a\xff\n"


def test_what_is_not_there_raises_and_leaves_no_descriptor(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(FileNotFoundError):
        files.whole(tmp_path / "none")
    with pytest.raises(IsADirectoryError):
        files.whole(tmp_path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
