"""Classic BPF for seccomp: a table of decisions over system call numbers becomes a filter program.

The program is a balanced binary search, so that a call costs about nine jumps however many calls are granted.
Nothing here knows what a decision means. struct sock_filter and struct seccomp_data are linux/filter.h and
linux/seccomp.h; every supported architecture is little endian.
"""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Mapping, Sequence

from msgspec import Struct

# linux/seccomp.h
RET_ALLOW = 0x7FFF0000
RET_ERRNO = 0x00050000

# linux/bpf_common.h, linux/filter.h
_LD_W_ABS = 0x20
_JMP_JA = 0x05
_JMP_JEQ_K = 0x15
_JMP_JGE_K = 0x35
_AND_K = 0x54
_RET_K = 0x06

# Offsets into struct seccomp_data: int nr; __u32 arch; __u64 instruction_pointer; __u64 args[6]
_NR, _ARCH, _ARGS = 0, 4, 16

# linux/bpf_common.h BPF_MAXINSNS: the kernel refuses a longer program.
MAX_INSTRUCTIONS = 4096
_MAX_JUMP = 255

_WORD = 0xFFFFFFFF

# struct sock_filter
_INSTRUCTION = struct.Struct("<HBBI")
Instruction = tuple[int, int, int, int]
_Word = tuple[int, int, int]  # offset into struct seccomp_data, mask, value


class Return(Struct, frozen=True):
    """End with this action (an action of linux/seccomp.h with its data)."""

    action: int


class Masked(Struct, frozen=True, order=True):
    """`arguments[argument] & mask == value` on all 64 bits."""

    argument: int
    mask: int
    value: int


class IfAny(Struct, frozen=True):
    """`hit` when all tests of at least one alternative hold, else `miss`."""

    alternatives: tuple[tuple[Masked, ...], ...]
    hit: int
    miss: int


Decision = Return | IfAny


def program(
    decisions: Sequence[tuple[int, Decision]], *, audit_arch: int, other_arch: int, number_limit: int | None
) -> bytes:
    """Bytes of an array of struct sock_filter.

    Args:
        decisions: pairs of first number and decision, sorted, the first at 0; each holds up to the next.
        audit_arch: the AUDIT_ARCH_ constant that the decisions are for.
        other_arch: action for every other architecture, and for numbers from `number_limit` on.
        number_limit: first number of another calling convention under the same tag (x32), or None.

    Raises:
        ValueError: the decisions are not sorted from 0, or the program is too long for the kernel.
    """
    starts = [start for start, _ in decisions]
    if not starts or starts[0] != 0 or any(a >= b for a, b in itertools.pairwise(starts)):
        raise ValueError("decisions must be sorted and start at 0")
    code: list[Instruction] = [
        (_LD_W_ABS, 0, 0, _ARCH),
        (_JMP_JEQ_K, 1, 0, audit_arch),
        (_RET_K, 0, 0, other_arch),
        (_LD_W_ABS, 0, 0, _NR),
    ]
    if number_limit is not None:
        code += [(_JMP_JGE_K, 0, 1, number_limit), (_RET_K, 0, 0, other_arch)]
    code += _search(decisions)
    if len(code) > MAX_INSTRUCTIONS:
        raise ValueError(f"the filter has {len(code)} instructions, the kernel takes {MAX_INSTRUCTIONS}")
    return b"".join(itertools.starmap(_INSTRUCTION.pack, code))


def _search(decisions: Sequence[tuple[int, Decision]]) -> list[Instruction]:
    if len(decisions) == 1:
        return list(_decide(decisions[0][1]))
    middle = len(decisions) // 2
    lower, upper = _search(decisions[:middle]), _search(decisions[middle:])
    pivot = decisions[middle][0]
    if len(lower) <= _MAX_JUMP:
        return [(_JMP_JGE_K, len(lower), 0, pivot), *lower, *upper]
    # A conditional jump reaches 255 instructions; JA reaches 2**32.
    return [(_JMP_JGE_K, 0, 1, pivot), (_JMP_JA, 0, 0, len(lower)), *lower, *upper]


@functools.lru_cache(maxsize=256)
def _decide(decision: Decision) -> tuple[Instruction, ...]:
    if isinstance(decision, Return):
        return ((_RET_K, 0, 0, decision.action),)
    alternatives = sorted({_words(tests) for tests in decision.alternatives})
    if () in alternatives:
        raise ValueError("an alternative without a test holds for every call")
    return (*_any_of(alternatives, decision.hit), (_RET_K, 0, 0, decision.miss))


def _words(tests: tuple[Masked, ...]) -> tuple[_Word, ...]:
    """The tests on 32-bit words that say the same; a word without a bit in the mask is not loaded.

    Raises:
        ValueError: a value has a bit that its mask has not, so the test never holds.
    """
    found = []
    for test in sorted(tests):
        if test.value & ~test.mask:
            raise ValueError(f"{test} never holds")
        for half in (0, 32):
            mask, value = test.mask >> half & _WORD, test.value >> half & _WORD
            if mask:
                found.append((_ARGS + 8 * test.argument + half // 8, mask, value))
    return tuple(found)


def _any_of(alternatives: Sequence[tuple[_Word, ...]], hit: int) -> list[Instruction]:
    """Code that returns `hit` when an alternative holds and else runs off its end.

    Alternatives that begin with the same word and mask share its load. Their values exclude each other, so where
    one value leads on to further tests that fail, the rest of the group need not be asked.
    """
    code: list[Instruction] = []
    for (offset, mask), group in itertools.groupby(alternatives, key=lambda words: words[0][:2]):
        by_value = {
            value: [words[1:] for words in same] for value, same in itertools.groupby(group, key=lambda w: w[0][2])
        }
        tests = _one_of(by_value, hit)
        code += [(_LD_W_ABS, 0, 0, offset), *([] if mask == _WORD else [(_AND_K, 0, 0, mask)]), *tests]
    return code


def _one_of(by_value: Mapping[int, Sequence[tuple[_Word, ...]]], hit: int) -> list[Instruction]:
    """Compares the word in the accumulator with each value; runs off its end as `_any_of` does."""
    final = [value for value, rest in by_value.items() if () in rest]
    code: list[Instruction] = []
    for few in (final[at : at + _MAX_JUMP] for at in range(0, len(final), _MAX_JUMP)):
        # All jump to one return behind the last comparison, which alone steps over it.
        code += [(_JMP_JEQ_K, len(few) - 1 - at, 0 if at + 1 < len(few) else 1, v) for at, v in enumerate(few)]
        code.append((_RET_K, 0, 0, hit))
    further = [(value, rest) for value, rest in by_value.items() if () not in rest]
    blocks: list[Instruction] = []
    for value, rest in reversed(further):
        body = _any_of(rest, hit)
        if blocks:
            body.append((_JMP_JA, 0, 0, len(blocks)))
        skip = [(_JMP_JEQ_K, 0, len(body), value)]
        if len(body) > _MAX_JUMP:
            skip = [(_JMP_JEQ_K, 1, 0, value), (_JMP_JA, 0, 0, len(body))]
        blocks = [*skip, *body, *blocks]
    return code + blocks
