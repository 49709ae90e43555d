"""Start each agent many times, and count the starts that do not end as the first cell says."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tests.agents import catalogue, sessions


def count(times: int, names: Sequence[str]) -> int:
    """Start each of these agents ``times`` times, print one line for each, and return 1 if a start failed."""
    failed = 0
    for name in names:
        cell = catalogue.load()[name].version
        assert cell is not None
        bad = []
        for _ in range(times):
            done = sessions.run(sessions.version(name))
            if done.returncode != 0 or not re.search(cell.shows, done.stdout + done.stderr):
                bad.append(f"status {done.returncode}: {done.stderr[-300:]!r}")
        print(f"{name}: {times} starts, {len(bad)} crashes", *bad, sep="\n  ", flush=True)
        failed += len(bad)
    return int(failed > 0)
