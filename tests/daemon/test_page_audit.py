"""docs/audit.md: its commands from the first to the last, beside a daemon and, where the page says so, without one."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from policy.audit_log import event_kinds
from tests import cli_daemon_kit
from tests.cli_kit import call, done
from tests.house.test_docs import commands


def test_page_can_be_followed(clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    monkeypatch.setenv("COVENANT_HOME", str(home))
    monkeypatch.chdir(tmp_path)
    ran = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(cli_daemon_kit.granted(home))
        row = json.loads(done("audit", "recent", "--json"))["events"][0]["id"]
        for line in commands((clone / "docs" / "audit.md").read_text()):
            before, _, into = line.partition(" > ")
            program, *words = shlex.split(before)
            assert program == "covenant"
            if words[1] == "prove":
                words[2] = row
            elif words[1] == "cosign":
                # The witness is elsewhere, and was given the log's key.
                shutil.copy(home / "audit-head" / "checkpoint.vkey", tmp_path)
            elif words[1] == "cosigned":
                stack.close()
            result = call(*words)
            assert result.exit_code == 0, (line, result.output, result.exception)
            if into:
                (tmp_path / into).write_text(result.stdout)
            if words[1] == "cosign":
                (tmp_path / "witness.vkey").write_text(result.stderr.removeprefix("witness key: "))
            ran.append(words[1])
    assert ran == ["recent", "recent", "verify", "purge", "checkpoint", "prove", "checkpoint", "cosign", "cosigned"]
    report = json.loads(done("audit", "verify", "--json"))["report"]
    assert report["valid"]


def test_it_names_kinds_of_version_1_that_nothing_writes(clone: Path) -> None:
    section = (
        (clone / "docs" / "audit.md")
        .read_text()
        .partition("## Kinds that are never written\n")[2]
        .partition("\n## ")[0]
    )
    # Two of them stand elsewhere in the code, since the supervisor writes them as well.
    kinds = {*event_kinds.V1, "capability_check", "intent_dispatched"}
    sources = [path.read_text() for folder in ("covenant", "sandbox") for path in (clone / folder).rglob("*.py")]
    never = {kind for kind in kinds if not any(f'"{kind}"' in source for source in sources)}
    assert set(re.findall(r"`(\w+)`", section)) & kinds == never
    assert f"version 1's {len(kinds)} kinds {len(kinds) - len(never)} are written" in section
