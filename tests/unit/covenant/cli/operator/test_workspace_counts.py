"""Numbers of changes are said in one form."""

from __future__ import annotations

import pytest

from covenant.cli.operator import workspace_review


@pytest.mark.parametrize(
    ("changes", "held", "words"),
    [
        (0, 0, "0 changes"),
        (1, 0, "1 change"),
        (13, 1, "13 changes, 1 of them not applied"),
        (1, 1, "1 change, not applied"),
    ],
)
def test_changes_are_counted_in_one_form(changes: int, held: int, words: str) -> None:
    assert workspace_review.counted(changes, held) == words
