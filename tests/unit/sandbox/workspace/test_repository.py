"""The common directory of a linked worktree: taken when both name each other and one user owns both."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from policy import errors
from sandbox.workspace import repository
from sandbox.workspace.repository import LinkedRepository
from tests.unit.sandbox.workspace.test_git_content import ENVIRONMENT


def git(top: Path, *words: str) -> None:
    subprocess.run(["git", *words], cwd=top, env=ENVIRONMENT, capture_output=True, check=True)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A repository ``main`` with a linked worktree ``tree``."""
    main = tmp_path / "main"
    main.mkdir()
    git(main, "init", "-q", "-b", "main")
    git(main, "commit", "-q", "--allow-empty", "-m", "first")
    git(main, "worktree", "add", "-q", "../tree")
    return tmp_path


@contextlib.contextmanager
def directory(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)


def checked(tree: Path, common: Path) -> LinkedRepository:
    with directory(tree) as fd, directory(common) as beside:
        return repository.checked(fd, str(tree), beside)


def found(tree: Path) -> str:
    return repository.path_of(tree)


def test_worktree_leads_to_its_repository(base: Path) -> None:
    common = base / "main/.git"
    assert found(base / "tree") == str(common)
    info = common.stat()
    assert checked(base / "tree", common) == LinkedRepository(str(common), info.st_dev, info.st_ino, "tree")


def test_relative_names_lead_there_too(base: Path) -> None:
    """git 2.48 writes them by `worktree.useRelativePaths`."""
    (base / "tree/.git").write_text("gitdir: ../main/.git/worktrees/tree\n")
    (base / "main/.git/worktrees/tree/gitdir").write_text("../../../../tree/.git\n")
    assert found(base / "tree") == str(base / "main/.git")
    assert checked(base / "tree", base / "main/.git").worktree == "tree"


def test_other_directories_lead_nowhere(base: Path) -> None:
    assert found(base / "main") == ""
    assert found(base) == ""
    assert found(base / "missing") == ""


@pytest.mark.parametrize(
    "text",
    [
        *("gitdir: /nowhere/worktrees/tree", "gitdir: ../main/.git", "gitdir: ../main/.git/modules/m", "nothing", ""),
        *("gitdir: ../main/.git/worktrees/..", "gitdir: a\nb/worktrees/tree", "x" * 9000),
    ],
)
def test_file_that_names_no_repository_leads_nowhere(base: Path, text: str) -> None:
    (base / "tree/.git").write_text(text)
    assert found(base / "tree") == ""
    with pytest.raises(errors.WorkspaceError):
        checked(base / "tree", base / "main/.git")


def test_link_in_place_of_file_is_not_followed(base: Path) -> None:
    (base / "tree/.git").rename(base / "file")
    (base / "tree/.git").symlink_to(base / "file")
    assert found(base / "tree") == ""


def test_link_on_way_is_not_followed(base: Path) -> None:
    (base / "other").symlink_to(base / "main")
    (base / "tree/.git").write_text(f"gitdir: {base}/other/.git/worktrees/tree\n")
    assert found(base / "tree") == ""


def _another(base: Path) -> None:
    (base / "main/.git/worktrees/tree/gitdir").write_text(f"{base}/elsewhere/.git\n")


def _no_entry(base: Path) -> None:
    shutil.rmtree(base / "main/.git/worktrees/tree")


def _common_elsewhere(base: Path) -> None:
    (base / "main/.git/worktrees/tree/commondir").write_text("/etc\n")


def _linked_entry(base: Path) -> None:
    (base / "main/.git/worktrees/tree").rename(base / "entry")
    (base / "main/.git/worktrees/tree").symlink_to(base / "entry")


def _linked_file(base: Path) -> None:
    back = base / "main/.git/worktrees/tree/gitdir"
    back.rename(base / "back")
    back.symlink_to(base / "back")


def _no_objects(base: Path) -> None:
    shutil.rmtree(base / "main/.git/objects")


def _pipe(base: Path) -> None:
    (base / "main/.git/worktrees/tree/gitdir").unlink()
    os.mkfifo(base / "main/.git/worktrees/tree/gitdir")


@pytest.mark.parametrize(
    "change", [_another, _no_entry, _common_elsewhere, _linked_entry, _linked_file, _no_objects, _pipe]
)
def test_repository_that_names_another_is_refused(base: Path, change: Callable[[Path], None]) -> None:
    """Control: before the change it is taken."""
    checked(base / "tree", base / "main/.git")
    change(base)
    with pytest.raises(errors.WorkspaceError):
        checked(base / "tree", base / "main/.git")


def test_directory_that_is_not_named_is_refused(base: Path) -> None:
    """The caller may open it, and the worktree names another one."""
    shutil.copytree(base / "main", base / "copy")
    with pytest.raises(errors.WorkspaceError, match="no worktree"):
        checked(base / "tree", base / "copy/.git")


def test_worktree_within_its_repository_is_refused(base: Path) -> None:
    git(base / "main", "worktree", "add", "-q", ".git/inside")
    with pytest.raises(errors.WorkspaceError, match="in one another"):
        checked(base / "main/.git/inside", base / "main/.git")
    # Control: beside it, within the files of the main worktree.
    git(base / "main", "worktree", "add", "-q", "beside")
    assert checked(base / "main/beside", base / "main/.git").worktree == "beside"
