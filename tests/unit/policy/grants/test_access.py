"""Join the ports of destinations."""

from __future__ import annotations

from policy.grants.sets import access
from policy.grants.sets.access import Access

WEB, DNS = Access.of("tcp", [(443, 443)]), Access.of("udp", [(53, 53)])


def test_union_has_the_ports_of_both() -> None:
    both = access.union(WEB, DNS)
    assert (both.tcp, both.udp) == (((443, 443),), ((53, 53),))
    assert access.union(WEB, access.NOTHING) == access.union(access.NOTHING, WEB) == access.union(WEB, WEB) == WEB
    assert access.union(both, WEB) == access.union(WEB, both) == both
    assert access.union(access.NOTHING, access.NOTHING) == access.NOTHING
