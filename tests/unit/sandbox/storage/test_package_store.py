"""The supervisor's copies of packages: whole or not there, and a maker that died leaves nothing behind for good."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import signal
import stat
from pathlib import Path

import pytest

from policy.package import Package
from sandbox.storage import package_store


def _package() -> Package:
    return Package({"agent.toml": b"x", "bin/entry": b"y", "lib/a/b": b"z"})


def test_copy_has_packages_bytes_and_our_modes(tmp_path: Path) -> None:
    copy = package_store.PackageStore(tmp_path / "p").put(_package(), executable="bin/entry")
    modes = {str(p.relative_to(copy)): stat.S_IMODE(p.stat().st_mode) for p in copy.rglob("*")}
    assert modes == {
        "agent.toml": 0o444,
        "bin": 0o555,
        "bin/entry": 0o555,
        "lib": 0o555,
        "lib/a": 0o555,
        "lib/a/b": 0o444,
    }
    assert (copy / "bin/entry").read_bytes() == b"y"
    assert package_store.PackageStore(tmp_path / "p").put(_package(), executable="bin/entry") == copy


def test_what_killed_maker_left_goes_with_next_start_and_live_makers_copy_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork = multiprocessing.get_context("fork")
    makers = []
    sync = os.fsync

    def stuck(fd: int) -> None:
        sync(fd)
        signal.pause()

    monkeypatch.setattr(os, "fsync", stuck)
    folder = package_store.PackageStore(tmp_path / "p")
    for _ in range(2):
        maker = fork.Process(target=folder.put, args=(_package(),))
        maker.start()
        makers.append(maker)
    while len(list((tmp_path / "p").glob(".making-*/agent.toml"))) < 2:
        pass
    monkeypatch.undo()
    folder.sweep()
    assert len(list((tmp_path / "p").iterdir())) == 2
    makers[0].kill()
    makers[0].join()
    folder.sweep()
    assert len(list((tmp_path / "p").iterdir())) == 1
    makers[1].kill()
    makers[1].join()
    folder.sweep()
    assert list((tmp_path / "p").iterdir()) == []


def test_unused_copy_survives_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, remove = package_store.PackageStore(tmp_path / "p"), shutil.rmtree

    def swept(path: Path) -> None:
        package_store.PackageStore(tmp_path / "p").sweep()
        remove(path)

    def taken(source: Path, target: Path) -> None:
        raise FileExistsError(errno.EEXIST, "another maker was first", str(target))

    monkeypatch.setattr(os, "rename", taken)
    monkeypatch.setattr(shutil, "rmtree", swept)
    # Another process sweeps while this maker removes its unused copy: neither fails.
    folder.put(_package())
    assert not list((tmp_path / "p").iterdir())
