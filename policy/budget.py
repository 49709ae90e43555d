"""Token buckets, what a run costs, and which run is ended for it: whole numbers only, and time is an argument.

A bucket refills by floor(elapsed_ms * capacity / 3,600,000), lazily, and its clock advances only by the time that made
whole tokens (Covenant version 1, section 11). What of a millisecond is used already is kept in ``owed``, so that
reading a bucket often gives neither more nor less than reading it once; version 1 rounds and loses or gains there.

The balance may be below zero: a run is measured after it was paid for, and what it cost more is owed until it has
refilled. A new debit never makes it so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal

from msgspec import Struct, structs

HOUR_MS: Final = 3_600_000
U64_MAX: Final = 2**64 - 1

# Reserved when a run is dispatched; what it measurably cost more is settled afterwards.
DISPATCH_CREDITS: Final = 1

Policy = Literal["none", "linear"]


# --- buckets -----------------------------------------------------------------------------------------------


class Bucket(Struct, frozen=True):
    """``capacity`` tokens an hour and at most; ``balance`` of them at ``last_refill_ms``.

    ``owed`` is the part of the millisecond after ``last_refill_ms`` that made tokens already, in 1/capacity of a
    millisecond: 0 <= owed < capacity, or 0.
    """

    capacity: int
    balance: int
    last_refill_ms: int
    owed: int = 0

    @property
    def tokens(self) -> int:
        """Return the credits that can be spent."""
        return max(0, self.balance)

    @property
    def debt(self) -> int:
        """Return the credits that have to refill before any can be spent."""
        return max(0, -self.balance)


class Exhausted(Struct, frozen=True):
    """A debit that was refused: what there is, and when there is enough (``U64_MAX``: never)."""

    tokens_remaining: int
    refill_eta_ms: int


def refill(bucket: Bucket, now_ms: int) -> Bucket:
    """The bucket at ``now_ms``. An earlier time changes nothing; a full bucket keeps no time in hand."""
    if now_ms <= bucket.last_refill_ms:
        return bucket
    if bucket.balance >= bucket.capacity:
        return structs.replace(bucket, last_refill_ms=now_ms, owed=0)
    gained = ((now_ms - bucket.last_refill_ms) * bucket.capacity - bucket.owed) // HOUR_MS
    if gained <= 0:
        return bucket
    balance = bucket.balance + gained
    if balance >= bucket.capacity:
        return Bucket(bucket.capacity, bucket.capacity, now_ms)
    whole_ms, owed = divmod(gained * HOUR_MS + bucket.owed, bucket.capacity)
    return Bucket(bucket.capacity, balance, bucket.last_refill_ms + whole_ms, owed)


def refill_eta_ms(bucket: Bucket, amount: int, now_ms: int) -> int:
    """The first millisecond, not before ``now_ms``, in which ``amount`` tokens can be taken; ``U64_MAX`` when never."""
    bucket = refill(bucket, now_ms)
    if bucket.balance >= amount:
        return min(now_ms, U64_MAX)
    if amount > bucket.capacity or not bucket.capacity:
        return U64_MAX
    made_of = (amount - bucket.balance) * HOUR_MS + bucket.owed
    return min(max(now_ms, bucket.last_refill_ms + -(-made_of // bucket.capacity)), U64_MAX)


def wait_in_words(eta_ms: int, now_ms: int) -> str:
    """Return the time until a refill, rounded up: ``in 30 min``; ``never`` for ``U64_MAX``."""
    if eta_ms == U64_MAX:
        return "never"
    left, unit = -(-max(0, eta_ms - now_ms) // 1000), "s"
    for size, larger, most in ((60, "min", 120), (60, "h", 120), (24, "days", 48)):
        if left <= most:
            break
        left, unit = -(-left // size), larger
    return f"in {left} {unit}"


def set_capacity(bucket: Bucket | None, capacity: int, now_ms: int) -> Bucket:
    """The bucket under another capacity: full when it is new, untouched when nothing changes.

    What was earned until now was earned at the old rate; the tokens stay, down to what the new capacity holds.
    """
    if bucket is None:
        return Bucket(capacity, capacity, now_ms)
    if bucket.capacity == capacity:
        return bucket
    settled = refill(bucket, now_ms)
    return Bucket(capacity, min(settled.balance, capacity), max(settled.last_refill_ms, now_ms))


def debit(bucket: Bucket, amount: int, now_ms: int) -> Bucket | Exhausted:
    """The bucket after ``amount`` tokens were taken, or why they were not."""
    filled = refill(bucket, now_ms)
    if filled.balance < amount:
        return Exhausted(filled.tokens, refill_eta_ms(filled, amount, now_ms))
    return structs.replace(filled, balance=filled.balance - amount)


def charge(bucket: Bucket, amount: int, now_ms: int) -> Bucket:
    """The bucket after ``amount`` tokens that were used already: it may owe them."""
    filled = refill(bucket, now_ms)
    return structs.replace(filled, balance=max(filled.balance - amount, -U64_MAX))


def give_back(bucket: Bucket, amount: int, now_ms: int) -> Bucket:
    """The bucket after ``amount`` tokens came back of a run that never began; never above its capacity."""
    filled = refill(bucket, now_ms)
    return structs.replace(filled, balance=min(filled.balance + amount, filled.capacity))


# --- costs -------------------------------------------------------------------------------------------------


class Prices(Struct, frozen=True):
    """How much of each one credit buys (policy/data/prices.toml)."""

    version: int
    cpu_ms: int
    memory_byte_ms: int
    wall_ms: int
    stored_bytes: int

    @property
    def parts(self) -> int:
        """The parts of a credit in which ``parts_used`` counts: no fraction is ever rounded."""
        return self.cpu_ms * self.memory_byte_ms * self.wall_ms


class BudgetUsage(Struct, frozen=True):
    """The measured use of a run up to a moment. ``credits`` are the prices of what it asked at its service gate."""

    cpu_ms: int = 0
    memory_byte_ms: int = 0
    wall_ms: int = 0
    credits: int = 0

    @classmethod
    def of_peak(cls, *, cpu_ms: int, memory_peak_bytes: int, wall_ms: int) -> BudgetUsage:
        """The usage where only the peak of memory is known: as if it had been held all the time."""
        return cls(cpu_ms, memory_peak_bytes * wall_ms, wall_ms)


def parts_used(usage: BudgetUsage, prices: Prices) -> int:
    """Return the exact cost of the usage, in ``prices.parts`` parts of a credit."""
    return (
        usage.cpu_ms * prices.memory_byte_ms * prices.wall_ms
        + usage.memory_byte_ms * prices.cpu_ms * prices.wall_ms
        + usage.wall_ms * prices.cpu_ms * prices.memory_byte_ms
    )


def cost(usage: BudgetUsage, prices: Prices) -> int:
    """Return the cost of a run in whole credits, rounded up: at least its reservation."""
    measured = max(DISPATCH_CREDITS, -(-parts_used(usage, prices) // prices.parts))
    return min(measured + usage.credits, U64_MAX)


def storage_cost(stored_bytes: int, prices: Prices) -> int:
    """Return the cost of a memory record: at least one credit (version 1: ceil(bytes / 1024))."""
    return max(1, -(-stored_bytes // prices.stored_bytes))


# --- projection --------------------------------------------------------------------------------------------


def project_overshoot(
    policy: Policy,
    *,
    debit: int,
    remaining: int,
    window_ms: int,
    samples: int,
    min_window_ms: int,
    min_samples: int,
) -> bool:
    """Whether spending ``debit`` in a window is on the way past the ``remaining`` there was at its beginning.

    Version 1's contract: ``none`` extrapolates nothing and flags only what is over already. ``linear`` flags nothing
    below its thresholds; above them it expects the next window to spend as much again. No debit is never flagged, and
    what is flagged for a debit is flagged for every greater one.
    """
    if debit <= 0:
        return False
    if policy == "none":
        return debit > remaining
    if window_ms < min_window_ms or samples < min_samples:
        return False
    return 2 * debit > remaining


class Sample(Struct, frozen=True):
    """The use of a run at a moment of a monotonic clock."""

    at_ms: int
    usage: BudgetUsage


class Measured(Struct, frozen=True):
    """A live run: its agent's key, what was reserved for it, and what was measured, the oldest sample first."""

    run_id: str
    agent: str
    samples: Sequence[Sample]
    reserved: int = DISPATCH_CREDITS


class BudgetVerdict(Struct, frozen=True):
    """The verdict on a run, with its credits: used, expected one window from now, and allowed."""

    run_id: str
    agent: str
    preempt: bool
    cost: int
    projected: int
    allowance: int


def verdicts(
    runs: Iterable[Measured],
    buckets: Mapping[str, Bucket],
    *,
    policy: Policy,
    prices: Prices,
    now_ms: int,
    min_window_ms: int,
    min_samples: int,
) -> tuple[BudgetVerdict, ...]:
    """Decide which live runs end for their budget. ``runs`` are in the order in which they began.

    The rule: an accepted debit pays for its run, so an empty bucket ends no run. Only under ``linear`` is a run ended:
    when its measured cost exceeds, or will exceed within another window, the rest of its agent plus its own
    reservation. Runs of one agent share the rest, in the order in which they began. An agent without a bucket has no
    limit.
    """
    left: dict[str, int] = {}
    answers = []
    for run in runs:
        bucket = buckets.get(run.agent)
        if bucket is None or bucket.capacity == 0:
            answers.append(BudgetVerdict(run.run_id, run.agent, preempt=False, cost=0, projected=0, allowance=0))
            continue
        available = left.setdefault(run.agent, refill(bucket, now_ms).balance * prices.parts)
        verdict, taken = _judge(run, available, policy, prices, min_window_ms, min_samples)
        # What a run owes beyond its reservation is not there for the next one.
        left[run.agent] = available - max(0, taken - run.reserved * prices.parts)
        answers.append(verdict)
    return tuple(answers)


def _judge(
    run: Measured, available: int, policy: Policy, prices: Prices, min_window_ms: int, min_samples: int
) -> tuple[BudgetVerdict, int]:
    """The verdict, and the parts that the run takes: what it has used if it is ended, else what it is expected to."""
    allowance = available + run.reserved * prices.parts
    window = _window(run.samples, min_window_ms, min_samples)
    used = parts_used(run.samples[-1].usage, prices) if run.samples else 0
    before = parts_used(window[0].usage, prices) if window else 0
    ended = policy == "linear" and project_overshoot(
        policy,
        debit=used - before,
        remaining=allowance - before,
        window_ms=window[-1].at_ms - window[0].at_ms if window else 0,
        samples=len(window),
        min_window_ms=min_window_ms,
        min_samples=min_samples,
    )
    projected = used + max(0, used - before)
    verdict = BudgetVerdict(
        run.run_id,
        run.agent,
        preempt=ended,
        cost=-(-used // prices.parts),
        projected=-(-projected // prices.parts),
        allowance=max(0, allowance // prices.parts),
    )
    return verdict, used if ended else projected


def _window(samples: Sequence[Sample], min_window_ms: int, min_samples: int) -> Sequence[Sample]:
    """The last samples, as few as reach both thresholds; all of them when they do not."""
    for start in range(len(samples) - max(1, min_samples), -1, -1):
        if samples[-1].at_ms - samples[start].at_ms >= min_window_ms:
            return samples[start:]
    return samples
