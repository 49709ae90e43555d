"""The files of the ledger and the checkpoints: version 1's rows, restarts, full disks and kill -9."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from covenant.stores.budget import durable, rows
from covenant.stores.journal import Journal
from covenant.wire import types
from policy import base58, errors

AGENT = types.AgentId(display="hello@agent", pubkey=base58.encode(b"\1" * 32))
PLAIN = {"display": AGENT.display, "pubkey": AGENT.pubkey}

# Reserves, settles and saves as fast as it can, and says what it was promised, a line each.
WRITER = """
import sys, anyio
from pathlib import Path
from covenant.stores.budget import durable
from covenant.wire import types
agent = types.AgentId.model_validate_json(sys.argv[2])
home = Path(sys.argv[1])

def say(*words):
    print(*words, flush=True)

async def one(ledger, points, number):
    while True:
        number += 8
        receipt = f"r{number}"
        await ledger.try_debit(agent, 2, receipt)
        say("debit", receipt)
        if number % 3 == 0:
            await ledger.settle(agent, receipt, 1)
            say("settle", receipt)
        if number % 5 == 0:
            point = _point("i")
    await ledger.set_capacity(AGENT, 9)
    await ledger.try_debit(AGENT, 2, "a")
    await points.save(point)
    before = dict(ledger.buckets())

    async def full(self: Journal, line: bytes) -> None:
        raise errors.StoreFullError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "append", full)
        for attempt in (
            lambda: ledger.try_debit(AGENT, 1, "b"),
            lambda: ledger.settle(AGENT, "a", 3),
            lambda: ledger.refund(AGENT, "a"),
            lambda: ledger.set_capacity(AGENT, 4),
            lambda: ledger.set_capacity(AGENT.model_copy(update={"pubkey": base58.encode(b"\2" * 32)}), 4),
            lambda: points.claim("i", AGENT),
            lambda: points.save(point.model_copy(update={"intent_id": "j"})),
        ):
            with pytest.raises(errors.StoreFullError):
                await attempt()
    assert dict(ledger.buckets()) == before
    assert [one.paired_receipt for one in ledger.unsettled()] == ["a"]
    assert [one.paired_receipt for one in await ledger.recent(9)] == ["a"]
    assert points.active() == (point,)
    await ledger.settle(AGENT, "a", 3)
    await points.claim("i", AGENT)
    await ledger.close()
    await points.close()


@pytest.mark.anyio
@pytest.mark.parametrize("lines", [3, 40, 150])
async def test_after_a_kill_nothing_that_was_promised_is_missing(path: Path, lines: int) -> None:
    home = path.parent.parent
    command = [sys.executable, "-c", WRITER, str(home), AGENT.model_dump_json()]
    promised: dict[str, set[str]] = {"debit": set(), "settle": set(), "save": set(), "claim": set()}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path.cwd()) as writer:
        assert writer.stdout is not None
        for _ in range(lines):
            word, receipt = writer.stdout.readline().split()
            promised[word].add(receipt)
        os.kill(writer.pid, signal.SIGKILL)
        # The last line may be in part.
        for line in writer.stdout.read().split("\n")[:-1]:
            word, receipt = line.split()
            promised[word].add(receipt)
    ledger = await durable.DurableBudgetLedger.open(path, lambda: 7)
    points = await durable.DurableCheckpoints.open(home / "budget" / "checkpoints.jsonl", lambda: 7)
    balance = ledger.buckets()[AGENT.pubkey].balance
    waiting = {one.paired_receipt for one in ledger.unsettled()}
    assert promised["debit"]
    # Eight were at work: each may have one more on disk than it was told of, of at most two credits.
    spent = 2 * len(promised["debit"]) + len(promised["settle"])
    assert spent <= 2**62 - balance <= spent + 8 * 2
    assert not waiting & promised["settle"]
    assert promised["debit"] - waiting <= {f"r{n}" for n in range(0, 10**6, 3)}
    active = {one.intent_id for one in points.active()}
    assert not active & promised["claim"]
    assert promised["save"] - active <= {f"r{n}" for n in range(0, 10**6, 10)}
    await ledger.close()
    await points.close()


def test_a_row_is_read_back_as_it_was() -> None:
    row = rows.Snapshot(
        agent=AGENT,
        capacity=9,
        tokens_remaining=0,
        last_refill_ms=3,
        at_ms=4,
        owed=2,
        debt=1,
        open=(rows.Open(credits=1, paired_receipt="a", at_ms=2),),
    )
    assert rows.ledger_row(rows.line(row), "") == row
