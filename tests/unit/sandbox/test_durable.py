"""Which file a name is now, told without a look at its times."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox import durable


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


@pytest.mark.parametrize("size", [0, 1, 5_000_000_000])
def test_a_file_is_told_as_stat_tells_it(tmp_path: Path, folder: int, size: int) -> None:
    made = tmp_path / "rows\u00e9"
    made.touch()
    os.truncate(made, size)
    info = made.stat()
    assert durable.which(folder, made.name) == ((info.st_dev, info.st_ino), size)


@pytest.mark.parametrize("mode", [0o600, 0o4755, 0o000])
def test_an_open_file_is_told_as_fstat_tells_it(tmp_path: Path, mode: int) -> None:
    made = tmp_path / "rows"
    made.write_bytes(b"one")
    (tmp_path / "second").hardlink_to(made)
    with made.open("rb") as stream:
        made.chmod(mode)
        info, found = os.fstat(stream.fileno()), durable.opened(stream.fileno())
    assert found == tuple(getattr(info, name) for name in found._fields)
    assert found.st_nlink == 2


def test_a_link_is_told_and_not_what_it_leads_to(tmp_path: Path, folder: int) -> None:
    made, link = tmp_path / "rows", tmp_path / "link"
    made.write_bytes(b"one")
    link.symlink_to(made)
    info = link.lstat()
    assert durable.which(folder, "link") == ((info.st_dev, info.st_ino), info.st_size)


def test_another_file_under_the_name_is_another(tmp_path: Path, folder: int) -> None:
    made = tmp_path / "rows"
    made.write_bytes(b"one")
    before = durable.which(folder, "rows")
    other = tmp_path / "other"
    other.write_bytes(b"one")
    other.replace(made)
    assert durable.which(folder, "rows")[0] != before[0]


def test_a_name_that_nothing_has_is_told_as_missing(folder: int) -> None:
    with pytest.raises(FileNotFoundError, match="statx"):
        durable.which(folder, "rows")
