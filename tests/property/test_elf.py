"""Check that the ELF reader and patcher either return or refuse, for any bytes."""

from __future__ import annotations

import contextlib
import struct

import hypothesis
from hypothesis import strategies as st

from policy import errors
from sandbox.rootfs import elf, loader_patch
from tests.unit.sandbox import tiny_elf

GOOD = tiny_elf.build(interpreter="/lib64/ld-linux-x86-64.so.2", needed=["libc.so.6", "libm.so.6"], runpath="/a:/b")
PADDED = tiny_elf.build(padding=4096)
HEADERS_END = elf.HEADER.size + 3 * elf.PROGRAM_HEADER.size


@hypothesis.given(st.binary(max_size=400))
def test_any_bytes(data: bytes) -> None:
    for candidate in (data, b"\x7fELF\x02\x01\x01" + data, GOOD[:64] + data):
        with contextlib.suppress(errors.NotElfError):
            elf.parse(candidate, name="it")


@hypothesis.given(st.lists(st.tuples(st.integers(0, len(GOOD) - 8), st.integers(0, 2**64 - 1)), min_size=1, max_size=4))
def test_good_file_with_words_overwritten(changes: list[tuple[int, int]]) -> None:
    data = bytearray(GOOD)
    for at, word in changes:
        struct.pack_into("<Q", data, at, word)
    try:
        parsed = elf.parse(bytes(data), name="it")
    except errors.NotElfError:
        return
    for text in (*parsed.needed, *parsed.runpath, *parsed.rpath, parsed.interpreter):
        assert text.isascii()
        assert text.isprintable()


@hypothesis.given(st.integers(0, HEADERS_END - 8), st.integers(0, 2**64 - 1))
def test_patch_changes_nothing_but_entry_size_and_padding(at: int, word: int) -> None:
    data = bytearray(PADDED)
    struct.pack_into("<Q", data, at, word)
    try:
        patched = loader_patch.patch(bytes(data))
    except (errors.NotElfError, errors.NotEnforceableError):
        return
    assert len(patched) == len(data)
    segment = next(s for s in elf.parse(bytes(data), name="it").segments if s.kind == elf.PT_LOAD)
    cave = segment.offset + segment.file_size
    assert not any(data[cave : cave + loader_patch.TRAMPOLINE_SIZE])
    changed = [i for i, (a, b) in enumerate(zip(data, patched, strict=True)) if a != b]
    assert all(i < HEADERS_END or cave <= i < cave + loader_patch.TRAMPOLINE_SIZE for i in changed)
