"""Decide about connections of the TLS gate by its part of gates.json."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sandbox.network.tls.client_hello import Hello
from sandbox.network.tls.leased_names import LeasedNames

# The operator's default (sandbox.config, `connection_idle_seconds`).
IDLE_SECONDS = 86_400
_Ports = tuple[tuple[int, int], ...]


class TlsPlan:
    """The granted names and spans of addresses, each with their ports.

    ``idle_seconds`` is how long a connection may say nothing, ``injected`` are names whose requests are read.
    ``leases`` are the names that need a lease and have one.
    """

    def __init__(self, document: Mapping[str, Any], leases: LeasedNames | None = None) -> None:
        self._leases = leases or LeasedNames()
        self._asked: dict[str, _Ports] = {one["pattern"]: _ports(one["ports"]) for one in document.get("asked", ())}
        self.idle_seconds = float(document.get("idle_seconds", IDLE_SECONDS))
        self._injected = frozenset(document.get("injected", ()))
        self._names: dict[str, _Ports] = {}
        for one in document["names"]:
            self._names[one["pattern"]] = self._names.get(one["pattern"], ()) + _ports(one["ports"])
        self._addresses = {
            version: [
                (int(first), int(ipaddress.ip_address(one["last"])), _ports(one["ports"]))
                for one in document["addresses"]
                if (first := ipaddress.ip_address(one["first"])).version == version
            ]
            for version in (4, 6)
        }

    def refusal(self, host: str, port: int, hello: Hello) -> str | None:
        """Return the reason to refuse a connection to the address ``host`` with this hello. None if it is granted.

        A granted address may be used with any name or none. No name is compared there, so an encrypted hello hides
        nothing of importance.
        """
        if self.by_address(host, port):
            return None
        if hello.ech:
            return "ech_present"
        if hello.name is None:
            return "no_sni"
        if self.named(hello.name, port):
            return None
        return "not_approved" if self.asks(hello.name, port) else "sni_not_granted"

    def named(self, name: str, port: int) -> bool:
        """Whether a name is granted as such on this port, by the manifest or by a lease."""
        return self._written(name, port) or self.leased(name, port)

    def asks(self, name: str, port: int) -> bool:
        """Whether a lease would let a connection to a name begin."""
        return any(_within(port, self._asked.get(pattern, ())) for pattern in _patterns(name))

    def leased(self, name: str, port: int) -> bool:
        """Whether a lease alone lets a connection to a name begin."""
        return self.asks(name, port) and not self._written(name, port) and self._leases.live(name)

    def _written(self, name: str, port: int) -> bool:
        return any(_within(port, self._names.get(pattern, ())) for pattern in _patterns(name))

    def injected(self, name: str) -> bool:
        """Whether requests to a name are read, to add a secret to them."""
        return name in self._injected

    def by_address(self, host: str, port: int) -> bool:
        """Whether an address is granted as such on this port."""
        address = ipaddress.ip_address(host)
        number = int(address)
        spans = self._addresses[address.version]
        return any(first <= number <= last and _within(port, ports) for first, last, ports in spans)


def _patterns(name: str) -> Iterator[str]:
    """The patterns that hold a name: itself, ``*.`` before each of its parents, ``*``."""
    yield name
    dot = name.find(".")
    while dot >= 0:
        yield "*" + name[dot:]
        dot = name.find(".", dot + 1)
    yield "*"


def _ports(spans: Sequence[Sequence[int]]) -> _Ports:
    return tuple((first, last) for first, last in spans)


def _within(port: int, ports: _Ports) -> bool:
    return any(first <= port <= last for first, last in ports)
