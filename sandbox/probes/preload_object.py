"""Build a shared object of one page that makes some system calls before the program that the loader starts.

The dynamic loader takes it from the list in /etc/ld.so.preload of the agent's root (ld.so(8)) and calls its DT_INIT
before the first instruction of any program: in the same process, under the same filter, without a trace in its
arguments, environment or modules. It acts only in the agent's first process, by its id (1, or 2 beside an init) and if
argv[0] is the agent's program: an agent may start other programs, and exec itself. A call with another result than
expected ends the process with ``STATUS``; no code of the agent has run then.

Pointers in the records are relocations that the loader makes (R_X86_64_RELATIVE): it may be mapped anywhere.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from sandbox.probes.probe_program import Bytes, Call, Result

# The loader's list, and the path of the object in the root of a run that has one. No other root has them.
LIST: Final = "/etc/ld.so.preload"
PATH: Final = "/etc/.covenant-prelude.so"
STATUS: Final = 77
ARCHES: Final = frozenset({"x86_64"})

_PAGE = 0x1000
_CODE_AT, _CODE_LEA = 64 + 3 * 56, 3
# init(argc, argv, envp): compare argv[0] with the name behind the head of the data; getpid() == 1; for each record take
# number and six arguments, the first from memory where the eighth word says so, call, hold the result against the
# two last words; exit_group(77) where it is not between them.
_CODE = bytes.fromhex(
    "534154 488d1d00000000 488b16 4885d2 7479 488d4b10 8a02 3a01 756f 48ffc2 48ffc1 84c0 75f0"
    "b827000000 0f05 83f801 7559 4c8b23 488b5b08 4d85e4 744d 488b03 488b7b08 488b7310 488b5318 4c8b5320 4c8b4328"
    "4c8b4b30 488b4b38 4885c9 7403 488b39 0f05 488903 483b4340 7c0f 483b4348 7f09 4883c350 49ffcc ebba"
    "bf4d000000 b8e7000000 0f05 415c 5b c3"
)
_PROCESS_AT = _CODE.index(bytes.fromhex("83f801")) + 2
_HEAD = struct.Struct("<QQ")
_RECORD = struct.Struct("<8Qqq")
_RELATIVE = 8
# Tags of the dynamic section: DT_NULL, STRTAB, SYMTAB, RELA, RELASZ, RELAENT, STRSZ, SYMENT, INIT.
_NULL, _STRTAB, _SYMTAB, _RELA, _RELASZ, _RELAENT, _STRSZ, _SYMENT, _INIT = 0, 5, 6, 7, 8, 9, 10, 11, 12
_DYNAMIC_BYTES = 9 * 16


class ProbeStep(Struct, frozen=True):
    """One call and the least and the most that it may give; a call that fails gives its errno, negative."""

    call: Call
    least: int
    most: int


def build(program: str, steps: Sequence[ProbeStep], *, process: int = 1) -> bytes:
    """The object that makes these calls before ``program``, which is its argv[0], in the process with this id."""
    name = program.encode() + b"\0"
    # The data: head, name, records, what they point at, one empty string and symbol, relocations, dynamic section.
    records_at = _aligned(_HEAD.size + len(name))
    memory_at = records_at + len(steps) * _RECORD.size
    memory, relocations, records = b"", [8], []
    for index, step in enumerate(steps):
        words, source = [step.call.number], 0
        here = records_at + index * _RECORD.size
        for argument in step.call.arguments:
            if isinstance(argument, Bytes):
                relocations.append(here + 8 * len(words))
                words.append(_PAGE + memory_at + len(memory))
                memory += argument.value
            elif isinstance(argument, Result):
                words.append(0)
                source = _PAGE + records_at + argument.call * _RECORD.size
                relocations.append(here + 56)
            else:
                words.append(argument % 2**64)
        records.append(_RECORD.pack(*words, *[0] * (7 - len(words)), source, step.least, step.most))
    data = (_HEAD.pack(len(steps), _PAGE + records_at) + name).ljust(records_at, b"\0") + b"".join(records) + memory
    empty = _aligned(len(data))
    rela_at = empty + 24
    data = data.ljust(rela_at, b"\0")
    for place in relocations:
        (pointed,) = struct.unpack_from("<Q", data, place)
        data += struct.pack("<QQq", _PAGE + place, _RELATIVE, pointed)
    dynamic_at = len(data)
    for tag, value in (
        (_INIT, _CODE_AT),
        (_STRTAB, _PAGE + empty),
        (_SYMTAB, _PAGE + empty),
        (_STRSZ, 1),
        (_SYMENT, 24),
        (_RELA, _PAGE + rela_at),
        (_RELASZ, 24 * len(relocations)),
        (_RELAENT, 24),
        (_NULL, 0),
    ):
        data += struct.pack("<QQ", tag, value)
    return _elf(len(data), dynamic_at, process).ljust(_PAGE, b"\0") + data


def _elf(data_bytes: int, dynamic_at: int, process: int) -> bytes:
    head = struct.pack(
        *("<4s5B7xHHIQQQIHHHHHH", b"\x7fELF", 2, 1, 1, 0, 0, 3, 62, 1),
        *(0, 64, 0, 0, 64, 56, 3, 0, 0, 0),
    )
    size = _CODE_AT + len(_CODE)
    segments = (
        (1, 5, 0, size, _PAGE),  # PT_LOAD, read and execute
        (1, 6, _PAGE, data_bytes, _PAGE),  # PT_LOAD, read and write: the loader and the results write there
        (2, 6, _PAGE + dynamic_at, _DYNAMIC_BYTES, 8),  # PT_DYNAMIC
    )
    for kind, flags, at, length, align in segments:
        head += struct.pack("<IIQQQQQQ", kind, flags, at, at, at, length, length, align)
    # The distance from the end of the lea to the data.
    lea = struct.pack("<i", _PAGE - (_CODE_AT + _CODE_LEA + 7))
    code = bytearray(_CODE)
    code[_CODE_LEA + 3 : _CODE_LEA + 7], code[_PROCESS_AT] = lea, process
    return head + bytes(code)


def _aligned(size: int) -> int:
    return -(-size // 8) * 8
