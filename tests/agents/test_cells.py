"""Each agent in each of its cells."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agents import catalogue, cells


@pytest.mark.parametrize("agent", catalogue.cells("version"))
def test_version_is_shown(agent: str) -> None:
    cells.version(agent)


@pytest.mark.parametrize("agent", catalogue.cells("task"))
def test_task_is_done_and_committed(agent: str) -> None:
    cells.task(agent)


@pytest.mark.parametrize("agent", catalogue.cells("gate"))
def test_task_is_done_by_models_at_gate(agent: str) -> None:
    cells.gate(agent)


@pytest.mark.parametrize("agent", catalogue.cells("terminal"))
def test_terminal_is_resized_and_left(agent: str, tmp_path: Path) -> None:
    cells.terminal(agent, tmp_path)


@pytest.mark.parametrize("agent", catalogue.cells("acp"))
def test_prompt_of_acp_is_answered(agent: str, tmp_path: Path) -> None:
    cells.acp(agent, tmp_path)
