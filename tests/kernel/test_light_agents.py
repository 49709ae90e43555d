"""Three agents that people use, installed from locks of npm and pip, in the cells of tests/agents (docs/agents.md)."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agents import catalogue, cells, place

light = pytest.mark.parametrize("agent", catalogue.LIGHT)


@pytest.fixture(scope="module")
def installed() -> Iterator[None]:
    """The agents and their layers, in a directory that no mount of a sandbox covers."""
    assert not place.missing(), f"missing: {place.missing()}; fix: apt-get install npm tmux"
    with (
        tempfile.TemporaryDirectory(dir="/var/lib", prefix="covenant-test-") as made,
        pytest.MonkeyPatch.context() as patched,
    ):
        patched.setenv("COVENANT_AGENTS", made)
        place.build(catalogue.LIGHT)
        # The probes of a policy are tests of their own, and each cell has another policy.
        config = place.home() / "supervisor/config.toml"
        config.write_text("self_test = false\n")
        config.chmod(0o600)
        yield


@light
def test_version_is_shown(agent: str, installed: None) -> None:
    cells.version(agent)


@light
def test_task_is_done_and_committed(agent: str, installed: None) -> None:
    cells.task(agent)


@light
def test_terminal_is_resized_and_left(agent: str, tmp_path: Path, installed: None) -> None:
    cells.terminal(agent, tmp_path)
