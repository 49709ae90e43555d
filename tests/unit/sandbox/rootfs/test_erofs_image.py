"""EROFS files of roots: equal trees give equal bytes, times of files stay, and each change is found."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from policy import errors
from sandbox.host import erofs_roots
from sandbox.rootfs import erofs_image

MTIME_NS = 981_173_106_123_456_789


@pytest.fixture
def program() -> Path:
    """mkfs.erofs, which set-up installs."""
    found = erofs_roots.program()
    assert found is not None, "apt-get install erofs-utils"
    return found


def tree(top: Path, order: str = "abc") -> Path:
    """A tree whose files are written in this order."""
    (top / "d").mkdir(parents=True)
    for name in order:
        (top / "d" / name).write_bytes(name.encode() * 5000)
        os.utime(top / "d" / name, ns=(MTIME_NS, MTIME_NS))
    (top / "link").symlink_to("d/a")
    os.link(top / "d" / "a", top / "second")
    (top / "d" / "b").chmod(0o755)
    return top


def test_equal_trees_give_equal_bytes(program: Path, tmp_path: Path) -> None:
    made = set[str]()
    for name, order in (("one", "abc"), ("other", "cba")):
        top = tree(tmp_path / name, order)
        # Times of directories and links, which no layer records.
        os.utime(top / "d", ns=(len(made), len(made)))
        os.utime(top / "link", ns=(len(made), len(made)), follow_symlinks=False)
        made.add(erofs_image.make(program, top, tmp_path / f"{name}.erofs"))
    assert len(made) == 1
    assert made == {erofs_image.digest_of(tmp_path / "one.erofs")}
    assert (tmp_path / "one.erofs").stat().st_mode & 0o7777 == erofs_image.MODE
    # Control: another byte, mode, time or name is another digest.
    changes: tuple[Callable[[Path], object], ...] = (
        lambda top: (top / "d" / "a").write_bytes(b"a"),
        lambda top: (top / "d" / "a").chmod(0o755),
        lambda top: os.utime(top / "d" / "a", ns=(1, 1)),
        lambda top: (top / "d" / "a").rename(top / "d" / "x"),
    )
    for at, change in enumerate(changes):
        top = tree(tmp_path / str(at))
        change(top)
        made.add(erofs_image.make(program, top, tmp_path / f"{at}.erofs"))
    assert len(made) == 1 + len(changes)


def test_times_of_files_stay(program: Path, tmp_path: Path) -> None:
    top = tree(tmp_path / "tree")
    erofs_image.make(program, top, tmp_path / "image")
    raw = (tmp_path / "image").read_bytes()
    # erofs_fs.h: struct erofs_inode_extended has seconds (64 bits) and then nanoseconds (32 bits).
    seconds, rest = divmod(MTIME_NS, 10**9)
    assert seconds.to_bytes(8, "little") + rest.to_bytes(4, "little") in raw
    assert (top / "d" / "a").stat().st_mtime_ns == MTIME_NS


def test_fault_of_mkfs_is_named(program: Path, tmp_path: Path) -> None:
    with pytest.raises(errors.LayerToolError, match="cannot be run"):
        erofs_image.make(tmp_path / "absent", tree(tmp_path / "tree"), tmp_path / "image")
    with pytest.raises(errors.LayerToolError, match=r"mkfs.erofs failed: .+") as e:
        erofs_image.make(program, tmp_path / "tree", tmp_path / "nowhere" / "image")
    assert "df -h" in e.value.hint
    (tmp_path / "nowhere").mkdir()
    erofs_image.make(program, tmp_path / "tree", tmp_path / "nowhere" / "image")


@pytest.fixture
def folder(program: Path, tmp_path: Path) -> Path:
    """An image with the record of its inode."""
    place = tmp_path / "folder"
    place.mkdir(mode=0o700)
    erofs_image.make(program, tree(tmp_path / "tree"), place / erofs_image.NAME)
    (place / erofs_image.TABLE).write_bytes(erofs_image.identity(os.stat(place / erofs_image.NAME)))
    (place / erofs_image.TABLE).chmod(0o600)
    return place


@pytest.fixture
def check(folder: Path) -> Iterator[Callable[[], None]]:
    """The check of a start, as often as it is called."""
    digest, fds = erofs_image.digest_of(folder / erofs_image.NAME), list[int]()

    def made() -> None:
        file = erofs_image.opened(folder, digest, hint="the fix")
        fds.append(file.fd)
        erofs_image.FileCheck(folder, file, hint="the fix").wait()

    yield made
    for fd in fds:
        os.close(fd)


def _byte(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.seek(5000)
        old = stream.read(1)
        stream.seek(5000)
        stream.write(bytes([old[0] ^ 1]))


def _fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file, 0o400)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_byte, "has other bytes"),
        (lambda file: os.truncate(file, 4096), "has other bytes"),
        (lambda file: file.chmod(0o644), "has another owner or mode"),
        (lambda file: file.unlink(), "No such file"),
        (lambda file: (file.rename(file.with_name("x")), file.symlink_to("x")), "symbolic links"),
        (_fifo, "has another owner or mode"),
    ],
)
def test_changed_image_is_refused(
    folder: Path, check: Callable[[], None], change: Callable[[Path], object], told: str
) -> None:
    check()
    change(folder / erofs_image.NAME)
    for _ in range(2):
        with pytest.raises(errors.LayerChangedError, match=told) as e:
            check()
        assert (e.value.code, e.value.hint) == ("layer_changed", "the fix")


def test_image_with_other_times_is_read_once(
    folder: Path, check: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backup that was restored."""
    read: list[int] = []
    real = erofs_image.digest

    def digest(fd: int) -> str:
        read.append(fd)
        return real(fd)

    monkeypatch.setattr(erofs_image, "digest", digest)
    check()
    assert read == [], "control: the inode is the recorded one"
    file = folder / erofs_image.NAME
    shutil.copyfile(file, folder / "copy")
    (folder / "copy").chmod(0o400)
    (folder / "copy").rename(file)
    check()
    check()
    assert len(read) == 1
