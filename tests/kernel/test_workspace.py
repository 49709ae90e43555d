"""`covenant exec --workspace` and `covenant workspace`: nothing changes before it is applied, and then all of it."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kernel.conftest import leftovers
from tests.kernel.session_kit import Home
from tests.kernel.workspace_kit import OWNER, git


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    made = Home(tmp_path_factory.mktemp("workspace"), "debian-minimal")
    yield made
    assert leftovers(made.world) == []


@pytest.fixture
def project() -> Iterator[Path]:
    """A directory of a user, with a file of each kind."""
    with tempfile.TemporaryDirectory(dir="/srv", prefix="covenant-test-") as made:
        top = Path(made) / "project"
        (top / "src").mkdir(parents=True)
        (top / "src" / "a.txt").write_text("one\ntwo\n")
        (top / "src" / "run.sh").write_text("#!/bin/sh\necho ran\n")
        (top / "src" / "run.sh").chmod(0o755)
        (top / "old.txt").write_text("old\n")
        (top / ".env").write_text("TOKEN=secret\n")
        (top / "AGENTS.md").write_text("rules\n")
        (top / "link").symlink_to("src/a.txt")
        for path in (Path(made), top, *top.rglob("*")):
            os.lchown(path, OWNER, OWNER)
        Path(made).chmod(0o755)
        yield top


def tree(top: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return mode, owner and content of each path."""
    return {
        str(path.relative_to(top)): (
            path.lstat().st_mode,
            path.lstat().st_uid,
            os.fsencode(os.readlink(path)) if path.is_symlink() else path.read_bytes() if path.is_file() else b"",
        )
        for path in sorted(top.rglob("*"))
    }


def work(home: Home, project: Path, script: str) -> subprocess.CompletedProcess[bytes]:
    """Run a script in a session on the project."""
    return home.exec("--quiet", "--workspace", str(project), "--", "sh", "-ec", script)


def listed(home: Home) -> list[dict[str, Any]]:
    """The workspaces of the store."""
    found: list[dict[str, Any]] = json.loads(home.covenant("workspace", "list", "--json").stdout)["workspaces"]
    return found


def test_changes_are_applied_only_when_asked(home: Home, project: Path) -> None:
    before = tree(project)
    script = "pwd; cat src/a.txt; sh src/run.sh; ./src/run.sh; echo three >> src/a.txt; rm old.txt; mkdir -p new/deep; "
    script += "echo fresh > new/deep/f; ln -s f new/deep/l; chmod 700 src/run.sh; id -u; stat -c %u src/a.txt"
    done = work(home, project, script)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.decode().split()
    assert lines[:5] == [str(project), "one", "two", "ran", "ran"]
    assert lines[5] == lines[6], "the owner of the directory is the agent's user"
    assert tree(project) == before, "nothing is changed before it is applied"
    (one,) = listed(home)
    assert (one["directory"], one["settled"]) == (str(project), True)
    shown = json.loads(home.covenant("workspace", "diff", one["run_id"], "--json").stdout)
    assert [(row["action"], row["path"]) for row in shown["changes"]] == [
        ("add", "new"),
        ("add", "new/deep"),
        ("add", "new/deep/f"),
        ("add", "new/deep/l"),
        ("delete", "old.txt"),
        ("modify", "src/a.txt"),
        ("mode", "src/run.sh"),
    ]
    patch = home.covenant("workspace", "diff", one["run_id"], "--patch").stdout.decode()
    assert "+three\n" in patch
    applied = home.covenant("workspace", "apply", one["run_id"])
    assert applied.returncode == 0, applied.stderr
    after = tree(project)
    assert after["src/a.txt"] == (before["src/a.txt"][0], OWNER, b"one\ntwo\nthree\n")
    assert after["new/deep/f"] == (0o100644, OWNER, b"fresh\n")
    assert after["new/deep/l"][2] == b"f"
    assert "old.txt" not in after
    assert after["src/run.sh"][0] == 0o100700
    kept = {path for path in before if path not in ("old.txt", "src/a.txt", "src/run.sh")}
    assert {path: after[path] for path in kept} == {path: before[path] for path in kept}
    assert listed(home) == []
    rows = [row["kind"] for row in home.world.rows() if row["kind"]["type"] == "workspace_applied"]
    assert [(row["run_id"], row["changes"]) for row in rows] == [(one["run_id"], 7)]


def test_renamed_file_is_told_by_its_old_name(home: Home, project: Path) -> None:
    assert work(home, project, "mv old.txt moved.txt; mv src source").returncode == 0
    (one,) = listed(home)
    shown = home.covenant("workspace", "diff", one["run_id"]).stdout.decode().splitlines()
    assert "+ moved.txt  4 bytes  was old.txt" in shown
    assert "+ source/a.txt  8 bytes  was src/a.txt" in shown
    assert home.covenant("workspace", "apply", one["run_id"]).returncode == 0
    assert sorted(path.name for path in project.rglob("*")) == [
        *(".env", "AGENTS.md", "a.txt", "link", "moved.txt", "run.sh", "source")
    ]


def test_unchanged_workspace_is_removed(home: Home, project: Path) -> None:
    assert work(home, project, "cat src/a.txt").returncode == 0
    assert listed(home) == []


def test_masked_file_is_empty_and_protected_file_is_not_applied(home: Home, project: Path) -> None:
    before = tree(project)
    done = work(home, project, "cat .env; wc -c < .env; cat AGENTS.md; echo more >> AGENTS.md; rm .env; echo x > .env")
    assert done.returncode == 0, done.stderr
    assert done.stdout == b"0\nrules\n"
    (one,) = listed(home)
    applied = json.loads(home.covenant("workspace", "apply", one["run_id"], "--json").stdout)
    assert applied["applied"] == []
    assert {row["path"]: row["refused"].partition(":")[0] for row in applied["left"]} == {
        ".env": "masked",
        "AGENTS.md": "protected",
    }
    assert tree(project) == before
    assert home.covenant("workspace", "discard", one["run_id"]).returncode == 0
    assert listed(home) == []


def test_conflict_with_host_is_not_applied(home: Home, project: Path) -> None:
    assert work(home, project, "echo agent > old.txt; echo new > n.txt").returncode == 0
    (project / "old.txt").write_text("host\n")
    (one,) = listed(home)
    refused = home.covenant("workspace", "apply", one["run_id"])
    assert refused.returncode != 0
    assert b"old.txt" in refused.stderr
    assert not (project / "n.txt").exists()
    assert home.covenant("workspace", "apply", one["run_id"], "n.txt").returncode == 0
    assert (project / "n.txt").read_text() == "new\n"
    assert (project / "old.txt").read_text() == "host\n"
    assert home.covenant("workspace", "discard", one["run_id"]).returncode == 0


@pytest.mark.parametrize("word", ["yes", "no", "discard"])
def test_session_in_terminal_asks_at_its_end(home: Home, project: Path, word: str) -> None:
    with home.terminal("--workspace", project, "--", "sh", "-c", "echo new > n.txt; exit 4") as one:
        one.until(b"apply these changes?")
        assert b"+ n.txt  4 bytes" in one.shown
        assert not (project / "n.txt").exists()
        one.type(word.encode() + b"\r")
        assert one.ended() == 4, "the status is the command's"
    assert (project / "n.txt").exists() == (word == "yes")
    left = listed(home)
    assert len(left) == (word == "no")
    for one_left in left:
        assert home.covenant("workspace", "discard", one_left["run_id"]).returncode == 0


def test_session_without_terminal_says_what_is_kept(home: Home, project: Path) -> None:
    done = home.exec("--workspace", project, "--", "sh", "-c", "echo new > n.txt")
    (one,) = listed(home)
    assert f"workspace: 1 change; covenant workspace diff {one['run_id'][:8]}" in done.stderr.decode()
    assert home.covenant("workspace", "discard", one["run_id"]).returncode == 0


def test_branch_takes_changes_and_leaves_files_and_index(home: Home, project: Path) -> None:
    (project / ".gitignore").write_text("*.log\n")
    os.chown(project / ".gitignore", OWNER, OWNER)
    git(project, "init", "-q", "-b", "main")
    git(project, "add", "src", "old.txt", "link", "AGENTS.md", ".gitignore")
    git(project, "commit", "-qm", "first")
    before, index = tree(project), git(project, "status", "--porcelain")
    script = (
        "echo three >> src/a.txt; rm old.txt; echo x > new.txt; echo log > a.log; chmod +x src/a.txt; ln -s new.txt l"
    )
    assert work(home, project, f"{script}; echo more >> AGENTS.md; git status --porcelain").returncode == 0
    (one,) = listed(home)
    done = home.covenant("workspace", "branch", one["run_id"], "agent/fix")
    assert done.returncode == 0, done.stderr
    assert b"AGENTS.md" in done.stdout
    assert git(project, "diff", "--name-status", "main", "agent/fix").splitlines() == [
        *("A\tl", "A\tnew.txt", "D\told.txt", "M\tsrc/a.txt")
    ]
    assert git(project, "show", "agent/fix:src/a.txt") == "one\ntwo\nthree\n"
    assert git(project, "ls-tree", "agent/fix", "l", "src/a.txt").split("\n")[0].startswith("120000")
    assert git(project, "log", "-1", "--format=%an", "agent/fix") == "exec-sh (covenant)\n"
    assert git(project, "status", "--porcelain") == index
    after = tree(project)
    assert {path: after[path] for path in before if not path.startswith(".git/")} == {
        path: found for path, found in before.items() if not path.startswith(".git/")
    }
    again = home.covenant("workspace", "branch", one["run_id"], "agent/fix")
    assert again.returncode != 0, "a branch that exists is not moved"
    assert b"there is a branch `agent/fix` already [workspace]\n  fix: give another name\n" in again.stderr
    wrong = home.covenant("workspace", "branch", one["run_id"], "agent fix").stderr
    assert b"is not a valid branch name [workspace]\n  fix: give a name such as agent/fix\n" in wrong
    removed = home.covenant("workspace", "show", one["run_id"], "old.txt").stderr
    assert b"the agent removed `old.txt`" in removed
    assert home.covenant("workspace", "discard", one["run_id"]).returncode == 0


def test_branch_needs_repository_with_commit(home: Home, project: Path) -> None:
    """The fix of each refusal, followed, leads to the branch."""
    assert work(home, project, "echo three >> src/a.txt").returncode == 0
    (one,) = listed(home)
    command = ("workspace", "branch", one["run_id"], "agent/fix")
    assert b"fix: covenant workspace apply; a branch needs a repository with a commit" in home.covenant(*command).stderr
    git(project, "init", "-q", "-b", "main")
    assert b"fix: make a first commit in the directory" in home.covenant(*command).stderr
    git(project, "add", "src")
    git(project, "commit", "-qm", "first")
    done = home.covenant(*command)
    assert done.returncode == 0, done.stderr
    assert git(project, "show", "agent/fix:src/a.txt") == "one\ntwo\nthree\n"
    assert home.covenant("workspace", "discard", one["run_id"]).returncode == 0


def test_kept_workspace_is_resumed_and_forked(home: Home, project: Path) -> None:
    assert work(home, project, "echo one > n.txt; rm old.txt").returncode == 0
    (first,) = listed(home)
    fork = json.loads(home.covenant("workspace", "fork", first["run_id"], "--json").stdout)["fork"]
    resume = ("--quiet", "--workspace", project, "--resume", first["run_id"], "--")
    other = home.exec(*resume, "bash", "-c", "true")
    assert other.returncode == 125
    assert b"another agent_id: exec-sh" in other.stderr
    done = home.exec(*resume, "sh", "-ec", "cat n.txt; test ! -e old.txt; cat .env; echo two >> n.txt")
    assert (done.returncode, done.stdout) == (0, b"one\n"), done.stderr
    found = {one["run_id"]: one for one in listed(home)}
    assert first["run_id"] not in found, "its changes are the next run's"
    (second,) = set(found) - {fork}
    assert not (project / "n.txt").exists()
    assert home.covenant("workspace", "apply", second).returncode == 0
    assert (project / "n.txt").read_text() == "one\ntwo\n"
    assert not (project / "old.txt").exists()
    # The copy has what the first run had, and sees that the host is another now.
    shown = json.loads(home.covenant("workspace", "diff", fork, "--json").stdout)["changes"]
    assert {row["path"]: bool(row["conflict"]) for row in shown} == {"n.txt": True}
    assert home.covenant("workspace", "discard", fork).returncode == 0
    assert listed(home) == []


def test_coding_agent_works_on_this_directory(home: Home, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The profile takes it. Control: not with --no-workspace, and not with another profile."""
    monkeypatch.setattr(home, "base", project)
    coding = ("--profile", "coding-agent", "--")
    done = home.exec(*coding, "sh", "-c", "pwd; echo x > made.txt")
    assert done.stdout.decode() == f"{project}\n", done.stderr
    assert f"workspace {project}: changes are kept apart" in done.stderr.decode()
    (one,) = listed(home)
    assert one["directory"] == str(project)
    assert home.covenant("workspace", "discard", one["run_id"]).returncode == 0
    for words in (("--no-workspace", *coding), ("--",)):
        assert home.exec("--quiet", *words, "pwd").stdout == b"/tmp\n"
    monkeypatch.setattr(home, "base", Path("/"))
    message, fix = home.refused(*coding, "true")
    assert "`/` cannot be a workspace" in message
    assert "--no-workspace" in fix
    assert home.exec("--quiet", "--no-workspace", *coding, "true").returncode == 0
    assert listed(home) == []


def test_shell_works_on_its_checkout(home: Home, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: not a directory without `.git`, a home, or with --no-workspace, --role and --save."""
    monkeypatch.setattr(home, "base", project)
    script = ("sh", "-c", "pwd; cat old.txt; echo x > made.txt")
    done = home.exec("--", *script)
    assert done.stdout == b"/tmp\n"
    assert b"  no workspace: this directory is no checkout of git; --workspace DIR gives one\n" in done.stderr
    git(project, "init", "-q")
    done = home.exec("--keep-workspace", "--", *script)
    assert done.stdout.decode() == f"{project}\nold\n", done.stderr
    assert f"  workspace {project}: changes are kept apart" in done.stderr.decode()
    (one,) = listed(home)
    assert one["directory"] == str(project)
    assert not (project / "made.txt").exists()
    assert home.covenant("workspace", "discard", one["run_id"]).returncode == 0
    assert home.exec("--quiet", "--no-workspace", "--", "pwd").stdout == b"/tmp\n"
    assert home.exec("--save", project.parent / "saved", "--", "pwd").returncode == 0
    assert "[workspace]" not in (project.parent / "saved/agent.toml").read_text()
    monkeypatch.setattr(home, "environment", lambda: {**Home.environment(home), "HOME": str(project)})
    done = home.exec("--", "pwd")
    assert done.stdout == b"/tmp\n"
    assert f"no workspace: `{project}` cannot be a workspace: it is a home directory" in done.stderr.decode()
    assert listed(home) == []


def test_kept_workspace_needs_no_change_and_is_resumed_by_name(home: Home, project: Path) -> None:
    done = home.exec("--quiet", "--workspace", project, "--keep-workspace", "--", "sh", "-c", "true")
    assert done.returncode == 0, done.stderr
    (one,) = listed(home)
    assert (one["changes"], one["keeps"]) == (0, True)
    # A supervisor that starts keeps it as well.
    assert home.exec("--quiet", "--", "true").returncode == 0
    unknown = home.covenant("workspace", "resume", one["run_id"][:8])
    assert f"fix: covenant workspace resume {one['run_id'][:8]} -- COMMAND" in unknown.stderr.decode()
    resumed = home.covenant(
        "workspace", "resume", one["run_id"][:8], "--", "sh", "-c", "pwd; echo x > made.txt; exit 3"
    )
    assert (resumed.returncode, resumed.stdout.decode()) == (3, f"{project}\n"), resumed.stderr
    (two,) = listed(home)
    assert two["run_id"] != one["run_id"]
    assert home.covenant("workspace", "apply", two["run_id"]).returncode == 0
    assert (project / "made.txt").exists()
    assert listed(home) == []
