"""Reading one file of a package: a plain one, of a bounded size."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from policy import errors
from sandbox.storage import plain_file


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "below").mkdir()
    os.mkfifo(tmp_path / "fifo")
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def test_file_is_read_up_to_its_bound(directory: int) -> None:
    assert plain_file.read(directory, "file", most=5) == b"12345"
    assert plain_file.read(directory, "absent", most=5) is None
    with pytest.raises(errors.PackageError, match="over 4 bytes"):
        plain_file.read(directory, "file", most=4)


@pytest.mark.parametrize(
    ("name", "reason"), [("link", "is a symlink"), ("fifo", "is no plain file"), ("below", "is no plain file")]
)
def test_other_kinds_are_refused(directory: int, name: str, reason: str) -> None:
    with pytest.raises(errors.PackageError, match=reason):
        plain_file.read(directory, name, most=5)
