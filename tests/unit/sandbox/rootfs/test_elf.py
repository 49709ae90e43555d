"""The ELF reader: what it reads, what it refuses, and pyelftools as the oracle over this machine's own files."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import pytest
from elftools.elf.dynamic import DynamicSegment
from elftools.elf.elffile import ELFFile
from elftools.elf.segments import InterpSegment

from policy import errors
from sandbox.rootfs import elf
from tests.unit.sandbox import tiny_elf


def test_dynamic_program_is_read_as_loader_reads_it() -> None:
    data = tiny_elf.build(
        interpreter="/lib64/ld-linux-x86-64.so.2", needed=["libm.so.6", "libc.so.6"], runpath="$ORIGIN/../lib:/opt/lib"
    )
    parsed = elf.parse(data, name="it")
    assert (parsed.arch, parsed.kind, parsed.dynamic) == ("x86_64", elf.ET_DYN, True)
    assert parsed.interpreter == "/lib64/ld-linux-x86-64.so.2"
    assert parsed.needed == ("libm.so.6", "libc.so.6")
    assert parsed.runpath == ("$ORIGIN/../lib", "/opt/lib")
    assert parsed.rpath == ()


def test_static_program_needs_nothing() -> None:
    parsed = elf.parse(tiny_elf.build(kind=elf.ET_EXEC), name="it")
    assert (parsed.interpreter, parsed.needed, parsed.dynamic) == ("", (), False)


def test_other_architecture_is_told_apart() -> None:
    assert elf.parse(tiny_elf.build(machine=183), name="it").arch == "aarch64"


GOOD = tiny_elf.build(interpreter="/lib64/ld-linux-x86-64.so.2", needed=["libc.so.6"])


def _patched(offset: int, raw: bytes) -> bytes:
    return GOOD[:offset] + raw + GOOD[offset + len(raw) :]


# The first program header is the PT_LOAD, the second PT_INTERP, the third PT_DYNAMIC; p_offset at +8, p_filesz +32.
_FIRST = elf.HEADER.size
_SECOND, _THIRD = _FIRST + 56, _FIRST + 112
_DYNAMIC_AT = struct.unpack_from("<Q", GOOD, _THIRD + 8)[0]
_U64 = b"\xff" * 8

BROKEN = {
    "empty": b"",
    "script": b"#!/bin/sh\n" + bytes(100),
    "short": GOOD[:40],
    "32 bit": _patched(4, b"\x01"),
    "big endian": _patched(5, b"\x02"),
    "riscv": _patched(18, struct.pack("<H", 243)),
    "core dump": _patched(16, struct.pack("<H", 4)),
    "program header size": _patched(54, struct.pack("<H", 32)),
    "no program headers": _patched(56, struct.pack("<H", 0)),
    "thousands of program headers": _patched(56, struct.pack("<H", 60000)),
    "program headers outside": _patched(32, struct.pack("<Q", len(GOOD))),
    "program headers at 2^64": _patched(32, _U64),
    "segment outside": _patched(_FIRST + 8, _U64),
    "interpreter outside": _patched(_SECOND + 8, struct.pack("<Q", len(GOOD))),
    "interpreter without end": _patched(_SECOND + 32, struct.pack("<Q", 5)),
    "interpreter of one byte": _patched(_SECOND + 32, struct.pack("<Q", 1)),
    "two interpreters": _patched(_THIRD, GOOD[_SECOND : _SECOND + 56]),
    "dynamic outside": _patched(_THIRD + 8, _U64),
    "needed outside the strings": _patched(_DYNAMIC_AT + 8, _U64),
    "string table nowhere": _patched(_DYNAMIC_AT + 16 + 8, _U64),
    "string table empty": _patched(_DYNAMIC_AT + 32 + 8, bytes(8)),
    "control characters": tiny_elf.build(needed=["lib\x1b[31m.so"]),
    "not ASCII": tiny_elf.build(needed=["libé.so"]),
    "needs nothing by name": _patched(_DYNAMIC_AT + 8, bytes(8)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_file_is_refused(name: str) -> None:
    elf.parse(GOOD, name="control")
    with pytest.raises(errors.NotElfError):
        elf.parse(BROKEN[name], name="it")


@pytest.mark.parametrize("cut", range(0, len(GOOD), 3))
def test_cut_file_is_refused_and_never_worse(cut: int) -> None:
    with pytest.raises(errors.NotElfError):
        elf.parse(GOOD[:cut], name="it")


_SYSTEM = [p for d in ("/usr/lib/x86_64-linux-gnu", "/usr/bin") for p in sorted(Path(d).glob("*"))]


def test_pyelftools_agrees_about_machine_s_own_files() -> None:
    """The oracle: another reader says the same about real programs and libraries."""
    compared = 0
    for path in _SYSTEM:
        if path.is_symlink() or not path.is_file() or path.stat().st_size > 4 << 20:
            continue
        data = path.read_bytes()
        if data[:6] != b"\x7fELF\x02\x01" or data[16] not in (elf.ET_EXEC, elf.ET_DYN):
            continue
        ours = elf.parse(data, name=str(path))
        theirs = ELFFile(io.BytesIO(data))
        interpreter: str = ""
        needed: tuple[str, ...] = ()
        for segment in theirs.iter_segments():
            if isinstance(segment, InterpSegment):
                interpreter = segment.get_interp_name()
            if isinstance(segment, DynamicSegment):
                needed = tuple(str(vars(t)["needed"]) for t in segment.iter_tags() if t.entry.d_tag == "DT_NEEDED")
        assert (ours.interpreter, ours.needed, ours.entry) == (interpreter, needed, theirs.header.e_entry), path
        compared += 1
        if compared >= 150:
            break
    assert compared >= 20
