"""Conditions on arguments: every comparison against arithmetic, inclusion against counting, on words small enough."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable

import pytest

from policy import errors
from policy.decompile import conditions
from policy.decompile.conditions import ALWAYS, NEVER, Condition

TOP = 2**64 - 1
MEANING: dict[str, Callable[[int, int], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "&": lambda word, value: bool(word & value),
    "!&": lambda word, value: not word & value,
}


def words(condition: Condition, bits: int) -> set[int]:
    return {word for word in range(1 << bits) if any(word & mask == value for mask, value in condition)}


@pytest.mark.parametrize("comparison", sorted(MEANING))
def test_each_comparison_is_arithmetic_under_every_mask_and_value(comparison: str) -> None:
    for mask, value in itertools.product(range(16), range(32)):
        found = conditions.compare(comparison, value, mask=mask, shift=0)
        meant = {word for word in range(16) if MEANING[comparison](word & mask, value)}
        assert words(found, 4) == meant, (mask, value)
        assert all(not fixed & ~bits for bits, fixed in found)
        if not meant:
            assert found == NEVER
        if len(meant) == 16 and comparison in ("==", ">", ">=", "&"):
            assert found == ALWAYS


@pytest.mark.parametrize("comparison", sorted(MEANING))
def test_comparison_at_edges_of_64_bits(comparison: str) -> None:
    values = [0, 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**63, TOP - 1, TOP]
    for value, word in itertools.product(values, values):
        found = conditions.compare(comparison, value, mask=TOP, shift=64)
        assert conditions.holds(found, [7, word]) == MEANING[comparison](word, value), (hex(value), hex(word))


def test_rule_is_any_of_its_alternatives_and_all_of_their_matches() -> None:
    rule = conditions.any_of([[(0, 0xFF, 1), (2, TOP, 5)], [(1, 1 << 63, 1 << 63)]])
    for arguments, expected in [
        ((1, 0, 5), True),
        ((0x101, 0, 5), True),
        ((1, 0, 6), False),
        ((2, 0, 5), False),
        ((1, 0, 5 | 1 << 40), False),
        ((0, 1 << 63, 0), True),
        ((0, TOP >> 1, 0), False),
    ]:
        assert conditions.holds(rule, arguments) == expected, arguments
    assert conditions.matches(rule) == (((0, 0xFF, 1), (2, TOP, 5)), ((1, 1 << 63, 1 << 63),))


def test_ends_of_what_rule_can_be() -> None:
    assert conditions.any_of([]) == NEVER
    assert conditions.any_of([[]]) == ALWAYS
    assert conditions.any_of([[(0, 0xF0, 0x51)]]) == NEVER, "a value beyond its mask is never met"
    assert conditions.any_of([[(0, 1, 1), (0, 1, 0)]]) == NEVER
    assert conditions.any_of([[(0, 1, 1)], []]) == ALWAYS
    assert conditions.matches(ALWAYS) == ((),)
    for match in ((6, 1, 1), (-1, 1, 1), (0, 1 << 64, 0), (0, -1, 0), (0, 1, 1 << 64), (0, 1, -1)):
        with pytest.raises(errors.ArtefactError, match="no condition on an argument"):
            conditions.any_of([[match]])


def test_inclusion_comes_with_witness() -> None:
    small, large = conditions.any_of([[(0, TOP, 5)]]), conditions.any_of([[(0, 0xFF, 5)]])
    assert conditions.beyond(small, large) is None
    witness = conditions.beyond(large, small)
    assert witness is not None
    assert witness[0] & 0xFF == 5
    assert witness[0] != 5
    assert conditions.beyond(ALWAYS, NEVER) == (0,) * 6
    assert conditions.beyond(NEVER, NEVER) is None
    assert conditions.beyond(ALWAYS, ALWAYS) is None


def test_what_several_cubes_cover_together_is_covered() -> None:
    halves = conditions.any_of([[(3, 1, 0)], [(3, 1, 1)]])
    assert conditions.beyond(ALWAYS, halves) is None
    ranges = conditions.either(
        conditions.compare("<", 1000, mask=TOP, shift=0), conditions.compare(">=", 1000, mask=TOP, shift=0)
    )
    assert conditions.beyond(ALWAYS, ranges) is None
    gap = conditions.either(
        conditions.compare("<", 1000, mask=TOP, shift=0), conditions.compare(">", 1000, mask=TOP, shift=0)
    )
    assert conditions.beyond(ALWAYS, gap) == (1000, 0, 0, 0, 0, 0)


def test_call_that_lacks_its_last_arguments_has_0_there() -> None:
    assert conditions.holds(conditions.any_of([[(5, TOP, 0)]]), [1, 2])
    assert not conditions.holds(conditions.any_of([[(5, TOP, 1)]]), [1, 2])


def test_chain_of_alternatives_is_read_as_its_alternatives() -> None:
    def test(value: int) -> tuple[Condition, Callable[[], Condition]]:
        when = conditions.compare("==", value, mask=0xFF, shift=0)
        return when, lambda: conditions.compare("!=", value, mask=0xFF, shift=0)

    rest = NEVER
    for value in (9, 7, 5):
        rest = conditions.choose(*test(value), ALWAYS, rest)
    assert rest == ((0xFF, 5), (0xFF, 7), (0xFF, 9))
    denied = ALWAYS
    for value in (9, 7, 5):
        denied = conditions.choose(*test(value), NEVER, denied)
    assert words(denied, 8) == set(range(256)) - {5, 7, 9}


@pytest.mark.parametrize("branches", list(itertools.product([NEVER, ALWAYS, ((1, 1),), ((2, 0), (1, 0))], repeat=2)))
def test_choice_is_choice(branches: tuple[Condition, Condition]) -> None:
    then, otherwise = branches
    when, unless = ((3, 1),), conditions.compare("!=", 1, mask=3, shift=0)
    found = conditions.choose(when, lambda: unless, then, otherwise)
    assert words(found, 3) == (words(when, 3) & words(then, 3)) | (words(unless, 3) & words(otherwise, 3))


def test_conditions_too_many_are_refused() -> None:
    def scattered(argument: int, count: int) -> Condition:
        return tuple((TOP << 64 * argument, value << 64 * argument) for value in range(count))

    assert len(conditions.both(scattered(0, 40), scattered(1, 40))) == 1600
    for join, count in ((conditions.both, 50), (conditions.either, 1100)):
        with pytest.raises(errors.ArtefactError, match="too many to be read"):
            join(scattered(0, count), scattered(1, count))


def pigeons(count: int) -> Condition:
    """A pigeon without a hole, or two in one: holds for all words, as every proof of it is long."""
    holes = count - 1
    bit = {(pigeon, hole): 1 << pigeon * holes + hole for pigeon in range(count) for hole in range(holes)}
    homeless = [(sum(bit[pigeon, hole] for hole in range(holes)), 0) for pigeon in range(count)]
    shared = [
        (bit[one, hole] | bit[other, hole],) * 2
        for hole in range(holes)
        for one, other in itertools.combinations(range(count), 2)
    ]
    return (*homeless, *shared)


def test_conditions_too_involved_are_refused() -> None:
    assert conditions.beyond(ALWAYS, pigeons(4)) is None
    with pytest.raises(errors.ArtefactError, match="too involved"):
        conditions.beyond(ALWAYS, pigeons(9))
