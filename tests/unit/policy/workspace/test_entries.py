"""The entries of both sides: what a field that is left out says, and that an entry does not change."""

from __future__ import annotations

import copy

import pytest

from policy.workspace.changes import Change
from policy.workspace.entries import LowerEntry, LowerView, UpperEntry
from policy.workspace.steps import ApplyStep


def test_field_left_out_says_nothing() -> None:
    assert UpperEntry("a", "file") == UpperEntry("a", "file", 0, 0, 1, False, False, "", "")
    assert LowerEntry("a", "file") == LowerEntry("a", "file", 0, 0, 1, 0, 0, 0, 0, "", "")
    assert LowerView({}, {}) == LowerView({}, {}, {})
    assert Change("a", "add", "dir") == Change("a", "add", "dir", 0, 0, "", "", None, "", "")
    assert ApplyStep("rmdir", "a") == ApplyStep("rmdir", "a", 0, "")


@pytest.mark.parametrize(
    "entry", [UpperEntry("a", "file"), LowerEntry("a", "file"), Change("a", "add", "file"), ApplyStep("rmdir", "a")]
)
def test_entry_does_not_change(entry: UpperEntry | LowerEntry | Change | ApplyStep) -> None:
    with pytest.raises(AttributeError):
        entry.path = "b"  # type: ignore[misc]
    assert hash(entry) == hash(copy.copy(entry))


def test_entries_are_ordered_by_path() -> None:
    assert min([UpperEntry("b", "file"), UpperEntry("a", "gone")]).path == "a"
    assert min([LowerEntry("b", "file"), LowerEntry("a", "link")]).path == "a"
