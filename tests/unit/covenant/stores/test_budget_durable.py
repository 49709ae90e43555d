"""Check the files of the ledger and the checkpoints: version 1's rows, restarts, full disks and kill -9."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from covenant.stores.budget import durable, rows
from covenant.stores.journal import Journal
from covenant.wire import types
from policy import base58, errors
from tests import kill_kit

AGENT = types.AgentId(display="hello@agent", pubkey=base58.encode(b"\1" * 32))
PLAIN = {"display": AGENT.display, "pubkey": AGENT.pubkey}

# Reserves, settles and saves as fast as it can, and prints a line for each acknowledged operation.
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
            point = types.BudgetPauseCheckpoint(intent_id=receipt, agent=agent, reason="shutdown",
                requested_credits=1, tokens_remaining=0, refill_eta_ms=1, saved_at_ms=1)
            await points.save(point)
            say("save", receipt)
            if number % 2 == 0:
                await points.claim(receipt, agent)
                say("claim", receipt)
        if number % 97 == 0:
            await ledger.compact(10)
            await points.compact()

async def main():
    clock = lambda: 7
    ledger = await durable.DurableBudgetLedger.open(home / "budget" / "ledger.jsonl", clock)
    points = await durable.DurableCheckpoints.open(home / "budget" / "checkpoints.jsonl", clock)
    await ledger.set_capacity(agent, 2**62)
    async with anyio.create_task_group() as group:
        for number in range(8):
            group.start_soon(one, ledger, points, number)

anyio.run(main)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    (tmp_path / "budget").mkdir(mode=0o700)
    return tmp_path / "budget" / "ledger.jsonl"


def _point(intent_id: str) -> types.BudgetPauseCheckpoint:
    return types.BudgetPauseCheckpoint(
        intent_id=intent_id,
        agent=AGENT,
        reason="shutdown",
        requested_credits=1,
        tokens_remaining=0,
        refill_eta_ms=1,
        saved_at_ms=1,
    )


def _write(path: Path, *documents: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(one) + "\n" for one in documents))
    path.chmod(0o600)


@pytest.mark.anyio
async def test_ledger_of_version_1_is_read(path: Path) -> None:
    _write(
        path,
        {"type": "capacity_set", "agent": PLAIN, "credits_per_hour": 9, "at_ms": 10},
        {"type": "debit", "agent": PLAIN, "credits": 1, "paired_receipt": "a", "at_ms": 11, "unknown": 1},
        {"type": "snapshot", "agent": PLAIN, "capacity": 9, "tokens_remaining": 4, "last_refill_ms": 12, "at_ms": 13},
        {"type": "debit", "agent": PLAIN, "credits": 1, "paired_receipt": "b", "at_ms": 14},
    )
    ledger = await durable.DurableBudgetLedger.open(path, lambda: 15)
    assert ledger.tokens(AGENT) == 3
    # Its debits are not open reservations: no intent settles them.
    assert ledger.unsettled() == ()
    assert [one.paired_receipt for one in await ledger.recent(5)] == ["b", "a"]
    await ledger.close()


@pytest.mark.anyio
async def test_rows_have_version_1s_names_and_ours_only_where_they_say_something(path: Path) -> None:
    ledger = await durable.DurableBudgetLedger.open(path, lambda: 20)
    await ledger.set_capacity(AGENT, 9)
    await ledger.try_debit(AGENT, 1, "a")
    await ledger.settle(AGENT, "a", 2)
    await ledger.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"type": "capacity_set", "agent": PLAIN, "capacity": 9, "at_ms": 20},
        {"type": "debit", "agent": PLAIN, "credits": 1, "paired_receipt": "a", "at_ms": 20, "reserved": True},
        {"type": "debit", "agent": PLAIN, "credits": 2, "paired_receipt": "a", "at_ms": 20, "settles": True},
    ]


@pytest.mark.anyio
async def test_same_capacity_at_every_start_writes_nothing(path: Path) -> None:
    sizes = []
    for _ in range(3):
        ledger = await durable.DurableBudgetLedger.open(path, lambda: 20)
        await ledger.set_capacity(AGENT, 9)
        await ledger.close()
        sizes.append(path.stat().st_size)
    assert len(set(sizes)) == 1


@pytest.mark.anyio
async def test_compaction_keeps_what_is_reserved_owed_and_half_made(path: Path) -> None:
    now = 0
    ledger = await durable.DurableBudgetLedger.open(path, lambda: now)
    await ledger.set_capacity(AGENT, 7)
    await ledger.try_debit(AGENT, 7, "a")
    await ledger.try_debit(AGENT, 0, "z")
    now = 514_286
    await ledger.settle(AGENT, "a", 5)
    before = ledger.buckets()[AGENT.pubkey]
    assert before.owed > 0
    assert before.debt == 4
    outcome = await ledger.compact(now + 1)
    assert (outcome.dropped, outcome.snapshots) == (4, 1)
    assert len(path.read_bytes().splitlines()) == 1
    await ledger.close()
    again = await durable.DurableBudgetLedger.open(path, lambda: now)
    assert again.buckets()[AGENT.pubkey] == before
    assert [one.paired_receipt for one in again.unsettled()] == ["z"]
    inode = path.stat().st_ino
    outcome = await again.compact(now + 1)
    assert (outcome.dropped, outcome.snapshots) == (0, 0)
    assert path.stat().st_ino == inode
    assert again.buckets()[AGENT.pubkey] == before
    await again.close()


@pytest.mark.anyio
async def test_compaction_of_checkpoints_keeps_lines_of_those_that_wait(path: Path) -> None:
    points = await durable.DurableCheckpoints.open(path, lambda: 20)
    for name in "abc":
        await points.save(_point(name))
    await points.claim("b", AGENT)
    lines = path.read_bytes().splitlines()
    assert await points.compact() == 2
    assert path.read_bytes().splitlines() == [lines[0], lines[2]]
    assert await points.compact() == 0
    await points.close()


@pytest.mark.anyio
@pytest.mark.parametrize("line", ["{", '{"type":"gift"}', '{"type":"debit","credits":-1}', "[]"])
async def test_line_no_row_stops_start_and_is_named(path: Path, line: str) -> None:
    _write(path, {"type": "capacity_set", "agent": PLAIN, "capacity": 9, "at_ms": 10})
    with path.open("a") as stream:
        stream.write(line + "\n")
    with pytest.raises(errors.StoreError) as refused:
        await durable.DurableBudgetLedger.open(path, lambda: 15)
    assert refused.value.where == f"{path}:2"
    with pytest.raises(errors.StoreError):
        await durable.DurableCheckpoints.open(path, lambda: 15)


@pytest.mark.anyio
async def test_what_cannot_be_written_is_not_taken(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = await durable.DurableBudgetLedger.open(path, lambda: 20)
    points = await durable.DurableCheckpoints.open(path.with_name("checkpoints.jsonl"), lambda: 20)
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
async def test_after_kill_nothing_that_was_promised_is_missing(path: Path, lines: int) -> None:
    home = path.parent.parent
    command = [sys.executable, "-c", WRITER, str(home), AGENT.model_dump_json()]
    promised = kill_kit.promised(command, lines)
    ledger = await durable.DurableBudgetLedger.open(path, lambda: 7)
    points = await durable.DurableCheckpoints.open(home / "budget" / "checkpoints.jsonl", lambda: 7)
    balance = ledger.buckets()[AGENT.pubkey].balance
    waiting = {one.paired_receipt for one in ledger.unsettled()}
    assert promised["debit"]
    # Eight workers ran: each may have one unacknowledged operation on disk, of at most two credits.
    spent = 2 * len(promised["debit"]) + len(promised["settle"])
    assert spent <= 2**62 - balance <= spent + 8 * 2
    assert not waiting & promised["settle"]
    assert promised["debit"] - waiting <= {f"r{n}" for n in range(0, 10**6, 3)}
    active = {one.intent_id for one in points.active()}
    assert not active & promised["claim"]
    assert promised["save"] - active <= {f"r{n}" for n in range(0, 10**6, 10)}
    await ledger.close()
    await points.close()


def test_row_is_read_back_as_it_was() -> None:
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
