"""The screens of ``covenant tui`` over a real supervisor with live runs, and the doubles held to its answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from covenant.cli.daemon import tui
from covenant.tui.sources import Sources
from covenant.tui.widgets import Table
from tests import tui_data, tui_kit
from tests.kernel import serving
from tests.kernel.conftest import unfinished
from tests.kernel.serving import Served
from tests.kernel.test_contract_terminal import TERMINAL
from tests.kernel.test_serve import eventually
from tests.kernel.world import World
from tests.tui_kit import NO_DAEMON, Silent

WAITS = "import sys, time\nprint('READY', flush=True)\nwhile True: time.sleep(1)\n"


@pytest.fixture
def served(warm: Path) -> Iterator[Served]:
    with serving.open_place() as base, Served(World(base, warm=warm)) as one:
        yield one


# What the views read of a live run.
READ = {
    "top": ("run_id", "agent_id", "state", "depth", "started_ms", "cpu_ms", "memory_bytes", "processes", "denied"),
    "ps": ("run_id", "agent_id", "intent_id", "state", "started_ms", "issuer", "contract", "published"),
}


def _differences(given: Sources, run: str) -> list[str]:
    """Return where the doubles answer otherwise than this supervisor."""
    found: list[str] = []
    for kind, names in READ.items():
        double = {**tui_data.SESSION, "published": []}
        (real,) = given.supervisor(kind)["runs"]
        found += tui_kit.differences({name: double[name] for name in names}, real, kind)
    logs = given.supervisor("logs", run=run, offset=0, stream="stderr")
    found += tui_kit.differences(tui_data.SUPERVISOR["logs"], logs, "logs")
    workspaces = given.supervisor("workspace", verb="list")
    return found + tui_kit.differences({"workspaces": [], "damaged": []}, workspaces, "workspace")


async def _watched(given: Sources, run: str) -> None:
    async with tui_kit.opened(given) as pilot:
        table = tui_kit.app_of(pilot).main.query_one(Table)

        async def agree(key: str, words: str) -> None:
            await pilot.press(key)
            assert run in await tui_kit.says(pilot, "y yes")
            await pilot.press("y")
            await tui_kit.says(pilot, words)
            await pilot.press("enter")

        def is_now(state: str) -> bool:
            return table.chosen is not None and table.chosen.cells[1] == state

        await tui_kit.says(pilot, run[:8])
        table.choose(run)
        await agree("z", f"done: suspend {run}")
        await tui_kit.until(pilot, lambda: is_now("Suspended"))
        await agree("f", f"done: resume {run}")
        await tui_kit.until(pilot, lambda: is_now("Running"))
        await tui_kit.show(pilot, "S")
        await tui_kit.says(pilot, run[:8])
        await agree("k", f"done: kill {run}")
        await tui_kit.until(pilot, lambda: table.rows == ())


def test_session_is_watched_suspended_and_killed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    package = str(served.world.sign(served.world.package({"main.py": WAITS}, more=TERMINAL, cpu_ms=300_000)))
    for name, value in serving.environment_of(served, 0).items():
        monkeypatch.setenv(name, value)
    done = serving.covenant("run", package, "--detach", served=served)
    assert done.returncode == 0, done.stderr
    run = done.stdout.strip()
    given = Sources(Silent(NO_DAEMON), tui.ask_supervisor, tui.explain, tui.attach)
    assert _differences(given, run) == []
    asyncio.run(_watched(given, run))
    eventually(lambda: unfinished(served.world) == [])
    (ended,) = [row["kind"] for row in served.world.rows() if row["kind"]["type"] == "run_ended"]
    assert ended["run_id"] == run
    assert "asked for in covenant tui" in json.dumps([row["kind"] for row in served.world.rows()])
