"""Conditions on the six arguments of a system call, as sets of 384-bit words, decided exactly.

A *cube* is a pair (mask, value) with ``value & ~mask == 0``: all words w with ``w & mask == value``. Argument i stands
in the bits from 64 * i on. A *condition* is a tuple of cubes: the words that lie in at least one of them. That is the
form in which argument rules are written (OR of ANDs of masked equalities), and every comparison that a filter can
make of a word has it too: ``w > v`` means that for some bit i that v lacks, w has bit i and all bits of v above i.

Inclusion is decided, not sampled. ``beyond(inner, outer)`` takes each cube of `inner` and cuts one cube of `outer`
after the other out of it. What a cube leaves of another is the disjoint union, over the bits that it fixes and
the other does not, of the pieces in which that bit is the first to differ; so a piece that survives every cut lies in
`inner` and not in `outer`, and when nothing survives, all of it lies in `outer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from policy import errors

Cube = tuple[int, int]
Condition = tuple[Cube, ...]
# (argument, mask, value): (argument & mask) == value.
Match = tuple[int, int, int]

ALWAYS: Final[Condition] = ((0, 0),)
NEVER: Final[Condition] = ()

ARGUMENTS: Final = 6
BITS: Final = 64
_WORD: Final = (1 << BITS) - 1

# Ours have a few dozen. The bounds keep a filter made to be slow from stopping the machine: it is refused instead.
_MAX_CUBES: Final = 2048
_MAX_PIECES: Final = 1 << 16


def compare(operator: str, value: int, *, mask: int, shift: int) -> Condition:
    """All words w whose field ``(w >> shift) & mask`` stands in this relation to `value`.

    `operator` is one of == != < <= > >= and &, which asks for a common bit, and !&, which asks for none. The bits of
    `value` may lie outside of `mask`. For ==, >, >= and &, what every word meets is `ALWAYS` itself; what none meets is
    always `NEVER`.
    """
    return tuple([(bits << shift, wanted << shift) for bits, wanted in _FIELDS[operator](mask, value)])


def _equal(mask: int, value: int) -> Iterator[Cube]:
    if not value & ~mask:
        yield mask, value


def _unequal(mask: int, value: int) -> Iterator[Cube]:
    if value & ~mask:
        yield 0, 0
        return
    for bit in _bits(mask):
        yield bit, bit & ~value


def _greater(mask: int, value: int) -> Iterator[Cube]:
    """For each bit that the value lacks: that bit, and all bits of the value above it."""
    if value > mask:  # the field is never greater than its mask
        return
    for bit in _bits(mask & ~value):
        above = value & ~(bit | (bit - 1))
        if not above & ~mask:
            yield bit | above, bit | above


def _less(mask: int, value: int) -> Iterator[Cube]:
    """For each bit of the value: not that bit, and none above it that the value lacks."""
    top = 1 << max(mask.bit_length(), value.bit_length())
    for bit in _bits(value):
        above = (top - 1) & ~value & ~(bit | (bit - 1))
        yield mask & (bit | above), 0


def _at_least(mask: int, value: int) -> Iterator[Cube]:
    return _greater(mask, value - 1) if value else iter(ALWAYS)


def _at_most(mask: int, value: int) -> Iterator[Cube]:
    return _less(mask, value + 1)


def _common(mask: int, value: int) -> Iterator[Cube]:
    for bit in _bits(mask & value):
        yield bit, bit


def _disjoint(mask: int, value: int) -> Iterator[Cube]:
    yield mask & value, 0


_FIELDS: Final = {
    "==": _equal,
    "!=": _unequal,
    "<": _less,
    "<=": _at_most,
    ">": _greater,
    ">=": _at_least,
    "&": _common,
    "!&": _disjoint,
}


def _bits(word: int) -> Iterator[int]:
    while word:
        bit = word & -word
        yield bit
        word ^= bit


def any_of(alternatives: Iterable[Sequence[Match]]) -> Condition:
    """An argument rule: at least one alternative holds, and an alternative holds when all its matches do.

    Raises:
        errors.ArtefactError: an argument beyond the sixth, or a mask or value of more than 64 bits.
    """
    found: Condition = NEVER
    for alternative in alternatives:
        cubes = ALWAYS
        for argument, mask, value in alternative:
            if not (0 <= argument < ARGUMENTS and 0 <= mask <= _WORD and 0 <= value <= _WORD):
                raise errors.ArtefactError(f"no condition on an argument: {argument} {mask:#x} {value:#x}")
            cubes = both(cubes, compare("==", value, mask=mask, shift=BITS * argument))
        found = either(found, cubes)
    return found


def matches(condition: Condition) -> tuple[tuple[Match, ...], ...]:
    """The condition as an argument rule again; ``any_of`` of it is the same set."""
    return tuple(
        tuple(
            (argument, mask >> BITS * argument & _WORD, value >> BITS * argument & _WORD)
            for argument in range(ARGUMENTS)
            if mask >> BITS * argument & _WORD
        )
        for mask, value in condition
    )


def either(left: Condition, right: Condition) -> Condition:
    """The words of both, without the cubes that lie in another.

    Raises:
        errors.ArtefactError: more cubes than any filter of ours has.
    """
    if len(left) + len(right) > _MAX_CUBES:
        raise errors.ArtefactError("the filter's conditions are too many to be read")
    kept = [cube for cube in left if not any(_covers(other, cube) for other in right)]
    kept += [cube for cube in right if not any(_covers(other, cube) for other in kept)]
    return tuple(kept)


def both(left: Condition, right: Condition) -> Condition:
    """The words that lie in each of the two.

    Raises:
        errors.ArtefactError: as `either`.
    """
    if len(left) * len(right) > _MAX_CUBES:
        raise errors.ArtefactError("the filter's conditions are too many to be read")
    found = {(a | c, b | d): None for a, b in left for c, d in right if not a & c & (b ^ d)}
    return tuple(c for c in found if not any(other is not c and _covers(other, c) for other in found))


def choose(when: Condition, unless: Callable[[], Condition], then: Condition, otherwise: Condition) -> Condition:
    """(`when` and `then`) or (`unless` and `otherwise`); `unless` gives all that `when` is not, if it is needed.

    Where one branch allows all that the other does, that other branch needs no test: a chain of alternatives
    is then read as its alternatives, not as each with all earlier ones excluded.

    Raises:
        errors.ArtefactError: as `either`.
    """
    if then == otherwise:
        return then
    if _inside(otherwise, then):
        fresh = tuple(cube for cube in then if not any(_covers(other, cube) for other in otherwise))
        return either(both(when, fresh), otherwise)
    if _inside(then, otherwise):
        fresh = tuple(cube for cube in otherwise if not any(_covers(other, cube) for other in then))
        return either(then, both(unless(), fresh))
    return either(both(when, then), both(unless(), otherwise))


def _covers(outer: Cube, inner: Cube) -> bool:
    return not outer[0] & ~inner[0] and inner[1] & outer[0] == outer[1]


def _inside(inner: Condition, outer: Condition) -> bool:
    """Whether each cube lies in one of the other's: enough for inclusion, but not needed for it."""
    return all(any(_covers(other, cube) for other in outer) for cube in inner)


def beyond(inner: Condition, outer: Condition) -> tuple[int, ...] | None:
    """Six arguments that `inner` holds and `outer` does not, or None: then `inner` lies in `outer`.

    Raises:
        errors.ArtefactError: deciding it takes more steps than any filter of ours does.
    """
    known = set(outer)
    for cube in inner:
        if cube not in known and (word := _outside(cube, outer)) is not None:
            return tuple(word >> BITS * argument & _WORD for argument in range(ARGUMENTS))
    return None


def _outside(cube: Cube, others: Condition) -> int | None:
    """A word of the cube that lies in none of the others."""
    mask, value = cube
    # Those first that take most away: what is left to cut is then least.
    cutters = sorted(
        (other for other in others if not mask & other[0] & (value ^ other[1])),
        key=lambda other: (other[0] & ~mask).bit_count(),
    )
    waiting = [(mask, value, 0)]
    for _ in range(_MAX_PIECES):
        if not waiting:
            return None
        mask, value, at = waiting.pop()
        while at < len(cutters) and mask & cutters[at][0] & (value ^ cutters[at][1]):
            at += 1
        if at == len(cutters):
            return value
        cut_mask, cut_value = cutters[at]
        for bit in _bits(cut_mask & ~mask):
            mask |= bit
            waiting.append((mask, value | (bit & ~cut_value), at + 1))
            value |= bit & cut_value
    raise errors.ArtefactError("the filter's conditions are too involved to be compared")


def holds(condition: Condition, arguments: Sequence[int]) -> bool:
    """Whether a call with these arguments (64 bits each, absent ones 0) meets the condition."""
    word = sum(argument << BITS * at for at, argument in enumerate(arguments))
    return any(word & mask == value for mask, value in condition)
