"""The directory of a run that is over is the next one's only as it should have been left."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox import spare_place
from sandbox.kernel import sentry_log, trace
from sandbox.spare import Spares


def _run(path: Path) -> Path:
    """One that is over, with all that it may have written."""
    path.mkdir()
    for name in ("lock", "label.json", "cgroups.json"):
        (path / name).write_bytes(b"of the run before, longer than any number")
    for name in ("root", "trace", "bundle"):
        (path / name).mkdir()
    (path / "trace" / trace.CONFIG).write_bytes(b"{}")
    os.mkfifo(path / "trace" / sentry_log.NAME)
    (path / "trace" / "socket").touch()
    (path / "bundle" / "config.json").touch()
    (path / "revoked").touch()
    (path / spare_place.METER).write_bytes(b"used")
    return path


@pytest.fixture
def spares(tmp_path: Path) -> Spares:
    return Spares(tmp_path / "spare", "d1")


def _kept(spares: Spares) -> Path:
    (place,) = spares.there("place")
    return Path(place)


def test_what_is_left_is_the_next_ones_without_a_trace_of_the_one_before(tmp_path: Path, spares: Spares) -> None:
    assert spare_place.leave(spares, _run(tmp_path / "one"))
    kept = _kept(spares)
    # The end of the one before may not be written yet.
    assert (kept / spare_place.METER).read_bytes() == b"used"
    lock = spare_place.take(spares, tmp_path / "two", b"label")
    assert lock is not None
    try:
        two = tmp_path / "two"
        assert {entry.name for entry in two.iterdir()} == {"lock", "label.json", "cgroups.json", "root", "trace"}
        assert {entry.name for entry in (two / "trace").iterdir()} == {trace.CONFIG, sentry_log.NAME}
        assert (two / "label.json").read_bytes() == b"label"
        assert (two / "cgroups.json").read_bytes() == b"{}"
        assert (two / "lock").read_text() == str(os.getpid())
        with (two / "lock").open() as another, pytest.raises(BlockingIOError):
            fcntl.flock(another, fcntl.LOCK_SH | fcntl.LOCK_NB)
        assert spare_place.take(spares, tmp_path / "three", b"label") is None
    finally:
        os.close(lock)


def _linked(path: Path, place: Path) -> None:
    """As it was, but by a symlink out of the place."""
    elsewhere = place.parent.parent / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda place: (place / "root" / "left").touch(),
        lambda place: (place / "more").touch(),
        lambda place: (place / "cgroups.json").unlink(),
        lambda place: _linked(place / "lock", place),
        lambda place: _linked(place / "cgroups.json", place),
        lambda place: _linked(place / "root", place),
        lambda place: _linked(place / "trace" / trace.CONFIG, place),
    ],
    ids=["root", "more", "less", "lock", "file", "directory", "traced"],
)
def test_what_is_not_as_it_should_be_is_taken_by_nobody(
    tmp_path: Path, spares: Spares, spoil: Callable[[Path], None]
) -> None:
    assert spare_place.leave(spares, _run(tmp_path / "one"))
    spoil(_kept(spares))
    before = len(os.listdir("/proc/self/fd"))
    assert spare_place.take(spares, tmp_path / "two", b"label") is None
    assert not (tmp_path / "two").exists()
    assert len(os.listdir("/proc/self/fd")) == before


def test_nor_is_it_left_for_the_next(tmp_path: Path, spares: Spares) -> None:
    one = _run(tmp_path / "one")
    (one / "root" / "left").touch()
    assert not spare_place.leave(spares, one)
    assert not spares.there("place")


@pytest.mark.parametrize("how", [fcntl.LOCK_SH, fcntl.LOCK_EX])
def test_one_whose_lock_is_still_held_is_left_alone(tmp_path: Path, spares: Spares, how: int) -> None:
    assert spare_place.leave(spares, _run(tmp_path / "one"))
    with (_kept(spares) / "lock").open() as held:
        fcntl.flock(held, how)
        assert spare_place.take(spares, tmp_path / "two", b"label") is None


def test_a_place_that_cannot_be_moved_is_let_go(tmp_path: Path, spares: Spares) -> None:
    assert spare_place.leave(spares, _run(tmp_path / "one"))
    before = len(os.listdir("/proc/self/fd"))
    assert spare_place.take(spares, tmp_path / "none" / "two", b"label") is None
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_directory_is_removed_whole_and_its_meter_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, rmtree, left = _run(tmp_path / "one"), shutil.rmtree, []

    def told(path: str | Path) -> None:
        if Path(path) == one:
            left.extend(os.listdir(path))
        rmtree(path)

    monkeypatch.setattr(shutil, "rmtree", told)
    spare_place.remove(one)
    assert left == [spare_place.METER]
    assert not one.exists()
