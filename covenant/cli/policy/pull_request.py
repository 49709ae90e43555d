"""A difference of two policies as Markdown for a pull request.

Paths, names and hosts come from manifests of others: each stands in a code span, which no text of it can end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from covenant.cli import common

if TYPE_CHECKING:
    from policy.explain.diff import Diff

# A comment of a pull request has at most 65,536 characters.
_MOST_LINES = 200
_MOST_CHARACTERS = 160


def text(old: str, new: str, found: Diff, notes: Iterable[str]) -> str:
    """Return the difference of the policies ``old`` and ``new``, with ``notes`` such as what is not known of a host."""
    verdict = "**widens** what the agent may do" if found.widens else "widens nothing"
    lines = [f"### Policy of {_code(new)}: {verdict}", "", f"Compared with {_code(old)}: {_code(found.summary())}."]
    rows = [
        f"| {row.risk} | {sign} | {_code(line)} |"
        for row in found.rows
        for sign, side in (("+", row.added), ("-", row.removed))
        for line in side
    ]
    if rows:
        lines += ["", "| risk | | grant |", "|---|---|---|", *rows[:_MOST_LINES]]
    if len(rows) > _MOST_LINES:
        lines += ["", f"{len(rows) - _MOST_LINES} more lines are not shown."]
    lines += ["", *(f"- another {_code(name)}" for name in found.differs), *(f"- {_code(note)}" for note in notes)]
    return "\n".join(lines).rstrip("\n")


def _code(raw: str) -> str:
    """Return a code span of a table's cell (GitHub Flavored Markdown 6.1 and 4.10)."""
    shown = common.visible(raw)
    if len(shown) > _MOST_CHARACTERS:
        shown = shown[: _MOST_CHARACTERS - 3] + "..."
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", shown)), default=0))
    space = " " if "`" in shown or not shown else ""
    return f"{fence}{space}{shown}{space}{fence}".replace("|", r"\|")
