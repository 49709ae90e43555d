"""Evaluate a table of nft rules for one packet: the rules one after the other, as the kernel does.

Slow and plain on purpose. It is what policy.decompile.network.flows, which reads all packets at once, is compared with
(tests/property/policy/test_nft_reading.py).
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from policy.decompile.network import nft
from policy.decompile.network.nft import ReadRule, Table

# Chains call one another; the kernel follows 16 calls.
MAX_DEPTH: Final = 16


class Packet(Struct, frozen=True):
    """One packet at one hook.

    ``point`` is the destination on the line of policy.grants.sets.addresses; ``protocol`` is tcp, udp or another word;
    ``iif`` and ``oif`` are the devices, empty where the hook has none; ``held`` are the dynamic sets that the
    destination is in at this moment; ``over`` says that every rate is exceeded.
    """

    point: int
    protocol: str = "tcp"
    port: int = 0
    iif: str = ""
    oif: str = ""
    established: bool = False
    dnat: bool = False
    uid: int | None = None
    held: frozenset[str] = frozenset()
    over: bool = False


Outcome = tuple[str, int]
ACCEPT: Final[Outcome] = ("accept", 0)
DROP: Final[Outcome] = ("drop", 0)


def verdict(table: Table, hook: str, packet: Packet) -> Outcome:
    """accept, drop, or redirect with its port.

    Raises:
        errors.ArtefactError: the chains call one another too deeply.
    """
    chain = table.chains.get(hook)
    if chain is None:
        return ACCEPT
    return _run(table, chain, packet, 0) or (chain.policy, 0)


def _run(table: Table, chain: nft.ReadChain, packet: Packet, depth: int) -> Outcome | None:
    """The outcome of a chain, None when it lets the caller go on."""
    for rule in chain.rules:
        if not _matches(table, rule, packet):
            continue
        kind = rule.verdict.kind
        if kind == "log":
            continue
        if kind == "return":
            return None
        if kind in ("jump", "goto"):
            if depth >= MAX_DEPTH:
                raise nft.refuse(rule.line, "the chains call one another too deeply")
            outcome = _run(table, table.chains[rule.verdict.chain], packet, depth + 1)
            if outcome is not None or kind == "goto":
                return outcome
            continue
        return kind, rule.verdict.port
    return None


def _matches(table: Table, rule: ReadRule, packet: Packet) -> bool:
    return (
        rule.iif in (None, packet.iif)
        and rule.oif in (None, packet.oif)
        and rule.protocol in (None, packet.protocol)
        and (rule.ports is None or any(low <= packet.port <= high for low, high in rule.ports))
        and (not rule.established or packet.established)
        and (not rule.dnat or packet.dnat)
        and rule.uid in (None, packet.uid)
        and (rule.addresses is None or _holds(table.sets[rule.addresses], packet))
        and (rule.limit is None or packet.over)
    )


def _holds(one: nft.ReadSet, packet: Packet) -> bool:
    if one.dynamic:
        return one.name in packet.held and (packet.point >= nft.BASE_V6) == (one.family == 6)
    return any(low <= packet.point <= high for low, high in one.spans)
