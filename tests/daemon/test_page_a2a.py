"""docs/a2a.md: its commands from the first to the last, against a daemon on another port."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests import cli_daemon_kit
from tests.cli_kit import call
from tests.house.test_docs import commands
from tests.mailbox_kit import MANIFEST


def test_page_can_be_followed(clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    monkeypatch.setenv("COVENANT_HOME", str(home))
    cli_daemon_kit.package(home, "wordcount", MANIFEST.format(id="wordcount", required="[]"))
    said = []
    with cli_daemon_kit.running(home, http_port=0) as daemon:
        page = (clone / "docs" / "a2a.md").read_text()
        for line in commands(page):
            result = call(*shlex.split(line)[1:])
            assert result.exit_code == 0, (line, result.output)
        for line in re.findall(r"^    (curl .*)$", page, re.MULTILINE):
            shell = line.replace("http://127.0.0.1:8421", daemon.server.console.address)
            done = subprocess.run(["sh", "-c", shell], capture_output=True, check=True, timeout=60)
            said.append(json.loads(done.stdout))
    card, answer = said
    assert card["name"] == "wordcount"
    assert answer["task"]["status"]["state"] == "TASK_STATE_COMPLETED"
    assert answer["task"]["artifacts"][0]["parts"][0]["text"] == "ONE TWO"
