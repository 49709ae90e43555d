"""ELF files of a few hundred bytes, built field by field, for tests of what reads them."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from sandbox.rootfs import elf

BASE = 0x400000
DT_NEEDED, DT_STRTAB, DT_STRSZ, DT_RPATH, DT_RUNPATH = 1, 5, 10, 15, 29


def build(
    *,
    machine: int = 62,
    kind: int = elf.ET_DYN,
    interpreter: str = "",
    needed: Sequence[str] = (),
    rpath: str = "",
    runpath: str = "",
    code: bytes = b"\xf4",
    padding: int = 0,
) -> bytes:
    """A program with one executable PT_LOAD that covers everything up to ``padding`` zero bytes at its end.

    The entry is at ``code``. Addresses are BASE plus the file's offset.
    """
    dynamic = bool(needed or rpath or runpath)
    count = 1 + bool(interpreter) + dynamic
    at = elf.HEADER.size + count * elf.PROGRAM_HEADER.size
    strings, offsets = b"\0", {}
    for text in (*needed, rpath, runpath):
        if text:
            offsets[text] = len(strings)
            strings += text.encode() + b"\0"
    body = b""
    interpreter_at, raw = at, interpreter.encode() + b"\0" if interpreter else b""
    body += raw
    strings_at = at + len(body)
    body += strings
    dynamic_at = at + len(body)
    entries = [(DT_NEEDED, offsets[n]) for n in needed]
    entries += [(tag, offsets[t]) for tag, t in ((DT_RPATH, rpath), (DT_RUNPATH, runpath)) if t]
    entries += [(DT_STRTAB, BASE + strings_at), (DT_STRSZ, len(strings)), (0, 0)]
    table = b"".join(struct.pack("<qQ", *e) for e in entries) if dynamic else b""
    body += table
    code_at = at + len(body)
    body += code
    size = at + len(body)
    headers = [(elf.PT_LOAD, 5, 0, BASE, BASE, size, size, 0x1000)]
    if interpreter:
        headers.append((elf.PT_INTERP, 4, interpreter_at, BASE + interpreter_at, 0, len(raw), len(raw), 1))
    if dynamic:
        headers.append((elf.PT_DYNAMIC, 6, dynamic_at, BASE + dynamic_at, 0, len(table), len(table), 8))
    ident = b"\x7fELF\x02\x01\x01" + bytes(9)
    head = elf.HEADER.pack(ident, kind, machine, 1, BASE + code_at, elf.HEADER.size, 0, 0, 64, 56, count, 0, 0, 0)
    return head + b"".join(elf.PROGRAM_HEADER.pack(*h) for h in headers) + body + bytes(padding)
