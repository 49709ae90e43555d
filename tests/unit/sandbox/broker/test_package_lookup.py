"""A child's package is found by its agent id, in directories that the agent cannot name, and by nothing else."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from policy import errors
from policy.manifest import syntax
from policy.package import MANIFEST_BYTES
from sandbox.broker import package_lookup


def package(place: Path, agent_id: str, *, name: str = "") -> Path:
    path = place / (name or agent_id)
    path.mkdir(parents=True)
    (path / "agent.toml").write_text(f'[agent]\nid = "{agent_id}"\n')
    return path


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)


def test_it_is_manifest_that_says_whose_package_is(tmp_path: Path) -> None:
    package(tmp_path, "other", name="wanted")
    held = package(tmp_path, "wanted", name="elsewhere")
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    with opened(tmp_path) as beside:
        found = package_lookup.find("wanted", (), beside)
    assert found.name == str(held)
    assert set(found.package.files) == {"agent.toml"}


@pytest.mark.parametrize("others", [1, 600])
def test_siblings_who_look_at_once_see_all_of_it_and_once(tmp_path: Path, others: int) -> None:
    """Each child's keeper has the descriptor of its parent's, and with it the place up to which another has read: the
    end of a small directory, and after one call of getdents(2) (32 KiB) the middle of a large one."""
    held = package(tmp_path, "wanted")
    for number in range(others):
        (tmp_path / f"{number:0200}").touch()
    names = set(os.listdir(tmp_path))
    with opened(tmp_path) as beside, os.scandir(beside) as entries:
        seen = [next(entries).name]
        assert package_lookup.find("wanted", (), beside).name == str(held)
        # The control: the other sees what it would have seen alone.
        seen += [one.name for one in entries]
    assert (len(seen), set(seen)) == (len(names), names)


@pytest.mark.parametrize("agent_id", ["", "../wanted", "/etc", "a/b", "a\0b", "x" * 129, "nobody", "wanted "])
def test_what_is_no_id_there_is_refused(tmp_path: Path, agent_id: str) -> None:
    package(tmp_path / "in", "wanted")
    package(tmp_path, "wanted", name="outside")
    with opened(tmp_path / "in") as beside, pytest.raises(errors.PackageError):
        package_lookup.find(agent_id, (), beside)
    with pytest.raises(errors.PackageError):
        package_lookup.find("wanted", (), None)


def test_two_of_one_id_are_none(tmp_path: Path) -> None:
    for name in ("one", "two"):
        package(tmp_path, "wanted", name=name)
    with opened(tmp_path) as beside, pytest.raises(errors.PackageError, match="has two packages, `one` and `two`"):
        package_lookup.find("wanted", (), beside)


def test_manifest_that_another_holds_open_and_does_not_write_is_none(tmp_path: Path) -> None:
    held = package(tmp_path, "wanted", name="its own")
    (tmp_path / "fifo").mkdir()
    os.mkfifo(tmp_path / "fifo" / "agent.toml")
    writer = os.open(tmp_path / "fifo" / "agent.toml", os.O_RDWR)
    try:
        with opened(tmp_path) as beside:
            assert package_lookup.find("wanted", (), beside).name == str(held)
    finally:
        os.close(writer)


def test_links_lead_nowhere(tmp_path: Path) -> None:
    """A package elsewhere under a name here, and a manifest elsewhere in a package here."""
    package(tmp_path / "far", "wanted")
    (tmp_path / "here" / "half").mkdir(parents=True)
    (tmp_path / "here" / "linked").symlink_to(tmp_path / "far" / "wanted")
    (tmp_path / "here" / "half" / "agent.toml").symlink_to(tmp_path / "far" / "wanted" / "agent.toml")
    os.mkfifo(tmp_path / "here" / "pipe")
    with opened(tmp_path / "here") as beside, pytest.raises(errors.PackageError, match="no package"):
        package_lookup.find("wanted", (), beside)


def test_what_root_alone_can_write_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner is looked at on the whole way; here that way is pytest's, so only its last part is looked at."""
    looked: list[Path] = []
    monkeypatch.setattr(package_lookup, "check_owner", looked.append)
    mine = package(tmp_path / "configured", "wanted")
    package(tmp_path / "beside", "wanted")
    also = package(tmp_path / "beside", "also")
    with opened(tmp_path / "beside") as beside:
        assert package_lookup.find("wanted", (tmp_path / "configured",), beside).name == str(mine)
        assert package_lookup.find("also", (tmp_path / "configured",), beside).name == str(also)
    assert set(looked) == {tmp_path / "configured", *(tmp_path / "configured").parents}


def test_directory_that_others_can_write_is_refused(tmp_path: Path) -> None:
    package(tmp_path / "open", "wanted")
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(errors.HostError):
        package_lookup.find("wanted", (tmp_path / "open",), None)


def test_manifest_that_nobody_signed_takes_no_time_of_whoever_looks(tmp_path: Path) -> None:
    """A MiB that is one key of dots takes tomllib many minutes of the supervisor's time."""
    held = package(tmp_path, "wanted", name="zz")
    dots = package(tmp_path, "wanted", name="dots") / "agent.toml"
    long = b'[agent]\nid = "wanted"\na' + b".a" * (MANIFEST_BYTES // 2 - 20) + b" = 1\n"
    dots.write_bytes(long)
    before = time.process_time()
    with opened(tmp_path) as beside:
        assert package_lookup.find("wanted", (), beside).name == str(held)
    assert time.process_time() - before < 10


def test_only_so_much_is_parsed_for_one_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package_lookup, "PARSED_BYTES", 2000)
    for number in range(20):
        other = package(tmp_path, f"other-{number}")
        (other / "agent.toml").write_text(f'[agent]\nid = "other-{number}"\n# {"x" * 500}\n')
    package(tmp_path, "wanted")
    with opened(tmp_path) as beside:
        assert package_lookup.find("wanted", (), beside).name.endswith(
            "/wanted"
        )  # of those that do not name it, nothing
        for number in range(4):
            (tmp_path / f"other-{number}" / "agent.toml").write_text(f"# wanted {'x' * 500}\n")
        with pytest.raises(errors.PackageError, match="have more than 2000 bytes"):
            package_lookup.find("wanted", (), beside)


def test_longest_manifest_that_runs_is_found(tmp_path: Path) -> None:
    path = package(tmp_path, "wanted") / "agent.toml"
    manifest = path.read_bytes()
    comment = (b"#" * 99 + b"\n") * (MANIFEST_BYTES // 100)
    path.write_bytes(manifest + comment[: MANIFEST_BYTES - len(manifest)])
    syntax.load(path.read_bytes(), file="agent.toml")
    with opened(tmp_path) as beside:
        assert package_lookup.find("wanted", (), beside).name == str(path.parent)


def test_manifest_too_long_is_none(tmp_path: Path) -> None:
    path = package(tmp_path, "wanted") / "agent.toml"
    manifest = path.read_bytes()
    path.write_bytes(manifest + b"#" * (MANIFEST_BYTES - len(manifest)))
    with opened(tmp_path) as beside:
        assert package_lookup.find("wanted", (), beside).name == str(path.parent)
        path.write_bytes(manifest + b"#" * (MANIFEST_BYTES - len(manifest) + 1))
        with pytest.raises(errors.PackageError, match="no package"):
            package_lookup.find("wanted", (), beside)
