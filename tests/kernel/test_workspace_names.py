"""Workspaces with names and contents of any language: shown without harm, in a patch that git takes, and applied."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox.workspace.store import WorkspaceDirectory
from tests.cli_kit import document, done
from tests.kernel.workspace_kit import plant

RUN = "a" * 32
# Names, and how each is shown.
NAMES = {
    "会議.txt": "会議.txt",
    "اجتماع.txt": "اجتماع.txt",
    "cafe\u0301.txt": "cafe\u0301.txt",
    "👩🏽.txt": "👩🏽.txt",
    "a\u202ebc.txt": "a\\u202ebc.txt",
    "a\x1b[2Jb.txt": "a\\x1b[2Jb.txt",
    "a\nb.txt": "a\\nb.txt",
    'a"b\\c.txt': 'a"b\\c.txt',
    "x" * 200 + "会議.txt": "x" * 200 + "会議.txt",
}
APPLIED = [name for name, shown in NAMES.items() if name == shown]
TEXT = "会議 e\u0301 👩🏽 \u202e\x1b[2J\r\nاجتماع\n"


def _change(upper: Path) -> None:
    for name in NAMES:
        (upper / name).write_text(TEXT, newline="")
    Path(os.fsdecode(bytes(upper) + b"/\xff.txt")).write_text("bytes")
    (upper / "link").symlink_to("会議\x1b.txt")


@pytest.fixture
def made(covenant_home: Path, tmp_path: Path) -> tuple[Path, WorkspaceDirectory]:
    (project := tmp_path / "プロジェクト").mkdir()
    covenant_home.mkdir(mode=0o700)
    (state := covenant_home / "supervisor").mkdir(mode=0o700)
    return project, plant(state, RUN, project, 0, change=_change)


def test_names_of_any_language_are_shown_and_applied(made: tuple[Path, WorkspaceDirectory]) -> None:
    project, _ = made
    shown = done("workspace", "diff", "aa")
    lines = shown.splitlines()
    for name in NAMES.values():
        assert [line for line in lines if line.startswith(f"+ {name}  ")], name
    assert "+ \\xff.txt  refused: neither a file, a directory nor a link, or its name is not UTF-8" in lines
    assert "+ link  refused: it leads to a name with characters that are not shown" in lines
    assert all(ch.isprintable() or ch == "\n" for ch in shown)
    assert done("workspace", "show", "aa", "会議.txt").startswith("会議 e\u0301 👩🏽 \\u202e\\x1b[2J\\r\nاجتماع")
    file = project.parent / "page.html"
    done("workspace", "diff", "aa", "--html", file)
    assert all(ch.isprintable() or ch in "\n\t" for ch in file.read_text())
    # What is applied is what git makes of the patch.
    patched = project.parent / "patched"
    patched.mkdir()
    patch = subprocess.run(
        [sys.executable, "-m", "covenant", "workspace", "diff", "aa", "--patch"], capture_output=True, check=True
    ).stdout
    subprocess.run(["git", "apply", "-"], cwd=patched, input=patch, check=True)
    assert document("workspace", "apply", "aa")["count"] == len(APPLIED)
    for directory in (project, patched):
        assert {one.name: one.read_bytes() for one in directory.iterdir()} == dict.fromkeys(APPLIED, TEXT.encode())
