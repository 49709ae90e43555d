"""A package on a file system that does not answer, of an entry `[[mcp.server]]` or below agents/: the daemon gives it
up, lists it and the others, and ends. The file system is a real FUSE server (hanging_server.py)."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from covenant.cli.run import doctor
from covenant.providers import package_files, tool_packages
from covenant.runtime import agents as agents_module
from covenant.runtime import packages
from covenant.runtime.agents import Agents
from covenant.wire import client
from policy import errors
from tests import runtime_kit, tools_kit
from tests.daemon.test_lifecycle import process
from tests.kernel import hanging_files
from tests.kernel.hanging_files import Hanging

pytestmark = pytest.mark.anyio

ENTRY = '[[mcp.server]]\nname = "full"\npackage = "{place}"\n'
SECONDS = 60


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Hanging]:
    source = tools_kit.written(tmp_path / "package", tools_kit.package(tools_kit.FULL))
    with hanging_files.mounted(source, tmp_path / "hangs") as made:
        yield made


async def test_hanging_package_is_given_up_and_read_once_it_answers(files: Hanging) -> None:
    pins = list(await tool_packages.pins(files.place, seconds=SECONDS))
    assert pins
    files.hang("OPENDIR")
    with pytest.raises(errors.HangingError, match="does not answer"):
        await tool_packages.pins(files.place, seconds=2)
    files.await_hung()
    (left,) = package_files._LEFT
    # No second process waits beside the first.
    for _ in range(3):
        with pytest.raises(errors.HangingError):
            await tool_packages.pins(files.place, seconds=SECONDS)
    assert [left] == list(package_files._LEFT)
    files.answer()
    found: list[str] = []
    with anyio.fail_after(SECONDS):
        while not found:
            with contextlib.suppress(errors.HangingError):
                found = list(await tool_packages.pins(files.place, seconds=SECONDS))
            await anyio.sleep(0.1)
    assert found == pins
    assert package_files._LEFT == {}


def test_daemon_starts_lists_and_ends_with_hanging_package(files: Hanging, tmp_path: Path, clone: pathlib.Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    (home / "secrets.toml").write_text(ENTRY.format(place=files.place))
    (home / "secrets.toml").chmod(0o600)
    files.hang("OPENDIR")
    with process(home, clone) as daemon:
        files.await_hung()
        with client.connected(home, answer_seconds=SECONDS) as one:
            assert [tool["name"] for tool in one.ask("list_tools")["tools"]] == ["clock", "echo"]
        # It ends while the file system hangs, and its home is free for the next one.
        status, said = daemon.end()
        assert status == 0, said
    with process(home, clone) as daemon:
        assert daemon.end()[0] == 0
    files.answer()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with the agent `good`, and a directory `hangs` for the file system with the agent `far`."""
    made = tmp_path / "home"
    made.mkdir(mode=0o700)
    runtime_kit.package(made, "good")
    return made


@pytest.fixture
def agent_files(home: Path, tmp_path: Path) -> Iterator[Hanging]:
    source = runtime_kit.package(tmp_path / "source", "far")
    with hanging_files.mounted(source, home / "agents" / "hangs") as made:
        yield made


async def test_opened_package_that_hangs_is_given_up(
    agent_files: Hanging, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = Agents(home)
    await agents.reload()
    assert [card.id for card in agents.cards()] == ["far", "good"]
    async with packages.reached(agents.find("far")) as one:
        assert "main.py" in os.listdir(one.directory), "control"
    monkeypatch.setattr(packages, "ANSWER_SECONDS", 2.0)
    agent_files.hang("OPENDIR")
    with pytest.raises(errors.HangingError):
        async with packages.reached(agents.find("far")):
            pass
    assert await packages.ends(agents.cards()) == {"far": None, "good": None}
    agent_files.answer()


async def test_watch_goes_on_beside_hanging_package(
    agent_files: Hanging, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "ANSWER_SECONDS", 2.0)
    monkeypatch.setattr(agents_module, "_HANGING_AGAIN_SECONDS", 1.0)
    monkeypatch.setattr(agents_module, "_IDLE_MS", 500)
    agent_files.hang("OPENDIR", "READDIR", "LOOKUP", "GETATTR")
    agents = Agents(home)
    await agents.reload()
    async with anyio.create_task_group() as group:
        group.start_soon(agents.watch)
        runtime_kit.package(home, "later")
        await _listed(agents, "good", "later")
        agent_files.answer()
        await _listed(agents, "far", "good", "later")
        group.cancel_scope.cancel()


def test_daemon_starts_and_lists_hanging_agent(
    agent_files: Hanging, home: Path, clone: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COVENANT_HOME", str(home))
    agent_files.hang("OPENDIR")
    with process(home, clone) as daemon, client.connected(home, answer_seconds=SECONDS) as one:
        for asked in ("list_agents", "reload_agents"):
            hangs, good = sorted(one.ask(asked)["agents"], key=lambda found: found["routable"])
            assert (good["id"], good["routable"]) == ("good", True)
            assert (hangs["directory"], "does not answer" in hangs["error"]) == ("hangs", True)
            assert "unmount it" in hangs["fix"]
        shown = subprocess.run(
            [sys.executable, "-m", "covenant", "agents", "list"],
            capture_output=True, text=True, timeout=SECONDS, check=True, cwd=clone,
        ).stdout  # fmt: skip
        assert "does not answer" in shown
        assert "fix: unmount it" in shown
        (check,) = [check for check in doctor.of_the_home() if check.name == "daemon's agents"]
        assert "hangs: the file system of the package does not answer" in check.found
        assert "unmount it" in check.mend
        # It ends while the file system hangs.
        status, said = daemon.end()
        assert status == 0, said
        assert "package `hangs`: the file system of the package does not answer (fix: unmount it" in said
    agent_files.answer()


async def _listed(agents: Agents, *ids: str) -> None:
    with anyio.fail_after(SECONDS):
        while [card.id for card in agents.cards()] != list(ids):  # noqa: ASYNC110
            await anyio.sleep(0.05)
