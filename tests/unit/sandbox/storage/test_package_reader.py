"""Reading a package directory: only plain files, each once, and none by a name that another user can move."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from policy import errors
from policy import package as packages
from sandbox.storage import package_reader


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "pkg"
    (made / "lib").mkdir(parents=True)
    (made / "agent.toml").write_bytes(b"manifest")
    (made / "main.py").write_bytes(b"main")
    (made / "lib" / "a").write_bytes(b"a")
    return made


def test_files_come_back_as_they_lie(folder: Path) -> None:
    (folder / "empty").mkdir()
    read = package_reader.read(folder)
    assert dict(read.files) == {"agent.toml": b"manifest", "main.py": b"main", "lib/a": b"a"}
    assert read.envelope is None
    (folder / "agent.dsse.json").write_bytes(b"{}")
    assert package_reader.read(folder).envelope == b"{}"
    assert package_reader.read(folder).digest == read.digest


def test_manifest_and_envelope_are_read_alone(folder: Path) -> None:
    os.mkfifo(folder / "fifo")
    assert package_reader.manifest_and_envelope(folder) == (b"manifest", None)
    (folder / "agent.dsse.json").write_bytes(b"{}")
    assert package_reader.manifest_and_envelope(folder) == (b"manifest", b"{}")
    (folder / "agent.dsse.json").unlink()
    (folder / "agent.dsse.json").symlink_to("main.py")
    with pytest.raises(errors.PackageError, match="is a symlink"):
        package_reader.manifest_and_envelope(folder)
    (folder / "agent.toml").unlink()
    with pytest.raises(errors.PackageError, match=r"agent\.toml"):
        package_reader.manifest_and_envelope(folder)
    os.mkfifo(folder / "agent.toml")
    with pytest.raises(errors.PackageError, match="is a fifo"):
        package_reader.manifest_and_envelope(folder)


def test_descriptor_is_read_and_stays_open(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        folder.rename(folder.with_name("moved"))
        assert package_reader.read(fd).manifest == b"manifest"
        assert package_reader.read(fd).manifest == b"manifest"
    finally:
        os.close(fd)


@pytest.mark.parametrize("call", ["read", "scandir"])
def test_what_its_file_system_refuses_is_said_as_of_any_package(
    call: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, call, fails)
    with pytest.raises(errors.PackageError, match="Input/output error"):
        package_reader.read(folder)


def test_no_descriptor_is_left_open(folder: Path) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    package_reader.read(folder)
    (folder / "lib" / "link").symlink_to("/a")
    with pytest.raises(errors.PackageError):
        package_reader.read(folder)
    assert sorted(os.listdir("/proc/self/fd")) == before


def _symlink_to(target: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "lib" / "bad").symlink_to(target)


def _socket(folder: Path) -> None:
    with contextlib.chdir(folder / "lib"), contextlib.closing(socket.socket(socket.AF_UNIX)) as made:
        made.bind("bad")


def _symlinked_manifest(folder: Path) -> None:
    (folder / "agent.toml").unlink()
    (folder / "agent.toml").symlink_to("main.py")


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a symlink outside": (_symlink_to("/etc/passwd"), "is a symlink"),
    "a symlink to nowhere": (_symlink_to("nowhere"), "does not have"),
    "a symlinked directory": (_symlink_to("/etc"), "is a symlink"),
    "a symlink to itself": (_symlink_to("bad"), "is a symlink"),
    "a symlinked manifest": (_symlinked_manifest, "is a symlink, and has to be a file"),
    "a symlinked envelope": (lambda f: (f / "agent.dsse.json").symlink_to("main.py"), "is a symlink"),
    "a fifo": (lambda f: os.mkfifo(f / "lib" / "bad"), "is a fifo"),
    "a fifo as envelope": (lambda f: os.mkfifo(f / "agent.dsse.json"), "is a fifo"),
    "a socket": (_socket, "is a socket"),
    "a name that is not UTF-8": (
        lambda f: (Path(os.fsdecode(bytes(f / "lib") + b"/\xff"))).write_bytes(b""),
        "is not UTF-8",
    ),
    "a name with a newline": (lambda f: (f / "a\nb").write_bytes(b""), "U+000A"),
    "names that differ in case": (lambda f: (f / "MAIN.py").write_bytes(b""), "differ only in case"),
    "no manifest": (lambda f: (f / "agent.toml").unlink(), "has no `agent.toml`"),
    "an envelope of nine MiB": (lambda f: os.truncate(_touch(f / "agent.dsse.json"), 9 * 2**20), "larger than 8 MiB"),
    "a sparse file of a terabyte": (lambda f: os.truncate(_touch(f / "big"), 2**40), "larger than 256 MiB"),
    "many levels": (lambda f: (f / "/".join("d" * 40)).mkdir(parents=True), "deeper than 32"),
}


def _touch(path: Path) -> Path:
    path.touch()
    return path


@pytest.mark.parametrize("name", REFUSED)
def test_anything_but_files_and_own_links_is_refused(name: str, folder: Path) -> None:
    package_reader.read(folder)
    make, says = REFUSED[name]
    make(folder)
    with pytest.raises(errors.PackageError) as caught:
        package_reader.read(folder)
    assert says in caught.value.message


def test_directory_in_place_of_envelope_is_refused(folder: Path) -> None:
    (folder / "agent.dsse.json").mkdir()
    (folder / "agent.dsse.json" / "x").write_bytes(b"")
    with pytest.raises(errors.PackageError, match="both a file and a directory"):
        package_reader.read(folder)


def test_symlink_to_package_is_refused(folder: Path) -> None:
    link = folder.with_name("link")
    link.symlink_to(folder)
    with pytest.raises(errors.PackageError, match="it is a symlink"):
        package_reader.read(link)
    with pytest.raises(errors.PackageError, match="No such file"):
        package_reader.read(folder / "missing")
    with pytest.raises(errors.PackageError, match="Not a directory"):
        package_reader.read(folder / "main.py")


def test_hard_link_is_its_bytes(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere"
    other.write_bytes(b"shared")
    os.link(other, folder / "linked")
    read = package_reader.read(folder)
    other.write_bytes(b"changed")
    assert read.files["linked"] == b"shared"


def test_tree_of_empty_directories_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "MAX_FILES", 20)
    for number in range(40):
        (folder / f"d{number}").mkdir()
    with pytest.raises(errors.PackageError, match="more than 20 files"):
        package_reader.read(folder)


# --- a package that moves under the reader ------------------------------------------------------------------


@pytest.fixture
def before_open(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, Callable[[], None]], None]]:
    """Run something between the lstat and the open of one name: what a racing process could do."""
    real = package_reader.open_entry
    acts: dict[str, Callable[[], None]] = {}

    def opened(name: str, path: str, directory: int, flags: int) -> int:
        act = acts.pop(path, None)
        if act:
            act()
        return real(name, path, directory, flags)

    monkeypatch.setattr(package_reader, "open_entry", opened)
    yield acts.__setitem__
    assert not acts


Before = Callable[[str, Callable[[], None]], None]


def test_file_swapped_for_symlink_is_not_followed(folder: Path, before_open: Before) -> None:
    def swap() -> None:
        (folder / "main.py").unlink()
        (folder / "main.py").symlink_to("/etc/passwd")

    before_open("main.py", swap)
    with pytest.raises(errors.PackageError, match="it is a symlink"):
        package_reader.read(folder)


def test_directory_swapped_for_symlink_is_not_followed(folder: Path, before_open: Before) -> None:
    def swap() -> None:
        (folder / "lib").rename(folder / "was-lib")
        (folder / "lib").symlink_to("/etc")

    before_open("lib", swap)
    with pytest.raises(errors.PackageError, match="it changed while"):
        package_reader.read(folder)


def test_file_swapped_for_fifo_does_not_hang(folder: Path, before_open: Before) -> None:
    def swap() -> None:
        (folder / "main.py").unlink()
        os.mkfifo(folder / "main.py")

    before_open("main.py", swap)
    result: list[BaseException] = []

    def run() -> None:
        try:
            package_reader.read(folder)
        except errors.PackageError as e:
            result.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert "changed while it was read" in str(result[0])


@pytest.mark.parametrize("data", [b"main and more", b"m", b"niam"])
def test_file_that_changes_while_it_is_read_is_refused(data: bytes, folder: Path, before_open: Before) -> None:
    def write() -> None:
        (folder / "main.py").write_bytes(data)
        os.utime(folder / "main.py", ns=(1, 1))

    before_open("main.py", write)
    with pytest.raises(errors.PackageError, match="changed while it was read"):
        package_reader.read(folder)


def test_file_that_goes_away_is_refused(folder: Path, before_open: Before) -> None:
    before_open("main.py", (folder / "main.py").unlink)
    with pytest.raises(errors.PackageError, match="went away"):
        package_reader.read(folder)


def test_file_that_ends_early_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package_reader.read(folder)
    monkeypatch.setattr(os, "read", lambda fd, size: b"")
    with pytest.raises(errors.PackageError, match="changed while it was read"):
        package_reader.read(folder)


@pytest.mark.parametrize("name", ["nothing", "main.py"])
def test_place_without_directory_has_the_fix(folder: Path, name: str) -> None:
    """Not that a uid may not read it: there is no directory."""
    with pytest.raises(errors.PackageError) as caught:
        package_reader.read(folder / name)
    assert caught.value.hint == "give the directory that contains agent.toml"
    package_reader.read(folder)
