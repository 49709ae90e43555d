"""Check the console's view of packages; tests/daemon/test_console.py asks it over HTTP."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from covenant.runtime.agent_view import MOST_BYTES, AgentView
from covenant.runtime.agents import Agents
from policy import errors

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parents[4]


@pytest.fixture
async def agents(tmp_path: Path) -> Agents:
    (tmp_path / "agents").mkdir(mode=0o700)
    shutil.copytree(ROOT / "agents/librarian", tmp_path / "agents/librarian")
    found = Agents(tmp_path)
    await found.reload()
    return found


async def test_state_of_root_is_not_read(agents: Agents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an installed daemon has it: COVENANT_STATE is root's, and closed."""
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    (state / "config.toml").write_text("no configuration")
    view = AgentView(agents, home=tmp_path, state=state)
    with pytest.raises(errors.ConfigError):
        view.rules("librarian")
    real = os.access

    def access(path: Any, mode: int) -> bool:
        return path != state and real(path, mode)

    monkeypatch.setattr(os, "access", access)
    assert view.rules("librarian")["agent_id"] == "librarian"


async def test_manifest_that_is_tried_is_bounded(agents: Agents, tmp_path: Path) -> None:
    view = AgentView(agents, home=tmp_path, state=tmp_path / "supervisor")
    before = sorted(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    with pytest.raises(errors.UsageError, match="longer than"):
        view.compared("librarian", "#" * (MOST_BYTES + 1))
    with pytest.raises(errors.CovenantError):
        view.compared("librarian", "[agent]\nid = \ud800")
    with pytest.raises(errors.NoAgentError):
        view.compared("../librarian", "")
    assert sorted(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()) == before
