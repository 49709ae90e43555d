"""The budget tick: measure the usage of live runs, and end those that are about to exceed their agent's budget.

An accepted debit pays for its run, so an empty bucket ends no run (policy.budget.verdicts). Only the policy ``linear``
measures at all. The supervisor measures each sandbox; a run at a Hermes API is measured by the clock alone.

    SIGTERM, COVENANT_BUDGET_PREEMPT_GRACE_MS, then the sandbox is killed; a row in either case
"""

from __future__ import annotations

import errno
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import anyio

from covenant.runtime.runner import LiveIntent, Runners
from covenant.settings import Projection as Settings
from policy import budget, errors
from policy.budget import Bucket, BudgetUsage, Measured, Prices, Sample

_LOG: Final = logging.getLogger(__name__)

# Enough for the shortest window and tick; older samples say nothing about the present.
_MOST_SAMPLES: Final = 256
REASON: Final = "budget"


class PreemptionLog(Protocol):
    """The part of the audit log that the tick needs."""

    async def append(self, kind: str, fields: Mapping[str, Any]) -> str:
        """Write a row and return its id."""


class Ledger(Protocol):
    """The part of the budget ledger that the tick needs."""

    def buckets(self) -> Mapping[str, Bucket]:
        """Return every bucket by its agent's key."""


# Returns the usage of the live runs by intent: CPU time in ms, None if it is not counted, and bytes of memory.
Look = Callable[[], Awaitable[Mapping[str, tuple[int | None, int]]]]
# Returns the key of an agent's bucket.
KeyOf = Callable[[str], str]


@dataclass
class _Watched:
    """The samples of one run. Memory is integrated over time, each value until the next sample."""

    began_ms: int
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=_MOST_SAMPLES))
    _memory_byte_ms: int = 0
    # A standby instance has used CPU time before its intent, which does not count for the intent.
    _seen_ms: int | None = None
    _used_ms: int = 0

    def add(self, at_ms: int, cpu_ms: int | None, memory_bytes: int) -> None:
        last_ms = self.samples[-1].at_ms if self.samples else self.began_ms
        self._memory_byte_ms += memory_bytes * max(0, at_ms - last_ms)
        if cpu_ms is not None:
            seen_ms = cpu_ms if self._seen_ms is None else self._seen_ms
            # A counter never decreases: this is another run of the intent, started cold after the standby instance
            # returned it.
            self._used_ms += cpu_ms - seen_ms if cpu_ms >= seen_ms else cpu_ms
            self._seen_ms = cpu_ms
        self.samples.append(Sample(at_ms, BudgetUsage(self._used_ms, self._memory_byte_ms, at_ms - self.began_ms)))


class BudgetPreemption:
    """The tick. Call ``run`` in a task of the daemon's group. ``clock_ms`` is monotonic, ``now_ms`` is the buckets'
    clock."""

    def __init__(
        self,
        runners: Runners,
        ledger: Ledger,
        *,
        look: Look,
        audit: PreemptionLog,
        key_of: KeyOf,
        prices: Prices,
        now_ms: Callable[[], int],
        clock_ms: Callable[[], int],
        tick: Settings,
    ) -> None:
        self._runners, self._ledger, self._look, self._audit = runners, ledger, look, audit
        self._key_of, self._prices, self._now_ms, self._clock_ms, self._tick = key_of, prices, now_ms, clock_ms, tick
        self._watched: dict[str, _Watched] = {}

    async def run(self) -> None:
        """Tick until cancelled; after a failed measurement the next tick measures again."""
        if self._tick.policy != "linear":
            await anyio.sleep_forever()  # This policy ends no run, so none is measured.
        async with anyio.create_task_group() as group:
            while True:
                await anyio.sleep(self._tick.tick_ms / 1000)
                try:
                    for live in await self.over():
                        # The grace takes seconds; other runs are checked meanwhile.
                        group.start_soon(self._preempt, live)
                except errors.CovenantError as e:
                    _LOG.warning("what runs use cannot be measured now: %s", e)

    async def over(self) -> list[LiveIntent]:
        """Return the live runs to end now, each marked as preempted; empty if the policy ends none."""
        live = {
            intent_id: one
            for intent_id, one in self._runners.live.items()
            if one.card.manifest.settlement.budget_credits_per_hour and not one.preempted
        }
        self._watched = {intent_id: one for intent_id, one in self._watched.items() if intent_id in live}
        if not live:
            return []
        used = await self._look()
        at_ms = self._clock_ms()
        for intent_id, one in live.items():
            watched = self._watched.setdefault(intent_id, _Watched(at_ms))
            if one.card.manifest.agent.runtime == "hermes":
                watched.add(at_ms, 0, 0)
            elif intent_id in used:
                watched.add(at_ms, *used[intent_id])
        verdicts = budget.verdicts(
            [
                Measured(intent_id, self._key_of(one.card.id), tuple(self._watched[intent_id].samples))
                for intent_id, one in live.items()
            ],
            self._ledger.buckets(),
            policy=self._tick.policy,
            prices=self._prices,
            now_ms=self._now_ms(),
            min_window_ms=self._tick.min_window_ms,
            min_samples=self._tick.min_samples,
        )
        ended = []
        for verdict in verdicts:
            # The run may have ended by itself during the measurement.
            if verdict.preempt and verdict.run_id in self._runners.live:
                one = live[verdict.run_id]
                one.preempted = f"used {verdict.cost} credits, {verdict.allowance} were there for it"
                ended.append(one)
        return ended

    async def _preempt(self, live: LiveIntent) -> None:
        about = {"agent_display": f"{live.card.id}@agent", "intent_id": live.intent_id, "reason": live.preempted}
        try:
            try:
                there = await self._runners.end(live, reason=REASON)
            except errors.CovenantError as e:
                live.preempted = ""  # The run continues, and is checked again.
                _LOG.warning("intent %s could not be ended for its budget: %s", live.intent_id, e)
                await self._audit.append("budget_preempt_failed", {**about, "errno": errno.EIO})
                return
            # The supervisor's log says how it ended: by itself within its grace, or killed.
            signal = "SIGTERM" if there else "none"
            await self._audit.append("budget_preempted", {**about, "signal_sent": signal, "exit_code": None})
        except errors.StoreError as e:
            _LOG.error("the end of intent %s for its budget is not in the log: %s", live.intent_id, e)
