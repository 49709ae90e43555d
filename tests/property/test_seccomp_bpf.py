"""For any grant: the compiler, the interpreter and the symbolic reader agree on every call."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from policy import data
from policy.compile import seccomp
from policy.decompile import bpf

TAGS = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
NAMES = sorted(data.syscall_names() - data.deny().names)
WORDS = st.one_of(st.integers(0, 600), st.integers(0, 2**32 - 1), st.sampled_from([2**30, 2**30 - 1, 2**31, 2**32 - 1]))
FLAGS = st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([1 << b for b in range(64)]))


def holds(test: bpf.BitTest, word: int) -> bool:
    masked = word & test.mask
    results = {
        "==": masked == test.value,
        ">": masked > test.value,
        ">=": masked >= test.value,
        "&": bool(masked & test.value),
    }
    return results[test.operator] == test.holds


def inside(region: bpf.Region, words: dict[int, int]) -> bool:
    ranged = all(any(lo <= words[off] <= hi for lo, hi in spans) for off, spans in region.words.items())
    return ranged and all(holds(test, words[test.offset]) for test in region.tests)


@settings(max_examples=150, deadline=None)
@given(
    names=st.frozensets(st.sampled_from(NAMES)),
    arch=st.sampled_from(sorted(TAGS)),
    calls=st.lists(st.tuples(WORDS, st.sampled_from([*TAGS.values(), 0x40000003, 0]), FLAGS), min_size=1, max_size=30),
)
def test_three_readings_agree(names: frozenset[str], arch: str, calls: list[tuple[int, int, int]]) -> None:
    artefact = seccomp.compile(names, arch=arch)
    numbers = data.syscalls(arch).numbers
    granted = {numbers[name] for name in artefact.names}
    regions = bpf.regions(artefact.bpf)
    for number, tag, flags in calls:
        action = bpf.decide(artefact.bpf, number=number, arch=tag, arguments=[flags])
        words = {0: number, 4: tag, 16: flags & 0xFFFFFFFF, 20: flags >> 32}
        hit = [region for region in regions if inside(region, words)]
        assert [region.action for region in hit] == [action], "the regions cover every call once"
        guarded = number == numbers["clone"] and flags & 0x7E020000
        assert (action == bpf.ALLOW) == (tag == TAGS[arch] and number in granted and not guarded)


@settings(max_examples=50, deadline=None)
@given(names=st.lists(st.sampled_from(NAMES)), order=st.randoms(), arch=st.sampled_from(sorted(TAGS)))
def test_order_and_repetition_change_nothing(names: list[str], order: random.Random, arch: str) -> None:
    first = seccomp.compile(names, arch=arch)
    seccomp._compile.cache_clear()
    shuffled = names + names[:3]
    order.shuffle(shuffled)
    assert seccomp.compile(shuffled, arch=arch) == first


@settings(max_examples=100, deadline=None)
@given(left=st.frozensets(st.sampled_from(NAMES)), right=st.frozensets(st.sampled_from(NAMES)))
def test_a_narrower_grant_is_a_narrower_filter(left: frozenset[str], right: frozenset[str]) -> None:
    def numbers(names: frozenset[str]) -> set[int]:
        raw = seccomp.compile(names, arch="x86_64").bpf
        return {n for low, high in bpf.allowed(raw, arch=TAGS["x86_64"]) for n in range(low, high + 1)}

    assert numbers(left & right) == numbers(left) & numbers(right)
