"""A small load with every test run; ``make load`` has the large one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.load import harness

pytestmark = pytest.mark.anyio


async def test_of_many_intents_at_once_none_is_lost_and_none_is_doubled(tmp_path: Path) -> None:
    assert await harness.storm(tmp_path, intents=200, clients=64) > 0


async def test_what_was_acknowledged_before_kill_is_there_after_it(tmp_path: Path) -> None:
    assert await harness.kill(tmp_path, intents=200, clients=64) >= 100
