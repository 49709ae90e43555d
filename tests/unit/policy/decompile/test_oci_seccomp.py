"""linux.seccomp read as runsc reads it. That runsc does is tests/kernel/test_runsc_seccomp_semantics.py."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from policy import errors
from policy.decompile import conditions, oci_seccomp
from policy.decompile.calls import CallTable
from policy.decompile.conditions import ALWAYS

NUMBERS = {"read": 0, "write": 1, "clone3": 435, "ptrace": 101}
TOP = 2**64 - 1
HUGE = 2**64


def document(*entries: dict[str, Any], **changes: Any) -> dict[str, Any]:
    whole = {
        "defaultAction": "SCMP_ACT_ERRNO",
        "architectures": ["SCMP_ARCH_X86_64"],
        "syscalls": list(entries),
        **changes,
    }
    return {key: value for key, value in whole.items() if value is not None}


def entry(*names: str, action: str = "SCMP_ACT_ALLOW", **more: Any) -> dict[str, Any]:
    return {"names": list(names), "action": action, **more}


def equal(index: int, value: int) -> dict[str, Any]:
    return {"index": index, "op": "SCMP_CMP_EQ", "value": value}


def masked(index: int, mask: int, value: int) -> dict[str, Any]:
    return {"index": index, "op": "SCMP_CMP_MASKED_EQ", "value": mask, "valueTwo": value}


def read(*entries: dict[str, Any], **changes: Any) -> CallTable:
    return oci_seccomp.read(document(*entries, **changes), "x86_64", NUMBERS)


def test_names_pass_and_traced_call_is_missing() -> None:
    found = read(entry("read", "write"), entry("clone3", action="SCMP_ACT_TRACE"), defaultErrnoRet=1)
    assert found == CallTable({"read": ALWAYS, "write": ALWAYS}, frozenset({"clone3"}))
    assert read() == CallTable()


def test_conditions_on_different_arguments_must_all_hold() -> None:
    found = read(entry("read", args=[equal(0, 1), masked(1, 0xF0, 0x30)]))
    assert found == CallTable({"read": conditions.any_of([[(0, TOP, 1), (1, 0xF0, 0x30)]])})


def test_two_conditions_on_one_argument_make_any_of_all_enough() -> None:
    found = read(entry("read", args=[equal(0, 1), equal(1, 3), equal(0, 2)]))
    assert found == CallTable({"read": conditions.any_of([[(0, TOP, 1)], [(1, TOP, 3)], [(0, TOP, 2)]])})


def test_entries_of_one_name_add_up() -> None:
    found = read(entry("read", args=[equal(0, 1)]), entry("read", args=[equal(0, 2)]), entry("read", "write"))
    assert found == CallTable({"read": ALWAYS, "write": ALWAYS})
    found = read(entry("read", args=[equal(0, 1)]), entry("read", args=[equal(0, 2)]))
    assert found == CallTable({"read": conditions.any_of([[(0, TOP, 1)], [(0, TOP, 2)]])})


@pytest.mark.parametrize(
    ("operator", "passes", "fails"),
    [
        ("EQ", [5 << 32], [5, (5 << 32) + 1, TOP]),
        ("NE", [5, (5 << 32) + 1, 0], [5 << 32]),
        ("LT", [0, (5 << 32) - 1], [5 << 32, TOP]),
        ("LE", [0, 5 << 32], [(5 << 32) + 1, TOP]),
        ("GT", [(5 << 32) + 1, TOP], [5 << 32, 0]),
        ("GE", [5 << 32, TOP], [(5 << 32) - 1, 0]),
    ],
)
def test_operators_compare_64_bits_without_sign(operator: str, passes: list[int], fails: list[int]) -> None:
    rule = {"index": 5, "op": f"SCMP_CMP_{operator}", "value": 5 << 32, "valueTwo": 0}
    condition = read(entry("read", args=[rule])).condition("read")
    for value in passes:
        assert conditions.holds(condition, [0, 0, 0, 0, 0, value]), hex(value)
    for value in fails:
        assert not conditions.holds(condition, [0, 0, 0, 0, 0, value]), hex(value)


def test_condition_that_nothing_meets_allows_nothing() -> None:
    assert read(entry("read", args=[masked(0, 0xF0, 0x51)])) == CallTable()
    assert read(entry("read", args=[{"index": 0, "op": "SCMP_CMP_LT", "value": 0}])) == CallTable()


def test_other_architecture_has_its_own_name() -> None:
    arm = document(entry("read"), architectures=["SCMP_ARCH_AARCH64"])
    assert oci_seccomp.read(arm, "aarch64", NUMBERS) == CallTable({"read": ALWAYS})
    with pytest.raises(errors.ArtefactError, match="SCMP_ARCH_AARCH64"):
        oci_seccomp.read(arm, "x86_64", NUMBERS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"defaultAction": "SCMP_ACT_ALLOW"}, "SCMP_ACT_ALLOW"),
        ({"defaultAction": "SCMP_ACT_KILL"}, "SCMP_ACT_KILL"),
        ({"defaultAction": "SCMP_ACT_TRACE"}, "SCMP_ACT_TRACE"),
        ({"defaultAction": "SCMP_ACT_LOG"}, "SCMP_ACT_LOG"),
        ({"defaultAction": ["SCMP_ACT_ERRNO"]}, "SCMP_ACT_ERRNO"),
        ({"defaultAction": None}, "no `defaultAction`"),
        ({"defaultErrnoRet": 38}, "`38`"),
        ({"defaultErrnoRet": True}, "`true`"),
        ({"architectures": None}, "no `architectures`"),
        ({"architectures": []}, r"`\[\]`"),
        ({"architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86"]}, "SCMP_ARCH_X86"),
        ({"architectures": "SCMP_ARCH_X86_64"}, "SCMP_ARCH_X86_64"),
        ({"syscalls": None}, "no `syscalls`"),
        ({"syscalls": {}}, "no filter of ours"),
        ({"syscalls": [[]]}, "no filter of ours"),
        ({"flags": []}, "`flags`"),
        ({"flags": ["SECCOMP_FILTER_FLAG_LOG"]}, "`flags`"),
        ({"listenerPath": "/run/x"}, "`listenerPath`"),
        ({"listenerMetadata": ""}, "`listenerMetadata`"),
        ({"DefaultAction": "SCMP_ACT_ALLOW"}, "`DefaultAction`"),
        ({"Syscalls": []}, "`Syscalls`"),
        ({"nonsense": 1}, "`nonsense`"),
    ],
)
def test_document_that_says_more_or_less_is_refused(changes: dict[str, Any], message: str) -> None:
    assert read(entry("read")) == CallTable({"read": ALWAYS})
    with pytest.raises(errors.ArtefactError, match=message):
        oci_seccomp.read(document(**{"syscalls": [entry("read")], **changes}), "x86_64", NUMBERS)


def test_what_is_no_object_is_refused() -> None:
    for value in (None, [], "", 0, [document()]):
        with pytest.raises(errors.ArtefactError, match="no filter of ours"):
            oci_seccomp.read(value, "x86_64", NUMBERS)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([entry()], "without names"),
        ([{"action": "SCMP_ACT_ALLOW"}], "no `names`"),
        ([{"names": ["read"]}], "no `action`"),
        ([{"name": "read", "action": "SCMP_ACT_ALLOW"}], "no `names`"),
        ([{"Names": ["read"], **entry("write")}], "`Names`"),
        ([{**entry("read"), "comment": "x"}], "`comment`"),
        ([{**entry("read"), "includes": {}}], "`includes`"),
        ([{**entry("read"), "errnoRet": 1}], "`errnoRet`"),
        ([entry("READ")], "`READ`"),
        ([entry("a_call_of_tomorrow")], "`a_call_of_tomorrow`"),
        ([{"names": "read", "action": "SCMP_ACT_ALLOW"}], "`read`"),
        ([{"names": [0], "action": "SCMP_ACT_ALLOW"}], "`0`"),
        ([{"names": [["read"]], "action": "SCMP_ACT_ALLOW"}], "no filter of ours"),
        *(
            ([entry("read", action=action)], action)
            for action in (
                "SCMP_ACT_ERRNO", "SCMP_ACT_KILL", "SCMP_ACT_KILL_THREAD", "SCMP_ACT_KILL_PROCESS", "SCMP_ACT_TRAP",
                "SCMP_ACT_LOG", "SCMP_ACT_NOTIFY", "scmp_act_allow", "ALLOW",
            )
        ),
        ([entry("read", action="SCMP_ACT_TRACE", args=[equal(0, 1)])], "SCMP_ACT_TRACE"),
        ([entry("read"), entry("read", action="SCMP_ACT_TRACE")], "two actions for `read`"),
        ([entry("clone3", action="SCMP_ACT_TRACE"), entry("clone3", args=[equal(0, 1)])], "two actions for `clone3`"),
        ([entry("ptrace"), entry("clone3", action="SCMP_ACT_TRACE")], "only while `ptrace` is refused"),
        ([entry("read", args=[])], "an empty list"),
        ([entry("read", args=None)], "`null`"),
        ([entry("read", args=equal(0, 1))], "no filter of ours"),
        ([entry("read", args=[[]])], "no filter of ours"),
    ],
)  # fmt: skip
def test_entry_not_of_ours_is_refused(entries: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(errors.ArtefactError, match=message):
        read(*entries)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index": None}, "no `index`"),
        ({"value": None}, "no `value`"),
        ({"op": None}, "no `op`"),
        ({"index": 6}, "`6`"),
        ({"index": 7}, "`7`"),
        ({"index": -1}, "`-1`"),
        ({"index": "0"}, "`0`"),
        ({"index": False}, "`false`"),
        ({"value": -1}, "`-1`"),
        ({"value": HUGE}, f"`{HUGE}`"),
        ({"value": 1.0}, r"`1\.0`"),
        ({"value": True}, "`true`"),
        ({"valueTwo": 7}, "SCMP_CMP_EQ"),
        ({"valueTwo": "0"}, "`0`"),
        ({"op": "SCMP_CMP_MASKED_EQ"}, "SCMP_CMP_MASKED_EQ"),
        ({"op": "SCMP_CMP_NOPE"}, "SCMP_CMP_NOPE"),
        ({"op": "scmp_cmp_eq"}, "scmp_cmp_eq"),
        ({"op": ["SCMP_CMP_EQ"]}, "SCMP_CMP_EQ"),
        ({"Value": 0}, "`Value`"),
        ({"comment": ""}, "`comment`"),
    ],
)
def test_argument_not_of_ours_is_refused(change: dict[str, Any], message: str) -> None:
    rule = {key: value for key, value in {**equal(0, 5), **change}.items() if value is not None}
    with pytest.raises(errors.ArtefactError, match=message) as refusal:
        read(entry("write"), entry("read", args=[rule]))
    assert refusal.value.where.startswith("seccomp.json:syscalls[1].args[0]")


def test_reading_changes_nothing() -> None:
    given = document(entry("read", args=[equal(0, 1)]), entry("read", args=[equal(0, 2)]))
    before = copy.deepcopy(given)
    oci_seccomp.read(given, "x86_64", NUMBERS)
    assert given == before
