"""Classic BPF for seccomp: a table of decisions over system call numbers becomes a filter program.

The program is a balanced binary search, so that a call costs about nine jumps however many calls are granted.
Nothing here knows what a decision means. struct sock_filter and struct seccomp_data are linux/filter.h and
linux/seccomp.h; every supported architecture is little endian.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass

# linux/seccomp.h
RET_ALLOW = 0x7FFF0000
RET_ERRNO = 0x00050000

# linux/bpf_common.h, linux/filter.h
_LD_W_ABS = 0x20
_JMP_JA = 0x05
_JMP_JEQ_K = 0x15
_JMP_JGE_K = 0x35
_JMP_JSET_K = 0x45
_RET_K = 0x06

# Offsets into struct seccomp_data: int nr; __u32 arch; __u64 instruction_pointer; __u64 args[6]
_NR, _ARCH, _ARGS = 0, 4, 16

# linux/bpf_common.h BPF_MAXINSNS: the kernel refuses a longer program.
MAX_INSTRUCTIONS = 4096
_MAX_JUMP = 255

Instruction = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Return:
    """End with this action (an action of linux/seccomp.h with its data)."""

    action: int


@dataclass(frozen=True, slots=True)
class IfAnyBit:
    """`hit` when the low 32 bits of an argument share a bit with `mask`, else `miss`.

    The kernel takes such arguments (clone's flags, a socket family) as 32 bits, so the upper half decides nothing.
    """

    argument: int
    mask: int
    hit: int
    miss: int


Decision = Return | IfAnyBit


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
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)


def _search(decisions: Sequence[tuple[int, Decision]]) -> list[Instruction]:
    if len(decisions) == 1:
        return _decide(decisions[0][1])
    middle = len(decisions) // 2
    lower, upper = _search(decisions[:middle]), _search(decisions[middle:])
    pivot = decisions[middle][0]
    if len(lower) <= _MAX_JUMP:
        return [(_JMP_JGE_K, len(lower), 0, pivot), *lower, *upper]
    # A conditional jump reaches 255 instructions; JA reaches 2**32.
    return [(_JMP_JGE_K, 0, 1, pivot), (_JMP_JA, 0, 0, len(lower)), *lower, *upper]


def _decide(decision: Decision) -> list[Instruction]:
    if isinstance(decision, Return):
        return [(_RET_K, 0, 0, decision.action)]
    return [
        (_LD_W_ABS, 0, 0, _ARGS + 8 * decision.argument),
        (_JMP_JSET_K, 0, 1, decision.mask),
        (_RET_K, 0, 0, decision.hit),
        (_RET_K, 0, 0, decision.miss),
    ]
