"""Addresses in the sets of names that need a lease, with and without one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from policy.leases.book import Lease
from sandbox.attest import leases

GATES = {
    "dns": {
        "asked": [
            {"pattern": "*.example.com", "seconds": 60, "sets": {"v4": ["n4_1"], "v6": ["n6_1"]}},
            {"pattern": "other.org", "seconds": 60, "sets": {"v4": ["n4_2"], "v6": ["n6_2"]}},
        ]
    }
}


def listing(*filled: str) -> bytes:
    sets: list[dict[str, Any]] = [{"name": name, "family": "inet", "table": "covenant"} for name in ("n4_1", "n4_2")]
    for one in sets:
        if one["name"] in filled:
            one["elem"] = [{"elem": {"val": "93.184.216.34", "timeout": 30, "expires": 20}}]
    return json.dumps({"nftables": [{"set": one} for one in sets]}).encode()


def lease(target: str, kind: Any = "network") -> Lease:
    return Lease("0", "1", kind, target, "run", 10_000, ("op1",), "f" * 64)


@pytest.mark.parametrize(
    ("filled", "given", "found"),
    [
        ((), (), 0),
        (("n4_1",), (), 1),
        (("n4_1", "n4_2"), (), 2),
        (("n4_1",), (lease("api.example.com"),), 0),
        (("n4_1",), (lease("other.org"),), 1),
        (("n4_2",), (lease("other.org"),), 0),
        (("n4_2",), (lease("other.org", "tool"),), 1),
        (("n4_1",), (lease("example.com"),), 1),
    ],
)
def test_address_without_lease_is_wider(filled: tuple[str, ...], given: tuple[Lease, ...], found: int) -> None:
    layers = list(leases.judge(GATES, listing(*filled), given))
    assert [one.name for one in layers] == ["network"] * found
    assert not any(one.holds for one in layers)


def test_policy_without_questions_is_not_read() -> None:
    assert list(leases.judge({"dns": None}, b"no listing", ())) == []
