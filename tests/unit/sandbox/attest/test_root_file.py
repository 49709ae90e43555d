"""The file that has the root of a sandbox, as a process holds it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from policy.prove.live import Standing
from sandbox.attest import root_file
from sandbox.attest.reference import RootFile
from sandbox.rootfs import erofs_image


def made(path: Path) -> RootFile:
    path.write_bytes(b"root")
    info = path.stat()
    return RootFile(info.st_dev, info.st_ino, info.st_size, "0" * 64, erofs_image.identity(info).decode())


def test_file_that_one_look_misses_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "root.erofs"
    one, held = made(path), list[int]()
    # The descriptor is made between two looks.
    monkeypatch.setattr("time.sleep", lambda seconds: held.append(os.open(path, os.O_RDONLY)))
    try:
        (layer,) = root_file.judge(one, os.getpid(), {})
    finally:
        for fd in held:
            os.close(fd)
    assert (layer.standing, len(held)) == (Standing.EQUAL, 1)


def test_file_that_no_process_holds_is_missed(tmp_path: Path) -> None:
    (layer,) = root_file.judge(made(tmp_path / "root.erofs"), os.getpid(), {})
    assert (layer.standing, layer.found) == (Standing.WIDER, "it holds no such file")
