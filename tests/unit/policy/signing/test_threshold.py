"""Check the signers that count towards a threshold, against a search of all subsets and by their properties."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from policy.signing import threshold


@dataclass(frozen=True)
class Key:
    number: int
    threshold: int


def keys(*thresholds: int) -> tuple[Key, ...]:
    return tuple(Key(number, wanted) for number, wanted in enumerate(thresholds))


several = st.lists(st.integers(1, 6), max_size=6).map(lambda wanted: keys(*wanted))


def subsets(of: tuple[Key, ...]) -> list[tuple[Key, ...]]:
    return [s for size in range(len(of) + 1) for s in itertools.combinations(of, size)]


def test_examples() -> None:
    table = {(): 0, (1,): 1, (2,): 0, (2, 2): 2, (1, 2): 2, (1, 3): 1, (3, 2): 0, (3, 2, 2): 3, (2, 2, 4): 2}
    for wanted, count in table.items():
        assert len(threshold.counting(keys(*wanted))) == count, wanted


def test_one_who_counts_is_enough_unless_more_are_wanted() -> None:
    assert threshold.missing((), keys(1, 1)) == 1
    assert threshold.missing((), keys(1, 1), least=2) == 2
    assert threshold.missing((), keys(3, 2)) is None


@given(several)
def test_it_is_largest_set_in_which_each_demand_is_met(signed: tuple[Key, ...]) -> None:
    fair = [s for s in subsets(signed) if all(k.threshold <= len(s) for k in s)]
    assert threshold.counting(signed) == max(fair, key=len)
    # It is the only set of its size: every other fair set is a subset of it.
    assert all(set(s) <= set(threshold.counting(signed)) for s in fair)


@given(several, st.integers(1, 6))
def test_one_more_signature_never_takes_away(signed: tuple[Key, ...], wanted: int) -> None:
    more = threshold.counting((*signed, Key(99, wanted)))
    assert set(threshold.counting(signed)) <= set(more)


@given(several, several, st.integers(1, 6))
def test_what_is_missing_is_fewest_that_would_do(signed: tuple[Key, ...], others: tuple[Key, ...], least: int) -> None:
    others = tuple(Key(k.number + 50, k.threshold) for k in others)
    enough = [len(s) for s in subsets(others) if len(threshold.counting((*signed, *s))) >= least]
    assert threshold.missing(signed, others, least=least) == min(enough, default=None)


@given(several, st.sets(st.integers(0, 5)))
def test_counting_before_role_is_known_and_again_after_is_counting_once(
    signed: tuple[Key, ...], covering: set[int]
) -> None:
    """``trust.verify`` counts for the agent, then ``trust.authorise`` for the role among these: no signer is added."""

    def narrowed(some: tuple[Key, ...]) -> tuple[Key, ...]:
        return tuple(key for key in some if key.number in covering)

    assert threshold.counting(narrowed(threshold.counting(signed))) == threshold.counting(narrowed(signed))
