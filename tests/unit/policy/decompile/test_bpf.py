"""Reading a filter back: what it allows, and what cannot be read."""

from __future__ import annotations

import struct

import pytest

from policy import data, errors
from policy.compile import seccomp
from policy.decompile import bpf

X86 = 0xC000003E
LOAD, AND, RETURN, JA, JEQ, JGT, JGE, JSET = 0x20, 0x54, 0x06, 0x05, 0x15, 0x25, 0x35, 0x45
DENY = 0x00050001


def program(*instructions: tuple[int, int, int, int]) -> bytes:
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in instructions)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "no seccomp program"),
        (b"\x06" * 7, "no seccomp program"),
        (program((RETURN, 0, 0, 0)) * 4097, "no seccomp program"),
        (program((0x07, 0, 0, 0), (RETURN, 0, 0, 0)), "not understood"),
        (program((0x16, 0, 0, 0)), "not understood"),
        (program((0x1D, 0, 0, 0), (RETURN, 0, 0, 0)), "not understood"),
        (program((LOAD, 0, 0, 64), (RETURN, 0, 0, 0)), "not understood"),
        (program((LOAD, 0, 0, 2), (RETURN, 0, 0, 0)), "not understood"),
        (program((LOAD, 0, 0, 0)), "past its end"),
        (program((LOAD, 0, 0, 0), (JEQ, 0, 1, 5), (RETURN, 0, 0, 0)), "past its end"),
        (program((JA, 0, 0, 1), (RETURN, 0, 0, 0)), "past its end"),
        (program((JA, 0, 0, 0xFFFFFFFF), (RETURN, 0, 0, 0)), "past its end"),
    ],
)
def test_what_is_no_filter_is_refused(raw: bytes, message: str) -> None:
    for read in (bpf.parse, bpf.regions, lambda raw: bpf.decide(raw, number=0, arch=X86)):
        with pytest.raises(errors.ArtefactError, match=message):
            read(raw)


def test_a_test_before_a_load_is_refused() -> None:
    with pytest.raises(errors.ArtefactError, match="before it loads"):
        bpf.regions(program((JEQ, 0, 0, 1), (RETURN, 0, 0, 0)))


def test_a_program_of_too_many_paths_is_refused_rather_than_half_read() -> None:
    doubling = [step for bit in range(17) for step in ((LOAD, 0, 0, 16), (JSET, 0, 0, 1 << bit))]
    with pytest.raises(errors.ArtefactError, match="too many paths"):
        bpf.regions(program(*doubling, (RETURN, 0, 0, 0)))


@pytest.mark.parametrize(
    ("operation", "true_for", "false_for"),
    [(JEQ, [5], [4, 6]), (JGT, [6, 0xFFFFFFFF], [0, 5]), (JGE, [5, 0xFFFFFFFF], [0, 4]), (JSET, [1, 4, 7], [0, 2, 8])],
)
def test_each_test_is_the_kernels(operation: int, true_for: list[int], false_for: list[int]) -> None:
    raw = program((LOAD, 0, 0, 0), (operation, 0, 1, 5), (RETURN, 0, 0, bpf.ALLOW), (RETURN, 0, 0, DENY))
    assert {bpf.decide(raw, number=n, arch=0) for n in true_for} == {bpf.ALLOW}
    assert {bpf.decide(raw, number=n, arch=0) for n in false_for} == {DENY}


def test_arguments_are_two_words_each() -> None:
    for offset, value in ((16 + 8 * 5, 0x11111111), (20 + 8 * 5, 0x22222222)):
        raw = program((LOAD, 0, 0, offset), (JEQ, 0, 1, value), (RETURN, 0, 0, bpf.ALLOW), (RETURN, 0, 0, DENY))
        assert bpf.decide(raw, number=0, arch=0, arguments=[0] * 5 + [0x2222222211111111]) == bpf.ALLOW


def test_a_masked_argument_is_kept_as_a_test() -> None:
    raw = program(
        (LOAD, 0, 0, 16), (AND, 0, 0, 0xF0), (JEQ, 0, 1, 0x30), (RETURN, 0, 0, bpf.ALLOW), (RETURN, 0, 0, DENY)
    )
    by_action = {region.action: region for region in bpf.regions(raw)}
    assert by_action[bpf.ALLOW].tests == (bpf.BitTest(16, 0xF0, "==", 0x30, True),)
    assert by_action[bpf.ALLOW].conditional
    assert bpf.decide(raw, number=0, arch=0, arguments=[0x1234]) == bpf.ALLOW
    assert bpf.decide(raw, number=0, arch=0, arguments=[0x1244]) == DENY


def test_paths_that_no_call_can_take_are_not_reported() -> None:
    raw = program(
        (LOAD, 0, 0, 0), (JGE, 0, 2, 10), (JEQ, 0, 1, 5), (RETURN, 0, 0, bpf.ALLOW),
        (LOAD, 0, 0, 16), (JSET, 0, 2, 1), (JSET, 1, 0, 1), (RETURN, 0, 0, bpf.ALLOW), (RETURN, 0, 0, DENY),
    )  # fmt: skip
    assert {region.action for region in bpf.regions(raw)} == {DENY}


@pytest.mark.parametrize("arch", ["x86_64", "aarch64"])
@pytest.mark.parametrize("profile", ["python3", "node", "static"])
def test_what_is_allowed_is_what_was_granted(arch: str, profile: str) -> None:
    tag = {"x86_64": X86, "aarch64": 0xC00000B7}[arch]
    names = data.profile(profile).names
    numbers = data.syscalls(arch).numbers
    raw = seccomp.compile(names, arch=arch).bpf
    read_back = {n for low, high in bpf.allowed(raw, arch=tag) for n in range(low, high + 1)}
    assert read_back == {numbers[name] for name in names if name in numbers}
    for foreign in (0xC00000B7 if arch == "x86_64" else X86, 0x40000003, 0):
        assert bpf.allowed(raw, arch=foreign) == ()
    conditional = {region.ranges(bpf.NUMBER) for region in bpf.regions(raw) if region.conditional}
    guarded = {numbers[name] for name in ("clone", "mknod", "mknodat") if name in names and name in numbers}
    assert conditional == {((number, number),) for number in guarded}


def meaning(raw: bytes) -> set[tuple[int, int, tuple[bpf.BitTest, ...]]]:
    """Every single number and what happens to it under x86_64, however the program is laid out."""
    return {
        (region.action, number, region.tests)
        for region in bpf.regions(raw)
        if any(low <= X86 <= high for low, high in region.ranges(bpf.ARCH))
        for low, high in region.ranges(bpf.NUMBER)
        for number in range(low, min(high, 1000) + 1)
    }


def test_each_planted_fault_is_seen() -> None:
    raw = seccomp.compile(data.profile("static").names, arch="x86_64").bpf
    honest, faults = meaning(raw), 0
    for at, (operation, _, _, constant) in enumerate(bpf.parse(raw)):
        # Every pivot moved by one, every mask widened, every answer turned round.
        wrong = {JGE: constant + 1, JSET: constant & (constant - 1), RETURN: constant ^ DENY ^ bpf.ALLOW}
        if at < 6 or operation not in wrong:
            continue
        planted = bytearray(raw)
        struct.pack_into("<I", planted, at * 8 + 4, wrong[operation])
        assert meaning(bytes(planted)) != honest, at
        faults += 1
    assert faults > 100
