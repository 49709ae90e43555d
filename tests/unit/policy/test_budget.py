"""Credits by hand: each bound at its own edge, and verdicts whose every number was worked out on paper."""

from __future__ import annotations

import pytest
from msgspec import structs

from policy import budget
from policy.budget import Bucket, BudgetUsage, BudgetVerdict, Exhausted, Measured, Prices, Sample

# Ten milliseconds of processor are a credit, and one credit has ten parts; what else is used costs more than any has.
PRICES = Prices(version=1, cpu_ms=10, memory_byte_ms=1, wall_ms=1, stored_bytes=1024)


def test_bucket_has_tokens_or_debt() -> None:
    assert budget.U64_MAX == 18_446_744_073_709_551_615
    assert [(b.tokens, b.debt) for b in (Bucket(9, 5, 0), Bucket(9, 0, 0), Bucket(9, -3, 0))] == [
        (5, 0),
        (0, 0),
        (0, 3),
    ]


@pytest.mark.parametrize(
    ("bucket", "now_ms", "after"),
    [
        (Bucket(10, 10, 5, 3), 5, Bucket(10, 10, 5, 3)),
        (Bucket(10, 10, 0, 7), 100, Bucket(10, 10, 100, 0)),
        (Bucket(3600, 0, 0), 999, Bucket(3600, 0, 0)),
        (Bucket(3600, 0, 0), 1000, Bucket(3600, 1, 1000)),
        (Bucket(3600, 0, 0), 1500, Bucket(3600, 1, 1000)),
        (Bucket(7, 0, 0), 600_000, Bucket(7, 1, 514_285, 5)),
        # Just full keeps no time in hand.
        (Bucket(3600, 3599, 0, 1), 1001, Bucket(3600, 3600, 1001)),
        (Bucket(3600, -2, 0), 3000, Bucket(3600, 1, 3000)),
    ],
)
def test_bucket_refills_by_whole_tokens(bucket: Bucket, now_ms: int, after: Bucket) -> None:
    assert budget.refill(bucket, now_ms) == after


@pytest.mark.parametrize(
    ("bucket", "amount", "now_ms", "eta_ms"),
    [
        (Bucket(10, 5, 0, 9), 5, 0, 0),
        (Bucket(10, 5, 0), 6, 0, 360_000),
        (Bucket(10, 5, 0), 6, 359_999, 360_000),
        (Bucket(10, 5, 0, 1), 6, 0, 360_001),
        (Bucket(10, 5, 0), 10, 0, 1_800_000),
        (Bucket(10, 5, 0), 11, 0, budget.U64_MAX),
        (Bucket(0, -1, 0), 0, 0, budget.U64_MAX),
        (Bucket(1, 0, budget.U64_MAX - 1), 1, budget.U64_MAX - 1, budget.U64_MAX),
    ],
)
def test_when_there_is_enough(bucket: Bucket, amount: int, now_ms: int, eta_ms: int) -> None:
    assert budget.refill_eta_ms(bucket, amount, now_ms) == eta_ms


@pytest.mark.parametrize(
    ("left_ms", "words"),
    [
        (-1, "in 0 s"),
        (1, "in 1 s"),
        (120_000, "in 120 s"),
        (120_001, "in 3 min"),
        (1_800_000, "in 30 min"),
        (7_200_001, "in 3 h"),
        (172_800_000, "in 48 h"),
        (172_800_001, "in 3 days"),
        (budget.U64_MAX - 10_000_000, "never"),
    ],
)
def test_wait_is_told_in_words(left_ms: int, words: str) -> None:
    assert budget.wait_in_words(10_000_000 + left_ms, 10_000_000) == words


def test_what_is_taken_owed_and_given_back() -> None:
    bucket = Bucket(10, 5, 0)
    assert budget.debit(bucket, 5, 0) == Bucket(10, 0, 0)
    assert budget.debit(bucket, 6, 0) == Exhausted(5, 360_000)
    assert budget.debit(Bucket(10, -2, 0), 1, 0) == Exhausted(0, 1_080_000)
    assert budget.charge(bucket, 7, 0) == Bucket(10, -2, 0)
    assert budget.charge(bucket, 2**70, 0).balance == -budget.U64_MAX
    assert budget.give_back(bucket, 4, 0) == Bucket(10, 9, 0)
    assert budget.give_back(bucket, 6, 0) == Bucket(10, 10, 0)


def test_another_capacity_keeps_what_was_earned_at_old_one() -> None:
    bucket = Bucket(10, 5, 0)
    assert budget.set_capacity(bucket, 4, 100) == Bucket(4, 4, 100)
    assert budget.set_capacity(bucket, 20, 720_000) == Bucket(20, 7, 720_000)
    assert budget.set_capacity(Bucket(10, 5, 500), 20, 100) == Bucket(20, 5, 500)
    assert budget.set_capacity(None, 3, 9) == Bucket(3, 3, 9)


def test_what_run_and_record_cost() -> None:
    assert BudgetUsage() == BudgetUsage(0, 0, 0)
    assert BudgetUsage.of_peak(cpu_ms=3, memory_peak_bytes=5, wall_ms=7) == BudgetUsage(3, 35, 7)
    assert budget.parts_used(BudgetUsage(3, 5, 7), Prices(1, 2, 11, 13, 1)) == 3 * 11 * 13 + 5 * 2 * 13 + 7 * 2 * 11
    assert [budget.cost(BudgetUsage(cpu_ms=used), PRICES) for used in (0, 1, 10, 11, 20)] == [1, 1, 1, 2, 2]
    assert budget.cost(BudgetUsage(cpu_ms=2**80), PRICES) == budget.U64_MAX
    assert [budget.storage_cost(size, PRICES) for size in (0, 1, 1024, 1025)] == [1, 1, 1, 2]


@pytest.mark.parametrize(
    ("policy", "debit", "remaining", "window_ms", "samples", "flagged"),
    [
        ("none", 5, 5, 0, 0, False),
        ("none", 6, 5, 0, 0, True),
        ("none", 1, 0, 0, 0, True),
        ("none", 0, -1, 0, 0, False),
        ("linear", 5, 10, 10, 2, False),
        ("linear", 5, 9, 10, 2, True),
        ("linear", 5, 9, 9, 2, False),
        ("linear", 5, 9, 10, 1, False),
        ("linear", 1, 1, 10, 2, True),
        ("linear", 0, -1, 10, 2, False),
    ],
)
def test_what_is_on_its_way_past_what_there_was(
    policy: budget.Policy, debit: int, remaining: int, window_ms: int, samples: int, flagged: bool
) -> None:
    found = budget.project_overshoot(
        policy, debit=debit, remaining=remaining, window_ms=window_ms, samples=samples, min_window_ms=10, min_samples=2
    )
    assert found is flagged


def _run(*used: tuple[int, int], name: str = "r", reserved: int = 1) -> Measured:
    return Measured(name, "a", tuple(Sample(at, BudgetUsage(cpu_ms=cpu)) for at, cpu in used), reserved)


def _said(
    *runs: Measured, balance: int = 5, policy: budget.Policy = "linear", window_ms: int = 10, samples: int = 2
) -> list[tuple[bool, int, int, int]]:
    found = budget.verdicts(
        runs,
        {"a": Bucket(100, balance, 0)},
        policy=policy,
        prices=PRICES,
        now_ms=0,
        min_window_ms=window_ms,
        min_samples=samples,
    )
    assert [(one.run_id, one.agent) for one in found] == [(run.run_id, "a") for run in runs]
    return [(one.preempt, one.cost, one.projected, one.allowance) for one in found]


def test_run_is_ended_when_next_window_would_be_over() -> None:
    assert _said(_run((0, 0), (10, 30))) == [(False, 3, 6, 6)]
    assert _said(_run((0, 0), (10, 31))) == [(True, 4, 7, 6)]
    assert _said(_run((0, 0), (10, 31)), policy="none") == [(False, 4, 7, 6)]
    assert _said(_run((0, 20), (10, 40))) == [(False, 4, 6, 6)]
    assert _said(_run((0, 20), (10, 41))) == [(True, 5, 7, 6)]
    assert _said(_run((5, 0), (14, 31))) == [(False, 4, 7, 6)]  # a window too short
    assert _said(_run((0, 0), (10, 31), reserved=2)) == [(False, 4, 7, 7)]


def test_what_was_not_measured_ends_nobody() -> None:
    assert _said(_run()) == [(False, 0, 0, 6)]
    assert _said(_run(), window_ms=0, samples=0) == [(False, 0, 0, 6)]
    assert _said(_run((7, 999)), window_ms=0, samples=0) == [(False, 100, 100, 6)]
    assert _said(_run((0, 0)), balance=-50) == [(False, 0, 0, 0)]


def test_agent_without_bucket_has_no_gate() -> None:
    for buckets in ({}, {"a": Bucket(0, 0, 0)}):
        found = budget.verdicts(
            [_run((0, 0), (10, 999))],
            buckets,
            policy="linear",
            prices=PRICES,
            now_ms=0,
            min_window_ms=10,
            min_samples=2,
        )
        assert found == (BudgetVerdict("r", "a", preempt=False, cost=0, projected=0, allowance=0),)


def test_window_is_shortest_that_reaches_both_thresholds() -> None:
    run = _run((0, 0), (10, 100), (20, 300), (30, 3300))

    def projected(window_ms: int, samples: int) -> int:
        return _said(run, window_ms=window_ms, samples=samples)[0][2]

    assert projected(0, 0) == projected(0, 1) == 330  # one sample says nothing of a window
    assert projected(10, 2) == projected(1, 0) == projected(10, 1) == 330 + 300
    assert projected(10, 3) == projected(11, 2) == projected(20, 2) == 330 + 320
    assert projected(30, 4) == projected(31, 2) == projected(0, 5) == 330 + 330


def test_who_began_first_takes_first() -> None:
    def second(first: Measured, *used: tuple[int, int]) -> tuple[bool, int, int, int]:
        return _said(first, _run(*used, name="s"))[1]

    # It may go on to 6 credits, of which one was its own: nothing but its own is left for the next.
    assert second(_run((0, 0), (10, 30)), (0, 0), (10, 5)) == (False, 1, 1, 1)
    assert second(_run((0, 0), (10, 30)), (0, 0), (10, 6)) == (True, 1, 2, 1)
    # It is ended, and takes what it has used: 31 parts but for the ten that were its own.
    assert second(_run((0, 0), (10, 31)), (0, 0), (10, 1)) == (False, 1, 1, 3)
    # It uses less than was reserved for it, which is not there for the next.
    assert second(_run((0, 0), (10, 0)), (0, 1), (10, 30)) == (False, 3, 6, 6)
    assert second(_run((0, 0), (10, 0)), (0, 1), (10, 31)) == (True, 4, 7, 6)


def test_prices_of_services_are_added_to_a_run() -> None:
    usage = BudgetUsage(cpu_ms=1)
    alone = budget.cost(usage, PRICES)
    assert budget.cost(structs.replace(usage, credits=41), PRICES) == alone + 41
    assert budget.cost(BudgetUsage(credits=budget.U64_MAX), PRICES) == budget.U64_MAX
