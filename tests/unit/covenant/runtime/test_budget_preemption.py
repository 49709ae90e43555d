"""Check the tick: the runs that it measures, the runs that it ends, and the rows that it writes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from covenant.handlers import billing
from covenant.runtime.agents import Agents
from covenant.runtime.budget_preemption import BudgetPreemption
from covenant.runtime.runner import Intent, Runners, RunResult
from covenant.settings import Projection as Settings
from covenant.stores.budget.in_memory import InMemoryBudgetLedger
from policy import errors
from policy.data import price_table
from tests import runtime_kit, server_kit
from tests.runtime_kit import Acts

pytestmark = pytest.mark.anyio

LINEAR = Settings(tick_ms=10, policy="linear", min_window_ms=1000, min_samples=3)


class Log:
    def __init__(self) -> None:
        self.rows: list[tuple[str, Mapping[str, Any]]] = []

    async def append(self, kind: str, fields: Mapping[str, Any]) -> str:
        self.rows.append((kind, fields))
        return ""


class Bench:
    """One agent with a budget of ``credits`` an hour; ``used`` is the usage of its run that the supervisor reports."""

    def __init__(self, home: Path, budget: int = 4, settings: Settings = LINEAR, runtime: str = "python3") -> None:
        entry = "" if runtime == "hermes" else "main.py"
        runtime_kit.package(home, "a", budget=budget, runtime=runtime, entry=entry)
        self.agents, self.acts, self.log = Agents(home), Acts(self._waits), Log()
        self.runners = Runners({runtime: self.acts})
        self.clock = server_kit.Clock(0)
        self.ledger = InMemoryBudgetLedger(self.clock)
        self.looks = 0
        self.used: dict[str, tuple[int | None, int]] = {}
        self.done = anyio.Event()
        self.projection = BudgetPreemption(
            self.runners,
            self.ledger,
            look=self._look,
            audit=self.log,
            key_of=lambda agent_id: billing.budget_of(agent_id).pubkey,
            prices=price_table.prices(),
            now_ms=self.clock,
            clock_ms=self.clock,
            tick=settings,
        )

    async def _waits(self, card: Any, intent: Intent) -> RunResult:
        await self.done.wait()
        return RunResult(text="done")

    async def _look(self) -> Mapping[str, tuple[int | None, int]]:
        self.looks += 1
        return self.used

    async def start(self, group: anyio.abc.TaskGroup) -> None:
        await self.agents.reload()
        agent = billing.budget_of("a")
        budget = self.agents.find("a").manifest.settlement.budget_credits_per_hour
        if budget:
            await self.ledger.set_capacity(agent, budget)
            await self.ledger.try_debit(agent, 1, "i")
        group.start_soon(lambda: self.runners.run(self.agents.find("a"), Intent("i", "x", 0), caller=runtime_kit.ALICE))
        while "i" not in self.runners.live:
            await anyio.lowlevel.checkpoint()

    async def after(self, ms: int, cpu_ms: int | None) -> list[str]:
        """Advance the clock by ``ms``, set the run's usage, tick, and return the intents that the tick ends."""
        self.clock.at_ms += ms
        self.used = {"i": (cpu_ms, 0)}
        return [live.intent_id for live in await self.projection.over()]


async def test_run_on_its_way_past_what_is_there_is_ended_once(tmp_path: Path) -> None:
    """Four credits an hour are four seconds of CPU: three in two seconds are too fast, one is not."""
    async with anyio.create_task_group() as group:
        bench = Bench(tmp_path)
        await bench.start(group)
        assert await bench.after(500, 0) == []
        assert await bench.after(500, 300) == []
        assert await bench.after(500, 600) == []
        assert await bench.after(500, 2_900) == ["i"]
        assert bench.runners.live["i"].preempted.startswith("used 3 credits")
        assert await bench.after(500, 3_900) == []
        bench.done.set()


async def test_last_credit_pays_for_its_run(tmp_path: Path) -> None:
    """Reserving its one credit empties the bucket, but the run that this credit paid for continues."""
    async with anyio.create_task_group() as group:
        bench = Bench(tmp_path, budget=1)
        await bench.start(group)
        assert bench.ledger.tokens(billing.budget_of("a")) == 0
        for used in (0, 50, 100, 150, 200):
            assert await bench.after(500, used) == []
        bench.done.set()


async def test_nobody_is_measured_who_has_no_budget(tmp_path: Path) -> None:
    async with anyio.create_task_group() as group:
        bench = Bench(tmp_path, budget=0)
        await bench.start(group)
        for _ in range(5):
            assert await bench.after(1000, 60_000) == []
        assert bench.looks == 0
        bench.done.set()


async def test_under_policy_none_nobody_is_measured_at_all(tmp_path: Path) -> None:
    """The control is the same tick under `linear`."""
    for settings, looks in ((Settings(tick_ms=1), False), (LINEAR, True)):
        async with anyio.create_task_group() as group:
            bench = Bench(tmp_path, settings=settings)
            await bench.start(group)
            group.start_soon(bench.projection.run)
            with anyio.move_on_after(60 if looks else 0.2):
                while not bench.looks:  # noqa: ASYNC110 - the task under test ticks
                    await anyio.sleep(0.001)
            assert bool(bench.looks) is looks
            group.cancel_scope.cancel()


async def test_what_instance_used_before_its_intent_is_not_intent_s(tmp_path: Path) -> None:
    async with anyio.create_task_group() as group:
        bench = Bench(tmp_path)
        await bench.start(group)
        for used in (90_000, 90_010, 90_020, 90_030):
            assert await bench.after(500, used) == []
        bench.done.set()


async def test_intent_that_instance_gave_back_is_measured_in_run_that_it_has_then(tmp_path: Path) -> None:
    """The new run counts from its own start: measuring does not wait until it has used more than the instance had."""

    async def ended(used: list[int]) -> list[bool]:
        (tmp_path / str(used[0])).mkdir()
        async with anyio.create_task_group() as group:
            bench = Bench(tmp_path / str(used[0]))
            await bench.start(group)
            said = [bool(await bench.after(1000, one)) for one in used]
            bench.done.set()
        return said

    cold = [0, *range(4000, 40_000, 4000)]
    assert any(await ended(cold)), "the control: begun cold at once"
    assert any(await ended([900_000, *cold]))


async def test_run_elsewhere_is_measured_by_clock(tmp_path: Path) -> None:
    """A minute costs one credit, so the budget is four minutes."""
    async with anyio.create_task_group() as group:
        bench = Bench(tmp_path, runtime="hermes")
        await bench.start(group)
        ended = [bool(await bench.after(45_000, None)) for _ in range(5)]
        assert ended[0] is False
        assert any(ended)
        bench.done.set()


@pytest.mark.parametrize("fails", [False, True])
async def test_end_is_written_down_either_way(tmp_path: Path, fails: bool) -> None:
    async with anyio.create_task_group() as group:
        bench = Bench(tmp_path)
        if fails:

            async def end(intent_id: str, *, reason: str, whole: bool = False) -> bool:
                raise errors.ServiceError("the supervisor ended the conversation")

            bench.acts.end = end  # type: ignore[method-assign]
        await bench.start(group)
        group.start_soon(bench.projection.run)
        with anyio.fail_after(60):
            for used in range(0, 40_000, 2_000):
                bench.clock.at_ms += 500
                bench.used = {"i": (used, 0)}
                looks = bench.looks
                while bench.looks == looks and not bench.log.rows:  # noqa: ASYNC110 - the task under test ticks
                    await anyio.sleep(0.001)
                if bench.log.rows:
                    break
        kind, row = bench.log.rows[0]
        assert (row["agent_display"], row["intent_id"]) == ("a@agent", "i")
        if fails:
            assert (kind, bench.runners.live["i"].preempted) == ("budget_preempt_failed", "")
        else:
            assert (kind, row["signal_sent"], bench.acts.ended) == ("budget_preempted", "SIGTERM", [("i", "budget")])
        group.cancel_scope.cancel()
