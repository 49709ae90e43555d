"""How a destination may be reached: ports by protocol. ``tls`` is TCP that begins with a ClientHello, so it lies
within ``tcp`` on the same port; ``udp`` is apart."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Literal, Self

from msgspec import Struct

from policy.grants.sets import spans
from policy.grants.sets.spans import Spans

Protocol = Literal["tcp", "tls", "udp"]
PROTOCOLS: tuple[Protocol, ...] = ("tcp", "tls", "udp")
ALL_PORTS: Spans = ((1, 65535),)


class Access(Struct, frozen=True):
    """Ports by protocol; ``tls`` holds only ports that are not in ``tcp``."""

    tcp: Spans = ()
    tls: Spans = ()
    udp: Spans = ()

    @classmethod
    def of(cls, protocol: Protocol, ports: Iterable[tuple[int, int]]) -> Self:
        """Access by one protocol to these spans of ports."""
        joined = spans.join(ports)
        return cls(
            joined if protocol == "tcp" else (),
            joined if protocol == "tls" else (),
            joined if protocol == "udp" else (),
        )

    def __bool__(self) -> bool:
        return bool(self.tcp or self.tls or self.udp)

    def allows(self, protocol: Protocol, port: int) -> bool:
        """Whether this port may be reached by this protocol."""
        within = (self.tcp, self.tls) if protocol == "tls" else (getattr(self, protocol),)
        return any(first <= port <= last for ports in within for first, last in ports)

    def by_protocol(self) -> Iterator[tuple[Protocol, Spans]]:
        """Each protocol that has ports, with them."""
        for protocol in PROTOCOLS:
            if ports := getattr(self, protocol):
                yield protocol, ports


NOTHING = Access()
EVERYTHING = Access(tcp=ALL_PORTS, udp=ALL_PORTS)
HTTPS = Access(tls=((443, 443),))

# The caches only save time: the same few accesses stand beside hundreds of hosts. Bounded, since manifests are hostile.
_cached = functools.lru_cache(maxsize=4096)


@_cached
def union(a: Access, b: Access) -> Access:
    """Return the union: the access that either allows."""
    if a == b or not b:
        return a
    tcp = spans.union(a.tcp, b.tcp)
    return Access(tcp, spans.minus(spans.union(a.tls, b.tls), tcp), spans.union(a.udp, b.udp))


@_cached
def meet(a: Access, b: Access) -> Access:
    """Return the meet: the access that both allow."""
    if a == b or not a:
        return a
    tcp = spans.meet(a.tcp, b.tcp)
    tls = spans.meet(spans.union(a.tcp, a.tls), spans.union(b.tcp, b.tls))
    return Access(tcp, spans.minus(tls, tcp), spans.meet(a.udp, b.udp))


@_cached
def minus(a: Access, b: Access) -> Access:
    """Return the access that ``a`` allows and ``b`` does not.

    Plain TCP where ``b`` has only tls stays whole: it is more than tls.
    """
    if not a or not b:
        return a
    return Access(
        spans.minus(a.tcp, b.tcp),
        spans.minus(spans.minus(a.tls, b.tcp), b.tls),
        spans.minus(a.udp, b.udp),
    )
