"""Take a seccomp filter of any origin apart: its instructions, and its answer to one call.

policy.decompile.answers reads it for all calls at once. Only the instructions that seccomp compilers emit are
understood; any other is an error, since a program that is half read proves nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Final

from policy import errors

# Words of struct seccomp_data by byte offset; an argument has a low and a high word (little endian).
NUMBER: Final = 0
ARCH: Final = 4
ARGUMENTS: Final = 16

ALLOW: Final = 0x7FFF0000

_SIZE = 64  # of struct seccomp_data
_MAX_INSTRUCTIONS = 4096  # BPF_MAXINSNS of linux/bpf_common.h

# The instructions that are understood: load a word of seccomp_data, mask it, return, jump; and the tests.
LOAD, AND, RETURN, JUMP = 0x20, 0x54, 0x06, 0x05
TESTS: Final[Mapping[int, str]] = {0x15: "==", 0x25: ">", 0x35: ">=", 0x45: "&"}

# First and last, both in it.
Range = tuple[int, int]
Instruction = tuple[int, int, int, int]


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
        if operation in TESTS:
            furthest = at + 1 + max(if_true, if_false)
        elif operation == JUMP:
            furthest = at + 1 + constant
        elif operation == RETURN:
            furthest = at
        elif operation == AND or (operation == LOAD and constant % 4 == 0 and constant < _SIZE):
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
        if operation == RETURN:
            return constant
        if operation == LOAD:
            (accumulator,) = struct.unpack_from("<I", data, constant)
        elif operation == AND:
            accumulator &= constant
        elif operation == JUMP:
            at += constant
        else:
            at += if_true if _holds(TESTS[operation], accumulator, constant) else if_false


def _holds(operator: str, left: int, right: int) -> bool:
    table = {"==": left == right, ">": left > right, ">=": left >= right, "&": bool(left & right)}
    return table[operator]
