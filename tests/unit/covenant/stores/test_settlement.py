"""Check both kinds of receipts: stored, settled in batches, proved, confirmed and revised."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from covenant.stores.journal import Journal
from covenant.stores.settlement import durable, in_memory, interface
from covenant.wire import types
from policy import base58, errors
from policy.audit_log import receipt_tree
from tests import kill_kit

PAYER = types.AgentId(display="operator@local", pubkey=base58.encode(b"\3" * 32))
ANCHOR = interface.Anchor(chain="solana", cluster="litesvm", tx_sig="5sig", slot=9, confirmed_at=77)

WRITER = """
import sys, anyio
from pathlib import Path
from covenant.stores.settlement import durable
from covenant.wire import types
payer = types.AgentId.model_validate_json(sys.argv[2])

def say(*words):
    print(*words, flush=True)

async def one(receipts, number):
    while True:
        number += 8
        key = f"00000000-0000-4000-8000-{number:012d}"
        await receipts.append(types.SettlementReceipt(id=key, payer=payer, resource="compute",
            credits_consumed=1, settled_at=number))
        say("receipt", key)

async def batches(receipts):
    while True:
        found = await receipts.unsettled(5)
        if found:
            batch = await receipts.mark_batch([one.id for one in found])
            say("batch", batch.batch_id)

async def main():
    receipts = await durable.DurableReceipts.open(Path(sys.argv[1]))
    async with anyio.create_task_group() as group:
        for number in range(8):
            group.start_soon(one, receipts, number)
        group.start_soon(batches, receipts)

anyio.run(main)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    (tmp_path / "receipts").mkdir(mode=0o700)
    return tmp_path / "receipts" / "working.jsonl"


@pytest.fixture(params=["durable", "in_memory"])
async def receipts(request: pytest.FixtureRequest, path: Path) -> AsyncIterator[interface.Receipts]:
    made: interface.Receipts
    made = in_memory.InMemoryReceipts() if request.param == "in_memory" else await durable.DurableReceipts.open(path)
    yield made
    await made.close()


def receipt(number: int, **more: Any) -> types.SettlementReceipt:
    fields: dict[str, Any] = {"resource": "compute", "credits_consumed": number + 1, "settled_at": 100 + number}
    return types.SettlementReceipt(id=f"00000000-0000-4000-8000-{number:012d}", payer=PAYER, **{**fields, **more})


async def _fill(receipts: interface.Receipts, count: int) -> list[types.SettlementReceipt]:
    made = [receipt(number) for number in range(count)]
    for one in made:
        await receipts.append(one)
    return made


@pytest.mark.anyio
async def test_receipts_are_kept_newest_first_and_once(receipts: interface.Receipts) -> None:
    made = await _fill(receipts, 4)
    await receipts.append(made[1])
    assert list(await receipts.recent(2)) == [made[3], made[2]]
    assert list(await receipts.recent(10, since_ms=102)) == [made[3], made[2]]
    assert list(await receipts.recent(1, keep=lambda one: one.credits_consumed < 3)) == [made[1]]
    assert list(await receipts.unsettled(3)) == made[:3]
    assert list(await receipts.unsettled(3, keep=lambda one: one.credits_consumed > 2)) == made[2:]
    assert await receipts.get(made[2].id) == made[2]
    assert await receipts.get("nobody") is None
    with pytest.raises(errors.ReceiptError, match="another receipt"):
        await receipts.append(receipt(1, credits_consumed=50))
    with pytest.raises(errors.ReceiptError, match="is in a batch"):
        await receipts.append(receipt(9, batch_id="ab"))
    assert len(await receipts.recent(10)) == 4


@pytest.mark.anyio
async def test_batch_has_order_in_which_they_came_and_each_is_proved(receipts: interface.Receipts) -> None:
    made = await _fill(receipts, 5)
    batch = await receipts.mark_batch([made[n].id for n in (3, 0, 2)])
    leaves = [interface.leaf(made[n]).digest() for n in (0, 2, 3)]
    assert batch.merkle_root == receipt_tree.root(leaves).hex()
    assert batch.batch_id == receipt_tree.batch_id(receipt_tree.root(leaves)).hex()
    assert (batch.receipt_count, batch.tx_sig, batch.slot) == (3, None, None)
    for place, number in enumerate((0, 2, 3)):
        proof = await receipts.prove(made[number].id)
        assert proof is not None
        assert proof.index == place
        assert receipt_tree.verify(leaves[place], proof)
    assert await receipts.prove(made[1].id) is None
    assert await receipts.prove("nobody") is None
    settled = await receipts.get(made[3].id)
    assert settled is not None
    assert settled == made[3].model_copy(update={"batch_id": batch.batch_id, "merkle_root": batch.merkle_root})
    assert list(await receipts.unsettled(9)) == [made[1], made[4]]
    # Appending the original receipt again changes nothing.
    await receipts.append(made[3])


@pytest.mark.anyio
async def test_no_receipt_is_in_two_batches(receipts: interface.Receipts) -> None:
    made = await _fill(receipts, 3)
    await receipts.mark_batch([made[0].id])
    for ids in ([made[0].id], [made[1].id, made[0].id], [made[1].id, made[1].id], ["nobody"], []):
        with pytest.raises(errors.ReceiptError):
            await receipts.mark_batch(ids)
    assert len(await receipts.batches(9)) == 1
    assert list(await receipts.unsettled(9)) == made[1:]
    outcomes = []

    async def race() -> None:
        try:
            await receipts.mark_batch([made[1].id, made[2].id])
            outcomes.append("made")
        except errors.ReceiptError:
            outcomes.append("refused")

    async with anyio.create_task_group() as group:
        for _ in range(8):
            group.start_soon(race)
    assert sorted(outcomes) == ["made"] + ["refused"] * 7


@pytest.mark.anyio
async def test_batch_is_confirmed_by_one_transaction(receipts: interface.Receipts) -> None:
    made = await _fill(receipts, 3)
    batch = await receipts.mark_batch([made[0].id, made[1].id])
    with pytest.raises(errors.ReceiptError, match="no batch"):
        await receipts.mark_batch_confirmed("ab", ANCHOR)
    assert await receipts.mark_batch_confirmed(batch.batch_id, ANCHOR) == 2
    assert await receipts.mark_batch_confirmed(batch.batch_id, ANCHOR) == 0
    other = interface.Anchor(chain="solana", cluster="litesvm", tx_sig="other", slot=9, confirmed_at=77)
    with pytest.raises(errors.ReceiptError, match="another transaction"):
        await receipts.mark_batch_confirmed(batch.batch_id, other)
    settled = await receipts.get(made[1].id)
    assert settled is not None
    assert (settled.chain, settled.cluster, settled.slot, settled.confirmed_at) == ("solana", "litesvm", 9, 77)
    assert settled.tx_sig == settled.onchain_sig == "5sig"
    assert await receipts.prove(made[1].id) is not None
    second = await receipts.mark_batch([made[2].id])
    found = await receipts.batches(9)
    assert [one.batch_id for one in found] == [second.batch_id, batch.batch_id]
    assert [(one.receipt_count, one.tx_sig, one.slot) for one in found] == [(1, None, None), (2, "5sig", 9)]
    assert len(await receipts.batches(1)) == 1
    assert list(await receipts.unconfirmed(9)) == [second]


@pytest.mark.anyio
async def test_only_what_is_open_is_revised(receipts: interface.Receipts) -> None:
    made = await _fill(receipts, 3)
    await receipts.mark_batch([made[0].id])
    changed = made[1].model_copy(update={"memory_record_id": "m"})
    await receipts.revise([changed], now_ms=5)
    assert await receipts.get(made[1].id) == changed
    assert list(await receipts.unsettled(9)) == [changed, made[2]]
    for wrong in (made[0], receipt(8), made[2].model_copy(update={"batch_id": "ab"})):
        with pytest.raises(errors.ReceiptError, match="cannot change"):
            await receipts.revise([made[2], wrong], now_ms=6)
    await receipts.revise([], now_ms=7)
    assert list(await receipts.unsettled(9)) == [changed, made[2]]


@pytest.mark.anyio
async def test_what_was_revised_has_copy_to_go_back_to(path: Path) -> None:
    receipts = await durable.DurableReceipts.open(path)
    made = await _fill(receipts, 2)
    before = path.read_bytes()
    await receipts.revise([made[0].model_copy(update={"memory_record_id": "m"})], now_ms=5)
    copy = receipts.copy_path(5)
    assert copy == f"{path}.rollback-5"
    assert Path(copy).read_bytes() == before
    assert Path(copy).stat().st_mode & 0o777 == 0o600
    with pytest.raises(errors.StoreError, match="no copy"):
        await receipts.revise([made[0]], now_ms=5)
    await receipts.append(receipt(5))
    await receipts.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [one.get("memory_record_id") for one in lines] == ["m", None, None]


@pytest.mark.anyio
async def test_start_finds_batches_and_what_is_open(path: Path) -> None:
    receipts = await durable.DurableReceipts.open(path)
    made = await _fill(receipts, 6)
    first = await receipts.mark_batch([made[n].id for n in (4, 1)])
    await receipts.mark_batch([made[3].id])
    await receipts.mark_batch_confirmed(first.batch_id, ANCHOR)
    before = {one.batch_id: one for one in await receipts.batches(9)}
    await receipts.close()
    again = await durable.DurableReceipts.open(path)
    assert {one.batch_id: one for one in await again.batches(9)} == before
    assert list(await again.unsettled(9)) == [made[0], made[2], made[5]]
    proof = await again.prove(made[4].id)
    assert proof is not None
    assert receipt_tree.verify(interface.leaf(made[4]).digest(), proof)
    await again.close()


@pytest.mark.anyio
async def test_receipt_that_was_changed_in_file_is_found_by_its_root(path: Path) -> None:
    receipts = await durable.DurableReceipts.open(path)
    made = await _fill(receipts, 3)
    await receipts.mark_batch([one.id for one in made])
    await receipts.close()
    raw = path.read_text()
    assert '"credits_consumed":2' in raw
    path.write_text(raw.replace('"credits_consumed":2', '"credits_consumed":1'))
    again = await durable.DurableReceipts.open(path)
    for one in made:
        with pytest.raises(errors.ReceiptError, match="do not make its root"):
            await again.prove(one.id)
    await again.close()


@pytest.mark.anyio
async def test_lines_are_version_1s(path: Path) -> None:
    receipts = await durable.DurableReceipts.open(path)
    await receipts.append(receipt(0))
    await receipts.append(receipt(1, resource="memory", memory_record_id="m"))
    await receipts.close()
    names = ["id", "payer", "resource", "credits_consumed", "settled_at", "chain", "cluster", "batch_id"]
    names += ["merkle_root", "tx_sig", "slot", "confirmed_at", "onchain_sig"]
    plain, of_memory = (json.loads(line) for line in path.read_text().splitlines())
    assert list(plain) == names
    assert sorted(of_memory) == sorted([*names, "memory_record_id"])
    assert plain["tx_sig"] is None
    assert plain["payer"] == {"display": PAYER.display, "pubkey": PAYER.pubkey}


@pytest.mark.anyio
@pytest.mark.parametrize("twice", [False, True])
async def test_file_that_cannot_be_told_stops_start(path: Path, twice: bool) -> None:
    receipts = await durable.DurableReceipts.open(path)
    await _fill(receipts, 2)
    await receipts.close()
    with path.open("ab") as stream:
        stream.write(path.read_bytes().splitlines()[0] + b"\n" if twice else b'{"id":1}\n')
    with pytest.raises(errors.StoreError) as refused:
        await durable.DurableReceipts.open(path)
    assert refused.value.where == f"{path}:3"


@pytest.mark.anyio
async def test_what_cannot_be_written_did_not_happen(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    receipts = await durable.DurableReceipts.open(path)
    made = await _fill(receipts, 2)
    batch = await receipts.mark_batch([made[0].id])

    async def full(self: Journal, lines: object) -> None:
        raise errors.StoreFullError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "append", full)
        patched.setattr(Journal, "change", full)
        with pytest.raises(errors.StoreFullError):
            await receipts.append(receipt(7))
        with pytest.raises(errors.StoreFullError):
            await receipts.mark_batch([made[1].id])
        with pytest.raises(errors.StoreFullError):
            await receipts.mark_batch_confirmed(batch.batch_id, ANCHOR)
    assert await receipts.get(receipt(7).id) is None
    assert list(await receipts.unsettled(9)) == [made[1]]
    assert list(await receipts.batches(9)) == [batch]
    await receipts.append(receipt(7))
    await receipts.close()


@pytest.mark.anyio
async def test_receipts_that_come_together_have_one_order(path: Path) -> None:
    receipts = await durable.DurableReceipts.open(path)
    async with anyio.create_task_group() as group:
        for number in range(100):
            group.start_soon(receipts.append, receipt(number))
    in_file = [json.loads(line)["id"] for line in path.read_text().splitlines()]
    assert [one.id for one in reversed(await receipts.recent(100))] == in_file
    batch = await receipts.mark_batch([one.id for one in await receipts.unsettled(100)])
    await receipts.close()
    again = await durable.DurableReceipts.open(path)
    assert list(await again.batches(2)) == [batch]
    assert await again.prove(in_file[40]) is not None
    await again.close()


@pytest.mark.anyio
@pytest.mark.parametrize("lines", [2, 30, 120])
async def test_after_kill_every_receipt_and_batch_that_was_promised_is_there(path: Path, lines: int) -> None:
    command = [sys.executable, "-c", WRITER, str(path), PAYER.model_dump_json()]
    promised = kill_kit.promised(command, lines)
    receipts = await durable.DurableReceipts.open(path)
    there = await receipts.recent(10**6)
    assert promised["receipt"]
    assert promised["receipt"] <= {one.id for one in there}
    assert promised["batch"] <= {one.batch_id for one in await receipts.batches(10**6)}
    for one in there:
        proof = await receipts.prove(one.id)
        assert (proof is None) == (one.batch_id is None)
        assert proof is None or receipt_tree.verify(interface.leaf(one).digest(), proof)
    await receipts.close()
