"""Check the memory limit of one caller, for each way that records are made."""

from __future__ import annotations

from pathlib import Path

import pytest

from covenant.handlers.intents import submit
from covenant.handlers.memory import records as memory_records
from covenant.stores.memory.interface import Room
from covenant.wire import requests
from covenant.wire.types import MemoryRecord
from tests import intents_kit, runtime_kit
from tests.intents_kit import ALICE, BOB, rows

pytestmark = pytest.mark.anyio


async def _kept(home: Path, monkeypatch: pytest.MonkeyPatch, *, credits_: int) -> list[str]:
    """Return the statuses of five intents of a caller whose limit is two records."""
    monkeypatch.setattr(memory_records, "MAX_OWN", Room(records=2, bytes=10**6))
    runtime_kit.package(home, "wordcount", name="Count words", budget=credits_)
    server = intents_kit.make(home)
    await server.agents.reload()
    for who in (ALICE, BOB):
        await intents_kit.granted(server, who, "memory.write")
    text = "count my words" if credits_ else "nobody knows this"
    for number in range(5):
        answer = await submit.submit_intent(server, ALICE, requests.SubmitIntent(text=f"{text} {number}"))
        assert answer.text.endswith(f"{text} {number}")
    await submit.submit_intent(server, BOB, requests.SubmitIntent(text=text))
    records: list[MemoryRecord] = await server.memory.recent(None, 99, owner=ALICE.agent.pubkey)
    assert len(await server.memory.recent(None, 99, owner=BOB.agent.pubkey)) == 1
    statuses = [str(row["status"]) for row in await rows(server, "intent_dispatched")][:5]
    assert statuses.count("ok") == len(records)
    return statuses


async def test_answers_that_cost_nothing_fill_room_of_who_asked_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await _kept(tmp_path, monkeypatch, credits_=0) == ["ok"] * 2 + ["not_stored"] * 3


async def test_answer_that_was_paid_for_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await _kept(tmp_path, monkeypatch, credits_=1000) == ["ok"] * 5
