"""A program read on all calls at once: what is refused unread, and what two readings have in common."""

from __future__ import annotations

import struct

import pytest

from policy import data, errors
from policy.compile import seccomp
from policy.decompile import answers, bpf, calls, conditions, oci_seccomp
from policy.decompile.calls import CallTable
from policy.decompile.conditions import ALWAYS

X86, ARM, I386 = 0xC000003E, 0xC00000B7, 0x40000003
LOAD, AND, RETURN, JA, JEQ, JGT, JGE, JSET = 0x20, 0x54, 0x06, 0x05, 0x15, 0x25, 0x35, 0x45
ALLOW, EPERM, ENOSYS = bpf.ALLOW, calls.EPERM, calls.ENOSYS
NAMES = {0: "read", 1: "write", 2: "open"}
TOP = 2**64 - 1
ARGUMENT = 16

Step = tuple[int, int, int, int]
HEAD: tuple[Step, ...] = ((LOAD, 0, 0, 4), (JEQ, 1, 0, X86), (RETURN, 0, 0, EPERM), (LOAD, 0, 0, 0))


def program(*steps: Step) -> bytes:
    return b"".join(struct.pack("<HBBI", *step) for step in steps)


def only_read(*steps: Step) -> bytes:
    """A program that refuses all but read, and does the rest for read."""
    return program(*HEAD, (JEQ, 1, 0, 0), (RETURN, 0, 0, EPERM), *steps)


def read(raw: bytes) -> CallTable:
    return calls.read_bpf(raw, "x86_64", NAMES)


def test_call_is_read_with_its_condition() -> None:
    raw = only_read(
        (LOAD, 0, 0, ARGUMENT + 8), (AND, 0, 0, 0xF0), (JEQ, 0, 3, 0x30),
        (LOAD, 0, 0, ARGUMENT + 12), (JEQ, 0, 1, 7), (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, EPERM),
    )  # fmt: skip
    assert read(raw) == CallTable({"read": conditions.any_of([[(1, 0xFFFFFFFF_000000F0, 0x7_00000030)]])})


def test_ranges_of_numbers_and_missing_call_are_read() -> None:
    raw = program(
        *HEAD, (JGE, 0, 1, 2), (JGT, 2, 1, 2), (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, ENOSYS), (RETURN, 0, 0, EPERM)
    )
    assert read(raw) == CallTable({"read": ALWAYS, "write": ALWAYS}, frozenset({"open"}))


def test_spans_are_apart_and_cover_everything() -> None:
    raw = seccomp.compile(data.profile("python3").names, arch="x86_64").bpf
    spans = answers.answers(raw)
    size = sum((a.numbers[1] - a.numbers[0] + 1) * (a.tags[1] - a.tags[0] + 1) for a in spans)
    assert size == 2**64
    for number, arch in ((0, X86), (59, X86), (59, X86 - 1), (59, X86 + 1), (2**32 - 1, X86), (0, 0)):
        hits = [a for a in spans if a.numbers[0] <= number <= a.numbers[1] and a.tags[0] <= arch <= a.tags[1]]
        assert len(hits) == 1
        assert bpf.decide(raw, number=number, arch=arch) in hits[0].rest.actions


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (program((RETURN, 0, 0, ALLOW)), "does not refuse calls of architecture 0x0"),
        (program((LOAD, 0, 0, 4), (JEQ, 1, 0, X86), (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, EPERM)), "architecture 0x"),
        (program((LOAD, 0, 0, 4), (JGE, 1, 0, X86), (RETURN, 0, 0, EPERM), (RETURN, 0, 0, ALLOW)), "architecture 0xff"),
        (program((LOAD, 0, 0, 4), (JEQ, 1, 0, I386), (RETURN, 0, 0, EPERM), (RETURN, 0, 0, ALLOW)), "re 0x40000003"),
        (program((LOAD, 0, 0, 0), (JEQ, 1, 0, 0), (RETURN, 0, 0, EPERM), (RETURN, 0, 0, ALLOW)), "architecture 0x0"),
        (program(*HEAD, (RETURN, 0, 0, ALLOW)), "does not refuse call 3, which has no name"),
        (program(*HEAD, (JGE, 0, 1, 3), (RETURN, 0, 0, ENOSYS), (RETURN, 0, 0, EPERM)), "does not refuse call 3"),
        (program(*HEAD, (JEQ, 0, 1, 0x40000000), (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, EPERM)), "call 1073741824"),
        (program(*HEAD, (JGE, 1, 0, 3), (RETURN, 0, 0, EPERM), (RETURN, 0, 0, ALLOW)), "does not refuse call 3"),
        (only_read((RETURN, 0, 0, 0)), "answers calls with 0x0"),
        (only_read((RETURN, 0, 0, 0x7FF00001)), "answers calls with 0x7ff00001"),
        (only_read((RETURN, 0, 0, 0x00050000)), "answers calls with 0x50000"),
        (only_read((RETURN, 0, 0, 0x0005000D)), "answers calls with 0x5000d"),
        (
            only_read((LOAD, 0, 0, ARGUMENT), (JEQ, 0, 1, 1), (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, ENOSYS)),
            "answers calls with 0x50026 or 0x7fff0000",
        ),
        (program((LOAD, 0, 0, 4), (AND, 0, 0, 1), (JEQ, 0, 0, 1), (RETURN, 0, 0, EPERM)), "instruction 1 .* where it"),
        (program(*HEAD, (AND, 0, 0, 1), (RETURN, 0, 0, EPERM)), "instruction 4 .* where it stands"),
        (program(*HEAD, (JSET, 0, 0, 1), (RETURN, 0, 0, EPERM)), "instruction 4 .* where it stands"),
        (program((JEQ, 0, 0, 1), (RETURN, 0, 0, EPERM)), "instruction 0 .* where it stands"),
        (program((AND, 0, 0, 1), (RETURN, 0, 0, EPERM)), "instruction 0 .* where it stands"),
        (program((LOAD, 0, 0, 8), (RETURN, 0, 0, EPERM)), "instruction 0 .* where it stands"),
        (only_read((LOAD, 0, 0, ARGUMENT), (LOAD, 0, 0, 12), (RETURN, 0, 0, EPERM)), "instruction 7 .* where it"),
        (only_read((LOAD, 0, 0, ARGUMENT), (LOAD, 0, 0, 0), (RETURN, 0, 0, EPERM)), "instruction 7 .* where it"),
        (only_read((LOAD, 0, 0, ARGUMENT), (LOAD, 0, 0, 4), (RETURN, 0, 0, EPERM)), "instruction 7 .* where it"),
    ],
)
def test_what_no_filter_of_ours_does_is_refused(raw: bytes, message: str) -> None:
    with pytest.raises(errors.ArtefactError, match=message):
        read(raw)


def test_refused_programs_have_control() -> None:
    assert read(only_read((RETURN, 0, 0, ALLOW))) == CallTable({"read": ALWAYS})
    assert read(program((RETURN, 0, 0, EPERM))) == CallTable()


def test_condition_that_nothing_meets_allows_nothing() -> None:
    raw = only_read(
        (LOAD, 0, 0, ARGUMENT), (JEQ, 0, 2, 1), (JEQ, 0, 1, 2), (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, EPERM)
    )
    assert read(raw) == CallTable()


def test_tests_of_no_bit_at_all_are_read() -> None:
    raw = only_read(
        (LOAD, 0, 0, ARGUMENT), (AND, 0, 0, 0), (JEQ, 0, 2, 0), (JEQ, 1, 0, 5), (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, 0)
    )
    assert read(raw) == CallTable({"read": ALWAYS})


def test_long_chain_of_alternatives_stays_small() -> None:
    # 40 values of 64 bits: as paths with everything earlier excluded they would be thousands of cubes.
    steps: list[Step] = []
    for value in range(40):
        steps += [
            (LOAD, 0, 0, ARGUMENT + 4), (JEQ, 0, 3, value >> 2), (LOAD, 0, 0, ARGUMENT), (JEQ, 0, 1, value),
            (RETURN, 0, 0, ALLOW),
        ]  # fmt: skip
    found = read(only_read(*steps, (RETURN, 0, 0, EPERM)))
    assert set(found.allowed["read"]) == {(TOP, value >> 2 << 32 | value) for value in range(40)}


@pytest.mark.parametrize("arch", ["x86_64", "aarch64"])
@pytest.mark.parametrize("profile", ["python3", "node", "static"])
@pytest.mark.parametrize("network", [True, False])
def test_both_readings_are_what_was_granted(arch: str, profile: str, network: bool) -> None:
    names = data.profile(profile).names | (data.addition("network").names if network else frozenset())
    numbers = data.syscalls(arch).numbers
    artefact = seccomp.compile(names, arch=arch, network=network)
    from_bpf = calls.read_bpf(artefact.bpf, arch, {number: name for name, number in numbers.items()})
    from_oci = oci_seccomp.read(artefact.oci, arch, numbers)
    assert list(calls.differences(from_bpf, from_oci)) == []
    rules = {}
    for name in names:
        if (alternatives := data.arguments().alternatives(name, network=network)) is not None:
            rules[name] = [[(c.argument, c.mask, c.value) for c in a.conditions] for a in alternatives]
    meant = calls.expected([name for name in names if name in numbers], rules, {"clone3"})
    assert list(calls.differences(meant, from_bpf)) == []
    assert from_bpf.is_equal(meant)


def test_tables_of_numbers_read_both_ways() -> None:
    for arch in ("x86_64", "aarch64"):
        numbers = data.syscalls(arch).numbers
        assert len(set(numbers.values())) == len(numbers)


# --- comparing ---------------------------------------------------------------------------------------

NARROW = calls.expected(["read", "write"], {"read": [[(0, TOP, 5)]]}, ["clone3"])
WIDE = calls.expected(["read", "write", "open"], {"read": [[(0, 0xFF, 5)]]}, ["clone3"])


def test_what_was_expected_is_built_as_it_was_said() -> None:
    assert NARROW.condition("read") == conditions.any_of([[(0, TOP, 5)]])
    assert NARROW.condition("write") == ALWAYS
    assert NARROW.condition("open") == conditions.NEVER
    assert calls.expected(["read", "clone3"], {"write": [[]]}, ["clone3"]) == CallTable(
        {"read": ALWAYS}, frozenset({"clone3"})
    )
    assert calls.expected(["read"], {"read": []}) == CallTable()
    assert calls.expected(["read"]) == CallTable({"read": ALWAYS})


def test_inclusion_and_equality() -> None:
    assert NARROW.is_subset(WIDE)
    assert not WIDE.is_subset(NARROW)
    assert NARROW.is_equal(NARROW)
    assert not NARROW.is_equal(WIDE)
    assert CallTable().is_subset(NARROW)


def test_what_exceeds_comes_with_call_that_shows_it() -> None:
    opened, widened = calls.excess(WIDE, NARROW)
    assert (opened.name, opened.here, opened.there) == ("open", "allowed", "refused")
    assert widened.name == "read"
    assert conditions.holds(WIDE.condition("read"), widened.arguments)
    assert not conditions.holds(NARROW.condition("read"), widened.arguments)
    assert opened.describe("seccomp.bpf", "the grants") == (
        "`open` with arguments (0, 0, 0, 0, 0, 0) is allowed by seccomp.bpf and refused by the grants"
    )


def test_differences_name_each_direction() -> None:
    left = calls.expected(["read", "write"], {"read": [[(0, 1, 1)]]})
    right = calls.expected(["read"], {"read": [[(0, 2, 2)]]}, ["write"])
    found = list(calls.differences(left, right))
    assert [(d.name, d.here, d.there) for d in found] == [
        ("read", "allowed", "refused"),
        ("read", "refused", "allowed"),
        ("write", "allowed", "answered with ENOSYS"),
    ]
    assert found[0].arguments[0] & 3 == 1
    assert found[1].arguments[0] & 3 == 2


def test_call_missing_is_not_one_refused() -> None:
    refused, missing = CallTable(), CallTable({}, frozenset({"clone3"}))
    assert refused.is_subset(missing)
    assert missing.is_subset(refused)
    assert not refused.is_equal(missing)
    (difference,) = calls.differences(missing, refused)
    assert difference == calls.CallDifference("clone3", (0,) * 6, "answered with ENOSYS", "refused")


def test_conditions_written_otherwise_are_equal() -> None:
    left = calls.expected(["read"], {"read": [[(0, 1, 1)], [(0, 1, 0), (1, 1, 1)]]})
    right = calls.expected(["read"], {"read": [[(0, 1, 1), (1, 1, 0)], [(1, 1, 1)]]})
    assert left != right
    assert left.is_equal(right)
