"""Check the contract of both ledgers and both kinds of checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from covenant.stores.budget import durable, in_memory, interface, rows, state
from covenant.wire import types
from policy import base58, budget, errors

HOUR = 3_600_000


def agent(name: str = "hello") -> types.AgentId:
    return types.AgentId(display=f"{name}@agent", pubkey=base58.encode(name.encode().ljust(32, b"\1")))


class Clock:
    def __init__(self) -> None:
        self.ms = 1_000_000

    def __call__(self) -> int:
        return self.ms


@dataclasses.dataclass
class Place:
    """One kind of ledger and of checkpoints, their clock, and a restart."""

    clock: Clock
    ledger: interface.BudgetLedger
    checkpoints: interface.Checkpoints
    again: Callable[[], Any] | None = None


@pytest.fixture(params=["durable", "in_memory"])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    clock = Clock()
    if request.param == "in_memory":
        yield Place(clock, in_memory.InMemoryBudgetLedger(clock), in_memory.InMemoryCheckpoints(clock))
        return
    tmp_path.chmod(0o700)
    budget_files = tmp_path / "budget"
    place = Place(
        clock,
        await durable.DurableBudgetLedger.open(budget_files / "ledger.jsonl", clock),
        await durable.DurableCheckpoints.open(budget_files / "checkpoints.jsonl", clock),
    )
    yield place
    await place.ledger.close()
    await place.checkpoints.close()


@pytest.mark.anyio
async def test_new_bucket_is_full_and_same_capacity_again_is_nothing(place: Place) -> None:
    assert place.ledger.tokens(agent()) is None
    assert await place.ledger.set_capacity(agent(), 10)
    assert place.ledger.tokens(agent()) == 10
    await place.ledger.try_debit(agent(), 4, "r")
    assert not await place.ledger.set_capacity(agent(), 10)
    assert place.ledger.tokens(agent()) == 6
    assert await place.ledger.set_capacity(agent(), 5)
    assert place.ledger.tokens(agent()) == 5
    assert await place.ledger.set_capacity(agent(), 50)
    assert place.ledger.tokens(agent()) == 5


@pytest.mark.anyio
async def test_debit_is_refused_where_there_is_no_bucket_or_not_enough(place: Place) -> None:
    with pytest.raises(errors.BudgetUnseededError):
        await place.ledger.try_debit(agent(), 1, "r")
    await place.ledger.set_capacity(agent(), 2)
    await place.ledger.try_debit(agent(), 2, "r")
    with pytest.raises(errors.BudgetExhaustedError) as refused:
        await place.ledger.try_debit(agent(), 1, "s")
    assert refused.value.details == {"tokens_remaining": 0, "refill_eta_ms": place.clock.ms + HOUR // 2}
    place.clock.ms += HOUR // 2 - 1
    with pytest.raises(errors.BudgetExhaustedError):
        await place.ledger.try_debit(agent(), 1, "s")
    place.clock.ms += 1
    taken = await place.ledger.try_debit(agent(), 1, "s")
    assert taken == types.BudgetDebit(agent=agent(), credits=1, paired_receipt="s", at_ms=place.clock.ms)
    with pytest.raises(errors.BudgetExhaustedError, match="3 needed") as never:
        await place.ledger.try_debit(agent(), 3, "t")
    assert never.value.details["refill_eta_ms"] == budget.U64_MAX
    assert "never" in never.value.hint


@pytest.mark.anyio
async def test_two_hundred_that_race_never_overdraw(place: Place) -> None:
    await place.ledger.set_capacity(agent(), 73)
    outcomes: list[bool] = []

    async def race(number: int) -> None:
        await anyio.sleep(0.0001 * (number % 7))
        try:
            await place.ledger.try_debit(agent(), 1, f"r{number}")
            outcomes.append(True)
        except errors.BudgetExhaustedError:
            outcomes.append(False)

    async with anyio.create_task_group() as group:
        for number in range(200):
            group.start_soon(race, number)
    assert (outcomes.count(True), len(outcomes)) == (73, 200)
    assert place.ledger.buckets()[agent().pubkey].balance == 0
    assert len(place.ledger.unsettled()) == 73


@pytest.mark.anyio
async def test_buckets_of_agents_are_apart_by_key_and_not_by_name(place: Place) -> None:
    await place.ledger.set_capacity(agent("a"), 1)
    await place.ledger.set_capacity(agent("b"), 1)
    await place.ledger.try_debit(agent("a"), 1, "r")
    assert place.ledger.tokens(agent("b")) == 1
    renamed = types.AgentId(display="other@agent", pubkey=agent("a").pubkey)
    assert place.ledger.tokens(renamed) == 0


@pytest.mark.anyio
async def test_measured_rest_is_taken_once_and_may_leave_debt(place: Place) -> None:
    await place.ledger.set_capacity(agent(), 2)
    await place.ledger.try_debit(agent(), 1, "r")
    with pytest.raises(errors.ReservationError):
        await place.ledger.try_debit(agent(), 1, "r")
    with pytest.raises(errors.ReservationError):
        await place.ledger.settle(agent("other"), "r", 1)
    settled = await place.ledger.settle(agent(), "r", 4)
    assert settled.credits == 4
    assert place.ledger.tokens(agent()) == 0
    assert place.ledger.buckets()[agent().pubkey].debt == 3
    assert place.ledger.unsettled() == ()
    with pytest.raises(errors.ReservationError):
        await place.ledger.settle(agent(), "r", 1)
    with pytest.raises(errors.BudgetExhaustedError) as refused:
        await place.ledger.try_debit(agent(), 1, "s")
    # Three credits to pay the debt and one to spend, at two an hour.
    assert refused.value.details["refill_eta_ms"] == place.clock.ms + 2 * HOUR
    place.clock.ms += 2 * HOUR
    await place.ledger.try_debit(agent(), 1, "s")
    assert (await place.ledger.settle(agent(), "s", 0)).credits == 0
    assert [one.credits for one in await place.ledger.recent(10)] == [1, 4, 1]


@pytest.mark.anyio
async def test_what_comes_back_of_run_that_never_began_is_there_again(place: Place) -> None:
    await place.ledger.set_capacity(agent(), 3)
    await place.ledger.try_debit(agent(), 2, "r")
    await place.ledger.try_debit(agent(), 1, "s")
    assert await place.ledger.refund(agent(), "r") == 2
    assert place.ledger.tokens(agent()) == 2
    assert [one.paired_receipt for one in await place.ledger.recent(9)] == ["s"]
    await place.ledger.refund(agent(), "s")
    with pytest.raises(errors.ReservationError):
        await place.ledger.refund(agent(), "r")
    await place.ledger.try_debit(agent(), 1, "r")


@pytest.mark.anyio
async def test_clock_set_back_makes_no_time_pass_twice(place: Place) -> None:
    await place.ledger.set_capacity(agent(), 1)
    await place.ledger.try_debit(agent(), 1, "r")
    place.clock.ms -= HOUR
    assert place.ledger.tokens(agent()) == 0
    with pytest.raises(errors.BudgetExhaustedError) as refused:
        await place.ledger.try_debit(agent(), 1, "s")
    assert refused.value.details["refill_eta_ms"] == 1_000_000 + HOUR
    # Rows are in the order of their times, by which a compaction cuts.
    assert (await place.ledger.settle(agent(), "r", 0)).at_ms == 1_000_000
    place.clock.ms += HOUR
    assert place.ledger.tokens(agent()) == 0


@pytest.mark.anyio
async def test_recent_debits_are_newest_first(place: Place) -> None:
    await place.ledger.set_capacity(agent(), 10)
    for number in range(5):
        await place.ledger.try_debit(agent(), 1, f"r{number}")
    assert [one.paired_receipt for one in await place.ledger.recent(2)] == ["r4", "r3"]
    assert len(await place.ledger.recent(100)) == 5
    assert await place.ledger.recent(0) == ()


@pytest.mark.anyio
async def test_debits_can_be_asked_for_by_whose_they_are(place: Place) -> None:
    await place.ledger.set_capacity(agent(), 10)
    for name, who in (("mine", agent("ada")), ("other", agent("eve")), ("nobody", None)):
        await place.ledger.try_debit(agent(), 1, name, submitter=who)
        await place.ledger.settle(agent(), name, 2)
    mine = await place.ledger.recent(9, of=agent("ada").pubkey)
    assert [(one.paired_receipt, one.credits) for one in mine] == [("mine", 2), ("mine", 1)]
    assert len(await place.ledger.recent(9, of=agent().pubkey)) == len(await place.ledger.recent(9)) == 6
    assert await place.ledger.recent(9, of=agent("bob").pubkey) == ()


def test_rest_of_older_file_is_that_of_who_reserved() -> None:
    found = state.LedgerState()
    row = rows.Debit(agent=agent(), credits=1, paired_receipt="r", at_ms=1, reserved=True, submitter=agent("ada"))
    found.apply(row)
    found.apply(rows.Debit(agent=agent(), credits=2, paired_receipt="r", at_ms=2, settles=True))
    assert [one.submitter for one in found.debits] == [agent("ada")] * 2


@pytest.mark.anyio
async def test_compaction_drops_old_debits_and_changes_no_bucket(place: Place) -> None:
    await place.ledger.set_capacity(agent(), 10)
    await place.ledger.try_debit(agent(), 3, "old")
    place.clock.ms += 1000
    await place.ledger.try_debit(agent(), 2, "new")
    outcome = await place.ledger.compact(place.clock.ms)
    assert outcome.dropped >= 1
    assert outcome.snapshots == 1
    assert [one.paired_receipt for one in await place.ledger.recent(10)] == ["new"]
    assert place.ledger.tokens(agent()) == 5
    await place.ledger.settle(agent(), "old", 1)
    assert place.ledger.tokens(agent()) == 4


class Held:
    """Holds a store's write until the test releases it, then refuses it or lets it through."""

    def __init__(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refuses = False
        self.calls = 0
        self.gate = anyio.Event()
        self._real = store._keep
        monkeypatch.setattr(store, "_keep", self.keep)

    async def keep(self, row: Any) -> None:
        self.calls += 1
        await self.gate.wait()
        if self.refuses:
            self.refuses = False
            raise errors.StoreFullError("no room")
        await self._real(row)


async def _twice(act: Callable[[], Any], held: Held, *, refused: bool) -> list[object]:
    """Make the same request twice while the first one's row is held, then kept or refused; return both results."""
    heard: list[object] = []

    async def one() -> None:
        try:
            heard.append(await act())
        except errors.StoreFullError:
            heard.append("refused")

    async with anyio.create_task_group() as group:
        group.start_soon(one)
        await anyio.wait_all_tasks_blocked()
        group.start_soon(one)
        await anyio.wait_all_tasks_blocked()
        assert heard == []
        held.refuses = refused
        held.gate.set()
    return heard


@pytest.mark.anyio
async def test_nobody_hears_of_capacity_that_may_be_taken_back(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(place.ledger, monkeypatch)
    assert await _twice(lambda: place.ledger.set_capacity(agent(), 7), held, refused=False) == [True, False]
    assert held.calls == 1
    held.gate = anyio.Event()
    assert await _twice(lambda: place.ledger.set_capacity(agent("b"), 7), held, refused=True) == ["refused", True]
    assert (held.calls, place.ledger.tokens(agent("b"))) == (3, 7)


async def _after_a_refusal(first: Callable[[], Any], second: Callable[[], Any], held: Held) -> list[str]:
    """Call ``second`` while the row of ``first`` is held and then refused; return the code of its refusal."""
    heard: list[str] = []

    async def asks_first() -> None:
        with pytest.raises(errors.StoreFullError):
            await first()

    async def asks_second() -> None:
        try:
            await second()
        except errors.CovenantError as e:
            heard.append(e.code)

    async with anyio.create_task_group() as group:
        group.start_soon(asks_first)
        await anyio.wait_all_tasks_blocked()
        group.start_soon(asks_second)
        await anyio.wait_all_tasks_blocked()
        held.refuses = True
        held.gate.set()
    return heard


@pytest.mark.anyio
async def test_nothing_is_taken_under_capacity_that_may_be_taken_back(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = place.ledger
    seed, debit = lambda: ledger.set_capacity(agent(), 7), lambda: ledger.try_debit(agent(), 1, "r")
    found = await _after_a_refusal(seed, debit, Held(ledger, monkeypatch))
    assert found == [errors.BudgetUnseededError.code]


@pytest.mark.anyio
async def test_nobody_hears_of_checkpoint_that_may_be_taken_back(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(place.checkpoints, monkeypatch)
    assert await _twice(lambda: place.checkpoints.save(checkpoint("i")), held, refused=False) == [None, None]
    assert held.calls == 1
    held.gate = anyio.Event()
    assert await _twice(lambda: place.checkpoints.save(checkpoint("j")), held, refused=True) == ["refused", None]
    assert (held.calls, len(place.checkpoints.active())) == (3, 2)


@pytest.mark.anyio
async def test_checkpoint_that_may_be_taken_back_is_nobodys_yet(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    points = place.checkpoints
    save, claim = lambda: points.save(checkpoint()), lambda: points.claim("i", agent())
    found = await _after_a_refusal(save, claim, Held(points, monkeypatch))
    assert found == [errors.NoCheckpointError.code]


def checkpoint(intent_id: str = "i", name: str = "hello", **more: Any) -> types.BudgetPauseCheckpoint:
    return types.BudgetPauseCheckpoint(
        intent_id=intent_id,
        agent=agent(name),
        reason="budget_exhausted",
        requested_credits=1,
        tokens_remaining=0,
        refill_eta_ms=5,
        saved_at_ms=4,
        **more,
    )


@pytest.mark.anyio
async def test_checkpoint_is_used_once(place: Place) -> None:
    await place.checkpoints.save(checkpoint(resume_state={"intent_text": "/etc is a path", "retries": [1, "x/y"]}))
    await place.checkpoints.save(checkpoint("j"))
    with pytest.raises(errors.NoCheckpointError):
        await place.checkpoints.claim("i", agent("other"))
    claimed = await place.checkpoints.claim("i", agent())
    assert claimed.resume_state["retries"] == [1, "x/y"]
    with pytest.raises(errors.NoCheckpointError):
        await place.checkpoints.claim("i", agent())
    assert [one.intent_id for one in place.checkpoints.active()] == ["j"]
    await place.checkpoints.save(checkpoint("i"))
    assert (await place.checkpoints.claim("i", agent())).resume_state == {}


@pytest.mark.anyio
async def test_of_many_that_claim_checkpoint_one_gets_it(place: Place) -> None:
    await place.checkpoints.save(checkpoint())
    won = []

    async def race() -> None:
        with contextlib.suppress(errors.NoCheckpointError):
            won.append(await place.checkpoints.claim("i", agent()))

    async with anyio.create_task_group() as group:
        for _ in range(50):
            group.start_soon(race)
    assert won == [checkpoint()]


@pytest.mark.anyio
async def test_one_checkpoint_is_active_for_intent_and_agent(place: Place) -> None:
    await place.checkpoints.save(checkpoint())
    await place.checkpoints.save(checkpoint())
    with pytest.raises(errors.CheckpointError, match="waits already"):
        await place.checkpoints.save(checkpoint(resume_state={"more": 1}))
    await place.checkpoints.save(checkpoint(name="another"))
    assert len(place.checkpoints.active()) == 2


@pytest.mark.anyio
@pytest.mark.parametrize(
    "state",
    [
        {"file": "/home/me/x"},
        {"deep": [{"at": "~/x"}]},
        {"file": "C:\\x"},
        {"file": "\\\\server\\share\\x"},
        {"file": "file:///etc"},
        {"/etc": 1},
        {"inner": {"intent_text": "/etc"}},
    ],
)
async def test_checkpoint_with_path_of_this_machine_is_refused(place: Place, state: dict[str, Any]) -> None:
    with pytest.raises(errors.CheckpointError, match="path of this machine"):
        await place.checkpoints.save(checkpoint(resume_state=state))
    assert place.checkpoints.active() == ()


@pytest.mark.anyio
async def test_state_nested_without_end_is_refused(place: Place) -> None:
    state: dict[str, Any] = {}
    for _ in range(40):
        state = {"in": state}
    with pytest.raises(errors.CheckpointError, match="deep"):
        await place.checkpoints.save(checkpoint(resume_state=state))


@pytest.mark.anyio
async def test_what_was_claimed_goes_with_compaction(place: Place) -> None:
    for name in "abc":
        await place.checkpoints.save(checkpoint(name))
    await place.checkpoints.claim("b", agent())
    await place.checkpoints.compact()
    assert [one.intent_id for one in place.checkpoints.active()] == ["a", "c"]


@pytest.mark.anyio
async def test_both_ledgers_come_to_same(tmp_path: Path) -> None:
    """Both ledgers run the same long random sequence; the durable one also restarts and compacts in between."""
    tmp_path.chmod(0o700)
    path = tmp_path / "budget" / "ledger.jsonl"
    clock, chance = Clock(), random.Random(44)
    plain = in_memory.InMemoryBudgetLedger(clock)
    kept = await durable.DurableBudgetLedger.open(path, clock)
    for step in range(400):
        clock.ms += chance.choice([-500, 0, 1, 777, 60_000])
        who = agent(chance.choice("ab"))
        act, amount = chance.choice(["debit"] * 5 + ["settle"] * 3 + ["refund", "capacity"]), chance.randrange(4)
        waiting = [one for one in plain.unsettled() if one.agent == who]
        for ledger in (plain, kept):
            try:
                if act == "capacity":
                    await ledger.set_capacity(who, 20 + amount)
                elif act == "debit":
                    await ledger.try_debit(who, amount, f"r{step}", submitter=agent("x") if amount % 2 else None)
                elif waiting and act == "settle":
                    await ledger.settle(who, waiting[0].paired_receipt, amount)
                elif waiting:
                    await ledger.refund(who, waiting[0].paired_receipt)
            except (errors.BudgetExhaustedError, errors.BudgetUnseededError):
                pass
        if step % 50 == 49:
            await kept.compact(clock.ms - 20_000)
            await kept.close()
            kept = await durable.DurableBudgetLedger.open(path, clock)
        assert kept.buckets() == plain.buckets()
        assert set(kept.unsettled()) == set(plain.unsettled())
    await kept.close()
