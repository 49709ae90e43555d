"""The instructions of a filter: what is one, and what each does to one call."""

from __future__ import annotations

import struct

import pytest

from policy import errors
from policy.decompile import answers, bpf

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
    for read in (bpf.parse, answers.answers, lambda raw: bpf.decide(raw, number=0, arch=X86)):
        with pytest.raises(errors.ArtefactError, match=message):
            read(raw)


@pytest.mark.parametrize(
    ("operation", "true_for", "false_for"),
    [(JEQ, [5], [4, 6]), (JGT, [6, 0xFFFFFFFF], [0, 5]), (JGE, [5, 0xFFFFFFFF], [0, 4]), (JSET, [1, 4, 7], [0, 2, 8])],
)
def test_each_test_is_kernels(operation: int, true_for: list[int], false_for: list[int]) -> None:
    raw = program((LOAD, 0, 0, 0), (operation, 0, 1, 5), (RETURN, 0, 0, bpf.ALLOW), (RETURN, 0, 0, DENY))
    assert {bpf.decide(raw, number=n, arch=0) for n in true_for} == {bpf.ALLOW}
    assert {bpf.decide(raw, number=n, arch=0) for n in false_for} == {DENY}


def test_arguments_are_two_words_each() -> None:
    for offset, value in ((16 + 8 * 5, 0x11111111), (20 + 8 * 5, 0x22222222)):
        raw = program((LOAD, 0, 0, offset), (JEQ, 0, 1, value), (RETURN, 0, 0, bpf.ALLOW), (RETURN, 0, 0, DENY))
        assert bpf.decide(raw, number=0, arch=0, arguments=[0] * 5 + [0x2222222211111111]) == bpf.ALLOW


def test_mask_and_jump_are_kernels() -> None:
    raw = program(
        (LOAD, 0, 0, 16), (AND, 0, 0, 0xF0), (JA, 0, 0, 1), (RETURN, 0, 0, 0), (JEQ, 0, 1, 0x30),
        (RETURN, 0, 0, bpf.ALLOW), (RETURN, 0, 0, DENY),
    )  # fmt: skip
    assert bpf.decide(raw, number=0, arch=X86, arguments=[0x1234]) == bpf.ALLOW
    assert bpf.decide(raw, number=0, arch=X86, arguments=[0x1244]) == DENY


def test_number_and_tag_are_words_of_their_own() -> None:
    for offset, expected in ((bpf.NUMBER, 7), (bpf.ARCH, X86), (8, 0), (12, 0)):
        raw = program((LOAD, 0, 0, offset), (JEQ, 0, 1, expected), (RETURN, 0, 0, bpf.ALLOW), (RETURN, 0, 0, DENY))
        assert bpf.decide(raw, number=7, arch=X86) == bpf.ALLOW
