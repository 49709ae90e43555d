"""Check the maximum age of a log verification that an answer may report."""

from __future__ import annotations

from pathlib import Path

import pytest

from covenant.handlers.audit import integrity
from tests import intents_kit, server_kit

pytestmark = pytest.mark.anyio


async def test_clock_put_back_makes_no_old_look_new(tmp_path: Path) -> None:
    clock = server_kit.Clock(10**9)
    server = intents_kit.make(tmp_path, now_ms=clock)
    assert (await integrity.verified(server, within_ms=60_000)).events == 0
    await server.audit.append("daemon_stopped", {"reason": "test"})
    assert (await integrity.verified(server, within_ms=60_000)).events == 0
    clock.at_ms -= 10**6
    assert (await integrity.verified(server, within_ms=60_000)).events == 1
    clock.at_ms += 10**6 + 60_000
    await server.audit.append("daemon_stopped", {"reason": "test"})
    assert (await integrity.verified(server, within_ms=60_000)).events == 2
