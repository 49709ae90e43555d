"""Read ELF headers strictly and within bounds: the loader's view of a file, which is never executed.

Only what the dynamic loader itself reads is read: program headers and the dynamic segment. Section headers are
ignored, since a hostile file can make them disagree with what gets loaded. ldd is not used anywhere: for some
files it executes them. pyelftools is the oracle in tests/unit/sandbox/rootfs/test_elf.py.
Source: elf(5), https://refspecs.linuxfoundation.org/elf/gabi4+/ch5.dynamic.html.
"""

from __future__ import annotations

import struct

from msgspec import Struct

from policy import errors

MACHINES = {62: "x86_64", 183: "aarch64"}
ET_EXEC, ET_DYN = 2, 3
PT_LOAD, PT_DYNAMIC, PT_INTERP = 1, 2, 3
PF_X = 1
HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
PROGRAM_HEADER = struct.Struct("<IIQQQQQQ")
_DYNAMIC = struct.Struct("<qQ")
_DT_NULL, _DT_NEEDED, _DT_STRTAB, _DT_STRSZ, _DT_RPATH, _DT_RUNPATH = 0, 1, 5, 10, 15, 29

# Far above anything real (libLLVM needs 12 libraries), far below what could cost time or memory.
_MAX_PROGRAM_HEADERS = 128
_MAX_DYNAMIC = 4096
_MAX_NEEDED = 256
_MAX_STRING = 4096


class Segment(Struct, frozen=True):
    """One program header; offsets, addresses and sizes in bytes."""

    kind: int
    flags: int
    offset: int
    vaddr: int
    paddr: int
    file_size: int
    memory_size: int
    align: int


class Elf(Struct, frozen=True):
    """The ELF fields that the kernel and the loader use.

    ``interpreter`` is PT_INTERP's text, empty for a static program or a library; ``needed`` are the DT_NEEDED
    names in order; ``rpath`` and ``runpath`` are unexpanded.
    """

    arch: str
    kind: int
    entry: int
    segments: tuple[Segment, ...]
    program_headers_at: int
    interpreter: str
    dynamic: bool
    needed: tuple[str, ...]
    rpath: tuple[str, ...]
    runpath: tuple[str, ...]


def parse(data: bytes | memoryview, *, name: str) -> Elf:
    """Read the headers of a whole 64-bit little-endian ELF file. ``name`` is used in errors.

    Raises:
        errors.NotElfError: Raised when the magic, class, machine or type is another one, or an offset points outside
            the file.
    """
    if len(data) < HEADER.size or bytes(data[:4]) != b"\x7fELF":
        raise errors.NotElfError(f"`{name}` is not an ELF file")
    ident, kind, machine, _, entry, ph_at, _, _, _, ph_size, ph_count, *_ = HEADER.unpack_from(data)
    if ident[4:7] != b"\x02\x01\x01" or machine not in MACHINES:
        raise errors.NotElfError(f"`{name}` is for another kind of machine: only 64-bit x86_64 and aarch64 are known")
    if kind not in (ET_EXEC, ET_DYN):
        raise errors.NotElfError(f"`{name}` is neither a program nor a shared object")
    if ph_size != PROGRAM_HEADER.size or not 0 < ph_count <= _MAX_PROGRAM_HEADERS:
        raise errors.NotElfError(f"`{name}` has an impossible program header table")
    if ph_at + ph_size * ph_count > len(data):
        raise errors.NotElfError(f"`{name}` ends within its program headers")
    segments = tuple(Segment(*PROGRAM_HEADER.unpack_from(data, ph_at + i * ph_size)) for i in range(ph_count))
    for segment in segments:
        if segment.file_size and segment.offset + segment.file_size > len(data):
            raise errors.NotElfError(f"`{name}` ends within a segment")
    entries = _dynamic(data, segments, name)
    strings = _Strings(data, segments, entries, name)
    places = [value for tag, value in entries if tag == _DT_NEEDED]
    if len(places) > _MAX_NEEDED:
        raise errors.NotElfError(f"`{name}` needs {len(places)} libraries, more than {_MAX_NEEDED}")
    needed = [strings.at(place) for place in places]
    return Elf(
        arch=MACHINES[machine],
        kind=kind,
        entry=entry,
        segments=segments,
        program_headers_at=ph_at,
        interpreter=_interpreter(data, segments, name),
        dynamic=any(s.kind == PT_DYNAMIC for s in segments),
        needed=tuple(needed),
        rpath=strings.paths(entries, _DT_RPATH),
        runpath=strings.paths(entries, _DT_RUNPATH),
    )


def _interpreter(data: bytes | memoryview, segments: tuple[Segment, ...], name: str) -> str:
    found = [s for s in segments if s.kind == PT_INTERP]
    if not found:
        return ""
    if len(found) > 1 or not 2 <= found[0].file_size <= _MAX_STRING:
        raise errors.NotElfError(f"`{name}` names its loader in an impossible way")
    raw = bytes(data[found[0].offset : found[0].offset + found[0].file_size])
    if raw[-1] != 0 or 0 in raw[:-1]:
        raise errors.NotElfError(f"`{name}` names its loader in an impossible way")
    return _text(raw[:-1], name)


def _dynamic(data: bytes | memoryview, segments: tuple[Segment, ...], name: str) -> list[tuple[int, int]]:
    found = [s for s in segments if s.kind == PT_DYNAMIC]
    if not found:
        return []
    if len(found) > 1:
        raise errors.NotElfError(f"`{name}` has two dynamic segments")
    count = found[0].file_size // _DYNAMIC.size
    if count > _MAX_DYNAMIC:
        raise errors.NotElfError(f"`{name}` has a dynamic segment of {count} entries")
    entries = []
    for i in range(count):
        tag, value = _DYNAMIC.unpack_from(data, found[0].offset + i * _DYNAMIC.size)
        if tag == _DT_NULL:
            break
        entries.append((tag, value))
    return entries


class _Strings:
    """The string table of the dynamic segment, found by address as the loader finds it."""

    def __init__(
        self,
        data: bytes | memoryview,
        segments: tuple[Segment, ...],
        entries: list[tuple[int, int]],
        name: str,
    ) -> None:
        self._data, self._name = data, name
        tags = dict(entries)
        address, self._size = tags.get(_DT_STRTAB), tags.get(_DT_STRSZ, 0)
        self._start = -1
        for s in segments:
            if s.kind == PT_LOAD and address is not None and s.vaddr <= address < s.vaddr + s.file_size:
                self._start = s.offset + address - s.vaddr
                self._size = min(self._size, s.file_size - (address - s.vaddr))
                break

    def paths(self, entries: list[tuple[int, int]], wanted: int) -> tuple[str, ...]:
        return tuple(p for tag, value in entries if tag == wanted for p in self.at(value).split(":") if p)

    def at(self, offset: int) -> str:
        if self._start < 0 or offset >= self._size:
            raise errors.NotElfError(f"`{self._name}` points outside its string table")
        start = self._start + offset
        raw = bytes(self._data[start : min(start + _MAX_STRING, self._start + self._size)])
        end = raw.find(b"\0")
        if end < 0:
            raise errors.NotElfError(f"`{self._name}` has a string without an end")
        return _text(raw[:end], self._name)


def _text(raw: bytes, name: str) -> str:
    try:
        text = raw.decode("ascii")
    except UnicodeDecodeError:
        text = ""
    if not text.isprintable() or not text:
        raise errors.NotElfError(f"`{name}` holds a name that is not printable ASCII")
    return text
