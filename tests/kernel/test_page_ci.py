"""docs/ci.md: each command beside the repository's agents, and what the action runs, in a repository of its own."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.kernel.test_command_line import call
from tests.kernel.world import AGENTS, ROOT, World

_FENCE = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
ACTION = ROOT / ".github/actions/covenant"


def test_page_can_be_followed(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for block in _FENCE.findall((ROOT / "docs/ci.md").read_text()):
        for line in block.splitlines():
            words = [str(tmp_path / word) if word == "facts.json" else word for word in shlex.split(line)[1:]]
            done = call(world.home, *words)
            assert done.returncode == 0, (line, done.stderr)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one commit that has the agent hello."""
    made = tmp_path / "repository"
    shutil.copytree(AGENTS / "hello", made / "agents/hello")
    for words in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-qm", "one"]):
        who = ["-c", "user.name=n", "-c", "user.email=n@example.invalid"]
        subprocess.run(["git", "-C", made, *who, *words], check=True, capture_output=True, timeout=60)
    return made


def _step(name: str, repository: Path, **inputs: str) -> subprocess.CompletedProcess[str]:
    """Run a step of the action as a runner does. Afterwards ``summary`` and ``output`` lie beside the repository."""
    files = {"GITHUB_STEP_SUMMARY": "summary", "GITHUB_OUTPUT": "output"}
    environment = {
        **{key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ},
        **{key: str(repository.parent / file) for key, file in files.items()},
        **inputs,
    }
    command = [str(ACTION / name)]
    return subprocess.run(
        command, cwd=repository, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def _check(repository: Path, packages: str = "agents/hello", allow: str = "false") -> tuple[int, str, str]:
    for name in ("summary", "output"):
        (repository.parent / name).write_text("")
    inputs = {"PACKAGES": packages, "BASE": "main", "HOST": "none", "ALLOW_WIDENING": allow}
    status = _step("check", repository, **inputs).returncode
    return status, (repository.parent / "summary").read_text(), (repository.parent / "output").read_text()


def test_action_fails_on_widening(repository: Path) -> None:
    status, summary, output = _check(repository)
    assert (status, output) == (0, "widens=false\n")
    assert "widens nothing" in summary
    manifest = repository / "agents/hello/agent.toml"
    text = manifest.read_text()
    manifest.write_text(text.replace("read = []", 'read = ["/srv/data"]'))
    status, summary, output = _check(repository)
    assert (status, output) == (3, "widens=true\n")
    assert "`read /srv/data`" in summary
    assert _check(repository, allow="true")[0] == 0
    manifest.write_text(text.replace("read = []", 'read = ["/root/.ssh"]'))
    assert _check(repository)[0] == 3
    manifest.write_text("no manifest")
    assert _check(repository, allow="true")[0] == 1
    manifest.write_text(text)
    shutil.copytree(repository / "agents/hello", repository / "agents/new")
    status, summary, _ = _check(repository, packages="agents/hello\nagents/new\n")
    assert status == 3
    assert "New agent in `agents/new`" in summary


def test_action_runs_agent_confined(repository: Path) -> None:
    done = _step("run", repository, PACKAGE="agents/hello", TEXT="World")
    assert done.returncode == 0, done.stderr
    assert "World" in done.stdout
    (repository / "agents/hello/main.py").write_text("import os\nos.execv('/bin/true', ['true'])\n")
    assert _step("run", repository, PACKAGE="agents/hello", TEXT="World").returncode != 0
