"""Attacks of a user on the supervisor's workspaces: processes that stay, a kill in the middle, prefixes of ids."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from policy import errors
from sandbox.workspace import branch, caller, store
from sandbox.workspace.caller import CallerIdentity
from tests.kernel import serving, workspace_kit
from tests.kernel.serving import CALLER, LONE, Served
from tests.kernel.test_workspace_users import MINE, mine, served, told, top, workspace

__all__ = ["mine", "served", "top"]


def processes(uid: int) -> list[int]:
    """The processes of a user."""
    found = []
    for path in Path("/proc").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if path.name.isdecimal() and path.stat().st_uid == uid:
                found.append(int(path.name))
    return found


@pytest.fixture
def silent(served: Served, top: Path) -> Iterator[Path]:
    """A repository with a workspace in which git waits for ever: the file of its exclusions is a pipe."""
    mine = workspace_kit.project(top, "silent", LONE)
    workspace_kit.plant(served.world.state, MINE, mine, LONE)
    for words in (["init", "-q"], ["add", "in.txt"], ["commit", "-qm", "first"]):
        subprocess.run(
            ["git", "-c", "user.name=x", "-c", "user.email=x@example.invalid", *words],
            cwd=mine, env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}, check=True, **serving.identity(LONE),
        )  # fmt: skip
    yield mine
    for pid in processes(LONE):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_caller_keeps_no_process_among_the_supervisors(served: Served, silent: Path) -> None:
    """It kills the process that waits for git. Control: git runs, and without the pipe the branch is made."""
    assert told(served, "branch", "aaa", "control", uid=LONE)["branch"] == "control"
    begun = time.time() - 1
    os.mkfifo(silent / "pipe")
    os.chown(silent / "pipe", LONE, LONE)
    with (silent / ".git" / "config").open("a") as file:
        file.write(f"[core]\n\texcludesFile = {silent}/pipe\n")
    asked: list[subprocess.CompletedProcess[str]] = []
    thread = threading.Thread(target=lambda: asked.append(workspace(served, "branch", "aaa", "silent", uid=LONE)))
    thread.start()
    git = _until(lambda: [pid for pid in processes(LONE) if b"read-tree" in _command(pid)])
    (parent,) = {int(serving.status(pid)["PPid"]) for pid in git}
    subprocess.run(["kill", "-KILL", str(parent)], check=True, **serving.identity(LONE))
    thread.join(60)
    assert asked[0].returncode != 0
    _until(lambda: not processes(LONE))
    left = [path for path in Path(tempfile.gettempdir()).glob("covenant-branch-*") if path.stat().st_uid == LONE]
    assert not [path for path in left if path.stat().st_ctime >= begun], "its index is gone"
    assert told(served, "list", uid=LONE)["workspaces"], "the supervisor goes on"


def _until(found: object) -> list[int]:
    end = time.monotonic() + 60
    while True:
        said = found()  # type: ignore[operator]
        if said:
            return list(said) if isinstance(said, list) else []
        assert time.monotonic() < end
        time.sleep(0.02)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_work_with_programs_ends_at_its_time() -> None:
    """Control: work that ends before is answered."""
    who = CallerIdentity(LONE, LONE)
    ran = ["/bin/sh", "-c", "id -u; echo $$"]

    def say() -> str:
        return subprocess.run(ran, capture_output=True, text=True, check=True).stdout

    assert caller.work(who, say, str, 20, starts_programs=True) == f"{LONE}\n2\n"
    begin = time.monotonic()
    with pytest.raises(errors.WorkspaceError, match="killed"):
        caller.work(who, lambda: str(subprocess.run(["/bin/sleep", "300"], check=False)), str, 1, starts_programs=True)
    assert time.monotonic() - begin < 30
    _until(lambda: not processes(LONE))
    with pytest.raises(errors.WorkspaceError, match="no such thing"):
        caller.work(who, lambda: _fails("no such thing"), str, 20, starts_programs=True)


def _fails(text: str) -> str:
    raise OSError(0, text)


def test_configuration_of_git_is_the_callers_own() -> None:
    """The supervisor's HOME is another user's, and closed to the caller."""
    assert caller.work(CallerIdentity(CALLER, CALLER), branch._home, str) == "/nonexistent"
    assert caller.work(CallerIdentity(0, 0), branch._home, str) == "/root"


def test_word_that_begins_two_is_none(served: Served, mine: Path) -> None:
    """An apply of a prefix never takes one of two. Control: the longer word."""
    workspace_kit.plant(served.world.state, f"{MINE[:-1]}b", mine, CALLER)
    refused = workspace(served, "apply", MINE[:-1])
    assert "several workspaces begin" in refused.stderr
    assert sorted(os.listdir(mine)) == ["in.txt"]
    assert workspace(served, "apply", MINE).returncode == 0


@pytest.mark.parametrize("word", ["../packages", "..", "templates", "making", ".", "/", "a/../b"])
def test_word_is_no_path(served: Served, mine: Path, word: str) -> None:
    for verb in ("diff", "discard"):
        assert "no workspace begins" in workspace(served, verb, word).stderr
    assert store.place(served.world.state, MINE).path.exists()


@pytest.mark.parametrize("path", ["../mine/in.txt", "/etc/hostname", "new/../shown", "."])
def test_content_outside_of_changes_is_not_shown(served: Served, mine: Path, path: str) -> None:
    shown = workspace(served, "show", "aaa", path)
    assert (shown.returncode != 0, shown.stdout) == (True, "")
    assert "no change at" in shown.stderr
