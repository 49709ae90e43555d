"""Credits: the five properties of version 1's formal page, and what makes a reading of a bucket harmless."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import structs

from policy import budget
from policy.budget import Bucket, BudgetUsage, Exhausted, Measured, Prices, Sample

U64 = st.integers(0, budget.U64_MAX)
# Small ones meet often, great ones overflow elsewhere.
CAPACITY = st.one_of(st.integers(0, 50), st.integers(1, 10_000_000), U64)
TIMES = st.one_of(st.integers(0, 20_000_000), U64)
PRICES = st.builds(
    Prices,
    version=st.just(1),
    cpu_ms=st.integers(1, 5000),
    memory_byte_ms=st.integers(1, 10**14),
    wall_ms=st.integers(1, 100_000),
    stored_bytes=st.integers(1, 4096),
)
USAGES = st.builds(
    BudgetUsage, cpu_ms=st.integers(0, 10**7), memory_byte_ms=st.integers(0, 10**17), wall_ms=st.integers(0, 10**8)
)


@st.composite
def buckets(draw: st.DrawFn) -> Bucket:
    capacity = draw(CAPACITY)
    balance = draw(st.integers(-budget.U64_MAX, capacity) | st.integers(-10, min(capacity, 10)))
    owed = draw(st.integers(0, max(0, capacity - 1)))
    return Bucket(capacity, balance, draw(TIMES), owed)


@given(bucket=buckets(), now=TIMES)
def test_refill_never_panics(bucket: Bucket, now: int) -> None:
    after = budget.refill(bucket, now)
    assert all(type(value) is int for value in structs.astuple(after))
    assert 0 <= after.owed < max(1, after.capacity)


@given(bucket=buckets(), now=TIMES)
@example(bucket=Bucket(7, 3, 0, 6), now=2**64 - 1)
def test_refill_keeps_tokens_within_capacity(bucket: Bucket, now: int) -> None:
    after = budget.refill(bucket, now)
    assert bucket.balance <= after.balance <= bucket.capacity
    assert 0 <= after.tokens <= after.capacity
    assert not (after.tokens and after.debt)


@given(bucket=buckets(), now=TIMES)
def test_refill_clock_never_rewinds(bucket: Bucket, now: int) -> None:
    after = budget.refill(bucket, now)
    assert bucket.last_refill_ms <= after.last_refill_ms <= max(now, bucket.last_refill_ms)
    if now <= bucket.last_refill_ms:
        assert after == bucket


@given(bucket=buckets(), amount=st.integers(0, 100) | U64, now=TIMES)
@example(bucket=Bucket(0, -1, 0), amount=0, now=1)  # a debt, and nothing that refills
def test_refill_eta_never_schedules_in_past(bucket: Bucket, amount: int, now: int) -> None:
    eta = budget.refill_eta_ms(bucket, amount, now)
    assert now <= eta <= budget.U64_MAX
    if eta < budget.U64_MAX:
        assert budget.refill(bucket, eta).balance >= amount
        assert eta == now or budget.refill(bucket, eta - 1).balance < amount
    elif now < eta:
        never = amount > bucket.capacity or not bucket.capacity
        assert never or budget.refill(bucket, budget.U64_MAX - 1).balance < amount


@given(capacity=st.integers(1, 1000), now=st.integers(0, 10**9), needed=st.integers(1, 1000))
def test_eta_from_empty_bucket_is_version_1s(capacity: int, now: int, needed: int) -> None:
    eta = budget.refill_eta_ms(Bucket(capacity, 0, now), needed, now)
    v1 = now + -(-needed * 3_600_000 // capacity)
    assert eta == (v1 if needed <= capacity else budget.U64_MAX)


@given(bucket=buckets(), stops=st.lists(st.integers(0, 10_000_000), max_size=30))
def test_splitting_interval_never_gives_more_and_never_takes_any(bucket: Bucket, stops: list[int]) -> None:
    stops.sort()
    end = bucket.last_refill_ms + (stops[-1] if stops else 0)
    split = bucket
    for stop in stops:
        split = budget.refill(split, bucket.last_refill_ms + stop)
    assert split == budget.refill(bucket, end)


@given(bucket=buckets(), first=TIMES, second=TIMES)
def test_more_time_never_gives_less(bucket: Bucket, first: int, second: int) -> None:
    early, late = sorted((first, second))
    assert budget.refill(bucket, early).balance <= budget.refill(bucket, late).balance


@given(capacity=st.integers(1, 10**7), elapsed=st.integers(0, 3_599_999))
def test_empty_bucket_gains_floor_of_what_time_made(capacity: int, elapsed: int) -> None:
    assert budget.refill(Bucket(capacity, 0, 1000), 1000 + elapsed).balance == elapsed * capacity // 3_600_000


@given(bucket=buckets(), capacity=CAPACITY, now=TIMES)
def test_another_capacity_gives_nothing(bucket: Bucket, capacity: int, now: int) -> None:
    after = budget.set_capacity(bucket, capacity, now)
    assert after.capacity == capacity
    assert after.balance <= min(budget.refill(bucket, now).balance, capacity)
    assert after.last_refill_ms >= bucket.last_refill_ms
    assert budget.set_capacity(bucket, bucket.capacity, now) is bucket
    assert budget.set_capacity(None, capacity, now) == Bucket(capacity, capacity, now)


@given(bucket=buckets(), amount=st.integers(0, 1000), now=TIMES)
def test_debit_leaves_no_debt_and_charge_leaves_just_what_was_used(bucket: Bucket, amount: int, now: int) -> None:
    filled = budget.refill(bucket, now)
    after = budget.debit(bucket, amount, now)
    if isinstance(after, Exhausted):
        assert filled.balance < amount
        assert after.tokens_remaining == filled.tokens
        assert after.refill_eta_ms > now or now == budget.U64_MAX
    else:
        assert after.balance == filled.balance - amount >= 0
        assert budget.give_back(after, amount, now).balance == filled.balance
    charged = budget.charge(bucket, amount, now)
    assert charged.balance == max(filled.balance - amount, -budget.U64_MAX)


@given(usage=USAGES, prices=PRICES)
def test_cost_is_exact_sum_rounded_up_once(usage: BudgetUsage, prices: Prices) -> None:
    exact = (
        Fraction(usage.cpu_ms, prices.cpu_ms)
        + Fraction(usage.memory_byte_ms, prices.memory_byte_ms)
        + Fraction(usage.wall_ms, prices.wall_ms)
    )
    assert Fraction(budget.parts_used(usage, prices), prices.parts) == exact
    assert budget.cost(usage, prices) == max(1, -(-exact.numerator // exact.denominator))


@given(size=st.integers(0, 10**9), prices=PRICES)
def test_record_of_memory_costs_one_credit_for_each_part_begun(size: int, prices: Prices) -> None:
    paid = budget.storage_cost(size, prices)
    assert paid >= 1
    assert (paid - 1) * prices.stored_bytes <= max(0, size - 1) < paid * prices.stored_bytes


THRESHOLDS = st.fixed_dictionaries({"min_window_ms": st.integers(0, 5000), "min_samples": st.integers(0, 6)})
SEEN = st.fixed_dictionaries({"window_ms": st.integers(0, 6000), "samples": st.integers(0, 8)})


@given(
    debit=st.integers(0, 10**6),
    more=st.integers(0, 10**6),
    remaining=st.integers(-(10**6), 10**6),
    thresholds=THRESHOLDS,
    seen=SEEN,
)
def test_project_overshoot_matches_spec(
    debit: int, more: int, remaining: int, thresholds: dict[str, int], seen: dict[str, int]
) -> None:
    def asked(policy: budget.Policy, spent: int) -> bool:
        return budget.project_overshoot(policy, debit=spent, remaining=remaining, **seen, **thresholds)

    below = seen["window_ms"] < thresholds["min_window_ms"] or seen["samples"] < thresholds["min_samples"]
    assert asked("none", debit) == (debit > 0 and debit > remaining)
    if below:
        assert not asked("linear", debit)
    else:
        assert asked("linear", debit) == (debit > 0 and 2 * debit > remaining)
        assert not debit > max(0, remaining) or asked("linear", debit)
    assert not asked("none", 0)
    assert not asked("linear", 0)
    # Monotonic in the debit.
    assert asked("none", debit + more) or not asked("none", debit)
    assert asked("linear", debit + more) or not asked("linear", debit)


@st.composite
def measured(draw: st.DrawFn, run_id: str) -> Measured:
    steps = draw(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 3000)), max_size=8))
    at = cpu = 0
    samples = []
    for passed, used in steps:
        at, cpu = at + passed, cpu + used
        samples.append(Sample(at, BudgetUsage(cpu_ms=cpu, wall_ms=at)))
    return Measured(run_id, draw(st.sampled_from("ab")), tuple(samples), draw(st.integers(1, 3)))


RUNS = st.integers(0, 6).flatmap(lambda n: st.tuples(*(measured(str(i)) for i in range(n))))
SMALL = Prices(version=1, cpu_ms=1000, memory_byte_ms=10**9, wall_ms=60_000, stored_bytes=1024)
SMALL_BUCKETS = st.dictionaries(
    st.sampled_from("ab"), st.builds(Bucket, st.integers(0, 20), st.integers(-5, 20), st.just(0))
).map(lambda found: {key: structs.replace(b, balance=min(b.balance, b.capacity)) for key, b in found.items()})


@given(runs=RUNS, there=SMALL_BUCKETS, min_window=st.integers(0, 3000), min_samples=st.integers(0, 5))
def test_run_is_ended_only_for_what_it_will_cost_beyond_what_is_there(
    runs: tuple[Measured, ...], there: dict[str, Bucket], min_window: int, min_samples: int
) -> None:
    def asked(policy: budget.Policy, live: tuple[Measured, ...]) -> list[budget.BudgetVerdict]:
        return list(
            budget.verdicts(
                live,
                there,
                policy=policy,
                prices=SMALL,
                now_ms=0,
                min_window_ms=min_window,
                min_samples=min_samples,
            )
        )

    assert not any(verdict.preempt for verdict in asked("none", runs))
    found = asked("linear", runs)
    assert [verdict.run_id for verdict in found] == [run.run_id for run in runs]
    for run, verdict in zip(runs, found, strict=True):
        gated = run.agent in there and there[run.agent].capacity > 0
        if verdict.preempt:
            assert gated
            assert len(run.samples) >= min_samples
            assert run.samples[-1].at_ms - run.samples[0].at_ms >= min_window
            # What it is expected to cost in whole credits is more than what is left and its own reservation.
            assert verdict.projected > verdict.allowance
        if gated and there[run.agent].balance >= 0 and verdict is found[[r.agent for r in runs].index(run.agent)]:
            assert verdict.allowance >= run.reserved
    # Who began first takes first: whether others came later changes nothing for it.
    for length in range(len(runs)):
        assert asked("linear", runs[:length]) == found[:length]
