"""Repositories of git in a workspace: a commit of the agent is applied whole, and nothing else of git's own files."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kernel.session_kit import Home
from tests.kernel.test_workspace import home, listed, work
from tests.kernel.workspace_kit import git

__all__ = ["home"]

OWNER = 1000
EMPTY = "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"
IDENTITY = "git config --global user.name agent; git config --global user.email a@example.invalid"
# The agent's user is no user of the image, and the repository is its own.
COMMIT = f"export HOME=/tmp; {IDENTITY}; "


@pytest.fixture
def repository() -> Iterator[Path]:
    """A repository with one commit, of the owner."""
    with tempfile.TemporaryDirectory(dir="/srv", prefix="covenant-test-") as made:
        Path(made).chmod(0o755)
        top = Path(made) / "main"
        top.mkdir()
        for path in (Path(made), top):
            os.chown(path, OWNER, OWNER)
        (top / "a.txt").write_text("one\n")
        os.chown(top / "a.txt", OWNER, OWNER)
        git(top, "init", "-q", "-b", "main")
        git(top, "add", ".")
        git(top, "commit", "-qm", "first")
        yield top


def applied(home: Home, *paths: str) -> dict[str, Any]:
    """Apply the only workspace. Returns the refused paths with their reasons."""
    (one,) = listed(home)
    done = home.covenant("workspace", "apply", one["run_id"], *paths, "--json")
    assert done.returncode == 0, done.stderr
    return {row["path"]: row["refused"] for row in json.loads(done.stdout)["left"]}


def discard(home: Home) -> None:
    for one in listed(home):
        assert home.covenant("workspace", "discard", one["run_id"]).returncode == 0


def test_commit_of_agent_is_applied(home: Home, repository: Path) -> None:
    script = COMMIT + "echo two >> a.txt; git commit -qam second; git tag v1; git branch other; git gc -q"
    done = work(home, repository, script)
    assert done.returncode == 0, done.stderr
    left = applied(home)
    # git gc removed objects that it had packed, and wrote lists of them.
    assert all(path.startswith((".git/objects/", ".git/info", ".git/config")) for path in left), left
    assert git(repository, "log", "--format=%s").split() == ["second", "first"]
    assert git(repository, "status", "--porcelain") == ""
    assert git(repository, "fsck", "--strict") == ""
    assert git(repository, "branch", "--format=%(refname:short)").split() == ["main", "other"]
    discard(home)


def index_with(name: bytes) -> bytes:
    """Return an index of one empty program."""
    entry = (
        struct.pack(">10I", *(0,) * 6, 0o100755, 0, 0, 0) + bytes.fromhex(EMPTY) + struct.pack(">H", len(name)) + name
    )
    raw = b"DIRC" + struct.pack(">II", 2, 1) + entry + bytes(8 - len(entry) % 8)
    return raw + hashlib.sha1(raw, usedforsecurity=False).digest()


ATTACKS = """
commit=$(git rev-parse HEAD)
object=.git/objects/$(echo $commit | sed 's/^../&\\//')
mkdir -p .git/refs/replace .git/info .git/objects/info .git/worktrees/w .git/modules/m
git rev-parse HEAD > .git/refs/replace/$commit
echo $commit > .git/info/grafts
echo $commit > .git/shallow
echo /etc > .git/objects/info/alternates
echo x > .git/objects/info/commit-graph
echo "$commit refs/replace/$commit" > .git/packed-refs
chmod u+w $object; echo evil > $object
mkdir -p .git/objects/aa; echo evil > .git/objects/aa/bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb
echo "ref: ../../x" > .git/HEAD
echo x > .git/worktrees/w/HEAD
echo x > .git/modules/m/HEAD
cp /tmp/index .git/index
"""


def test_attacks_on_repository_are_refused_by_name(home: Home, repository: Path) -> None:
    """Control: another file is applied."""
    before = git(repository, "rev-parse", "HEAD"), git(repository, "cat-file", "-p", "HEAD")
    plant = f"echo {base64.b64encode(index_with(b'.git/hooks/post-checkout')).decode()} | base64 -d > /tmp/index\n"
    done = work(home, repository, COMMIT + plant + ATTACKS + "echo fine > b.txt")
    assert done.returncode == 0, done.stderr
    left = applied(home)
    for path, reason in {
        "refs/replace": "replacement",
        "info/grafts": "of git only",
        "shallow": "history",
        "objects/info/alternates": "",
        "objects/info/commit-graph": "trusts",
        "packed-refs": "replacement",
        "objects/aa/bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb": "not what its name says",
        "HEAD": "no reference",
        "worktrees/w/HEAD": "another worktree",
        "modules/m/HEAD": "submodule",
        "index": "protected",
    }.items():
        assert reason in left[f".git/{path}"], path
    assert (repository / "b.txt").read_text() == "fine\n"
    assert (git(repository, "rev-parse", "HEAD"), git(repository, "cat-file", "-p", "HEAD")) == before
    assert git(repository, "fsck", "--strict") == ""
    discard(home)


@pytest.fixture
def worktree(repository: Path) -> Path:
    """A linked worktree beside the repository, on the branch `work`."""
    made = repository.parent / "tree"
    git(repository, "worktree", "add", "-q", "-b", "work", str(made))
    return made


def test_commit_in_linked_worktree_is_applied(home: Home, repository: Path, worktree: Path) -> None:
    status = git(repository, "status", "--porcelain"), git(repository, "rev-parse", "main")
    script = COMMIT + "git status --porcelain; cat .git; echo two >> a.txt; git commit -qam second; git branch other"
    done = work(home, worktree, script + "; git log --format=%s; git rev-parse --abbrev-ref HEAD")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.decode().splitlines()
    assert lines == ["gitdir: /run/workspace.git/worktrees/tree", "second", "first", "work"]
    assert git(worktree, "log", "--format=%s").split() == ["first"], "nothing before the apply"
    (one,) = listed(home)
    shown = json.loads(home.covenant("workspace", "diff", one["run_id"], "--json").stdout)["changes"]
    paths = {row["path"]: row["action"] for row in shown}
    assert paths[".git/refs/heads/work"] == "modify"
    assert paths[".git/refs/heads/other"] == "add"
    assert paths[".git/worktrees/tree/index"] == "modify"
    assert paths["a.txt"] == "modify"
    patch = home.covenant("workspace", "diff", one["run_id"], "--patch").stdout.decode()
    assert "+two" in patch
    assert applied(home) == {}
    assert git(worktree, "log", "--format=%s").split() == ["second", "first"]
    assert git(worktree, "status", "--porcelain") == ""
    assert git(worktree, "branch", "--format=%(refname:short)").split() == ["main", "other", "work"]
    assert (git(repository, "status", "--porcelain"), git(repository, "rev-parse", "main")) == status
    assert git(repository, "fsck", "--strict") == ""
    assert (worktree / ".git").read_text() == f"gitdir: {repository}/.git/worktrees/tree\n"
    assert listed(home) == []


PLANTED = """
R=/run/workspace.git
echo x > $R/hooks/pre-commit
echo x >> $R/config
echo ref: refs/heads/evil > $R/HEAD
cp $R/worktrees/tree/index $R/index
mkdir -p $R/refs/replace; git rev-parse HEAD > $R/refs/replace/$(git rev-parse HEAD)
mkdir -p $R/worktrees/more; echo x > $R/worktrees/more/HEAD
echo /tmp > $R/worktrees/tree/gitdir
echo /tmp > $R/worktrees/tree/commondir
"""


def test_linked_worktree_changes_no_other_checkout(home: Home, repository: Path, worktree: Path) -> None:
    """Control: its own HEAD is applied."""
    hooks = {path.name for path in (repository / ".git/hooks").iterdir()}
    kept = {name: (repository / ".git" / name).read_bytes() for name in ("HEAD", "index", "config")}
    done = work(home, worktree, COMMIT + "git checkout -q -b new" + PLANTED)
    assert done.returncode == 0, done.stderr
    left = applied(home)
    for path in ("hooks/pre-commit", "config", "HEAD", "index", "worktrees/tree/gitdir", "worktrees/tree/commondir"):
        assert "protected" in left[f".git/{path}"], path
    assert any(path.startswith(".git/refs/replace") for path in left)
    assert "another worktree" in left[".git/worktrees/more/HEAD"]
    assert {name: (repository / ".git" / name).read_bytes() for name in kept} == kept
    assert {path.name for path in (repository / ".git/hooks").iterdir()} == hooks
    assert git(worktree, "rev-parse", "--abbrev-ref", "HEAD") == "new\n"
    discard(home)


def test_commit_after_apply_is_applied_too(home: Home, repository: Path) -> None:
    """Also when git of the host has looked at the files, and written the index. Control: the host stages a file."""
    kept = ("--quiet", "--workspace", repository, "--keep-workspace")
    script = COMMIT + "echo two >> a.txt; git mv a.txt b.txt; git commit -qam second"
    done = home.exec(*kept, "--", "sh", "-ec", script)
    assert done.returncode == 0, done.stderr
    assert applied(home) == {}
    before = (repository / ".git/index").read_bytes()
    assert git(repository, "status", "--porcelain") == ""
    assert (repository / ".git/index").read_bytes() != before, "control: it was written"
    (one,) = listed(home)
    script = COMMIT + "echo three >> b.txt; git commit -qam third"
    done = home.exec(*kept, "--resume", one["run_id"], "--", "sh", "-ec", script)
    assert done.returncode == 0, done.stderr
    (repository / "own").write_text("x")
    os.chown(repository / "own", OWNER, OWNER)
    git(repository, "add", "own")
    (one,) = listed(home)
    refused = home.covenant("workspace", "apply", one["run_id"])
    assert refused.returncode != 0
    assert b"the host changed 1 of the paths: .git/index" in refused.stderr
    git(repository, "reset", "-q", "own")
    assert applied(home) == {}
    assert git(repository, "log", "--format=%s").split() == ["third", "second", "first"]
    assert git(repository, "status", "--porcelain") == "?? own\n"
    assert git(repository, "fsck", "--strict", "--no-dangling") == ""
    discard(home)


def test_fix_of_index_conflict_merges_changes(home: Home, repository: Path) -> None:
    """`git status` on the host writes the index after times of files changed, also while the agent works."""
    script = COMMIT + "echo two > b.txt; git add b.txt; git commit -qm second"
    done = home.exec("--quiet", "--workspace", repository, "--keep-workspace", "--", "sh", "-ec", script)
    assert done.returncode == 0, done.stderr
    os.utime(repository / "a.txt", (1, 1))
    assert git(repository, "status", "--porcelain") == ""
    (one,) = listed(home)
    refused = home.covenant("workspace", "apply", one["run_id"])
    assert refused.returncode != 0
    assert b"the host changed 1 of the paths: .git/index" in refused.stderr
    fix = refused.stderr.decode().partition("fix: ")[2].splitlines()[0]
    branch, _, merge = fix.partition(";")[0].replace("NAME", "agent/second").partition(", then ")
    made = home.covenant(*branch.split()[1:])
    assert made.returncode == 0, made.stderr
    git(repository, *merge.split()[1:])
    assert (repository / "b.txt").read_text() == "two\n"
    assert git(repository, "status", "--porcelain") == ""
    discard(home)


def test_branch_of_another_worktree_stays(home: Home, repository: Path, worktree: Path) -> None:
    """The fix frees it. Control: a branch that no worktree has, and an index without hidden files."""
    first = git(repository, "rev-parse", "HEAD").strip()
    git(repository, "branch", "free")
    script = COMMIT + "echo two >> a.txt; git commit -qam second; git update-ref refs/heads/free HEAD; "
    script += "! git branch -f work HEAD; git update-ref refs/heads/work HEAD; echo evil >> a.txt; "
    script += "git update-index --assume-unchanged a.txt; git status --porcelain"
    done = work(home, repository, script)
    assert (done.returncode, done.stdout) == (0, b""), done.stderr
    left = applied(home)
    assert left == {
        ".git/refs/heads/work": "protected: the worktree `tree` has this branch checked out "
        "(`git switch --detach` there frees it)",
        ".git/index": "protected: it hides changes of `a.txt` (assume-unchanged or skip-worktree)",
    }
    second = git(repository, "rev-parse", "main", "free").split()
    assert second[0] == second[1] != first
    assert git(repository, "rev-parse", "work").strip() == first
    # Without a look of git's at the index, which writes it.
    status = git(repository, "--no-optional-locks", "status", "--porcelain")
    assert status == "MM a.txt\n", "the host sees the change"
    git(worktree, "switch", "-q", "--detach")
    (one,) = listed(home)
    resume = ("--quiet", "--workspace", repository, "--resume", one["run_id"], "--", "sh", "-ec")
    done = home.exec(*resume, COMMIT + "git update-index --no-assume-unchanged a.txt; git commit -qam third")
    assert done.returncode == 0, done.stderr
    assert applied(home) == {}
    assert git(repository, "rev-parse", "work").strip() == second[0]
    assert git(repository, "log", "--format=%s", "main").split() == ["third", "second", "first"]
    discard(home)


def test_file_that_leads_to_repository_stays(home: Home, repository: Path, worktree: Path) -> None:
    """The agent makes a directory of its own in its place: none of git's changes is applied, other files are."""
    before = (worktree / ".git").read_text()
    script = COMMIT + "echo two >> a.txt; git commit -qam second; rm .git; mkdir .git; echo x > .git/config"
    assert work(home, worktree, script).returncode == 0
    left = applied(home)
    assert left[".git"]
    assert ".git/config" not in left
    assert (worktree / ".git").read_text() == before
    assert git(worktree, "log", "--format=%s").split() == ["first"]
    assert (worktree / "a.txt").read_text() == "one\ntwo\n"
    discard(home)


def test_branch_and_resume_work_in_linked_worktree(home: Home, repository: Path, worktree: Path) -> None:
    assert work(home, worktree, "echo two >> a.txt").returncode == 0
    (one,) = listed(home)
    done = home.covenant("workspace", "branch", one["run_id"], "agent/fix")
    assert done.returncode == 0, done.stderr
    assert git(repository, "show", "agent/fix:a.txt") == "one\ntwo\n"
    resumed = home.exec(
        "--quiet", "--workspace", worktree, "--resume", one["run_id"], "--", "sh", "-ec", "cat a.txt .git"
    )
    assert resumed.stdout == b"one\ntwo\ngitdir: /run/workspace.git/worktrees/tree\n"
    discard(home)


@pytest.mark.parametrize("place", [".git", ".git/worktrees/tree"])
def test_repository_of_another_user_is_refused(home: Home, repository: Path, worktree: Path, place: str) -> None:
    """Control: with its owner it starts."""
    os.chown(repository / place, OWNER + 1, OWNER)
    done = work(home, worktree, "true")
    assert done.returncode == 125
    assert b"belongs to" in done.stderr
    os.chown(repository / place, OWNER, OWNER)
    assert work(home, worktree, "git status --porcelain").returncode == 0
    discard(home)


# Without the lock that lets git write the index.
LOOKS = "export GIT_OPTIONAL_LOCKS=0; git status -s; git submodule status; "
# Each write that the kernel lets the agent do is printed.
WRITES = """
cat vendor/sub/deep/a.txt; git -C vendor/sub show HEAD:a.txt; stat -c %a vendor disk
tried() { if sh -c "$2" 2>/tmp/why; then echo "$1"; else grep -q 'not permitted' /tmp/why || cat /tmp/why; fi; }
for in in vendor/sub vendor/sub/deep disk plain plain/deep; do
    tried $in/made "echo x > $in/made"
    tried $in/directory "mkdir $in/directory"
    tried $in/link "ln -s x $in/link"
    tried $in/mode "chmod 711 $in && find $in -maxdepth 0 -perm 711 | grep -q ."  # a refused chmod answers 0 in gVisor
done
for in in vendor/sub vendor/sub/deep plain/deep; do
    tried $in/a.txt "echo two >> $in/a.txt"
    tried $in/name "ln $in/a.txt $in.name"
    tried $in/moved "mv $in/a.txt $in.moved"
done
tried commit "git -C vendor/sub commit -q --allow-empty -m evil"
tried sub "mv vendor/sub vendor/gone"
tried removed "rm -rf vendor/sub"
"""
WRITTEN = {f"{one}/{what}" for one in ("plain", "plain/deep") for what in ("made", "directory", "link", "mode")}
WRITTEN |= {f"plain/deep/{what}" for what in ("a.txt", "name", "moved")}


@pytest.fixture
def with_parts(repository: Path) -> Iterator[Path]:
    """The repository with a submodule, a mount, and a plain directory."""
    deep = repository / "plain/deep"
    deep.mkdir(parents=True)
    (deep / "a.txt").write_text("one\n")
    other = repository.parent / "other"
    git(repository.parent, "clone", "-q", str(repository), "other")
    (other / "deep").mkdir()
    (other / "deep/a.txt").write_text("deep\n")
    for path in (deep.parent, deep, deep / "a.txt", other / "deep", other / "deep/a.txt"):
        os.chown(path, OWNER, OWNER)
    git(other, "add", ".")
    git(other, "commit", "-qm", "deep")
    git(repository, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(other), "vendor/sub")
    (repository / "disk").mkdir(mode=0o750)
    os.chown(repository / "disk", OWNER, OWNER)
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "with a submodule")
    subprocess.run(["mount", "-t", "tmpfs", "none", str(repository / "disk")], check=True)
    try:
        yield repository
    finally:
        subprocess.run(["umount", str(repository / "disk")], check=True)


def test_submodule_and_mount_are_read_only(home: Home, with_parts: Path) -> None:
    """They are named, also after a resume, and read alone leaves no change. Control: plain directories."""
    kept = ("--workspace", with_parts, "--keep-workspace", "--", "sh", "-ec")
    done = home.exec(*kept, COMMIT + LOOKS + "cat vendor/sub/a.txt disk/x || ls disk")
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().split()[1:] == ["vendor/sub", "(heads/main)", "one"]
    told = done.stderr.decode()
    assert "workspace: vendor/sub/ is another checkout of git (a submodule, a linked worktree): it is read-only" in told
    assert "workspace: disk/ is another file system on the host: it is read-only" in told
    (one,) = listed(home)
    assert one["changes"] == 0
    done = home.exec("--quiet", "--resume", one["run_id"], *kept[:3], "--", "sh", "-ec", COMMIT + WRITES)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.decode().split()
    assert lines[:4] == ["deep", "one", "755", "750"]
    assert set(lines[4:]) == WRITTEN
    (one,) = listed(home)
    shown = home.covenant("workspace", "diff", one["run_id"])
    assert b"disk/ is another file system on the host: its changes are not applied" in shown.stderr
    found = json.loads(home.covenant("workspace", "diff", one["run_id"], "--json").stdout)["changes"]
    assert {row["path"].split("/")[0] for row in found} == {"plain"}
    assert applied(home) == {}
    assert git(with_parts, "submodule", "status").split()[1:] == ["vendor/sub", "(heads/main)"]
    assert git(with_parts / "vendor/sub", "status", "--porcelain") == ""
    assert os.listdir(with_parts / "disk") == []
    assert (with_parts / "plain/made").read_text() == "x\n"
    # A directory that the agent changed, and that became another checkout.
    (with_parts / "plain/.git").write_text("gitdir: elsewhere\n")
    os.chown(with_parts / "plain/.git", OWNER, OWNER)
    (one,) = listed(home)
    late = "cat plain/made; ! echo x > plain/late; ! echo x > plain/made; echo x > late"
    done = home.exec("--quiet", "--resume", one["run_id"], *kept[:3], "--", "sh", "-ec", late)
    assert (done.returncode, done.stdout) == (0, b"x\n"), done.stderr
    applied(home)
    assert (with_parts / "late").exists()
    assert not (with_parts / "plain/late").exists()
    discard(home)


def test_directory_is_renamed_by_copying(home: Home, repository: Path) -> None:
    """rename(2) of a directory that was there answers EXDEV (docs/workspaces.md). Control: of a new one it works."""
    (repository / "src/deep").mkdir(parents=True)
    (repository / "src/deep/a").write_text("a\n")
    for path in (repository / "src", *(repository / "src").rglob("*")):
        os.chown(path, OWNER, OWNER)
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "with src")
    script = COMMIT + "mkdir new; mv new renamed; test -d renamed; ! git mv src whole 2>&1; mv src moved; git add -A; "
    script += "git commit -qm moved; git show --stat=200 --format= HEAD"
    done = work(home, repository, script)
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert b"renaming 'src' failed: Invalid cross-device link" in done.stdout
    assert b"{src => moved}/deep/a" in done.stdout
    assert applied(home) == {}
    assert (repository / "moved/deep/a").read_text() == "a\n"
    assert not (repository / "src").exists()
    assert git(repository, "status", "--porcelain") == ""
