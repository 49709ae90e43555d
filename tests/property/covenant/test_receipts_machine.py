"""Run random sequences of operations on the durable receipts and compare them with the ones in memory.

A restart, with the index as it was left, lost, damaged or of an earlier moment, changes no answer.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio.from_thread
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from covenant.stores.settlement import durable, in_memory, interface
from covenant.wire import types
from policy import base58, errors

PAYER = types.AgentId(display="operator@local", pubkey=base58.encode(b"\3" * 32))
KEYS = st.integers(0, 12)
SETS = st.lists(KEYS, max_size=5)


def receipt(number: int, **more: Any) -> types.SettlementReceipt:
    fields: dict[str, Any] = {"resource": "compute", "credits_consumed": number + 1, "settled_at": number % 5}
    return types.SettlementReceipt(id=f"r{number}", payer=PAYER, **{**fields, **more})


def by_id(batches: Any) -> dict[str, interface.Batch]:
    """Batches of one moment may have another order when the index was made again."""
    return {one.batch_id: one for one in batches}


class Receipts(RuleBasedStateMachine):
    """One file and its double."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "receipts" / "working.jsonl"
        self.portal_context = anyio.from_thread.start_blocking_portal()
        self.portal = self.portal_context.__enter__()
        self.model = in_memory.InMemoryReceipts()
        self.receipts = self.portal.call(durable.DurableReceipts.open, self.path)
        self.now = 0

    def teardown(self) -> None:
        self.portal.call(self.receipts.close)
        self.portal_context.__exit__(None, None, None)
        self.folder.cleanup()

    def both(self, act: Callable[[interface.Receipts], Awaitable[Any]]) -> Any:
        """Do it to both; they give the same answer or refuse with the same error."""
        answers: list[Any] = []
        for one in (self.receipts, self.model):
            try:
                answers.append(self.portal.call(act, one))
            except errors.ReceiptError as e:
                answers.append(e.message)
        assert answers[0] == answers[1]
        return answers[0]

    @rule(number=KEYS, credits_consumed=st.sampled_from([None, 99]), batch_id=st.sampled_from([None, None, "ab"]))
    def append(self, number: int, credits_consumed: int | None, batch_id: str | None) -> None:
        more = {} if credits_consumed is None else {"credits_consumed": credits_consumed}
        one = receipt(number, batch_id=batch_id, **more)
        self.both(lambda receipts: receipts.append(one))

    @rule(numbers=SETS)
    def mark(self, numbers: list[int]) -> None:
        self.both(lambda receipts: receipts.mark_batch([f"r{number}" for number in numbers]))

    @rule(which=KEYS, slot=st.integers(1, 2))
    def confirm(self, which: int, slot: int) -> None:
        known = sorted(by_id(self.portal.call(self.model.batches, 99)))
        batch_id = known[which % len(known)] if known else "ab"
        anchor = interface.Anchor("solana", "litesvm", f"sig{slot}", slot, 2**64 - 1)
        self.both(lambda receipts: receipts.mark_batch_confirmed(batch_id, anchor))

    @rule(numbers=SETS, record=st.text(max_size=9))
    def revise(self, numbers: list[int], record: str) -> None:
        self.now += 1
        changed = [receipt(number, memory_record_id=record, settled_at=3) for number in numbers]
        self.both(lambda receipts: receipts.revise(changed, now_ms=self.now))

    @rule(index=st.sampled_from(["as it is", "lost", "damaged", "killed"]))
    def restart(self, index: str) -> None:
        there, killed = self.path.with_name("index.db"), self.path.parent.with_name("killed")
        if index == "killed":
            # The files of a daemon that is gone at this moment.
            shutil.copytree(self.path.parent, killed)
        self.portal.call(self.receipts.close)
        if index == "killed":
            shutil.rmtree(self.path.parent)
            killed.rename(self.path.parent)
        elif index == "lost":
            there.unlink()
        elif index == "damaged":
            there.write_bytes(b"x" * 5000)
        self.receipts = self.portal.call(durable.DurableReceipts.open, self.path)

    @rule(limit=st.integers(-1, 14), since_ms=st.none() | st.integers(0, 6))
    def read(self, limit: int, since_ms: int | None) -> None:
        self.both(lambda receipts: receipts.recent(limit, since_ms))
        self.both(lambda receipts: receipts.recent(limit, since_ms, keep=lambda one: one.credits_consumed % 2 == 0))
        self.both(lambda receipts: receipts.unsettled(limit, keep=lambda one: one.credits_consumed % 2 == 0))

    @rule(number=KEYS)
    def prove(self, number: int) -> None:
        self.both(lambda receipts: receipts.get(f"r{number}"))
        self.both(lambda receipts: receipts.prove(f"r{number}"))

    @invariant()
    def all_is_there(self) -> None:
        everything = self.both(lambda receipts: receipts.recent(99))
        in_file = [json.loads(line)["id"] for line in self.path.read_bytes().splitlines()]
        assert [one.id for one in reversed(everything)] == in_file
        self.both(lambda receipts: receipts.unsettled(99))
        for name in ("batches", "unconfirmed"):
            ours, theirs = (by_id(self.portal.call(getattr(one, name), 99)) for one in (self.receipts, self.model))
            assert ours == theirs


Receipts.TestCase.settings = settings(
    max_examples=30, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


TestReceipts = Receipts.TestCase
