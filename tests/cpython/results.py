"""Which tests of CPython passed in a run, read from its JUnit files, and how two runs compare."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Collection

# The goal of the project: of what passes under plain runsc.
GOAL = 0.98
# The line before each JUnit file.
MARK = "=== junit ==="


def passed(output: bytes) -> frozenset[str]:
    """Return the names of the tests that passed, of every JUnit file of the output."""
    found: set[str] = set()
    for junit in output.split(f"{MARK}\n".encode())[1:]:
        found |= _of_module(junit)
    return frozenset(found)


def _of_module(junit: bytes) -> set[str]:
    found = set()
    for case in ElementTree.fromstring(junit).iter("testcase"):
        outcomes = {child.tag for child in case}
        if not outcomes & {"error", "failure", "skipped"} and case.get("result", "completed") == "completed":
            found.add(case.get("name", ""))
    return found


def ratio(ours: Collection[str], plain: Collection[str]) -> float:
    """Return how much of what passed in ``plain`` passed in ``ours`` too; 0 where nothing passed."""
    return len(set(plain) & set(ours)) / len(plain) if plain else 0.0


def lost(ours: Collection[str], plain: Collection[str]) -> list[tuple[str, int]]:
    """Return the modules that lost tests, with how many, the most first."""
    modules = Counter(name.partition(".test_")[2].partition(".")[0] for name in set(plain) - set(ours))
    return sorted(modules.items(), key=lambda item: (-item[1], item[0]))
