"""Packages of git revisions, also of repositories that git itself would not check out."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from covenant.cli.policy import revisions
from policy import errors
from policy.package import Package
from sandbox.storage import package_reader


@pytest.fixture(autouse=True)
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    where = tmp_path / "repository"
    where.mkdir()
    monkeypatch.chdir(where)
    # Below it, so that `..` of the temporary directory is a place of this test.
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    subprocess.run(["git", "init", "-q"], check=True, timeout=60)
    return where


def _object(kind: str, data: bytes) -> str:
    command = ["git", "hash-object", "-w", "-t", kind, "--stdin", "--literally"]
    return subprocess.run(command, input=data, capture_output=True, check=True, timeout=60).stdout.decode().strip()


def _tree(*entries: tuple[str, str, bytes]) -> Path:
    """Write a tree as it is given: mode, name and content. Returns it as a path of a package."""
    raw = b""
    for mode, name, content in entries:
        raw += f"{mode} {name}\0".encode() + bytes.fromhex(_object("blob", content))
    return Path(f"{_object('tree', raw)}:")


def _read(tree: Path) -> Package:
    with revisions.place(tree) as place:
        return package_reader.read(place)


def test_links_of_tree_are_read() -> None:
    read = _read(_tree(("100644", "agent.toml", b""), ("100755", "run", b"x"), ("120000", "start", b"run")))
    assert (dict(read.files), dict(read.links)) == ({"agent.toml": b"", "run": b"x"}, {"start": "run"})


@pytest.mark.parametrize("name", ["../escaped", "/escaped", "a/../../escaped", "..", "a//b", "a\nb"])
def test_path_that_leaves_tree_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(errors.PackageError):
        _read(_tree(("100644", name, b"x")))
    assert [path.name for path in tmp_path.iterdir()] == ["repository"]


def test_file_at_or_below_link_of_tree_is_refused(repository: Path) -> None:
    link = ("120000", "a", str(repository / "escaped").encode())
    with pytest.raises(errors.PackageError):
        _read(_tree(link, ("100644", "a/b", b"x")))
    with pytest.raises(errors.RevisionError, match="`a` cannot be written"):
        _read(_tree(link, ("100644", "a", b"x")))
    with pytest.raises(errors.RevisionError, match=r"`agent.dsse.json` cannot be written"):
        _read(_tree(("120000", "agent.dsse.json", link[2]), ("100644", "agent.dsse.json", b"x")))
    assert not (repository / "escaped").exists()


def test_link_that_leaves_tree_is_refused() -> None:
    with pytest.raises(errors.PackageError, match="absolute path"):
        _read(_tree(("100644", "agent.toml", b""), ("120000", "a", b"/etc/hostname")))
    with pytest.raises(errors.RevisionError, match="cannot be written"):
        _read(_tree(("120000", "a", b"x\0y")))


def test_checkout_of_another_owner_names_fix_of_git(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = _tree(("100644", "agent.toml", b"x"))
    for name, value in (("HOME", str(tmp_path)), ("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    with pytest.raises(errors.RevisionError, match="dubious ownership") as refused:
        _read(tree)
    assert refused.value.hint == f"git config --global --add safe.directory {repository}"
    # The fix.
    subprocess.run(shlex.split(refused.value.hint), check=True, timeout=60)
    assert dict(_read(tree).files) == {"agent.toml": b"x"}


def test_name_of_checkout_is_no_fix(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner of the checkout chose its name, and the reader of the fix is another user."""
    tree = _tree(("100644", "agent.toml", b"x"))
    for name, value in (("HOME", str(tmp_path)), ("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")):
        monkeypatch.setenv(name, value)
    for number, words in enumerate(("wget evil; safe.directory", "\tgit config --global --add safe.directory '*'")):
        named = tmp_path / f"{number}\n{words}"
        repository.rename(named)
        monkeypatch.chdir(named)
        with pytest.raises(errors.RevisionError, match="dubious ownership") as refused:
            _read(tree)
        assert refused.value.hint == "run it as the owner of the checkout"
        named.rename(repository)
