"""docs/agents.md from its first command to its last, as typed, with directories of the test's own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agents import place
from tests.kernel.world import ROOT

_FENCE = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory that no mount of a sandbox covers."""
    made = place.cache() / "page"
    shutil.rmtree(made, ignore_errors=True)
    (made / "bin").mkdir(parents=True)
    yield made
    shutil.rmtree(made)


def test_page_can_be_followed(folder: Path) -> None:
    program = folder / "bin/covenant"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m covenant "$@"\n')
    program.chmod(0o755)
    # npm and pip keep the settings that this machine has for them.
    environment = {
        **os.environ,
        "PATH": f"{folder}/bin:/usr/local/bin:/usr/bin:/bin",
        "COVENANT_HOME": str(folder / "home"),
        "PYTHONPATH": str(ROOT),
    }
    config = folder / "home/supervisor/config.toml"
    config.parent.mkdir(parents=True, mode=0o700)
    config.parent.parent.chmod(0o700)
    config.write_text(f'self_test = false\n[vault]\nkey = "{folder}/vault.key"\n')
    config.chmod(0o600)
    (folder / "key").write_text("none\n")
    page = (ROOT / "docs/agents.md").read_text()
    lines = [line for block in _FENCE.findall(page) for line in block.splitlines()]
    shown = {}
    for line in lines:
        typed = line.replace("/opt/", f"{folder}/")
        done = subprocess.run(
            ["/bin/sh", "-c", typed], env=environment, cwd=folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        shown[line] = done.stdout
    assert shown["covenant exec --layer qwen-code --no-workspace -- qwen --version"] == "0.15.10\n"
    assert shown["covenant exec --layer llm -- llm --version"] == "llm, version 0.36\n"
    saved = (folder / "session/agent.toml").read_text()
    assert "models.example.com" in saved
    assert len(lines) == 13
