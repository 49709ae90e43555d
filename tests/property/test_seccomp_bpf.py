"""For any grant: the compiler, the interpreter and the symbolic reader agree on every call."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from policy import data
from policy.compile import bpf as emitter
from policy.compile import seccomp
from policy.decompile import answers, bpf, conditions
from policy.decompile import calls as reading

TAGS = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
NAMES = sorted(data.syscall_names() - data.deny().names)
WORDS = st.one_of(st.integers(0, 600), st.integers(0, 2**32 - 1), st.sampled_from([2**30, 2**30 - 1, 2**31, 2**32 - 1]))
VALUES = sorted({c.value for rule in data.arguments().rules.values() for a in rule.allow for c in a.conditions})
ARGUMENT = st.one_of(
    st.sampled_from(VALUES),
    st.sampled_from(VALUES).flatmap(lambda value: st.integers(0, 63).map(lambda bit: value ^ 1 << bit)),
    st.integers(0, 2**64 - 1),
    st.sampled_from([1 << b for b in range(64)]),
)
ARGUMENTS = st.tuples(ARGUMENT, ARGUMENT, ARGUMENT)
CALL = st.one_of(WORDS, st.sampled_from(sorted(data.arguments().rules)))


def meant(name: str, arguments: tuple[int, ...], *, network: bool) -> bool:
    alternatives = data.arguments().alternatives(name, network=network)
    return alternatives is None or any(
        all(arguments[c.argument] & c.mask == c.value for c in alternative.conditions) for alternative in alternatives
    )


@settings(max_examples=150, deadline=None)
@given(
    names=st.frozensets(st.sampled_from(NAMES)),
    ruled=st.frozensets(st.sampled_from(sorted(data.arguments().rules))),
    arch=st.sampled_from(sorted(TAGS)),
    network=st.booleans(),
    calls=st.lists(
        st.tuples(CALL, st.sampled_from([*TAGS.values(), 0x40000003, 0]), ARGUMENTS), min_size=1, max_size=30
    ),
)
def test_three_readings_agree(
    names: frozenset[str],
    ruled: frozenset[str],
    arch: str,
    network: bool,
    calls: list[tuple[int | str, int, tuple[int, ...]]],
) -> None:
    artefact = seccomp.compile(names | ruled, arch=arch, network=network)
    numbers = data.syscalls(arch).numbers
    granted = {numbers[name]: name for name in artefact.names}
    spans = answers.answers(artefact.bpf)
    for call, tag, arguments in calls:
        number = call if isinstance(call, int) else numbers.get(call, 600)
        action = bpf.decide(artefact.bpf, number=number, arch=tag, arguments=arguments)
        (span,) = (s for s in spans if s.numbers[0] <= number <= s.numbers[1] and s.tags[0] <= tag <= s.tags[1])
        assert conditions.holds(span.rest.when, arguments) == (action == bpf.ALLOW)
        expected = tag == TAGS[arch] and number in granted and meant(granted[number], arguments, network=network)
        assert (action == bpf.ALLOW) == expected


CONDITION = st.tuples(
    st.integers(0, 2), st.sampled_from([0xFF, 0xFFFFFFFF, 2**64 - 1, 0xFFF7F7FF, 0xF00000000]), st.integers(0, 3)
)
ALTERNATIVES = st.lists(st.lists(CONDITION, min_size=1, max_size=3), min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(raw=ALTERNATIVES, calls=st.lists(st.tuples(*[st.integers(0, 4).map(lambda v: v | (v & 1) << 34)] * 3)))
def test_any_alternatives_become_what_they_say(
    raw: list[list[tuple[int, int, int]]], calls: list[tuple[int, int, int]]
) -> None:
    # Small values, so that alternatives share prefixes, lead into dead ends and overlap.
    shift = {0xF00000000: 32}
    alternatives = [[(a, m, v << shift.get(m, 0)) for a, m, v in tests] for tests in raw]
    masked = tuple(tuple(emitter.Masked(*test) for test in tests) for tests in alternatives)
    decision = emitter.IfAny(masked, hit=bpf.ALLOW, miss=0x50001)
    program = emitter.program([(0, decision)], audit_arch=1, other_arch=0x50001, number_limit=None)
    for arguments in [*calls, (0, 0, 0), (1, 2, 3)]:
        expected = any(all(arguments[a] & m == v for a, m, v in tests) for tests in alternatives)
        assert (bpf.decide(program, number=7, arch=1, arguments=arguments) == bpf.ALLOW) == expected


@settings(max_examples=200, deadline=None)
@given(
    mask=st.sampled_from([0xFFFFFFFF, 0xFF, 0xF0F0, 0x7E020000, 2**64 - 1]),
    raw=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=6),
    asked=st.lists(st.integers(0, 2**64 - 1), max_size=20),
    bits=st.lists(st.integers(0, 63), max_size=20),
)
def test_all_but_some_values_are_refused(mask: int, raw: list[int], asked: list[int], bits: list[int]) -> None:
    allowed = sorted({value & mask for value in raw})
    checks = seccomp._all_but([data.Condition(2, mask, value) for value in allowed])
    assert {check.argument for check in checks} <= {2}
    for value in [*asked, *raw, *(raw[0] ^ 1 << bit for bit in bits)]:
        refused = [check for check in checks if value & check.mask == check.value]
        assert len(refused) == (value & mask not in allowed), "one check and no second, or none"


@settings(max_examples=50, deadline=None)
@given(names=st.lists(st.sampled_from(NAMES)), order=st.randoms(), arch=st.sampled_from(sorted(TAGS)))
def test_order_and_repetition_change_nothing(names: list[str], order: random.Random, arch: str) -> None:
    first = seccomp.compile(names, arch=arch)
    seccomp.compile_rules.cache_clear()
    shuffled = names + names[:3]
    order.shuffle(shuffled)
    assert seccomp.compile(shuffled, arch=arch) == first


@settings(max_examples=100, deadline=None)
@given(left=st.frozensets(st.sampled_from(NAMES)), right=st.frozensets(st.sampled_from(NAMES)))
def test_narrower_grant_is_narrower_filter(left: frozenset[str], right: frozenset[str]) -> None:
    names = {number: name for name, number in data.syscalls("x86_64").numbers.items()}
    one, other, common = (
        reading.read_bpf(seccomp.compile(granted, arch="x86_64").bpf, "x86_64", names)
        for granted in (left, right, left & right)
    )
    assert common.is_subset(one)
    assert common.is_subset(other)
    assert common.allowed.keys() == one.allowed.keys() & other.allowed.keys()


@settings(max_examples=60, deadline=None)
@given(
    names=st.frozensets(st.sampled_from(NAMES), min_size=1),
    arch=st.sampled_from(sorted(TAGS)),
    mask=st.integers(1, 2**32 - 1),
    argument=st.integers(0, 5),
    asked=st.lists(ARGUMENT, min_size=1, max_size=8),
    chosen=st.randoms(use_true_random=False),
)
def test_process_of_ours_may_do_what_it_says(
    names: frozenset[str], arch: str, mask: int, argument: int, asked: list[int], chosen: random.Random
) -> None:
    plain = seccomp.compile(names, arch=arch, network=True)
    assert seccomp.compile_own(names, arch=arch, where={}) == plain.bpf
    if not plain.names:
        return
    name, value = chosen.choice(plain.names), chosen.randrange(2**32) & mask
    number = data.syscalls(arch).numbers[name]
    own = seccomp.compile_own(names, arch=arch, where={name: ((emitter.Masked(argument, mask, value),),)})
    for word in (*asked, value):
        arguments = tuple(word if index == argument else 7 for index in range(6))
        action = bpf.decide(own, number=number, arch=TAGS[arch], arguments=arguments)
        assert (action == emitter.RET_ALLOW) == (word & mask == value)
    for other in set(plain.names) - {name}:
        number = data.syscalls(arch).numbers[other]
        both = [bpf.decide(one, number=number, arch=TAGS[arch], arguments=(0,) * 6) for one in (own, plain.bpf)]
        assert both[0] == both[1]
