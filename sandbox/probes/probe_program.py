"""Build the first process of a self-test: a static program of some hundred bytes that makes the given calls.

It reads one message from its stdin: the number of calls, the length of the answer, and the calls with their arguments
and the memory that they point to, all at a known address. Each result replaces its call's number, and the whole message
goes to stdout. The program has no loader, library or runtime, so it makes only the requested system calls. One program
serves every policy.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from msgspec import Struct

# The path of the program in the root of the self-test's sandbox. No other root has it.
PATH: Final = "/.covenant-canary"
# A message of this size is written to a pipe at once, and so read at once (pipe(7), PIPE_BUF).
MESSAGE_BYTES: Final = 4096

_TEXT, _DATA, _DATA_BYTES = 0x400000, 0x600000, 0x2000
_HEAD = struct.Struct("<QQ")
_CALL = struct.Struct("<8Q")
_RESULT = struct.Struct("<q")

# read(0, data, 8192); for each call: take number and six arguments, the first from memory where the eighth word says
# so, call, and put the result where the number was; write(1, data, length); exit_group(0).
_CODE: Final = {
    "x86_64": (
        62,
        """
        bb00006000 31c0 31ff 89de ba00200000 0f05 4c8b23 4c8b7308 4c8d6b10
        4d85e4 7437 498b4500 498b7d08 498b7510 498b5518 4d8b5520 4d8b4528 4d8b4d30 498b4d38
        4885c9 7403 488b39 0f05 49894500 4983c540 49ffcc ebc4
        b801000000 bf01000000 4889de 4c89f2 0f05 b8e7000000 31ff 0f05
        """,
    ),
    "aarch64": (
        183,
        """
        130ca0d2 e80780d2 000080d2 e10313aa 020084d2 010000d4 745640a9 76420091
        740100b4 c80240a9 c10a41a9 c31242a9 c52643a9 490000b4 200140f9 010000d4 c00604f8 940600d1 f6ffff17
        080880d2 200080d2 e10313aa e20315aa 010000d4 c80b80d2 000080d2 010000d4
        """,
    ),
}


def program(arch: str) -> bytes:
    """The program for a machine of this architecture, as an ELF file."""
    machine, listing = _CODE[arch]
    code = bytes.fromhex(listing)
    start = 64 + 2 * 56
    head = struct.pack(
        *("<4s5B7xHHIQQQIHHHHHH", b"\x7fELF", 2, 1, 1, 0, 0, 2, machine, 1),
        *(_TEXT + start, 64, 0, 0, 64, 56, 2, 0, 0, 0),
    )
    size = start + len(code)
    text = struct.pack("<IIQQQQQQ", 1, 5, 0, _TEXT, _TEXT, size, size, 0x1000)
    data = struct.pack("<IIQQQQQQ", 1, 6, 0, _DATA, _DATA, 0, _DATA_BYTES, 0x1000)
    return head + text + data + code


class Bytes(Struct, frozen=True):
    """An argument that is the address of these bytes."""

    value: bytes


class Result(Struct, frozen=True):
    """A first argument that is what an earlier call, by its number from 0, gave."""

    call: int


Argument = int | Bytes | Result


class Call(Struct, frozen=True):
    """One system call. ``number`` is the machine's; at most six arguments, of which the first may be a ``Result``."""

    number: int
    arguments: tuple[Argument, ...] = ()


def message(calls: Sequence[Call]) -> bytes:
    """Return the message for the program.

    Raises:
        ValueError: Raised when it is too long for one write.
    """
    at = _HEAD.size + len(calls) * _CALL.size
    memory, records = b"", []
    for call in calls:
        words, source = [call.number], 0
        for argument in call.arguments:
            if isinstance(argument, Bytes):
                words.append(_DATA + at + len(memory))
                memory += argument.value
            elif isinstance(argument, Result):
                words.append(0)
                source = _DATA + _place(argument.call)
            else:
                words.append(argument % 2**64)
        records.append(_CALL.pack(*words, *[0] * (7 - len(words)), source))
    whole = _HEAD.pack(len(calls), at + len(memory)) + b"".join(records) + memory
    if len(whole) > MESSAGE_BYTES:
        raise ValueError(f"a self-test of {len(whole)} bytes cannot be written at once")
    return whole


def _place(call: int) -> int:
    return _HEAD.size + call * _CALL.size


def results(calls: Sequence[Call], answer: bytes) -> tuple[tuple[int, bytes], ...] | None:
    """Return for each call its result (a negative errno, or its value) and the final bytes of its last memory argument.

    None for an answer that does not match the message.
    """
    sent = message(calls)
    if len(answer) != len(sent) or answer[: _HEAD.size] != sent[: _HEAD.size]:
        return None
    out = []
    for index, call in enumerate(calls):
        record = _CALL.unpack_from(answer, _place(index))
        held = b""
        for word, argument in zip(record[1:], call.arguments, strict=False):
            if isinstance(argument, Bytes):
                held = answer[word - _DATA : word - _DATA + len(argument.value)]
        out.append((int(_RESULT.unpack_from(answer, _place(index))[0]), held))
    return tuple(out)
