"""Network grants to network.json and to the nft ruleset of a gateway namespace that serves exactly one agent.

    agent ── agent0 [ gateway: this ruleset, the DNS gate, the TLS gate ] uplink0 ── world

Addresses are static sets; a name is a pair of sets that the DNS gate fills before it answers. tcp and udp grants are
forwarded; tls grants are redirected to the TLS gate, whose own connections leave under its uid to the same sets. What
a name leads to is looked up after everything that no name may ever lead to has been refused, so that an answer with a
private address gives nothing. What is not granted is refused at once, with a reset or an unreachable port.
"""

from __future__ import annotations

from typing import Any

from policy.compile.artefacts import Cause, Provenance, built_in
from policy.compile.causes import Origins
from policy.compile.network import nft
from policy.compile.network.destinations import DestinationRow
from policy.compile.network.nft import Chain, Ruleset, Set
from policy.compile.network.routes import Traced
from policy.grants.effective import Effective
from policy.grants.sets import addresses, spans

AGENT, UPLINK = "agent0", "uplink0"
DNS_PORT, TLS_PORT, SERVICE_PORT, SSH_AGENT_PORT = 53, 8443, 80, 81
# The TLS gate's own; below the range of the agents' uids, which begin at 65536 (sandbox.config).
GATE_UID = 64998
# Of the gate that carries connections of the host to published ports.
PUBLISH_UID = 64994
NAME_SET_SIZE = 1024
# The kernel takes rates whose bytes times 10^9 fit 64 bits (net/netfilter/nft_limit.c); a higher grant is held to this.
MAX_BYTES_PER_SECOND = 18_000_000_000
# Where refused packets are told: a group of nfnetlink_log in the gateway's own namespace, read by
# sandbox.kernel.net.nflog. The rate bounds what an agent can make the supervisor read; the counters have all of them.
# 128 bytes hold the headers.
LOG_GROUP, LOG_PACKETS_PER_SECOND, LOG_BURST, LOG_BYTES = 27, 64, 128, 128
# The counters of what was refused.
REFUSED = ("refused_tcp", "refused_udp", "refused_other")

_V6_BASE = 2**33
_NOT_PUBLIC = spans.minus(addresses.ALL, addresses.PUBLIC)
_REFUSE = built_in("refuse", "what is not granted is refused at once")
_TELL = built_in("tell", "what is refused is told, within a rate")
_ESTABLISHED = built_in("established", "answers to what was granted")
_NEIGHBOURS = built_in("neighbours", "IPv6 finds its neighbour on the link by these (RFC 4861)")
_NEVER_BY_NAME = built_in("never by name", "a name only ever leads to public addresses")
_GATES = built_in("gates", "the gateway's own doors, and nothing else of it")


def document(effective: Effective, traced: Traced, origins: Origins, provenance: Provenance) -> dict[str, Any]:
    """network.json."""
    mode, limit = effective.network.mode, effective.resources.net_bps
    provenance.add("network.json:mode", origins.value("network", "mode", "resources.network"))
    if limit is not None:
        provenance.add("network.json:net_bps", origins.resource("net_bps"))
    for row in traced.rows:
        provenance.add(f"network.json:grant/{row.id}", traced.causes[row.key])
    off = not effective.linked
    if not off:
        provenance.add("network.json:gateway", built_in("gateway", "one gateway namespace serves one agent"))
    return {
        "version": 2,
        "mode": mode,
        "interfaces": ["lo"] if off else ["eth0", "lo"],
        "gateway": None if off else {
            "agent": AGENT, "uplink": UPLINK, "dns_port": DNS_PORT, "tls_port": TLS_PORT, "gate_uid": GATE_UID,
            **({"service_port": SERVICE_PORT} if effective.served else {}),
            **({"publish_uid": PUBLISH_UID} if effective.publish else {}),
            **({"ssh_agent_port": SSH_AGENT_PORT} if effective.ssh else {}),
        },
        "net_bps": limit,
        "grants": [_row(row) for row in traced.rows],
    }  # fmt: skip


def _row(row: DestinationRow) -> dict[str, Any]:
    return {
        "id": row.id,
        "kind": row.kind,
        "host": row.host,
        "protocol": row.protocol,
        "ports": [list(span) for span in row.ports],
        "sets": list(row.sets),
        "counter": row.counter,
    }


def compile(effective: Effective, traced: Traced, origins: Origins, provenance: Provenance) -> bytes:
    """firewall.nft; empty for an agent without a link, whose network namespace has loopback alone."""
    if not effective.linked:
        return b""
    return _Gateway(effective, traced, origins).ruleset().text("firewall.nft", provenance)


class _Gateway:
    """The ruleset in the making."""

    def __init__(self, effective: Effective, traced: Traced, origins: Origins) -> None:
        limit = effective.resources.net_bps
        self.found = found = traced.found
        self.rate = None if limit is None else min(limit, MAX_BYTES_PER_SECOND)
        self.rate_cause = origins.resource("net_bps")
        self.causes: dict[str, Cause] = {}
        for row in traced.rows:
            # A group's rules stand for all its addresses: the first of them names the line.
            for name in (*row.sets, *([row.counter] if row.counter else [])):
                self.causes.setdefault(name, traced.causes[row.key])
        self.tls = any(row.protocol == "tls" for row in traced.rows)
        self.filled = any(one.sets for one in found.names)
        self.served = effective.served
        self.ssh = bool(effective.ssh)
        self.published = effective.publish.pairs()
        self.host_ports = [(port, origins.host_port(port)) for port in effective.host_ports.numbers()]
        self.published_causes = [origins.published(port, to) for port, to in self.published]

    def ruleset(self) -> Ruleset:
        counters = {name: cause for name, cause in self.causes.items() if name.startswith("c_")}
        counters.update((name, _REFUSE) for name in REFUSED)
        return Ruleset(self._sets(), counters, [chain for chain in self._chains() if chain.rules])

    def _sets(self) -> list[Set]:
        out = []
        for group in self.found.groups:
            out += [Set(name, 4 if name[1] == "4" else 6, held, self.causes[name]) for name, held in group.sets]
        for one in self.found.names:
            for version, name in zip((4, 6), one.sets, strict=False):
                out.append(Set(name, version, None, self.causes[name], NAME_SET_SIZE))
        if self.filled:
            out += [
                Set("x4", 4, tuple(span for span in _NOT_PUBLIC if span[0] < _V6_BASE), _NEVER_BY_NAME),
                Set("x6", 6, tuple(span for span in _NOT_PUBLIC if span[0] >= _V6_BASE), _NEVER_BY_NAME),
            ]
        return out

    def _chains(self) -> tuple[Chain, ...]:
        return (
            self._limit("upward"),
            self._limit("downward"),
            self._refuse(),
            self._destinations("granted", tls=False),
            self._destinations("gate", tls=True),
            self._plain(),
            self._forward(),
            self._input(),
            self._output(),
            self._prerouting(),
        )

    def _limit(self, name: str) -> Chain:
        chain = Chain(name)
        if self.rate is not None:
            # One bucket for what is forwarded and what the gate carries: both hooks jump to this one rule.
            chain.add("drop", self.rate_cause, f"limit rate over {self.rate:d} bytes/second")
        return chain

    def _refuse(self) -> Chain:
        chain = Chain("refuse")
        rate = f"limit rate {LOG_PACKETS_PER_SECOND:d}/second burst {LOG_BURST:d} packets"
        chain.add(f"log group {LOG_GROUP:d} snaplen {LOG_BYTES:d}", _TELL, rate)
        chain.add("reject with tcp reset", _REFUSE, "meta l4proto tcp", counter="refused_tcp")
        chain.add("reject with icmpx port-unreachable", _REFUSE, "meta l4proto udp", counter="refused_udp")
        chain.add("drop", _REFUSE, counter="refused_other")
        return chain

    def _destinations(self, name: str, *, tls: bool) -> Chain:
        """Static addresses, then the refusal of what no name may lead to, then what names led to."""
        chain = Chain(name)
        if tls and not self.tls:
            return chain
        self._static(chain, "accept", ("tls",) if tls else ("tcp", "udp"), counted=True)
        names = [one for one in self.found.names if one.sets and (one.protocol == "tls") is tls]
        if names:
            for version in (4, 6):
                chain.add(nft.goto("refuse"), _NEVER_BY_NAME, nft.to_set(version, f"x{version}"))
        self._named(chain, "accept", ("tls",) if tls else ("tcp", "udp"), counted=True)
        chain.add(nft.goto("refuse"), _REFUSE)
        return chain

    def _plain(self) -> Chain:
        """Exclude the destinations of plain-tcp name grants from redirection, unless no name may lead there."""
        chain = Chain("plain")
        if not self.tls or not any(one.sets and one.protocol == "tcp" for one in self.found.names):
            return chain
        for version in (4, 6):
            chain.add("return", _NEVER_BY_NAME, nft.to_set(version, f"x{version}"))
        self._named(chain, "accept", ("tcp",))
        return chain

    def _forward(self) -> Chain:
        chain = Chain("forward", "forward", _REFUSE)
        self._limited(chain, nft.comes_by(AGENT), "upward")
        self._limited(chain, nft.leaves_by(AGENT), "downward")
        chain.add("accept", _ESTABLISHED, "ct state established,related")
        chain.add(nft.jump("granted"), _GATES, nft.comes_by(AGENT), nft.leaves_by(UPLINK))
        chain.add(nft.goto("refuse"), _REFUSE, nft.comes_by(AGENT))
        return chain

    def _input(self) -> Chain:
        chain = Chain("input", "input", _REFUSE)
        self._limited(chain, nft.comes_by(AGENT), "upward")
        self._gateway_itself(chain)
        if self.found.names:
            for transport in ("udp", "tcp"):
                port = nft.to_ports(transport, ((DNS_PORT, DNS_PORT),))
                chain.add("accept", _GATES, nft.comes_by(AGENT), port)
        if self.served:
            chain.add("accept", _GATES, nft.comes_by(AGENT), nft.to_ports("tcp", ((SERVICE_PORT, SERVICE_PORT),)))
        if self.ssh:
            chain.add("accept", _GATES, nft.comes_by(AGENT), nft.to_ports("tcp", ((SSH_AGENT_PORT, SSH_AGENT_PORT),)))
        for number, cause in self.host_ports:
            chain.add("accept", cause, nft.comes_by(AGENT), nft.to_ports("tcp", ((number, number),)))
        if self.tls:
            port = nft.to_ports("tcp", ((TLS_PORT, TLS_PORT),))
            chain.add("accept", _GATES, nft.comes_by(AGENT), port, "ct status dnat")
        chain.add(nft.goto("refuse"), _REFUSE, nft.comes_by(AGENT))
        return chain

    def _output(self) -> Chain:
        chain = Chain("output", "output", _REFUSE)
        self._limited(chain, nft.leaves_by(AGENT), "downward")
        self._gateway_itself(chain)
        if self.tls:
            chain.add(nft.jump("gate"), _GATES, nft.leaves_by(UPLINK), f"meta skuid {GATE_UID:d}")
        for (port, _), cause in zip(self.published, self.published_causes, strict=True):
            to = nft.to_ports("tcp", ((port, port),))
            chain.add("accept", cause, nft.leaves_by(AGENT), f"meta skuid {PUBLISH_UID:d}", to)
        return chain

    def _prerouting(self) -> Chain:
        chain = Chain("prerouting", "prerouting", _GATES)
        if not self.tls:
            return chain
        agent = nft.comes_by(AGENT)
        self._static(chain, "accept", ("tcp",), agent)
        if any(one.sets and one.protocol == "tcp" for one in self.found.names):
            chain.add(nft.jump("plain"), _GATES, agent)
        redirect = f"redirect to :{TLS_PORT:d}"
        self._static(chain, redirect, ("tls",), agent)
        if any(one.sets and one.protocol == "tls" for one in self.found.names):
            for version in (4, 6):
                chain.add("accept", _NEVER_BY_NAME, agent, nft.to_set(version, f"x{version}"))
            self._named(chain, redirect, ("tls",), agent)
        return chain

    def _limited(self, chain: Chain, match: str, limit: str) -> None:
        if self.rate is not None:
            chain.add(nft.jump(limit), self.rate_cause, match)

    @staticmethod
    def _gateway_itself(chain: Chain) -> None:
        chain.add("accept", _ESTABLISHED, "ct state established,related")
        chain.add("accept", _NEIGHBOURS, "icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert }")

    def _static(
        self, chain: Chain, verdict: str, protocols: tuple[str, ...], *matches: str, counted: bool = False
    ) -> None:
        for group in self.found.groups:
            if group.protocol in protocols:
                port = nft.to_ports("udp" if group.protocol == "udp" else "tcp", group.ports)
                for name, _ in group.sets:
                    to = nft.to_set(int(name[1]), name)
                    counter = group.counter if counted else None
                    chain.add(verdict, self.causes[name], *matches, to, port, counter=counter)

    def _named(
        self, chain: Chain, verdict: str, protocols: tuple[str, ...], *matches: str, counted: bool = False
    ) -> None:
        for one in self.found.names:
            if one.protocol in protocols:
                port = nft.to_ports("udp" if one.protocol == "udp" else "tcp", one.ports)
                for version, name in zip((4, 6), one.sets, strict=False):
                    to = nft.to_set(version, name)
                    counter = one.counter if counted else None
                    chain.add(verdict, self.causes[name], *matches, to, port, counter=counter)
