"""The table of systemd's groups knows each call that a manifest of an import may bring."""

from __future__ import annotations

from policy import data
from policy.importing.units import system_call_groups as groups
from policy.importing.units import system_calls


def grouped() -> frozenset[str]:
    names = ("default", "system-service", "process", "file-system", "network-io", "privileged", "pkey", "memlock")
    return frozenset().union(*(groups.members(name) or frozenset() for name in names))


def test_each_call_of_profile_is_in_table() -> None:
    """Else a profile that grows would keep a call that a source refuses by its group."""
    assert system_calls.ours() - grouped() == groups.UNGROUPED


def test_each_call_of_table_is_one() -> None:
    assert grouped() | groups.UNGROUPED <= data.syscall_names()


def test_unknown_group_has_no_members() -> None:
    assert groups.members("no-such") is None
    assert groups.members("mount") == frozenset()
