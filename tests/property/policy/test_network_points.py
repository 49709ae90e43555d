"""Network grants against a naive reading of the entries, point by point: what is allowed, and what a meet allows.

The grants are a compressed function of host, port and protocol; here that function is evaluated without compression.
"""

from __future__ import annotations

import ipaddress
import itertools

from hypothesis import given
from hypothesis import strategies as st

from policy.grants.network import Network
from policy.grants.sets import access, addresses, spans
from tests.property.policy import grants_strategies as gs

Entry = tuple[str, list[tuple[int, int]], str]
entry_lists = st.lists(gs.entries, max_size=5)
points = st.tuples(st.sampled_from(["tcp", "tls", "udp"]), st.integers(1, 19) | st.just(443))
some_addresses = st.sampled_from([
    "10.0.0.0", "10.1.2.3", "10.127.255.255", "10.128.0.0", "10.255.255.255", "11.0.0.0", "8.8.8.8", "8.8.9.0",
    "127.0.0.1", "169.254.169.254", "::1", "fe80::1", "2001:db8::1", "2606:4700::1111", "2606:4701::",
    "255.255.255.255", "0.0.0.0", "::", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
])  # fmt: skip
exact_names = st.lists(st.sampled_from(["a", "b", "com", "ex", "x"]), min_size=1, max_size=5).map(".".join)


def through(entry: Entry, protocol: str, port: int) -> bool:
    """TLS is TCP that begins with a ClientHello, so a tcp entry lets it through."""
    _, ports, said = entry
    return (protocol == said or (protocol == "tls" and said == "tcp")) and any(a <= port <= b for a, b in ports)


def names_host(entry: Entry, name: str) -> bool:
    host = entry[0]
    return name.endswith(host[1:]) and name != host[2:] if host.startswith("*.") else name == host


def holds_address(entry: Entry, address: str) -> bool:
    try:
        network = ipaddress.ip_network(entry[0])
    except ValueError:
        return False
    if isinstance(network, ipaddress.IPv6Network) and network.network_address.ipv4_mapped:
        network = ipaddress.ip_network(network.network_address.ipv4_mapped)
    return ipaddress.ip_address(address) in network


@given(entry_lists, exact_names, points)
def test_name_is_reached_as_entries_say(entries: list[Entry], name: str, point: tuple[str, int]) -> None:
    wanted = any(names_host(e, name) and through(e, *point) for e in entries)
    assert Network.of(entries).to_name(name).allows(*point) == wanted  # type: ignore[arg-type]


@given(entry_lists, some_addresses, points)
def test_address_is_reached_as_entries_say(entries: list[Entry], address: str, point: tuple[str, int]) -> None:
    wanted = any(holds_address(e, address) and through(e, *point) for e in entries)
    assert Network.of(entries).to_address(address).allows(*point) == wanted  # type: ignore[arg-type]


@given(gs.networks, gs.networks, exact_names, some_addresses, points)
def test_meet_allows_what_both_allow(a: Network, b: Network, name: str, at: str, point: tuple[str, int]) -> None:
    both = a.meet(b)
    allowed = [x.to_name(name).allows(*point) for x in (a, b, both)]  # type: ignore[arg-type]
    assert allowed[2] == (allowed[0] and allowed[1])
    allowed = [x.to_address(at).allows(*point) for x in (a, b, both)]  # type: ignore[arg-type]
    assert allowed[2] == (allowed[0] and allowed[1])


@given(gs.networks, gs.networks, exact_names, some_addresses, points)
def test_subset_allows_nothing_more(a: Network, b: Network, name: str, at: str, point: tuple[str, int]) -> None:
    for x, y in ((a, b), (a.meet(b), b)):
        if x.is_subset(y):
            assert x.to_name(name).allows(*point) <= y.to_name(name).allows(*point)  # type: ignore[arg-type]
            assert x.to_address(at).allows(*point) <= y.to_address(at).allows(*point)  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=6), st.data())
def test_spans_are_sets_of_integers(raw: list[tuple[int, int]], data: st.DataObject) -> None:
    def whole(of: spans.Spans) -> set[int]:
        return {n for first, last in of for n in range(first, last + 1)}

    more = data.draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=6))
    a, b = (spans.join((first, first + size) for first, size in part) for part in (raw, more))
    assert whole(spans.union(a, b)) == whole(a) | whole(b)
    assert whole(spans.meet(a, b)) == whole(a) & whole(b)
    assert whole(spans.minus(a, b)) == whole(a) - whole(b)
    for result in (spans.union(a, b), spans.meet(a, b), spans.minus(a, b)):
        assert result == spans.join(result)
        assert all(one[1] + 1 < two[0] for one, two in itertools.pairwise(result))


@given(gs.networks, some_addresses, exact_names, points)
def test_listed_entries_are_grant(network: Network, at: str, name: str, point: tuple[str, int]) -> None:
    """`entries` is what people and compilers read: it must say neither more nor less than the set."""
    public = any(first <= _point(at) <= last for first, last in addresses.PUBLIC)
    listed_at, listed_name = [], []
    for host, protocol, ports in network.entries:
        entry: Entry = (host, list(ports), protocol)
        if host == "any public host":
            listed_at += [through(entry, *point)] if public else []
            listed_name.append(through(entry, *point))
        elif host == "*":
            listed_name.append(through(entry, *point))
        else:
            listed_at.append(holds_address(entry, at) and through(entry, *point))
            listed_name.append(names_host(entry, name) and through(entry, *point))
    assert any(listed_at) == network.to_address(at).allows(*point)  # type: ignore[arg-type]
    assert any(listed_name) == network.to_name(name).allows(*point)  # type: ignore[arg-type]


def _point(address: str) -> int:
    parsed = addresses.parse(address)
    assert parsed is not None
    return parsed[0]


def test_mode_is_least_that_holds_set() -> None:
    for mode in ("off", "outbound-https-only", "full"):
        assert Network.without_table(mode).mode == mode
    assert Network.of([("a.example", [(443, 443)], "tls")]).mode == "outbound-https-only"
    assert Network.of([("a.example", [(443, 443)], "tcp")]).mode == "full"
    assert Network.of([("a.example", [(443, 444)], "tls")]).mode == "full"
    assert Network.any(access.HTTPS).is_subset(Network.top())
