"""The content of git's own files, checked with git and by digest."""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from policy.workspace.entries import LowerView, UpperEntry
from sandbox.workspace import git_content
from sandbox.workspace.lower import Tops

ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/nonexistent",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    **{f"GIT_{who}_{what}": "a@example.invalid" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
}


class Sides:
    """The directory and the upper layer of a workspace, and a repository of git in the latter."""

    def __init__(self, base: Path) -> None:
        self.lower, self.upper = base / "lower", base / "upper"
        self.lower.mkdir()
        self.upper.mkdir()
        self.git("init", "-q", "-b", "main")
        (self.upper / "a.txt").write_text("one\n" * 100)
        self.git("add", ".")
        self.git("commit", "-qm", "first")

    def git(self, *words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=self.upper, env=ENVIRONMENT, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    def findings(self, worktree: str = "") -> dict[str, str]:
        entries = [
            UpperEntry(str(path.relative_to(self.upper)), "dir" if path.is_dir() else "file")
            for path in self.upper.rglob("*")
        ]
        top, upper = (os.open(path, os.O_RDONLY | os.O_DIRECTORY) for path in (self.lower, self.upper))
        try:
            return git_content.findings(Tops(top), Tops(upper), entries, LowerView({}, {}, worktree=worktree)).refusals
        finally:
            os.close(top)
            os.close(upper)

    def refused(self) -> dict[str, str]:
        return {path: reason for path, reason in self.findings().items() if reason}

    def loose(self, digest: str) -> Path:
        return self.upper / ".git" / "objects" / digest[:2] / digest[2:]


@pytest.fixture
def sides(tmp_path: Path) -> Iterator[Sides]:
    yield Sides(tmp_path)
    shutil.rmtree(tmp_path)


def test_what_git_wrote_is_accepted(sides: Sides) -> None:
    sides.git("tag", "-a", "v1", "-m", "x")
    sides.git("gc", "-q")
    (sides.upper / "a.txt").write_text("two\n")
    sides.git("commit", "-qam", "second")
    found = sides.findings()
    assert {path: reason for path, reason in found.items() if reason} == {}
    kinds = {path.rpartition("/")[2].rpartition(".")[2] for path in found}
    assert {"pack", "idx", "packed-refs", "index", "HEAD", "main"} <= kinds


@pytest.mark.parametrize("how", ["another", "cut", "longer", "no zlib", "empty"])
def test_object_with_another_content_is_refused(sides: Sides, how: str) -> None:
    path = sides.loose(sides.git("rev-parse", "HEAD:a.txt"))
    plain = path.read_bytes()
    path.chmod(0o644)
    planted = {
        "another": zlib.compress(b"blob 4\0evil"),
        "cut": plain[:-5],
        "longer": plain + b"x",
        "no zlib": b"evil",
        "empty": b"",
    }
    path.write_bytes(planted[how])
    assert list(sides.refused()) == [str(path.relative_to(sides.upper))]
    path.write_bytes(plain)
    assert sides.refused() == {}, "control"


def test_object_that_unpacks_without_end_is_refused(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    content = b"blob 8388608\0" + bytes(8 << 20)
    path = sides.loose(hashlib.sha1(content, usedforsecurity=False).hexdigest())
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(zlib.compress(content))
    assert sides.refused() == {}, "control"
    monkeypatch.setattr(git_content, "MOST_UNPACKED", 1 << 20)
    assert "too large" in sides.refused()[str(path.relative_to(sides.upper))]


def test_index_of_pack_that_lies_is_refused(sides: Sides) -> None:
    """It would give an object that the host has the content of another one."""
    sides.git("repack", "-adq")
    (index,) = (sides.upper / ".git/objects/pack").glob("*.idx")
    assert sides.refused() == {}, "control"
    raw = bytearray(index.read_bytes())
    # Version 2: 8 bytes, 256 counts, the names, then a check sum and an offset for each.
    (count,) = struct.unpack_from(">I", raw, 8 + 255 * 4)
    offsets = 8 + 1024 + count * 24
    raw[offsets : offsets + 8] = raw[offsets + 4 : offsets + 8] + raw[offsets : offsets + 4]
    raw[-20:] = hashlib.sha1(raw[:-20], usedforsecurity=False).digest()
    index.chmod(0o644)
    index.write_bytes(raw)
    found = sides.refused()
    assert sorted(path.rpartition(".")[2] for path in found) == ["idx", "pack"]
    index.unlink()
    assert "belong together" in next(iter(sides.refused().values()))


def test_index_with_hook_is_refused(sides: Sides) -> None:
    """Control: git itself would write the hook."""
    blob = sides.git("rev-parse", "HEAD:a.txt")
    index, name = sides.upper / ".git/index", b".git/hooks/post-checkout"
    entry = struct.pack(">10I", *(0,) * 6, 0o100755, 0, 0, 0) + bytes.fromhex(blob)
    entry += struct.pack(">H", len(name)) + name
    entry += bytes(8 - len(entry) % 8)
    raw = b"DIRC" + struct.pack(">II", 2, 1) + entry
    assert ".git/index" not in sides.refused()
    index.write_bytes(raw + hashlib.sha1(raw, usedforsecurity=False).digest())
    assert "git's directory" in sides.refused()[".git/index"]
    subprocess.run(["git", "checkout", "--", "."], cwd=sides.upper, env=ENVIRONMENT, check=False, capture_output=True)
    assert (sides.upper / ".git/hooks/post-checkout").exists()


def test_index_that_needs_another_file_is_refused(sides: Sides) -> None:
    sides.git("update-index", "--split-index")
    assert "stands alone" in sides.refused()[".git/index"]
    sides.git("update-index", "--no-split-index")
    assert ".git/index" not in sides.refused()


def test_packed_replacement_is_refused(sides: Sides) -> None:
    (sides.upper / "b.txt").write_text("two")
    sides.git("replace", "HEAD:a.txt", sides.git("hash-object", "-w", "b.txt"))
    sides.git("pack-refs", "--all")
    assert "replacement" in sides.refused()[".git/packed-refs"]
    # Control: the host has the same.
    (sides.lower / ".git").mkdir()
    shutil.copy(sides.upper / ".git/packed-refs", sides.lower / ".git/packed-refs")
    assert ".git/packed-refs" not in sides.refused()


def test_reference_to_elsewhere_is_refused(sides: Sides) -> None:
    (sides.upper / ".git/HEAD").write_text("ref: ../../elsewhere\n")
    assert "no reference" in sides.refused()[".git/HEAD"]


@pytest.mark.parametrize("bit", ["assume-unchanged", "skip-worktree"])
def test_index_that_hides_file_is_refused(sides: Sides, bit: str) -> None:
    """Control: git hides the change, and the host's own index may."""
    sides.git("update-index", f"--{bit}", "a.txt")
    (sides.upper / "a.txt").write_text("evil\n")
    assert sides.git("status", "--porcelain") == ""
    assert sides.refused() == {".git/index": f"protected: it hides changes of `a.txt` ({BITS})"}
    (sides.lower / ".git").mkdir()
    shutil.copy(sides.upper / ".git/index", sides.lower / ".git/index")
    assert sides.refused() == {}
    shutil.rmtree(sides.lower / ".git")
    sides.git("update-index", f"--no-{bit}", "a.txt")
    assert sides.git("status", "--porcelain") == "M a.txt"
    assert sides.refused() == {}


BITS = "assume-unchanged or skip-worktree"


def test_index_of_monitor_is_refused(sides: Sides) -> None:
    """A program that says that nothing changed stands in for the monitor. Control: the fix takes the extension out."""
    monitor = sides.upper.parent / "monitor"
    monitor.write_text("#!/bin/sh\nprintf 'token\\0'\n")
    monitor.chmod(0o755)
    sides.git("-c", f"core.fsmonitor={monitor}", "update-index", "--fsmonitor")
    sides.git("-c", f"core.fsmonitor={monitor}", "status")
    assert b"FSMN" in (sides.upper / ".git/index").read_bytes()
    assert "monitor" in sides.refused()[".git/index"]
    sides.git("-c", "core.fsmonitor=false", "update-index", "--no-fsmonitor")
    assert sides.refused() == {}


def test_branch_of_another_worktree_is_held(sides: Sides) -> None:
    """Control: git refuses to move it too, and moves a branch that no worktree has."""
    shutil.copytree(sides.upper, sides.lower, dirs_exist_ok=True)
    for words in (("branch", "free"), ("worktree", "add", "-q", "-b", "held", str(sides.upper.parent / "w"))):
        subprocess.run(["git", *words], cwd=sides.lower, env=ENVIRONMENT, check=True)
        subprocess.run(["git", *words], cwd=sides.upper, env=ENVIRONMENT, check=False)
    shutil.rmtree(sides.upper / ".git/worktrees", ignore_errors=True)
    assert sides.refused() == {".git/refs/heads/held": HELD}
    refused = subprocess.run(
        ["git", "branch", "-f", "held", "main"], cwd=sides.lower, env=ENVIRONMENT, check=False, capture_output=True
    )
    assert refused.returncode != 0
    assert str(sides.upper.parent / "w") in refused.stderr.decode()
    subprocess.run(["git", "branch", "-f", "free", "main"], cwd=sides.lower, env=ENVIRONMENT, check=True)
    # A branch that names another one: both are held.
    (sides.lower / ".git/worktrees/w/HEAD").write_text("ref: refs/heads/alias\n")
    (sides.lower / ".git/refs/heads/alias").write_text("ref: refs/heads/free\n")
    assert set(sides.refused()) == {".git/refs/heads/alias", ".git/refs/heads/free"}
    # A loop of them ends.
    (sides.lower / ".git/refs/heads/free").write_text("ref: refs/heads/alias\n")
    assert set(sides.refused()) == {".git/refs/heads/alias", ".git/refs/heads/free"}
    # A branch that is not there, and has the name of a directory of others.
    (sides.lower / ".git/worktrees/w/HEAD").write_text("ref: refs/heads\nref: refs/heads/x\n")
    (sides.lower / ".git/refs/heads/more/x").parent.mkdir()
    assert sides.refused() == {}
    (sides.lower / ".git/worktrees/w/HEAD").write_text("ref: refs/heads/more\n")
    assert set(sides.refused()) == {".git/refs/heads/more"}
    # A worktree on no branch holds none.
    (sides.lower / ".git/worktrees/w/HEAD").write_text("a" * 40 + "\n")
    assert sides.refused() == {}


HELD = "protected: the worktree `w` has this branch checked out (`git switch --detach` there frees it)"


def test_packed_branch_of_another_worktree_is_held(sides: Sides) -> None:
    """Control: packed as it was, and where the host has a file of the branch, which git reads first."""
    shutil.copytree(sides.upper, sides.lower, dirs_exist_ok=True)
    subprocess.run(
        ["git", "worktree", "add", "-q", "-b", "held", str(sides.upper.parent / "w")],
        cwd=sides.lower,
        env=ENVIRONMENT,
        check=True,
    )
    first = sides.git("rev-parse", "main")
    packed = sides.upper / ".git/packed-refs"
    packed.write_text(f"# pack-refs with: peeled fully-peeled sorted\n{'b' * 40} refs/heads/held\n")
    assert ".git/packed-refs" not in sides.refused()
    subprocess.run(["git", "pack-refs", "--all"], cwd=sides.lower, env=ENVIRONMENT, check=True)
    assert "moves `refs/heads/held`" in sides.refused()[".git/packed-refs"]
    packed.write_text(f"{first} refs/heads/held\n{'b' * 40} refs/heads/main\n")
    assert ".git/packed-refs" not in sides.refused()


def test_branch_of_main_worktree_is_held_in_linked_one(sides: Sides) -> None:
    """Control: a repository without files of its own has none checked out, and the worktree's own branch is free."""
    shutil.copytree(sides.upper / ".git", sides.lower / ".git")
    own = sides.lower / ".git/worktrees/tree"
    own.mkdir(parents=True)
    (own / "HEAD").write_text("ref: refs/heads/work\n")
    assert "main worktree" in sides.findings("tree")[".git/refs/heads/main"]
    assert ".git/refs/heads/work" not in sides.findings("tree")
    subprocess.run(["git", "config", "core.bare", "true"], cwd=sides.lower, env=ENVIRONMENT, check=True)
    assert not sides.findings("tree")[".git/refs/heads/main"]


def test_index_with_endless_names_is_refused(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ".git/index" not in sides.refused(), "control"
    monkeypatch.setattr(git_content, "MOST_LISTED", 3)
    assert "stands alone" in sides.refused()[".git/index"]
