"""The prices that are shipped, and what no table of prices may say."""

from __future__ import annotations

from typing import Any

import pytest

from policy import budget
from policy.data import price_table

BUYS = {"cpu_ms": 1, "memory_byte_ms": 2, "wall_ms": 3, "stored_bytes": 4}


def test_short_task_of_small_agent_costs_what_version_1_took() -> None:
    prices = price_table.prices()
    hello = budget.BudgetUsage.of_peak(cpu_ms=120, memory_peak_bytes=64 << 20, wall_ms=900)
    assert prices.version == 1
    assert budget.cost(hello, prices) == budget.DISPATCH_CREDITS == 1
    assert budget.cost(budget.BudgetUsage(cpu_ms=30_000), prices) == 30
    assert budget.cost(budget.BudgetUsage(memory_byte_ms=(1 << 30) * 10_001), prices) == 2
    assert budget.cost(budget.BudgetUsage(wall_ms=120_001), prices) == 3


@pytest.mark.parametrize(("size", "paid"), [(0, 1), (1, 1), (1024, 1), (1025, 2), (10_240, 10)])
def test_record_of_memory_is_priced_as_version_1_prices_it(size: int, paid: int) -> None:
    assert budget.storage_cost(size, price_table.prices()) == paid


@pytest.mark.parametrize(
    "table",
    [
        {"version": 1},
        {"version": 1, "buys": BUYS, "more": 1},
        {"version": 1, "buys": "all"},
        {"version": 1, "buys": {**BUYS, "gpu_ms": 5}},
        {"version": 1, "buys": {**BUYS, "cpu_ms": 0}},
        {"version": 1, "buys": {**BUYS, "cpu_ms": 1.5}},
        {"version": 1, "buys": {**BUYS, "cpu_ms": True}},
        {"version": 0, "buys": BUYS},
    ],
)
def test_table_not_whole_is_refused(table: dict[str, Any]) -> None:
    with pytest.raises(price_table.PriceTableError):
        price_table.read(table)


def test_whole_table_is_read() -> None:
    assert price_table.read({"version": 2, "buys": BUYS}) == budget.Prices(2, 1, 2, 3, 4)
