"""Compare the sets of names that need a lease with the leases of a run: without a live one a set holds no address."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from policy.decompile.network import live_nft
from policy.leases.book import Lease
from policy.prove.live import Layer, Standing
from sandbox.network.dns.names import Patterns
from sandbox.rundir import directory

# The run looks several times a second at what is overdue.
_LATE_MS: Final = 2_000


def noted(path: str) -> tuple[Lease, ...]:
    """Return the leases that a run had written down and that had not ended.

    A lease is written down before it begins, and until its addresses are out of the sets: read it before and after the
    sets.
    """
    now_ms = int(time.time() * 1000)
    return tuple(one for one in directory.leases_of(Path(path)) if now_ms < one.ends_ms + _LATE_MS)


def judge(gates: Mapping[str, Any], listing: bytes, leases: Iterable[Lease]) -> Iterator[Layer]:
    """Yield a finding for each set with addresses that no lease stands for."""
    asked = (gates["dns"] or {}).get("asked", ())
    patterns = Patterns(row["pattern"] for row in asked)
    opened = {number for one in leases if one.kind == "network" for number in patterns.covering(one.target)}
    closed = {
        name: row["pattern"]
        for number, row in enumerate(asked)
        if number not in opened
        for name in (*row["sets"]["v4"], *row["sets"]["v6"])
    }
    if not closed:
        return
    for kind, body in live_nft.objects(listing):
        if kind == "set" and (pattern := closed.get(body.get("name", ""))) is not None and body.get("elem"):
            expected = f"no address of {pattern} without a lease"
            yield Layer("network", Standing.WIDER, expected, f"set {body['name']} holds some")
