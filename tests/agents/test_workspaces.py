"""An agent edits and commits in a workspace: the host's checkout stays as it was, until the changes are applied."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agents import sessions
from tests.kernel import serving
from tests.kernel.workspace_kit import OWNER, git

AGENTS = ("codex", "opencode", "gemini-cli", "qwen-code")


@pytest.fixture
def checkout() -> Iterator[Path]:
    """A repository of a user with one commit."""
    with tempfile.TemporaryDirectory(dir="/srv", prefix="covenant-test-") as top:
        Path(top).chmod(0o755)
        made = Path(top) / "checkout"
        made.mkdir()
        (made / "README").write_text("A checkout.\n")
        for path in (made, made / "README"):
            os.chown(path, OWNER, OWNER)
        git(made, "init", "-q", "-b", "main")
        git(made, "add", "README")
        git(made, "commit", "-qm", "begin")
        yield made


def seen(top: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return mode, change time and content of each path."""
    return {
        str(path.relative_to(top)): (
            path.lstat().st_mode,
            path.lstat().st_ctime_ns,
            path.read_bytes() if path.is_file() and not path.is_symlink() else b"",
        )
        for path in sorted(top.rglob("*"))
    }


@pytest.mark.parametrize("agent", AGENTS)
def test_task_in_workspace_is_applied(agent: str, checkout: Path) -> None:
    before = seen(checkout)
    more = ("--no-tty", "--workspace", str(checkout), "--env", f"CHECKOUT={checkout}")
    done = sessions.run(sessions.beside(agent, "task", "task", *more))
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert "STATUS 0\nCOMMITS add a greeting,begin,\nGREETING hello, world\n" in done.stdout, (done.stdout, done.stderr)
    assert seen(checkout) == before
    found = json.loads(sessions.run(serving.covenant_command("workspace", "list", "--json")).stdout)["workspaces"]
    (one,) = [row for row in found if row["directory"] == str(checkout)]
    applied = sessions.run(serving.covenant_command("workspace", "apply", one["run_id"]))
    assert applied.returncode == 0, applied.stderr
    assert git(checkout, "log", "--format=%an %s") == "Agent add a greeting\nowner begin\n"
    assert (checkout / "greeting.txt").read_text() == "hello, world\n"
    assert git(checkout, "status", "--porcelain", "greeting.txt", "README") == ""
    assert git(checkout, "fsck", "--strict") == ""
