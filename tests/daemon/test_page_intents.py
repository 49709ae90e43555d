"""docs/intents.md: its commands from the first to the last; what a Hermes waits for is a double's."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from covenant.wire.parts import Approval
from covenant.wire.types import AgentId
from tests import cli_daemon_kit
from tests.cli_kit import call
from tests.house.test_docs import commands


class Waits:
    """A run that waits for the operator's word."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def approvals(self) -> tuple[Approval, ...]:
        names = {name: name for name in ("intent_id", "run_id", "agent_id", "description", "command")}
        return (Approval(id="approval-1", **names, choices=("once", "deny"), requested_at=1),)

    async def resolve(self, approval_id: str, choice: str, *, by: AgentId) -> int:
        self.told.append((approval_id, choice))
        return 1


def test_page_can_be_followed(clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    monkeypatch.setenv("COVENANT_HOME", str(home))
    cli_daemon_kit.package(home, "wordcount")
    waits, said = Waits(), {}
    with cli_daemon_kit.running(home) as daemon:
        daemon.server.runners.approving = waits
        for line in commands((clone / "docs" / "intents.md").read_text()):
            program, *words = shlex.split(line)
            if line == "make load":  # tests/daemon/test_load.py and tests/load are what it runs
                continue
            assert program == "covenant"
            result = call(*("approval-1" if word == "APPROVAL" else word for word in words))
            assert result.exit_code == 0, (line, result.output, result.exception)
            said[" ".join(words)] = result.stdout
    assert said["intent --agent wordcount one two"] == "ONE TWO\n"
    assert "wordcount" in said["agents list"]
    assert "approval-1" in said["approvals list"]
    assert waits.told == [("approval-1", "deny")]
    assert len(said) >= 7
