"""How runsc applies linux.seccomp: the assumptions of policy.decompile.oci_seccomp, and its reasons to refuse the rest.

Every answer is beside another from the same sandbox. So a filter that did nothing, or refused everything, would be
seen. The calls have no effect with any arguments, which only the filter reads.
"""

from __future__ import annotations

import errno
import platform
import random
from typing import Any

import pytest

from policy import data, errors
from policy.decompile import conditions, oci_seccomp
from tests.kernel import filtered_runsc

ARCH = platform.machine()
NUMBERS = data.syscalls(ARCH).numbers
NATIVE = {"x86_64": "SCMP_ARCH_X86_64", "aarch64": "SCMP_ARCH_AARCH64"}[ARCH]
FOREIGN = {"x86_64": "SCMP_ARCH_AARCH64", "aarch64": "SCMP_ARCH_X86_64"}[ARCH]
TOP = 2**64 - 1
ALLOW, ERRNO, TRACE = "SCMP_ACT_ALLOW", "SCMP_ACT_ERRNO", "SCMP_ACT_TRACE"
EPERM, ENOSYS = errno.EPERM, errno.ENOSYS

# Calls that change nothing with any argument, and that python does without.
FREE = ("getppid", "getsid", "getpgid", "getpriority", "sched_yield", "times", "sched_get_priority_max",
        "sched_get_priority_min")  # fmt: skip
REST = sorted(data.profile("python3").names & NUMBERS.keys() - set(FREE))

Entry = dict[str, Any]


def entry(*names: str, action: str = ALLOW, **more: Any) -> Entry:
    return {"names": list(names), "action": action, **more}


def check(index: int, operator: str, value: int, second: int | None = None) -> dict[str, Any]:
    rule = {"index": index, "op": f"SCMP_CMP_{operator}", "value": value}
    return rule if second is None else {**rule, "valueTwo": second}


def document(*entries: Entry, **changes: Any) -> dict[str, Any]:
    """A filter as we emit it: python can run, and these entries stand after."""
    whole = {
        "defaultAction": ERRNO,
        "architectures": [NATIVE],
        "syscalls": [entry(*REST), *entries],
        **changes,
    }
    return {key: value for key, value in whole.items() if value is not None}


def asked(filter_: dict[str, Any] | None, *calls: tuple[Any, ...]) -> list[int]:
    """The filter's answer to each (name, arguments): 0 for let by, else EPERM or ENOSYS."""
    numbers = [[NUMBERS[name], *arguments, *(0,) * (6 - len(arguments))] for name, *arguments in calls]
    answers = filtered_runsc.errnos(numbers, filter_)
    return [answer if answer in (EPERM, ENOSYS) else 0 for answer in answers]


def refused(filter_: dict[str, Any]) -> None:
    """Our reader has nothing to do with this document, but with the same without its fault."""
    oci_seccomp.read(document(entry("getppid")), ARCH, NUMBERS)
    with pytest.raises(errors.ArtefactError):
        oci_seccomp.read(filter_, ARCH, NUMBERS)


def test_without_filter_calls_answer_otherwise() -> None:
    calls = [(name, value, value) for name in FREE for value in (0, 7, TOP)]
    assert set(asked(None, *calls)) == {0}
    assert set(asked(document(), *calls)) == {EPERM}
    assert set(asked(document(entry(*FREE)), *calls)) == {0}


# --- what the reader takes ---------------------------------------------------------------------------


def test_reader_agrees_with_runsc_on_any_rules() -> None:
    """Random rules over every operator, read and run: each call at the edges of what its rules compare with."""
    chosen = random.Random(1)
    values = [0, 1, 2, 5, 2**31, 2**32 - 1, 2**32, 2**32 + 5, 5 << 32, 2**63, TOP - 1, TOP]
    masks = [TOP, 2**32 - 1, 0xFF, 1 << 40, 0xFF << 32 | 0xF, 1]

    def rule(wide: bool) -> dict[str, Any]:
        index, value = chosen.randrange(6), chosen.choice(values)
        if wide:
            return check(index, chosen.choice(["NE", "LT", "LE", "GT", "GE"]), value)
        mask = chosen.choice(masks)
        return chosen.choice([check(index, "EQ", value), check(index, "MASKED_EQ", mask, value & mask)])

    for _ in range(3):
        entries = []
        for name in FREE:
            for _ in range(chosen.randint(1, 3)):
                args = [rule(False) for _ in range(chosen.randint(0, 2))] + [rule(True)]
                chosen.shuffle(args)
                entries.append(entry(name, args=args))
        chosen.shuffle(entries)
        calls: list[tuple[Any, ...]] = []
        for name in FREE:
            mine = [c for e in entries if name in e["names"] for c in e["args"]]
            for _ in range(60):
                point = [chosen.choice(values) for _ in range(6)]
                for one in chosen.sample(mine, min(2, len(mine))):
                    point[one["index"]] = one.get("valueTwo", one["value"]) + chosen.choice([0, 0, 0, 1, -1, 256]) & TOP
                calls.append((name, *point))
        filter_ = document(*entries)
        found = oci_seccomp.read(filter_, ARCH, NUMBERS)
        expected = [0 if conditions.holds(found.condition(name), point) else EPERM for name, *point in calls]
        assert {0, EPERM} == set(expected)
        assert asked(filter_, *calls) == expected


@pytest.mark.parametrize("operator", ["EQ", "NE", "LT", "LE", "GE", "GT"])
def test_operator_compares_all_64_bits_without_sign(operator: str) -> None:
    value = 5 << 32 | 7
    holds = {"EQ": int.__eq__, "NE": int.__ne__, "LT": int.__lt__, "LE": int.__le__, "GE": int.__ge__, "GT": int.__gt__}
    points = [0, 7, value - 1, value, value + 1, 6 << 32, 6 << 32 | 7, 4 << 32 | 9, 5 << 32, 1 << 63, TOP]
    answers = asked(
        document(entry("getppid", args=[check(0, operator, value)])), *(("getppid", point) for point in points)
    )
    assert answers == [0 if holds[operator](point, value) else EPERM for point in points]


def test_masked_comparison_has_its_mask_first_and_all_64_bits() -> None:
    mask, value = 0xF0_0000_00F0, 0x30_0000_0050
    entries = [
        entry("getppid", args=[check(0, "MASKED_EQ", mask, value)]),
        entry("getsid", args=[check(0, "MASKED_EQ", 0xF0, 0x51)]),
        entry("getpgid", args=[check(0, "EQ", 5, 7)]),
    ]
    points = (value, value | 0x0F_0000_000F, value & 0xFF, value & ~0xFF, 0)
    assert asked(document(*entries), *(("getppid", p) for p in points)) == [0, 0, EPERM, EPERM, EPERM]
    # A value beyond its mask is never met; valueTwo is nothing to the other operators, and refused to be sure.
    assert asked(document(*entries), ("getsid", 0x51), ("getsid", 0x50), ("getpgid", 5), ("getpgid", 7)) == [
        EPERM, EPERM, 0, EPERM,
    ]  # fmt: skip
    refused(document(entries[2]))


def test_masked_comparison_without_its_second_value_compares_with_0() -> None:
    filter_ = document(entry("getppid", args=[check(0, "MASKED_EQ", 0xF0)]))
    assert asked(filter_, ("getppid", 0x0F), ("getppid", 0x50)) == [0, EPERM]
    refused(filter_)


def test_conditions_of_one_rule() -> None:
    entries = [
        entry("getppid", args=[check(0, "EQ", 1), check(1, "EQ", 2)]),
        entry("getsid", args=[check(0, "EQ", 1), check(0, "EQ", 2)]),
        entry("getpgid", args=[check(0, "EQ", 1), check(0, "EQ", 2), check(1, "EQ", 3)]),
    ]
    calls: dict[tuple[Any, ...], int] = {
        ("getppid", 1, 2): 0, ("getppid", 1, 0): EPERM, ("getppid", 0, 2): EPERM,
        ("getsid", 1): 0, ("getsid", 2): 0, ("getsid", 3): EPERM,
        # One argument twice: any one of all the rule's conditions is enough, on any argument.
        ("getpgid", 1, 0): 0, ("getpgid", 2, 0): 0, ("getpgid", 0, 3): 0, ("getpgid", 0, 0): EPERM,
    }  # fmt: skip
    filter_ = document(*entries)
    assert asked(filter_, *calls) == list(calls.values())
    found = oci_seccomp.read(filter_, ARCH, NUMBERS)
    read = [0 if conditions.holds(found.condition(name), arguments) else EPERM for name, *arguments in calls]
    assert read == list(calls.values())


def test_entries_of_one_call_add_up_where_they_allow() -> None:
    entries = [
        entry("getppid", args=[check(0, "EQ", 1)]), entry("getppid", args=[check(0, "EQ", 2)]),
        entry("getsid", args=[check(0, "EQ", 1)]), entry("getsid"),
        entry("getpgid"), entry("getpgid", args=[check(0, "EQ", 1)]),
        entry("times", "times", args=[check(0, "EQ", 1)]),
    ]  # fmt: skip
    calls: dict[tuple[Any, ...], int] = {
        ("getppid", 1): 0, ("getppid", 2): 0, ("getppid", 3): EPERM, ("getsid", 1): 0, ("getsid", 2): 0,
        ("getpgid", 1): 0, ("getpgid", 2): 0, ("times", 1): 0, ("times", 2): EPERM,
    }  # fmt: skip
    for order in (entries, entries[::-1]):
        filter_ = document(*order)
        assert asked(filter_, *calls) == list(calls.values())
        found = oci_seccomp.read(filter_, ARCH, NUMBERS)
        read = [0 if conditions.holds(found.condition(name), arguments) else EPERM for name, *arguments in calls]
        assert read == list(calls.values())


def test_first_entry_that_matches_decides() -> None:
    """Why a call with two actions is refused: what it does would hang on the order."""
    narrow = [check(0, "EQ", 1)]
    pairs = [
        (entry("getppid", action=ERRNO), entry("getppid", args=narrow)),
        (entry("getsid", args=narrow), entry("getsid", action=ERRNO)),
        (entry("getpgid", action=TRACE, args=narrow), entry("getpgid", args=narrow)),
    ]
    calls = [(name, value) for name in ("getppid", "getsid", "getpgid") for value in (1, 2)]
    first = [each for pair in pairs for each in pair]
    turned = [each for pair in pairs for each in pair[::-1]]
    assert asked(document(*first), *calls) == [EPERM, EPERM, 0, EPERM, ENOSYS, EPERM]
    assert asked(document(*turned), *calls) == [0, EPERM, EPERM, EPERM, 0, EPERM]
    for pair in pairs:
        refused(document(*pair))


def test_traced_call_does_not_exist_and_others_are_refused() -> None:
    filter_ = document(entry("getppid", action=TRACE))
    assert asked(filter_, ("getppid",), ("getsid",), ("read", TOP)) == [ENOSYS, EPERM, 0]
    assert oci_seccomp.read(filter_, ARCH, NUMBERS).missing == {"getppid"}


def test_errno_ret_changes_nothing() -> None:
    """Later releases heed it, so ours says what this one does anyway."""
    filter_ = document(
        entry("getppid", action=ERRNO, errnoRet=errno.EACCES), entry("getsid", action=TRACE, errnoRet=errno.EACCES),
        defaultErrnoRet=errno.EACCES,
    )  # fmt: skip
    answers = filtered_runsc.errnos([[NUMBERS[name], 0] for name in ("getppid", "getsid", "getpgid")], filter_)
    assert answers == [EPERM, ENOSYS, EPERM]
    refused(document(defaultErrnoRet=errno.EACCES))
    for each in filter_["syscalls"][1:]:
        refused(document(each))


@pytest.mark.parametrize("architectures", [None, [], [FOREIGN], [NATIVE, FOREIGN], ["SCMP_ARCH_NOPE"]])
def test_architectures_are_not_looked_at(architectures: list[str] | None) -> None:
    filter_ = document(entry("getppid"), architectures=architectures)
    assert asked(filter_, ("getppid",), ("getsid",)) == [0, EPERM]
    refused(filter_)


def test_every_name_means_number_of_our_table() -> None:
    # From Linux 6.14 on no filter of a guest sees these two (tests/kernel/test_seccomp.py).
    names = sorted(NUMBERS.keys() - {"uretprobe", "uprobe"})
    unknown = []
    # A call is refused for one value of its last argument alone, another value a name: if runsc took a name for
    # another number, that number's call would be let by. In parts, since a filter ends at 4,096 instructions.
    for start in range(0, len(names), 130):
        part = names[start : start + 130]
        codes = {name: 0x5EC0_0000 + at for at, name in enumerate(part)}
        entries = [entry(name, action=ERRNO, args=[check(5, "EQ", code)]) for name, code in codes.items()]
        filter_ = document(defaultAction=ALLOW, syscalls=entries)
        bad = (TOP, TOP, TOP, TOP, TOP)
        answers = filtered_runsc.errnos([[NUMBERS[name], *bad, code] for name, code in codes.items()], filter_)
        unknown += [name for name, answer in zip(part, answers, strict=True) if answer == ENOSYS]
        assert {n for n, a in zip(part, answers, strict=True) if a != EPERM} <= set(unknown)
    # Names of later kernels are passed over: such a call stays refused however it is granted. No profile has one.
    held = frozenset().union(*(data.profile(name).names for name in data.profile_names()))
    held |= frozenset().union(*(more.names for more in data.additions().values()))
    assert sorted(held & set(unknown)) == []
    assert set(unknown) < set(names)


def test_name_that_runsc_does_not_know_allows_nothing() -> None:
    # map_shadow_stack is in our tables, and in no release of gVisor that we know.
    assert asked(None, ("map_shadow_stack",)) == [ENOSYS]
    assert asked(document(entry("map_shadow_stack", "getppid")), ("map_shadow_stack",), ("getppid",)) == [EPERM, 0]


# --- what it refuses: because runsc passes it over, or would not start -------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"flags": ["SECCOMP_FILTER_FLAG_LOG"]},
        {"flags": ["NOPE"]},
        {"listenerPath": "/nonexistent", "listenerMetadata": "x"},
        {"nonsense": {}},
    ],
    ids=str,
)
def test_what_runsc_passes_over_is_refused(changes: dict[str, Any]) -> None:
    filter_ = document(entry("getppid"), **changes)
    assert asked(filter_, ("getppid",), ("getsid",)) == [0, EPERM]
    refused(filter_)


def test_what_runsc_passes_over_in_entry_is_refused() -> None:
    passed_over = {
        "getppid": entry("getppid", includes={"arches": ["nope"]}, comment="x"),
        "getsid": entry("getsid", args=[{**check(0, "EQ", 0), "comment": "x"}]),
        "getpgid": entry("getpgid", args=None),
        "times": entry("times", args=[]),
        "getpriority": entry("getpriority", args=[{"op": "SCMP_CMP_EQ", "value": 0}]),
        "sched_yield": entry("sched_yield", args=[{"op": "SCMP_CMP_EQ", "index": 0}]),
    }
    # These say nothing: a name in other letters is another, and without names there is no rule.
    empty = [entry(), {"action": ALLOW}, {"name": "sched_get_priority_max", "action": ALLOW}, entry("GETPPID"),
             entry("a_call_of_tomorrow")]  # fmt: skip
    filter_ = document(*passed_over.values(), *empty)
    assert asked(filter_, *((name,) for name in passed_over)) == [0] * len(passed_over)
    assert asked(filter_, ("sched_get_priority_max",)) == [EPERM]
    for each in (*passed_over.values(), *empty):
        refused(document(each))


def test_keys_are_heeded_in_any_letters() -> None:
    """Why an unknown key is refused rather than passed over: it can be a known one to runsc."""
    shouted = {"Names": ["getppid"], "ACTION": ALLOW}
    assert asked(document(shouted), ("getppid",), ("getsid",)) == [0, EPERM]
    refused(document(shouted))
    filter_ = {**document(entry("getppid")), "DefaultAction": ALLOW}
    assert asked(filter_, ("getppid",), ("getsid",)) == [0, 0]
    refused(filter_)


@pytest.mark.parametrize("action", ["SCMP_ACT_KILL", "SCMP_ACT_TRAP"])
def test_killing_action_kills_and_is_refused(action: str) -> None:
    for filter_ in (document(entry("getppid", action=action)), document(entry("getsid"), defaultAction=action)):
        done = filtered_runsc.run(
            ["/usr/bin/python3", "-I", "-c", f"import os; print(os.getsid(0), flush=True); os.{'getppid'}()"],
            seccomp={**filter_, "syscalls": [entry(*REST, "getsid"), *filter_["syscalls"]]},
        )
        assert (done.status, bool(done.stdout)) == (128 + 31, True)
        refused(filter_)


def _wrong(**changes: Any) -> Entry:
    rule = {key: value for key, value in {**check(0, "EQ", 1), **changes}.items() if value is not None}
    return entry("getppid", args=[rule])


@pytest.mark.parametrize(
    "filter_",
    [
        *(document(entry("getppid", action=f"SCMP_ACT_{word}"))
          for word in ("KILL_PROCESS", "KILL_THREAD", "LOG", "NOTIFY", "NONSENSE")),
        document({"names": ["getppid"]}),
        document(defaultAction=None),
        document(defaultAction="SCMP_ACT_LOG"),
        document(_wrong(index=6)),
        document(_wrong(index=7)),
        document(_wrong(index=-1)),
        document(_wrong(op=None)),
        document(_wrong(op="SCMP_CMP_NONSENSE")),
        document(_wrong(value=-1)),
        document(_wrong(value=2**64)),
        document(_wrong(value="1")),
        document(_wrong(value=1.0)),
    ],
    ids=lambda filter_: str({**filter_, "syscalls": filter_["syscalls"][1:]}),
)  # fmt: skip
def test_what_runsc_does_not_start_with_is_refused(filter_: dict[str, Any]) -> None:
    done = filtered_runsc.run(["/usr/bin/true"], seccomp=filter_)
    assert done.status == 128, done.stderr
    refused(filter_)


def test_runsc_starts_with_same_filter_without_fault() -> None:
    assert filtered_runsc.run(["/usr/bin/true"], seccomp=document(_wrong())).status == 0
