"""The address side of network grants: which access each address has, as spans of one line of integers.

IPv4 and IPv6 lie on one line with a gap between, so that no span crosses from one to the other. IPv4 written as
IPv6 (``::ffff:0:0/96``) is IPv4: packets carry that form.
"""

from __future__ import annotations

import bisect
import heapq
import ipaddress
import itertools
from collections.abc import Callable, Iterable, Iterator

from policy import errors
from policy.grants.sets import access, spans
from policy.grants.sets.access import Access
from policy.grants.sets.spans import Spans
from policy.manifest import text

# (first, last, access): sorted, disjoint, neighbours of equal access joined. INVARIANT: unique for its meaning.
Reach = tuple[tuple[int, int, Access], ...]
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_V4 = (0, 2**32 - 1)
_V6_BASE = 2**33
_V6 = (_V6_BASE, _V6_BASE + 2**128 - 1)
_MAPPED = ipaddress.IPv6Network("::ffff:0:0/96")
ALL: Spans = (_V4, _V6)

# What no name and no "any public address" ever reaches. A fixed table: ipaddress.is_global changes with the release
# of Python, and the same manifest must mean the same everywhere. Sources: the IANA special-purpose registries
# (RFC 6890 and successors); 168.63.129.16 is the metadata address of one cloud, in public space.
NOT_PUBLIC_V4 = (
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "168.63.129.16/32", "169.254.0.0/16", "172.16.0.0/12",
    "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24",
    "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4",
)  # fmt: skip
# IPv6 is the other way about: only 2000::/3 is public, without what is documentation or carries IPv4 inside
# (Teredo 2001::/32 lies in 2001::/23; 6to4 2002::/16), since that could name a private address.
PUBLIC_V6 = "2000::/3"
NOT_PUBLIC_V6 = ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")


def span(network: Network) -> tuple[int, int]:
    """The span of a block on the line."""
    if isinstance(network, ipaddress.IPv6Network):
        if network.subnet_of(_MAPPED):
            low = int(network.network_address) & 0xFFFFFFFF
            return low, low + network.num_addresses - 1
        first = _V6_BASE + int(network.network_address)
        return first, first + network.num_addresses - 1
    first = int(network.network_address)
    return first, first + network.num_addresses - 1


def parse(host: str) -> tuple[int, int] | None:
    """The span of an address or CIDR block, None when ``host`` is neither.

    Raises ManifestError for a block with bits outside its prefix, and for one that holds mapped IPv4 among others.
    """
    head, slash, tail = host.partition("/")
    if "%" in head or (slash and not tail.isdecimal()):
        return None  # a zone and a netmask are other spellings, which no name has either
    try:
        network = ipaddress.ip_network(host, strict=False)
    except ValueError:
        return None
    blurred = ipaddress.ip_address(head) != network.network_address
    if blurred or (isinstance(network, ipaddress.IPv6Network) and network.prefixlen < 96 and network.overlaps(_MAPPED)):
        raise errors.ManifestError(
            f"host {text.quote(host)} is no CIDR block", hint="write the first address of the block"
        )
    return span(network)


def blocks(first: int, last: int) -> Iterator[Network]:
    """The CIDR blocks of a span, in order; the inverse of ``span``."""
    if first >= _V6_BASE:
        v6 = ipaddress.IPv6Address
        yield from ipaddress.summarize_address_range(v6(first - _V6_BASE), v6(last - _V6_BASE))
    else:
        yield from ipaddress.summarize_address_range(ipaddress.IPv4Address(first), ipaddress.IPv4Address(last))


def _public() -> Spans:
    v4 = spans.minus((_V4,), spans.join(span(ipaddress.IPv4Network(n)) for n in NOT_PUBLIC_V4))
    v6 = (span(ipaddress.IPv6Network(PUBLIC_V6)),)
    return v4 + spans.minus(v6, spans.join(span(ipaddress.IPv6Network(n)) for n in NOT_PUBLIC_V6))


PUBLIC: Spans = _public()


def uniform(where: Spans, how: Access) -> Reach:
    """The same access for every address of ``where``."""
    return tuple((first, last, how) for first, last in where) if how else ()


def at(reach: Reach, point: int) -> Access:
    """The access of one address, as a point of the line."""
    index = bisect.bisect_right(reach, point, key=lambda part: part[0]) - 1
    return reach[index][2] if index >= 0 and point <= reach[index][1] else access.NOTHING


def _joined(parts: Iterable[tuple[int, int, Access]]) -> Reach:
    """Canonical form of sorted, disjoint parts."""
    out: list[tuple[int, int, Access]] = []
    for first, last, how in parts:
        if not how:
            continue
        if out and out[-1][1] + 1 == first and out[-1][2] == how:
            out[-1] = (out[-1][0], last, how)
        else:
            out.append((first, last, how))
    return tuple(out)


def join(parts: Iterable[tuple[int, int, Access]]) -> Reach:
    """The union of parts that may overlap: a sweep over their ends, in n log n for blocks that nest shallowly."""
    listed = sorted(parts, key=lambda part: part[:2])
    cuts = sorted({p[0] for p in listed} | {p[1] + 1 for p in listed})
    out: list[tuple[int, int, Access]] = []
    live: list[tuple[int, int, Access]] = []  # (last, order, access), the one that ends first on top
    at = 0
    for cut, following in itertools.pairwise(cuts):
        while live and live[0][0] < cut:
            heapq.heappop(live)
        while at < len(listed) and listed[at][0] == cut:
            heapq.heappush(live, (listed[at][1], at, listed[at][2]))
            at += 1
        how = access.NOTHING
        for _, _, one in live:
            how = access.union(how, one)
        out.append((cut, following - 1, how))
    return _joined(out)


def meet(a: Reach, b: Reach) -> Reach:
    """Return the addresses that both reach, by one merge."""
    if a == b:
        return a
    out: list[tuple[int, int, Access]] = []
    i = j = 0
    while i < len(a) and j < len(b):
        first, last = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if first <= last:
            out.append((first, last, access.meet(a[i][2], b[j][2])))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return _joined(out)


def minus(a: Reach, b: Reach) -> Reach:
    """Return the addresses that ``a`` reaches and ``b`` does not."""
    return _joined(_pieces(a, b, access.minus))


def _pieces(a: Reach, b: Reach, op: Callable[[Access, Access], Access]) -> Iterator[tuple[int, int, Access]]:
    """Each piece of ``a``, cut where ``b`` changes, with ``op`` of both accesses."""
    j = 0
    for whole_first, last, how in a:
        first = whole_first
        while j < len(b) and b[j][1] < first:
            j += 1
        k = j
        while k < len(b) and b[k][0] <= last:
            if first < b[k][0]:
                yield first, b[k][0] - 1, how
                first = b[k][0]
            end = min(last, b[k][1])
            yield first, end, op(how, b[k][2])
            first = end + 1
            k += 1
        if first <= last:
            yield first, last, how
