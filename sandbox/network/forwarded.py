"""Count the destinations of a run that its gateway forwards, by the kernel's own table of connections.

A tcp or udp grant passes no gate, so no process sees its bytes. The kernel counts them where net.netfilter.
nf_conntrack_acct is set (``namespaces.count_bytes``), and keeps an entry for some time after the connection. The
table is read at intervals and once after the agent's end: an entry that came and went in between is not counted.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Final

from policy.connections import PROTOCOLS, Connection
from sandbox.kernel.net.conntrack import Counted
from sandbox.network import addresses
from sandbox.network.reached import TellReached

_AGENT: Final = frozenset(ipaddress.ip_address(one).packed for one in (addresses.AGENT4, addresses.AGENT6))
_OWN: Final = frozenset(ipaddress.ip_address(one).packed for one in (addresses.GATEWAY4, addresses.GATEWAY6))


class ForwardedFlows:
    """The forwarded connections of one run. ``reached`` is told each destination with what is new."""

    def __init__(self, reached: TellReached) -> None:
        self._reached = reached
        # The bytes of each entry of the last look: as many as the table holds.
        self._known: dict[tuple[int, Connection], int] = {}

    def look(self, entries: Iterable[Counted]) -> None:
        """Count the entries of the table."""
        now = {(one.id, one.connection): one.bytes for one in entries if _is_forwarded(one.connection)}
        found: dict[str, tuple[int, int]] = {}
        for key, carried in now.items():
            before = self._known.get(key)
            connections, known = found.get(target(key[1]), (0, 0))
            found[target(key[1])] = connections + (before is None), known + carried - (before or 0)
        self._known = now
        for shown, (connections, carried) in found.items():
            if connections or carried:
                self._reached(shown, connections, carried)


def _is_forwarded(one: Connection) -> bool:
    """Whether the agent began it, and no gate took it."""
    return one.sent.source in _AGENT and one.sent.destination not in _OWN and one.direct and one.protocol in PROTOCOLS


def target(one: Connection) -> str:
    """The destination as ``covenant policy why --connect`` takes it, with the protocol behind it."""
    address = str(ipaddress.ip_address(one.sent.destination))
    shown = f"[{address}]" if ":" in address else address
    return f"{shown}:{one.sent.destination_port}/{PROTOCOLS[one.protocol]}"
