"""Connections that the kernel tracks for a run, read and judged: a packet of one passes without another look at rules.

The gateway's table is judged by the run's rules (policy.prove.connections). The agent's namespace tracks none, since no
rule there asks for it. Of the host's table, which is everybody's and of any size, the entries of the gateway's own
connections are looked up: each must lead where the gateway sent it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Mapping, Sequence

from policy.connections import Connection, Ends
from policy.prove.connections import Places, Ways
from policy.prove.live import Layer, Standing
from sandbox.kernel.net import conntrack

Begun = tuple[int, Ends]


def tracked() -> tuple[tuple[Connection, ...], int]:
    """The connections of the calling thread's namespace, and how many more the kernel expects.

    A listing walks the table of all namespaces, so the thread asks first for the number of entries.
    """
    return (tuple(conntrack.connections()) if conntrack.count() else (), conntrack.expectations())


def continued(found: Iterable[Connection], uplink: Iterable[str]) -> list[Begun]:
    """How the gateway's connections begin on the host. An answer to the gateway's own address says what it sent."""
    own = {ipaddress.ip_address(one).packed for one in uplink}
    return [
        (one.protocol, Ends(to.destination, to.source, to.destination_port, to.source_port))
        for one in found
        if (to := one.answered).destination in own
    ]


def judge(
    found: Mapping[str, Sequence[Connection]], expected: Mapping[str, int], places: Places, firewall: bytes
) -> Iterator[Layer]:
    """Entries that no rule lets begin, by namespace: ``gateway``, ``agent`` and ``host``."""
    refused: list[tuple[str, Connection]] = []
    if found["gateway"]:
        refused += [("gateway", one) for one in Ways.of(firewall).refused(found["gateway"], places)]
    refused += [("agent", one) for one in found["agent"]]
    refused += [("host", one) for one in found["host"] if not one.direct or one.odd]
    if refused:
        (where, first), more = refused[0], f" and {len(refused) - 1} more" if len(refused) > 1 else ""
        expects = f"in the namespace of the {where} connections that the rules let begin"
        yield Layer("network", Standing.WIDER, expects, f"{first}{more}")
    for name, count in expected.items():
        if count:
            expects = f"no connections that the kernel expects in the namespace of the {name}"
            yield Layer("network", Standing.WIDER, expects, str(count))
