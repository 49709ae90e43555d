"""Connections as the kernel tracks them (conntrack): both directions, in one line of text."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Final, NamedTuple

# By the number of IPPROTO_TCP and IPPROTO_UDP: the protocols that a grant can name.
PROTOCOLS: Final[Mapping[int, str]] = {6: "tcp", 17: "udp"}


class Ends(NamedTuple):
    """One direction of a connection: packed addresses (4 or 16 bytes), and ports."""

    source: bytes
    destination: bytes
    source_port: int
    destination_port: int


class Connection(NamedTuple):
    """One entry: ``sent`` is the first packet, ``answered`` what the kernel takes for an answer. ``odd`` names what
    the entry has besides (a zone, a helper, a master connection), empty for none."""

    protocol: int
    sent: Ends
    answered: Ends
    odd: str = ""

    @property
    def direct(self) -> bool:
        """Whether answers come from where the first packet was sent to."""
        to = self.sent.destination, self.sent.destination_port
        return (self.answered.source, self.answered.source_port) == to

    def __str__(self) -> str:
        name = PROTOCOLS.get(self.protocol, f"protocol {self.protocol}")
        text = f"{name} {_end(*self.sent[::2])} to {_end(*self.sent[1::2])}"
        if not self.direct:
            text += f", led to {_end(*self.answered[::2])}"
        return f"{text} ({self.odd})" if self.odd else text


def _end(address: bytes, port: int) -> str:
    text = str(ipaddress.ip_address(address)) if len(address) in (4, 16) else address.hex()
    return f"[{text}]:{port}" if ":" in text else f"{text}:{port}"
