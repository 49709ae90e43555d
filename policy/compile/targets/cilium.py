"""Network grants to a CiliumNetworkPolicy: names by toFQDNs, TLS by the server name, addresses by CIDR.

A NetworkPolicy cannot say either of the first two, and policies of both kinds add up: a rule in one allows,
with any rule in the other. So names, TLS and DNS stand here alone, and where there is no Cilium they are refused.

The form is that of the CRD ciliumnetworkpolicies.cilium.io, v2, as Cilium 1.18 publishes it: ``**.`` before a name is
every name below it, ``*`` alone every name, at most 40 ports a rule; an older Cilium reads ``**.`` as one level, which
allows less.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from policy.compile.targets import loss
from policy.grants.effective import Effective
from policy.grants.network import ANY_PUBLIC, Entry
from policy.grants.sets import addresses, spans
from policy.grants.sets.hostnames import EVERY

API_VERSION = "cilium.io/v2"
MAX_PORTS = 40  # maxItems of toPorts[].ports in the CRD
_TRANSPORT = {"tcp": "TCP", "tls": "TCP", "udp": "UDP"}
# The cluster's own resolver, as every distribution labels it.
_KUBE_DNS = {"k8s:io.kubernetes.pod.namespace": "kube-system", "k8s:k8s-app": "kube-dns"}


def compile(effective: Effective, *, name: str, labels: dict[str, str], selector: dict[str, str]) -> dict[str, Any]:
    """The policy of the pod that ``selector`` names.

    What is closed is denied in so many words: an empty rule, ``{}``, is no rule to Cilium and every peer to a
    NetworkPolicy, and an absent section leaves a pod open. Where there are egress rules, all else is refused.
    """
    spec: dict[str, Any] = {
        "endpointSelector": {"matchLabels": selector},
        "ingressDeny": [{"fromEntities": ["all"]}],
    }
    rules = [*_dns(effective), *itertools.chain(*map(_rules, _by_access(effective)))]
    spec |= {"egress": rules} if rules else {"egressDeny": [{"toEntities": ["all"]}]}
    if effective.network.names:
        # A name leads only to public addresses (decisions.md, Network), for any answer of the resolver. What an
        # address entry grants must stay: a denial stands above every permission.
        closed = spans.minus(spans.minus(addresses.ALL, addresses.PUBLIC), loss.private_reach(effective))
        if closed:
            spec["egressDeny"] = [{"toCIDR": _cidrs(closed)}]
    return {
        "apiVersion": API_VERSION,
        "kind": "CiliumNetworkPolicy",
        "metadata": {"name": name, "labels": labels},
        "spec": spec,
    }


def _dns(effective: Effective) -> list[dict[str, Any]]:
    """The resolver, for the granted names alone."""
    names = [pattern for pattern, _ in effective.network.names]
    if not names:
        return []
    ports = [{"port": "53", "protocol": "UDP"}, {"port": "53", "protocol": "TCP"}]
    rules = {"dns": [_fqdn(name) for name in names]}
    return [{"toEndpoints": [{"matchLabels": _KUBE_DNS}], "toPorts": [{"ports": ports, "rules": rules}]}]


def _fqdn(pattern: str) -> dict[str, str]:
    if pattern == EVERY or pattern.startswith("*."):
        return {"matchPattern": _pattern(pattern)}
    return {"matchName": pattern}


def _pattern(pattern: str) -> str:
    """Ours holds every depth below a name; with one star Cilium's holds one level."""
    return f"*{pattern}" if pattern.startswith("*.") else pattern


def _by_access(effective: Effective) -> list[tuple[Entry, ...]]:
    """The entries, those of one protocol and the same ports together; names apart, addresses apart."""
    names = {pattern for pattern, _ in effective.network.names}

    def key(entry: Entry) -> tuple[str, bool, Any, str]:
        # Each TLS name has a rule of its own: one list of names and one of server names would allow each with each.
        alone = entry.host if entry.protocol == "tls" and entry.host in names else ""
        return entry.protocol, entry.host in names, entry.ports, alone

    return [tuple(group) for _, group in itertools.groupby(sorted(effective.network.entries, key=key), key)]


def _rules(entries: tuple[Entry, ...]) -> Iterable[dict[str, Any]]:
    """The egress rule of entries that share protocol and ports."""
    first = entries[0]
    ports = [_port(span, _TRANSPORT[first.protocol]) for span in first.ports]
    named = not _is_address(first.host)
    extra = {"serverNames": [_pattern(first.host) if named else EVERY]} if first.protocol == "tls" else {}
    to_ports = [{"ports": ports[i : i + MAX_PORTS], **extra} for i in range(0, len(ports), MAX_PORTS)]
    if named:
        yield {"toFQDNs": [_fqdn(entry.host) for entry in entries], "toPorts": to_ports}
    else:
        yield {"toCIDR": [cidr for entry in entries for cidr in cidrs(entry.host)], "toPorts": to_ports}


def _is_address(host: str) -> bool:
    return host == ANY_PUBLIC or addresses.parse(host) is not None


def cidrs(host: str) -> list[str]:
    """The CIDR blocks of an address entry."""
    if host == ANY_PUBLIC:
        return _cidrs(addresses.PUBLIC)
    return [host]


def _cidrs(where: spans.Spans) -> list[str]:
    return [str(block) for first, last in where for block in addresses.blocks(first, last)]


def _port(span: tuple[int, int], protocol: str) -> dict[str, Any]:
    first, last = span
    return {"port": str(first), **({"endPort": last} if last > first else {}), "protocol": protocol}
