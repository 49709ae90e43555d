"""docs/mutants.md as it was made last: enough mutants, enough of them noticed, and a reason for each that was not.

Regenerate with: make mutants (under an hour on two cores)
"""

from __future__ import annotations

import re

from tests.mutants import page


def test_page_says_that_all_is_well() -> None:
    text = page.PAGE.read_text()
    found = re.search(r"^Drawn (\d+) of (\d+); (\d+\.\d) % killed\.$", text, re.MULTILINE)
    assert found
    drawn, possible, percent = int(found[1]), int(found[2]), float(found[3])
    assert possible >= drawn >= page.LEAST_DRAWN
    assert percent >= page.LEAST_KILLED_PERCENT
    assert page.NO_REASON not in page.SURVIVORS.read_text().lower()


def test_each_reason_is_that_of_survivor_and_says_something() -> None:
    listed = set(re.findall(r"^- `([0-9a-f]{10})` ", page.SURVIVORS.read_text(), re.MULTILINE))
    why = page.reasons()
    assert set(why) == listed
    assert all(len(reason.split()) > 3 for reason in why.values())
