"""The settings of the network probes under Covenant: the grants of each, and the packets that may be seen outside."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass

from policy.grants.sets import addresses, spans

NAMED = (("api.example.com", 443, "tls"), ("*.wild.example.com", 443, "tls"))
SERVICE = (("203.0.113.5", 5432, "tcp"), ("203.0.113.5", 123, "udp"))
_ICMP, _TCP, _UDP = 1, 6, 17
_ICMP6 = 58  # neighbours of the test's own link between host and world
# Where the names of the world lead, as far as a name may lead there (tests/kernel/hostile_world.py).
_NAMED_ADDRESSES = ("93.184.216.34", "93.184.216.35", "2606:2800:220:1::34", "2606:2800:220:1::35")
RESOLVER = "9.9.9.9"


@dataclass(frozen=True)
class Setting:
    """One network mode with its table.

    ``grants`` are the words of network.toml that it grants; ``allowed`` says of a packet's (protocol, address, port)
    whether it may leave.
    """

    name: str
    network: str
    entries: tuple[tuple[str, int, str], ...]
    grants: tuple[str, ...]
    allowed: Callable[[int, str, int], bool]

    def manifest(self) -> str:
        """The table as TOML."""
        line = '[[permissions.network]]\nhost = "{}"\nports = [{}]\nprotocol = "{}"\n'
        return "".join(line.format(*entry) for entry in self.entries)


def _resolving(protocol: int, address: str, port: int) -> bool:
    """Whether a packet is a gate's question to the machine's resolver, or the host's ICMP error for a late answer."""
    return address == RESOLVER and (protocol, port) in ((_TCP, 53), (_UDP, 53), (_ICMP, 0))


def _named(protocol: int, address: str, port: int) -> bool:
    to_name = protocol == _TCP and port == 443 and (address in _NAMED_ADDRESSES or address.startswith("44.7."))
    return to_name or _resolving(protocol, address, port)


def _service(protocol: int, address: str, port: int) -> bool:
    # An ICMP error that answers a datagram of a granted flow belongs to it.
    granted = address == "203.0.113.5" and (protocol, port) in ((_TCP, 5432), (_UDP, 123), (_ICMP, 0))
    return granted or _named(protocol, address, port)


def _public(address: str) -> bool:
    found = addresses.parse(address)
    assert found is not None
    return bool(spans.meet((found,), addresses.PUBLIC))


def _public_https(protocol: int, address: str, port: int) -> bool:
    return (protocol == _TCP and port == 443 and _public(address)) or _resolving(protocol, address, port)


def _public_any(protocol: int, address: str, port: int) -> bool:
    return (protocol in (_TCP, _UDP) and _public(address)) or _resolving(protocol, address, port)


SETTINGS = {
    one.name: one
    for one in (
        Setting("off", "off", (), (), lambda protocol, address, port: False),
        Setting("https", "outbound-https-only", NAMED, ("name",), _named),
        Setting("named", "full", (*NAMED, *SERVICE), ("name", "service"), _service),
        Setting("https-any", "outbound-https-only", (), ("name", "https"), _public_https),
        Setting("any", "full", (), ("name", "https", "public"), _public_any),
    )
}


def strays(setting: Setting, targets: set[tuple[int, str, int]]) -> list[tuple[int, str, int]]:
    """The packets that were seen outside and that nothing grants; what the test's own links say is none of them."""
    return sorted(
        target
        for target in targets
        if not setting.allowed(*target) and not ipaddress.ip_address(target[1]).is_multicast and target[0] != _ICMP6
    )
