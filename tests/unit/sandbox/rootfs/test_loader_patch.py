"""The trampoline: where it is put, what it changes, and its instructions run on stacks that the tests lay out."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from policy import errors
from sandbox.rootfs import elf, loader_patch
from tests.unit.sandbox import tiny_elf

PADDING = 4096


def test_only_entry_segment_size_and_padding_change() -> None:
    data = tiny_elf.build(padding=PADDING)
    before, after = elf.parse(data, name="before"), elf.parse(loader_patch.patch(data), name="after")
    end = before.segments[0].file_size
    assert len(loader_patch.patch(data)) == len(data)
    assert after.entry == tiny_elf.BASE + end
    assert after.segments[0].file_size == after.segments[0].memory_size == end + loader_patch.TRAMPOLINE_SIZE
    changed = [i for i, (a, b) in enumerate(zip(data, loader_patch.patch(data), strict=True)) if a != b]
    sizes = range(elf.HEADER.size + 32, elf.HEADER.size + 48)
    assert all(i in range(24, 32) or i in sizes or end <= i < end + loader_patch.TRAMPOLINE_SIZE for i in changed)


def test_jump_lands_on_original_entry() -> None:
    data = tiny_elf.build(padding=PADDING)
    end = elf.parse(data, name="it").segments[0].file_size
    code = loader_patch.patch(data)[end : end + loader_patch.TRAMPOLINE_SIZE]
    at = code.index(b"\xe9")
    (displacement,) = struct.unpack_from("<i", code, at + 1)
    assert tiny_elf.BASE + end + at + 5 + displacement == elf.parse(data, name="it").entry


class Machine:
    """The dozen x86-64 instructions of the trampoline, run on a stack that the test lays out."""

    def __init__(self, code: bytes, memory: dict[int, int], rsp: int) -> None:
        self.code, self.memory, self.rsp, self.at, self.zero = code, memory, rsp, 0, False
        self.rax = self.rcx = self.rdx = self.rdi = 0

    def run(self) -> str:
        for _ in range(10_000):
            if (done := self.step()) is not None:
                return done
        raise AssertionError("the trampoline does not end")

    def step(self) -> str | None:
        code, at = self.code, self.at
        table: dict[bytes, Callable[[], None]] = {
            b"\x48\x8b\x04\x24": lambda: setattr(self, "rax", self.memory[self.rsp]),
            b"\x48\x8d\x54\xc4\x10": lambda: setattr(self, "rdx", self.rsp + self.rax * 8 + 16),
            b"\x48\x8b\x02": lambda: setattr(self, "rax", self.memory[self.rdx]),
            b"\x48\x8b\x4a\x08": lambda: setattr(self, "rcx", self.memory[self.rdx + 8]),
            b"\x48\x83\xc2\x08": lambda: setattr(self, "rdx", self.rdx + 8),
            b"\x48\x83\xc2\x10": lambda: setattr(self, "rdx", self.rdx + 16),
            b"\x48\x85\xc0": lambda: setattr(self, "zero", self.rax == 0),
            b"\x48\x85\xc9": lambda: setattr(self, "zero", self.rcx == 0),
            b"\x48\x83\xf8\x07": lambda: setattr(self, "zero", self.rax == 7),
            b"\x31\xc0": lambda: setattr(self, "rax", 0),
            b"\x31\xc9": lambda: setattr(self, "rcx", 0),
            b"\x31\xd2": lambda: setattr(self, "rdx", 0),
            b"\xbf\x7e\x00\x00\x00": lambda: setattr(self, "rdi", 126),
            b"\xb8\xe7\x00\x00\x00": lambda: setattr(self, "rax", 231),
        }
        for raw, act in table.items():
            if code.startswith(raw, at):
                self.at += len(raw)
                act()
                return None
        opcode, offset = code[at], struct.unpack_from("<b", code, at + 1)[0]
        if opcode in (0x74, 0x75):
            self.at += 2 + (offset if self.zero == (opcode == 0x74) else 0)
            return None
        if opcode == 0xE9:
            return "loader"
        assert code.startswith(b"\x0f\x05", at), f"unknown instruction at {at}"
        return f"call {self.rax} with {self.rdi}"


def _run(arguments: int, environment: int, auxv: list[tuple[int, int]]) -> str:
    words = [arguments, *range(1000, 1000 + arguments), 0, *range(2000, 2000 + environment), 0]
    for pair in [*auxv, (0, 0)]:
        words += pair
    data = tiny_elf.build(padding=PADDING)
    end = elf.parse(data, name="it").segments[0].file_size
    code = loader_patch.patch(data)[end : end + loader_patch.TRAMPOLINE_SIZE]
    machine = Machine(code, {0x7000 + 8 * i: w for i, w in enumerate(words)}, 0x7000)
    return machine.run()


@pytest.mark.parametrize("arguments", [0, 1, 5])
@pytest.mark.parametrize("environment", [0, 1, 40])
def test_code_tells_loader_from_program(arguments: int, environment: int) -> None:
    other = [(33, 0x7FFF0000), (6, 4096), (3, 0x400040)]
    assert _run(arguments, environment, [*other, (7, 0x7F0000000000), (9, 1)]) == "loader"
    assert _run(arguments, environment, [(7, 0x7F0000000000)]) == "loader"
    assert _run(arguments, environment, [*other, (7, 0), (9, 1)]) == "call 231 with 126"
    # A kernel that gives no AT_BASE at all: refused.
    assert _run(arguments, environment, other) == "call 231 with 126"
    assert _run(arguments, environment, []) == "call 231 with 126"


def test_argument_or_variable_cannot_pose_as_at_base() -> None:
    """Seven arguments make argc 7, the number of AT_BASE; only the vector behind both NULLs counts."""
    assert _run(7, 7, [(7, 0)]) == "call 231 with 126"
    assert _run(7, 7, [(7, 1)]) == "loader"


def test_machine_without_trampoline_is_refused() -> None:
    with pytest.raises(errors.NotEnforceableError, match="aarch64"):
        loader_patch.patch(tiny_elf.build(machine=183, padding=PADDING))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (tiny_elf.build(padding=8), "no room"),
        (tiny_elf.build(padding=0), "no room"),
        (tiny_elf.build(code=b"\xf4" * (4096 - 150), padding=PADDING), "no room"),
        (tiny_elf.build() + b"data" + bytes(PADDING), "data where its padding"),
        (tiny_elf.build(interpreter="/lib64/ld-linux-x86-64.so.2", padding=PADDING), "is a program"),
        (tiny_elf.build(kind=elf.ET_EXEC, padding=PADDING), "is a program"),
    ],
)
def test_what_cannot_be_patched_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(errors.NotEnforceableError, match=why):
        loader_patch.patch(data)


def test_machine_s_own_loader() -> None:
    original = Path(loader_patch.LOADERS[os.uname().machine]).read_bytes()
    if os.uname().machine == "aarch64":
        with pytest.raises(errors.NotEnforceableError):
            loader_patch.patch(original)
    else:
        assert elf.parse(loader_patch.patch(original), name="new").entry != elf.parse(original, name="old").entry
