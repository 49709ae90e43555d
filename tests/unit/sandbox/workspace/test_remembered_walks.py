"""A walk that remembers listings finds what a walk without them finds, after any change that the owner makes."""

from __future__ import annotations

import os
import random
import shutil
import time
from pathlib import Path

import pytest

from sandbox.storage import directory_listings
from sandbox.workspace import masks

PATTERNS = (".env", "*.pem", "**/.aws/credentials")
_COARSE = 5  # CLOCK_REALTIME_COARSE, time.h
NAMES = ("a", "b", ".aws", ".env", "credentials", "x.pem", "X.PEM", ".git", "objects", "plain", "d\udcff")


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """A directory of 2,100 files in 21 directories, two of them masked."""
    made = tmp_path / "project"
    for number in range(2_100):
        (made / f"d{number // 100}").mkdir(parents=True, exist_ok=True)
        (made / f"d{number // 100}" / f"f{number}").touch()
    (made / "d3" / ".env").touch()
    (made / "d4" / "key.pem").touch()
    return made


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each walk be a minute after what was changed."""
    now = time.time_ns
    monkeypatch.setattr("sandbox.storage.directory_listings.time.time_ns", lambda: now() + 60 * 10**9)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The directories whose names are read."""
    names, scandir = list[str](), os.scandir

    def told(fd: int) -> object:
        names.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        return scandir(fd)

    monkeypatch.setattr("sandbox.workspace.masks.os.scandir", told)
    return names


def _walk(top: Path, place: Path | None, patterns: tuple[str, ...] = PATTERNS) -> masks.Walk:
    fd = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    try:
        found = masks.walk(fd, patterns, "", place)
    finally:
        os.close(fd)
    # The next change is of another tick of the kernel's clock, by which directories are stamped.
    tick = time.clock_gettime_ns(_COARSE)
    while time.clock_gettime_ns(_COARSE) == tick:
        time.sleep(0.0005)
    return masks.Walk(sorted(found.hidden), found.apart, sorted(found.held))


@pytest.mark.usefixtures("later")
def test_second_walk_reads_changed_directories(top: Path, tmp_path: Path, read: list[str]) -> None:
    place = tmp_path / "listings"
    assert _walk(top, place).hidden == ["d3/.env", "d4/key.pem"]
    assert len(read) == 22
    read.clear()
    assert _walk(top, place).hidden == ["d3/.env", "d4/key.pem"]
    assert read == []
    (top / "d7" / ".env").touch()
    (top / "d3" / ".env").unlink()
    assert _walk(top, place).hidden == ["d4/key.pem", "d7/.env"]
    assert sorted(read) == ["d3", "d7"]
    # The times that a user can set do not hide a change.
    os.utime(top / "d7", (0, 0))
    (top / "d7" / "b.pem").touch()
    os.utime(top / "d7", (0, 0))
    assert _walk(top, place).hidden == ["d4/key.pem", "d7/.env", "d7/b.pem"]


@pytest.mark.usefixtures("later")
def test_moved_directory_is_read_at_its_new_path(top: Path, tmp_path: Path) -> None:
    place = tmp_path / "listings"
    (top / "d5" / "credentials").touch()
    assert _walk(top, place).hidden == ["d3/.env", "d4/key.pem"]
    (top / "d5").rename(top / ".aws")
    assert _walk(top, place).hidden == [".aws/credentials", "d3/.env", "d4/key.pem"]
    # Two that change places, and a directory in the place of a file.
    (top / ".aws").rename(top / "t")
    (top / "d3").rename(top / ".aws")
    (top / "t").rename(top / "d3")
    (top / "d4" / "key.pem").unlink()
    (top / "d4" / "key.pem").mkdir()
    (top / "d4" / "key.pem" / ".env").touch()
    assert _walk(top, place).hidden == [".aws/.env", "d4/key.pem/.env"]


def test_directory_changed_just_now_is_read_again(top: Path, tmp_path: Path, read: list[str]) -> None:
    place = tmp_path / "listings"
    _walk(top, place)
    read.clear()
    # The listing was written, and has none of them: their last change is less than a second old.
    (top / "d9" / "late.pem").touch()
    assert "d9/late.pem" in _walk(top, place).hidden
    assert "d9" in read


@pytest.mark.usefixtures("later")
def test_damaged_or_foreign_listing_is_not_used(top: Path, tmp_path: Path, read: list[str]) -> None:
    place = tmp_path / "listings"
    whole = _walk(top, place)
    (one,) = place.iterdir()
    assert one.stat().st_mode & 0o777 == 0o600
    raw = one.read_bytes()
    for damaged in (b"", raw[:-1], raw[:40] + b"\x00" + raw[41:], raw[:32]):
        one.write_bytes(damaged)
        read.clear()
        assert _walk(top, place) == whole
        assert len(read) == 22
    # Other patterns have a listing of their own.
    read.clear()
    assert _walk(top, place, ("f7",)).hidden == ["d0/f7"]
    assert len(read) == 22


@pytest.mark.usefixtures("later")
def test_listing_of_older_rules_is_not_used(top: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "listings"
    monkeypatch.setattr("sandbox.workspace.masks.globs.matching", lambda patterns: lambda path: path == "d3/.env")
    assert _walk(top, place).hidden == ["d3/.env"]
    # An update of the program, which masks more by the same patterns.
    monkeypatch.undo()
    monkeypatch.setattr("sandbox.workspace.masks.RULES", ((1, 1),))
    assert _walk(top, place).hidden == ["d3/.env", "d4/key.pem"]


@pytest.mark.usefixtures("later")
def test_nothing_is_remembered_of_other_systems(
    top: Path, tmp_path: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandbox.kernel.fs.filesystems.type_of", lambda fd: 0x6969)  # NFS
    place = tmp_path / "listings"
    for number in (1, 2):
        assert _walk(top, place).hidden == ["d3/.env", "d4/key.pem"]
        assert len(read) == number * 22
    assert not place.exists()


def test_objects_of_git_alone_are_left_out(tmp_path: Path) -> None:
    for name in (".git", "a/.git", "shop.git", "objects"):
        (tmp_path / name / "objects").mkdir(parents=True)
        (tmp_path / name / "objects" / ".env").touch()
    assert _walk(tmp_path, None).hidden == ["objects/objects/.env", "shop.git/objects/.env"]


@pytest.mark.usefixtures("later")
def test_listings_are_bounded(top: Path, tmp_path: Path) -> None:
    place = tmp_path / "listings"
    place.mkdir()
    for number in range(40):
        (place / f"old{number}").touch()
        os.utime(place / f"old{number}", (number, number))
    _walk(top, place)
    assert len(list(place.iterdir())) == 32
    assert not (place / "old0").exists()
    # A directory of few names has none.
    shutil.rmtree(place)
    _walk(top / "d3", place)
    assert not place.exists()


@pytest.mark.usefixtures("later")
def test_random_changes_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_listings, "LEAST_NAMES", 1)
    rng, top, place = random.Random(7), tmp_path / "project", tmp_path / "listings"
    top.mkdir()
    for _ in range(150):
        paths = [top, *top.rglob("*")]
        one = rng.choice(paths)
        beside = (one if one.is_dir() and not one.is_symlink() else one.parent) / rng.choice(NAMES)
        act = rng.randrange(5)
        try:
            if act == 0:
                beside.mkdir()
            elif act == 1:
                beside.touch(exist_ok=False)
            elif act == 2:
                beside.symlink_to(rng.choice(NAMES))
            elif act == 3 and one != top:
                one.rename(beside)
            elif one != top and one.is_file():
                one.unlink()
        except OSError:
            continue
        assert _walk(top, place) == _walk(top, None)
