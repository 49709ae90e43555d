"""Compare the reader of whole filters with three references: counting, one call at a time, and libseccomp."""

from __future__ import annotations

import functools
import os
import platform
import struct
from typing import Any

import pyseccomp
from hypothesis import given, settings
from hypothesis import strategies as st

from policy import data, errors
from policy.decompile import answers, bpf, calls, conditions, oci_seccomp
from policy.decompile.conditions import Condition

TOP = 2**64 - 1
EPERM = calls.EPERM
ARCH = platform.machine()
NUMBERS = data.syscalls(ARCH).numbers
NAMES = {number: name for name, number in NUMBERS.items()}

# --- conditions, counted on words of 6 bits ------------------------------------------------------------

BITS = 6
CUBES = st.builds(lambda mask, value: (mask, value & mask), st.integers(0, 2**BITS - 1), st.integers(0, 2**BITS - 1))
CONDITIONS = st.lists(CUBES, max_size=7).map(tuple)


def words(condition: Condition) -> set[int]:
    return {word for word in range(2**BITS) if any(word & mask == value for mask, value in condition)}


@settings(max_examples=400, deadline=None)
@given(left=CONDITIONS, right=CONDITIONS)
def test_algebra_is_that_of_sets(left: Condition, right: Condition) -> None:
    assert words(conditions.either(left, right)) == words(left) | words(right)
    assert words(conditions.both(left, right)) == words(left) & words(right)
    witness = conditions.beyond(left, right)
    assert (witness is None) == (words(left) <= words(right))
    if witness is not None:
        assert conditions.holds(left, witness)
        assert not conditions.holds(right, witness)


@settings(max_examples=300, deadline=None)
@given(cube=CUBES, then=CONDITIONS, otherwise=CONDITIONS)
def test_choice_takes_one_branch(cube: conditions.Cube, then: Condition, otherwise: Condition) -> None:
    mask, value = cube
    found = conditions.choose((cube,), lambda: conditions.compare("!=", value, mask=mask, shift=0), then, otherwise)
    assert words(found) == (words((cube,)) & words(then)) | (words(otherwise) - words((cube,)))


# Rules as in a data file, at full width, and points near the values that they compare with.
VALUE = st.one_of(
    st.integers(0, 3),
    st.integers(0, 63).map(lambda bit: 1 << bit),
    st.sampled_from([2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**63, TOP - 1, TOP]),
)
MASK = st.one_of(st.sampled_from([TOP, 2**32 - 1, 0xFF, 0x7E020000, 0xFFF7F7FF, TOP << 32 & TOP]), VALUE)
RULES = st.lists(st.lists(st.tuples(st.integers(0, 5), MASK, VALUE), max_size=3), max_size=5)


@settings(max_examples=200, deadline=None)
@given(left=RULES, right=RULES, flips=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 63)), max_size=6))
def test_inclusion_agrees_with_points_near_edges(
    left: list[list[conditions.Match]], right: list[list[conditions.Match]], flips: list[tuple[int, int]]
) -> None:
    mine, other = conditions.any_of(left), conditions.any_of(right)
    included = conditions.beyond(mine, other) is None
    for mask, value in (*mine, *other):
        for argument, bit in [(0, 0), *flips]:
            for word in (value, value ^ 1 << 64 * argument + bit, value | ~mask & (2**384 - 1)):
                point = [word >> 64 * at & TOP for at in range(6)]
                meant = any(all(point[a] & m == v for a, m, v in alternative) for alternative in left)
                assert conditions.holds(mine, point) == meant
                assert not (included and meant and not conditions.holds(other, point))


# --- programs, run on one call after the other ---------------------------------------------------------

LOAD, AND, RETURN, JUMP = bpf.LOAD, bpf.AND, bpf.RETURN, bpf.JUMP
WORD = st.sampled_from([0, 1, 2, 5, 0x80, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF])


@st.composite
def programs(draw: st.DrawFn, *, tests: tuple[int, ...], loads: tuple[int, ...], ands: bool) -> bytes:
    """Draw a program of these instructions that only jumps forward and ends; its first instruction is a load."""
    length = draw(st.integers(1, 14))
    code = [(LOAD, 0, 0, draw(st.sampled_from(loads)))]
    kinds = st.sampled_from(["test"] * 6 + ["load"] * 3 + ["and"] * (2 * ands) + ["jump", "return"])
    for at in range(1, length + 1):
        left = length - at
        kind = draw(kinds)
        if kind == "load":
            code.append((LOAD, 0, 0, draw(st.sampled_from(loads))))
        elif kind == "and":
            code.append((AND, 0, 0, draw(WORD)))
        elif kind == "jump":
            code.append((JUMP, 0, 0, draw(st.integers(0, left))))
        elif kind == "test":
            code.append(
                (draw(st.sampled_from(tests)), draw(st.integers(0, left)), draw(st.integers(0, left)), draw(WORD))
            )
        else:
            code.append((RETURN, 0, 0, draw(st.sampled_from([bpf.ALLOW, EPERM]))))
    code.append((RETURN, 0, 0, draw(st.sampled_from([bpf.ALLOW, EPERM]))))
    return b"".join(struct.pack("<HBBI", *step) for step in code)


@settings(max_examples=300, deadline=None)
@given(
    program=programs(tests=(0x15, 0x25, 0x35, 0x45), loads=(16, 20, 24), ands=True),
    points=st.lists(st.tuples(WORD, WORD, WORD, st.integers(-1, 1)), min_size=10, max_size=40),
)
def test_program_over_arguments_is_read_as_it_runs(program: bytes, points: list[tuple[int, int, int, int]]) -> None:
    (answer,) = answers.answers(program)
    for low, high, second, step in points:
        arguments = [(high << 32 | low) + step & TOP, second]
        action = bpf.decide(program, number=7, arch=9, arguments=arguments)
        assert conditions.holds(answer.rest.when, arguments) == (action == bpf.ALLOW)
        assert action in answer.rest.actions


@settings(max_examples=300, deadline=None)
@given(program=programs(tests=(0x15, 0x25, 0x35), loads=(0, 4), ands=False))
def test_program_over_number_and_tag_is_read_as_it_runs(program: bytes) -> None:
    spans = answers.answers(program)
    assert sum((s.numbers[1] - s.numbers[0] + 1) * (s.tags[1] - s.tags[0] + 1) for s in spans) == 2**64
    for span in spans:
        for number in span.numbers:
            for tag in span.tags:
                assert span.rest.actions == {bpf.decide(program, number=number, arch=tag)}


# --- libseccomp, asked for a filter --------------------------------------------------------------------

OPERATORS = {
    "==": pyseccomp.EQ, "!=": pyseccomp.NE, "<": pyseccomp.LT, "<=": pyseccomp.LE, ">": pyseccomp.GT,
    ">=": pyseccomp.GE,
}  # fmt: skip
WIDE = st.tuples(st.sampled_from(sorted(OPERATORS)), st.just(TOP), VALUE)
MASKED = st.builds(lambda mask, value: ("masked", mask, value & mask), MASK, VALUE)
# At most one check per argument, which libseccomp requires, and at most one check that many values pass: the product
# of two such checks has more cubes than the reader accepts.
RULE = st.builds(
    lambda masked, at, wide: {**masked, **({at: wide} if wide else {})},
    st.dictionaries(st.integers(0, 5), MASKED, min_size=1, max_size=2),
    st.integers(0, 5),
    st.one_of(st.none(), WIDE),
)
Rule = dict[int, tuple[str, int, int]]


def built(names: frozenset[str], ruled: dict[str, Rule]) -> bytes:
    """Compile with libseccomp a filter that allows ``names``, and the ``ruled`` calls under their rules."""
    filter_ = pyseccomp.SyscallFilter(pyseccomp.ERRNO(1))
    filter_.set_attr(pyseccomp.Attr.ACT_BADARCH, pyseccomp.ERRNO(1))
    for name in sorted(names - ruled.keys()):
        filter_.add_rule_exactly(pyseccomp.ALLOW, NUMBERS[name])
    for name, rule in sorted(ruled.items()):
        filter_.add_rule_exactly(pyseccomp.ALLOW, NUMBERS[name], *(_asked(*item) for item in rule.items()))
    with open(os.memfd_create("filter"), "w+b") as file:
        filter_.export_bpf(file)
        file.seek(0)
        return file.read()


def _asked(argument: int, check: tuple[str, int, int]) -> Any:
    operator, mask, value = check
    if operator == "masked":
        return pyseccomp.Arg(argument, pyseccomp.MASKED_EQ, mask, value)
    return pyseccomp.Arg(argument, OPERATORS[operator], value)


def _meant(rule: Rule) -> Condition:
    found = [
        conditions.compare("==" if operator == "masked" else operator, value, mask=mask, shift=64 * argument)
        for argument, (operator, mask, value) in rule.items()
    ]
    return functools.reduce(conditions.both, found)


@settings(max_examples=200, deadline=None)
@given(
    names=st.frozensets(st.sampled_from(sorted(NUMBERS)), max_size=40),
    ruled=st.dictionaries(st.sampled_from(sorted(NUMBERS)), RULE, max_size=4),
)
def test_what_libseccomp_was_asked_for_is_what_is_read(names: frozenset[str], ruled: dict[str, Rule]) -> None:
    expected = {**dict.fromkeys(names, conditions.ALWAYS), **{name: _meant(rule) for name, rule in ruled.items()}}
    meant = calls.CallTable({name: condition for name, condition in expected.items() if condition})
    found = calls.read_bpf(built(names, ruled), ARCH, NAMES)
    assert list(calls.differences(found, meant)) == []


# --- linux.seccomp, by the facts about runsc -----------------------------------------------------------

SPELLED = {f"SCMP_CMP_{word}": sign for word, sign in
           {"EQ": "==", "NE": "!=", "LT": "<", "LE": "<=", "GT": ">", "GE": ">="}.items()}  # fmt: skip
HOLDS = {
    "==": int.__eq__, "!=": int.__ne__, "<": int.__lt__, "<=": int.__le__, ">": int.__gt__, ">=": int.__ge__,
}  # fmt: skip
INDEX = st.integers(0, 2)
# Again at most one check that many values pass.
ARGS = st.builds(
    lambda masked, wide, first: [wide, *masked] if first else [*masked, wide],
    st.lists(
        st.builds(
            lambda index, mask, value: {
                "index": index, "op": "SCMP_CMP_MASKED_EQ", "value": mask, "valueTwo": value & mask
            },
            INDEX, MASK, VALUE,
        ),
        max_size=2,
    ),
    st.fixed_dictionaries({"index": INDEX, "op": st.sampled_from(sorted(SPELLED)), "value": VALUE}),
    st.booleans(),
)  # fmt: skip
ENTRIES = st.lists(
    st.builds(
        lambda names, args: {"names": names, "action": "SCMP_ACT_ALLOW", **({"args": args} if args else {})},
        st.lists(st.sampled_from(["read", "write", "close"]), min_size=1, max_size=2, unique=True),
        st.one_of(st.none(), ARGS),
    ),
    max_size=4,
)


def passes(entries: list[dict[str, Any]], name: str, arguments: list[int]) -> bool:
    """Whether a list of entries allows one call, by the facts in oci_seccomp's docstring."""
    for entry in (entry for entry in entries if name in entry["names"]):
        checks = entry.get("args", [])
        results = [
            arguments[c["index"]] & c["value"] == c["valueTwo"]
            if c["op"] == "SCMP_CMP_MASKED_EQ"
            else HOLDS[SPELLED[c["op"]]](arguments[c["index"]], c["value"])
            for c in checks
        ]
        indexes = {check["index"] for check in checks}
        if all(results) if len(indexes) == len(checks) else any(results):
            return True
    return False


@settings(max_examples=200, deadline=None)
@given(entries=ENTRIES, points=st.lists(st.lists(VALUE, min_size=3, max_size=3), min_size=5, max_size=20))
def test_document_is_read_by_facts(entries: list[dict[str, Any]], points: list[list[int]]) -> None:
    document = {"defaultAction": "SCMP_ACT_ERRNO", "architectures": ["SCMP_ARCH_X86_64"], "syscalls": entries}
    found = oci_seccomp.read(document, "x86_64", {"read": 0, "write": 1, "close": 3})
    compared = [c.get("valueTwo", c["value"]) for entry in entries for c in entry.get("args", [])]
    near = [[value + step & TOP] * 3 for value in compared for step in (-1, 0, 1)]
    for name in ("read", "write", "close"):
        for point in points + near:
            assert conditions.holds(found.condition(name), point) == passes(entries, name, point)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-2, 2**65), st.text(max_size=8), st.floats(allow_nan=False)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["names", "action", "args", "index", "op", "value", "syscalls", "defaultAction", "x"]),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(syscalls=st.one_of(JSON, st.lists(JSON, max_size=2)), rest=JSON)
def test_no_garbage_is_read_or_breaks_reader(syscalls: object, rest: object) -> None:
    whole = {"defaultAction": "SCMP_ACT_ERRNO", "architectures": ["SCMP_ARCH_X86_64"], "syscalls": syscalls}
    for document in (whole, rest):
        try:
            found = oci_seccomp.read(document, "x86_64", {"read": 0})
        except errors.ArtefactError:
            continue
        assert found.allowed.keys() | found.missing <= {"read"}


@settings(max_examples=300, deadline=None)
@given(raw=st.binary(max_size=64).map(lambda head: head + b"\0" * (-len(head) % 8)), at=st.integers(0, 200))
def test_no_bytes_break_reader(raw: bytes, at: int) -> None:
    honest = built(frozenset({"read", "write", "close"}), {"ioctl": {1: ("==", TOP, 5)}})
    place = at % (len(honest) // 8) * 8
    for program in (raw, honest[:place] + raw + honest[place + len(raw) :], honest[:place] + raw + honest[place:]):
        try:
            found = calls.read_bpf(program, ARCH, NAMES)
        except errors.ArtefactError:
            continue
        for name in found.allowed:
            witness = conditions.beyond(found.condition(name), conditions.NEVER)
            assert witness is not None
            tag = calls.TAGS[ARCH]
            assert bpf.decide(program, number=NUMBERS[name], arch=tag, arguments=witness) == bpf.ALLOW
