"""The walk of a run that docs/architecture.md tells, beside the walk of a real run."""

from __future__ import annotations

import re

from tests.kernel import walked_run
from tests.kernel.world import ROOT, World


def test_architecture_page_tells_walk(world: World) -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    told = re.findall(r"^\d+\. `([^`]+)`", page.partition("<!-- walk -->")[2].partition("<!-- end")[0], re.MULTILINE)
    assert len(told) > 20
    visits = [file for file, _ in walked_run.first_visits(walked_run.first_calls(world))]
    assert [file for file in visits if file in told] == told
