"""A seccomp filter read back: what does this program allow, whoever made it?

Two readings, which share nothing with the compiler. `decide` runs the program on one call. `regions` runs it on
all calls at once: every path through the program with the values that take it there, as ranges of each 32-bit
word of struct seccomp_data (linux/seccomp.h) and the bit tests that ranges cannot hold. Only the instructions
that seccomp compilers emit are understood; any other is an error, since a program that is half read proves nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from policy import errors

# Words of struct seccomp_data by byte offset; an argument has a low and a high word (little endian).
NUMBER: Final = 0
ARCH: Final = 4
ARGUMENTS: Final = 16

ALLOW: Final = 0x7FFF0000

_SIZE = 64  # of struct seccomp_data
_TOP = 0xFFFFFFFF
_MAX_INSTRUCTIONS = 4096
# Paths of a program with nothing but forward jumps can double at each test; ours have one a range of numbers.
_MAX_REGIONS = 1 << 16

_LOAD, _AND, _RETURN, _JUMP = 0x20, 0x54, 0x06, 0x05
_TESTS: Final[Mapping[int, str]] = {0x15: "==", 0x25: ">", 0x35: ">=", 0x45: "&"}

Range = tuple[int, int]
Ranges = tuple[Range, ...]
_EVERYTHING: Final[Ranges] = ((0, _TOP),)
Instruction = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class BitTest:
    """`(word & mask) operator value`, and whether it holds on this path. `operator` is ==, >, >= or &."""

    offset: int
    mask: int
    operator: str
    value: int
    holds: bool


@dataclass(frozen=True, slots=True)
class Region:
    """All calls whose words lie in `words` (absent: any value) and that pass `tests` end with `action`."""

    action: int
    words: Mapping[int, Ranges] = field(default_factory=dict)
    tests: tuple[BitTest, ...] = ()

    def ranges(self, offset: int) -> Ranges:
        """The values of one word, sorted and apart."""
        return self.words.get(offset, _EVERYTHING)

    @property
    def conditional(self) -> bool:
        """Whether anything but number and architecture decides."""
        return bool(self.tests) or any(offset not in (NUMBER, ARCH) for offset in self.words)


def parse(program: bytes) -> tuple[Instruction, ...]:
    """The instructions (code, jump if true, jump if false, constant) of an array of struct sock_filter.

    Raises:
        errors.ArtefactError: it is empty, too long, cut off, holds an unknown instruction, loads outside of
            struct seccomp_data, or jumps past its end.
    """
    count, rest = divmod(len(program), 8)
    if rest or not 0 < count <= _MAX_INSTRUCTIONS:
        raise errors.ArtefactError(f"a filter of {len(program)} bytes is no seccomp program")
    code = tuple(struct.iter_unpack("<HBBI", program))
    for at, (operation, if_true, if_false, constant) in enumerate(code):
        if operation in _TESTS:
            furthest = at + 1 + max(if_true, if_false)
        elif operation == _JUMP:
            furthest = at + 1 + constant
        elif operation == _RETURN:
            furthest = at
        elif operation == _AND or (operation == _LOAD and constant % 4 == 0 and constant < _SIZE):
            furthest = at + 1
        else:
            raise errors.ArtefactError(
                f"instruction {at} of the filter is not understood: {operation:#x} {constant:#x}"
            )
        if furthest >= count:
            raise errors.ArtefactError(f"instruction {at} of the filter leads past its end")
    return code


def decide(program: bytes, *, number: int, arch: int, arguments: Sequence[int] = ()) -> int:
    """The action for one call; `arguments` are up to six, 64 bits each, the rest 0.

    Raises:
        errors.ArtefactError: as `parse`.
    """
    full = [*arguments, *(0,) * (6 - len(arguments))]
    data = struct.pack("<II7Q", number, arch, 0, *full)
    code = parse(program)
    accumulator = at = 0
    while True:
        operation, if_true, if_false, constant = code[at]
        at += 1
        if operation == _RETURN:
            return constant
        if operation == _LOAD:
            (accumulator,) = struct.unpack_from("<I", data, constant)
        elif operation == _AND:
            accumulator &= constant
        elif operation == _JUMP:
            at += constant
        else:
            at += if_true if _holds(_TESTS[operation], accumulator, constant) else if_false


def _holds(operator: str, left: int, right: int) -> bool:
    table = {"==": left == right, ">": left > right, ">=": left >= right, "&": bool(left & right)}
    return table[operator]


# --- symbolic reading -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _State:
    at: int
    loaded: int | None  # the word in the accumulator
    mask: int
    words: Mapping[int, Ranges]
    tests: tuple[BitTest, ...]


def regions(program: bytes) -> tuple[Region, ...]:
    """Every path through the program. The regions cover all calls, and no call lies in two of them.

    Raises:
        errors.ArtefactError: as `parse`; or a test comes before a load, or there are too many paths.
    """
    code = parse(program)
    found: list[Region] = []
    waiting = [_State(0, None, _TOP, {}, ())]
    while waiting:
        state = waiting.pop()
        operation, if_true, if_false, constant = code[state.at]
        if operation == _RETURN:
            found.append(Region(constant, state.words, state.tests))
            if len(found) > _MAX_REGIONS:
                raise errors.ArtefactError("the filter has too many paths to be read")
        elif operation == _LOAD:
            waiting.append(_State(state.at + 1, constant, _TOP, state.words, state.tests))
        elif operation == _AND:
            waiting.append(_State(state.at + 1, state.loaded, state.mask & constant, state.words, state.tests))
        elif operation == _JUMP:
            waiting.append(_State(state.at + 1 + constant, state.loaded, state.mask, state.words, state.tests))
        else:
            waiting += _branch(state, _TESTS[operation], constant, if_true, if_false)
    return tuple(found)


def _branch(state: _State, operator: str, constant: int, if_true: int, if_false: int) -> Iterator[_State]:
    """The one or two ways out of a test that some call can take."""
    if state.loaded is None:
        raise errors.ArtefactError(f"instruction {state.at} of the filter tests before it loads")
    offset = state.loaded
    for holds, jump in ((True, if_true), (False, if_false)):
        words, tests = state.words, state.tests
        if state.mask == _TOP and operator != "&":
            left = _intersect(words.get(offset, _EVERYTHING), _solutions(operator, constant, holds=holds))
            if not left:
                continue
            words = {**words, offset: left}
        else:
            test = BitTest(offset, state.mask, operator, constant, holds)
            opposite = BitTest(offset, state.mask, operator, constant, not holds)
            if opposite in tests:
                continue
            tests = tests if test in tests else (*tests, test)
        yield _State(state.at + 1 + jump, offset, state.mask, words, tests)


def _solutions(operator: str, constant: int, *, holds: bool) -> Ranges:
    first, last = {"==": (constant, constant), ">": (constant + 1, _TOP), ">=": (constant, _TOP)}[operator]
    pieces = [(first, last)] if holds else [(0, first - 1), (last + 1, _TOP)]
    return tuple((low, high) for low, high in pieces if low <= high)


def _intersect(left: Ranges, right: Ranges) -> Ranges:
    pieces = ((max(a, c), min(b, d)) for a, b in left for c, d in right)
    return tuple(sorted((low, high) for low, high in pieces if low <= high))


def allowed(program: bytes, *, arch: int) -> Ranges:
    """The system call numbers that the program allows under one AUDIT_ARCH_ tag, for some arguments at least.

    Raises:
        errors.ArtefactError: as `regions`.
    """
    numbers = [
        span
        for region in regions(program)
        if region.action == ALLOW and any(low <= arch <= high for low, high in region.ranges(ARCH))
        for span in region.ranges(NUMBER)
    ]
    return _union(numbers)


def _union(spans: Sequence[Range]) -> Ranges:
    merged: list[Range] = []
    for low, high in sorted(spans):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return tuple(merged)
