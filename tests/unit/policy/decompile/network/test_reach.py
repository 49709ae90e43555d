"""A way to every public address is a way to every name: what names have beside their own grants."""

from __future__ import annotations

import pytest

from policy.decompile.network import reach
from policy.grants.network import Network
from policy.grants.sets import access, addresses, hostnames
from policy.grants.sets.access import Access

WEB, DNS = Access.of("tcp", [(443, 443)]), Access.of("udp", [(53, 53)])
NAMES = hostnames.join([("example.com", WEB)])


def test_names_have_what_every_public_address_has() -> None:
    open_to_all = addresses.uniform(addresses.PUBLIC, DNS)
    found = reach.with_common(Network(NAMES, open_to_all))
    assert dict(found.names) == {"example.com": access.union(WEB, DNS)}
    assert found.reach == open_to_all
    # One address less than all: no way of its own for a name.
    first = addresses.PUBLIC[0][0]
    less = addresses.minus(open_to_all, addresses.uniform(((first, first),), access.EVERYTHING))
    assert reach.with_common(Network(NAMES, less)) == Network(NAMES, less)
    assert reach.with_common(Network(NAMES, addresses.uniform((), DNS))) == Network(NAMES, addresses.uniform((), DNS))


def test_common_access_is_that_of_all_addresses() -> None:
    both = access.union(WEB, DNS)
    assert reach.common_access(addresses.uniform(addresses.PUBLIC, both)) == both
    one, *rest = addresses.PUBLIC
    mixed = addresses.join([*addresses.uniform((one,), both), *addresses.uniform(tuple(rest), DNS)])
    assert reach.common_access(mixed) == DNS
    assert reach.common_access(addresses.uniform((), DNS)) == access.NOTHING


def test_ports_of_a_destination_do_not_change() -> None:
    raw = reach.Raw(((80, 80),), ((53, 53),), ((80, 80), (443, 443)))
    assert (raw.access.tcp, raw.access.tls, raw.access.udp) == (((80, 80),), ((443, 443),), ((53, 53),))
    with pytest.raises(AttributeError):
        raw.tcp = ()  # type: ignore[misc]
