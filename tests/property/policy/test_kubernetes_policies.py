"""The network policies against the grants, point by point, by a naive reading of the objects.

Nothing more than the grants in either policy, and in Cilium's nothing less: the reader here knows only what the
documentation of NetworkPolicy and CiliumNetworkPolicy says of their fields.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
from typing import Any

import jsonschema
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from policy.compile.targets import kubernetes
from policy.grants.network import Network
from tests.property.policy import grants_strategies as gs
from tests.property.policy.test_network_points import exact_names, points, some_addresses
from tests.unit.policy.compile import targets_kit as kit
from tests.unit.policy.compile.targets.test_kubernetes import CILIUM

PLAIN = kit.manifest()
GRANTS = kit.effective(PLAIN)
VALIDATOR = jsonschema.Draft202012Validator(CILIUM)
META = {"name": "x", "labels": {}}
PUBLIC = "93.184.216.34"
PRIVATE = "10.9.9.9"


def policies(network: Network) -> tuple[dict[str, Any], dict[str, Any]]:
    files = kubernetes.compile(
        dataclasses.replace(GRANTS, network=network),
        PLAIN,
        arch="x86_64",
        package_digest=kit.PACKAGE,
        image=kit.IMAGE,
        accepted=(),
    )
    return json.loads(files["networkpolicy.json"])["spec"], json.loads(files["ciliumnetworkpolicy.json"])["spec"]


def within(address: str, cidr: str) -> bool:
    one, block = ipaddress.ip_address(address), ipaddress.ip_network(cidr)
    return one.version == block.version and one in block


def plain_allows(spec: dict[str, Any], address: str, protocol: str, port: int) -> bool:
    transport = "UDP" if protocol == "udp" else "TCP"
    return any(
        any(within(address, to["ipBlock"]["cidr"]) for to in rule["to"])
        and any(p["protocol"] == transport and p["port"] <= port <= p.get("endPort", p["port"]) for p in rule["ports"])
        for rule in spec["egress"]
    )


def names(pattern: str, name: str) -> bool:
    if pattern == "*":
        return True
    return name.endswith(pattern[2:]) and name != pattern[3:] if pattern.startswith("**.") else name == pattern


def fqdn(selector: dict[str, str], name: str) -> bool:
    (pattern,) = selector.values()
    assert ("matchName" in selector) == ("*" not in pattern)
    return names(pattern, name)


def port_rule(rule: dict[str, Any], protocol: str, port: int, name: str) -> bool:
    transport = "UDP" if protocol == "udp" else "TCP"
    hit = any(
        p["protocol"] == transport and int(p["port"]) <= port <= p.get("endPort", int(p["port"])) for p in rule["ports"]
    )
    if "serverNames" in rule:
        return hit and protocol == "tls" and any(names(pattern, name) for pattern in rule["serverNames"])
    return hit


def cilium_allows(spec: dict[str, Any], name: str, address: str, protocol: str, port: int) -> bool:
    """Whether a connection that was looked up by `name`, and names it in TLS, reaches `address`."""
    assert spec["ingressDeny"] == [{"fromEntities": ["all"]}]
    denied = spec.get("egressDeny", ())
    if any(rule.get("toEntities") == ["all"] for rule in denied):
        return False
    if any(within(address, cidr) for rule in denied for cidr in rule["toCIDR"]):
        return False
    # Without a rule for egress nothing is refused.
    assert spec["egress"]
    for rule in spec["egress"]:
        to = any(within(address, cidr) for cidr in rule.get("toCIDR", ()))
        to = to or any(fqdn(one, name) for one in rule.get("toFQDNs", ()))
        if to and any(port_rule(one, protocol, port, name) for one in rule["toPorts"]):
            return True
    return False


def resolves(spec: dict[str, Any], name: str) -> bool:
    rules = [p for rule in spec.get("egress", ()) if "toEndpoints" in rule for p in rule["toPorts"]]
    return any(fqdn(one, name) for p in rules for one in p["rules"]["dns"])


@given(gs.networks, some_addresses, points)
def test_network_policy_opens_addresses_without_tls_and_no_other(
    network: Network, address: str, point: tuple[str, int]
) -> None:
    spec, _ = policies(network)
    how = network.to_address(address)
    protocol, port = point
    wanted = how.allows("udp" if protocol == "udp" else "tcp", port)
    assert plain_allows(spec, address, protocol, port) == wanted


@given(gs.networks, some_addresses, points)
def test_cilium_policy_opens_addresses_as_they_are_granted(
    network: Network, address: str, point: tuple[str, int]
) -> None:
    _, spec = policies(network)
    # A name that no entry of the strategy holds, unless every name is granted.
    assume("*" not in dict(network.names))
    assert cilium_allows(spec, "zz.invalid", address, *point) == network.to_address(address).allows(*point)  # type: ignore[arg-type]


@given(gs.networks, exact_names, points)
def test_cilium_policy_opens_names_as_they_are_granted(network: Network, name: str, point: tuple[str, int]) -> None:
    _, spec = policies(network)
    wanted = network.to_name(name).allows(*point) or network.to_address(PUBLIC).allows(*point)  # type: ignore[arg-type]
    assert cilium_allows(spec, name, PUBLIC, *point) == wanted
    assert resolves(spec, name) == bool(network.to_name(name))


@given(gs.networks, exact_names, points)
def test_name_leads_to_private_address_only_where_reported(network: Network, name: str, point: tuple[str, int]) -> None:
    _, spec = policies(network)
    if cilium_allows(spec, name, PRIVATE, *point) and not network.to_address(PRIVATE).allows(*point):  # type: ignore[arg-type]
        assert network.to_address(PRIVATE)


@settings(deadline=None)
@given(gs.networks)
def test_every_policy_is_legal_one(network: Network) -> None:
    _, spec = policies(network)
    VALIDATOR.validate({"apiVersion": "cilium.io/v2", "kind": "CiliumNetworkPolicy", "metadata": META, "spec": spec})


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(1, 32000), min_size=90, max_size=120, unique=True))
def test_more_ports_than_rule_takes_are_spread_over_several(ports: list[int]) -> None:
    doubled = [(2 * port, 2 * port) for port in ports]
    _, spec = policies(Network.of([("a.ex", doubled, "tcp"), ("8.8.8.8", doubled, "udp")]))
    VALIDATOR.validate({"apiVersion": "cilium.io/v2", "kind": "CiliumNetworkPolicy", "metadata": META, "spec": spec})
    for port in ports[:20]:
        assert cilium_allows(spec, "a.ex", PUBLIC, "tcp", 2 * port)
        assert cilium_allows(spec, "zz.invalid", "8.8.8.8", "udp", 2 * port)
        assert not cilium_allows(spec, "a.ex", PUBLIC, "tcp", 2 * port + 1)
