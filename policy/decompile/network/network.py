"""network.json, firewall.nft and gates.json read back together: whom the agent can reach, and how fast."""

from __future__ import annotations

import re
from typing import Any, Final

from msgspec import Struct

from policy import errors
from policy.decompile import documents
from policy.decompile.documents import OPTIONAL_INT, Files, NoneType, closed, fixed, refuse, shown
from policy.decompile.network import gates, nft, reach
from policy.grants.credentials import InjectSet
from policy.grants.network import Network
from policy.grants.services import AgentSet, HostPorts, PublishSet, ServiceSet, SshSet, TelemetrySet, WebSet
from policy.grants.sets import addresses, hostnames, spans
from policy.grants.sets.access import PROTOCOLS, Access
from policy.grants.sets.spans import Spans

NETWORK = "network.json"
VERSION: Final = 2
MODES = ("off", "outbound-https-only", "full")
ANY_PUBLIC_ADDRESS: Final = "any public address"
# The one gateway that there is; each agent has its own, in a network namespace of its own.
_GATEWAY: Final = {
    "agent": reach.AGENT,
    "dns_port": 53,
    "gate_uid": reach.GATE_UID,
    "tls_port": 8443,
    "uplink": reach.UPLINK,
}
_SERVICE_PORT: Final = 80
_SSH_AGENT_PORT: Final = 81
# The kernel takes rates whose bytes times 10^9 fit 64 bits (net/netfilter/nft_limit.c): more is held to this.
MAX_RATE: Final = 18_000_000_000
_ID = re.compile(r"g_[0-9a-f]{16}")


class Reached(Struct, frozen=True):
    """The destinations, the mode that says which network stack the sandbox gets, and bytes a second each way.

    ``listed`` are the destinations as the index of network.json has them, which people are shown and nothing enforces.
    ``named`` says whether there is a gate that resolves names; ``services`` are the models of the
    service gate, ``tools`` says whether it answers for tools, and ``publish`` has the ports of the agent that the host
    reaches.
    """

    network: Network
    mode: str
    net_bps: int | None
    listed: Network
    named: bool
    services: ServiceSet = ServiceSet()
    tools: bool = False
    publish: PublishSet = PublishSet()
    inject: InjectSet = InjectSet()
    web: WebSet = WebSet()
    host_ports: HostPorts = HostPorts()
    ssh: SshSet = SshSet()
    agents: AgentSet = AgentSet()
    telemetry: TelemetrySet = TelemetrySet()

    @property
    def linked(self) -> bool:
        """Whether the agent has a link to a gateway: for destinations, services, tools, or ports either way."""
        asked = (self.services, self.tools, self.publish, self.web, self.host_ports, self.ssh)
        return self.mode != "off" or any((*asked, self.agents, self.telemetry))


def read(files: Files) -> Reached:
    """Read the destinations that the network artefacts let an agent reach.

    Raises:
        errors.ArtefactError: one is malformed, or they contradict each other.
    """
    whole = closed(
        documents.load(files, NETWORK),
        NETWORK,
        {
            "gateway": (dict, NoneType),
            "grants": list,
            "interfaces": list,
            "mode": str,
            "net_bps": OPTIONAL_INT,
            "version": int,
        },
    )
    fixed(whole["version"], f"{NETWORK}:version", VERSION)
    mode = documents.one_of(whole["mode"], f"{NETWORK}:mode", MODES)
    bps = whole["net_bps"]
    if bps is not None:
        documents.whole(bps, f"{NETWORK}:net_bps", least=1)
    unlinked = mode == "off" and whole["gateway"] is None
    found, listed, gated = _off(files, whole) if unlinked else _gateway(files, whole)
    if found.mode != mode:
        raise refuse(f"{NETWORK}:mode", f"it is {mode}, and the rules amount to {found.mode}")
    asked = gated.service_port is not None or gated.publish or gated.host or gated.ssh
    if mode == "off" and not unlinked and not asked:
        raise refuse(f"{NETWORK}:gateway", "there is a gateway for an agent that reaches nothing")
    granted = (gated.services, gated.tools, gated.publish, gated.inject, gated.web, gated.host, gated.ssh, gated.agents)
    return Reached(found, mode, bps, listed, gated.dns_port is not None, *granted, gated.telemetry)


def _off(files: Files, whole: dict[str, Any]) -> tuple[Network, Network, gates.Gates]:
    """No network: nothing but the sandbox's own loopback, and nothing that a gateway could be made of."""
    fixed(whole["interfaces"], f"{NETWORK}:interfaces", ["lo"])
    fixed(whole["gateway"], f"{NETWORK}:gateway", None)
    fixed(whole["grants"], f"{NETWORK}:grants", [])
    if documents.raw(files, nft.FIREWALL):
        raise refuse(nft.FIREWALL, "there are rules for an agent without a network")
    fixed(documents.load(files, gates.GATES), gates.GATES, {"dns": None, "tls": None, "version": gates.VERSION})
    return Network.bottom(), Network.bottom(), gates.Gates()


def _gateway(files: Files, whole: dict[str, Any]) -> tuple[Network, Network, gates.Gates]:
    """The destinations by a gateway, by its rules and gates, and by the index; its gates."""
    fixed(whole["interfaces"], f"{NETWORK}:interfaces", ["eth0", "lo"])
    table, found = nft.parse(documents.raw(files, nft.FIREWALL)), gates.read(files)
    served = {"service_port": _SERVICE_PORT} if found.service_port is not None else {}
    published = {"publish_uid": reach.PUBLISH_UID} if found.publish else {}
    signed = {"ssh_agent_port": _SSH_AGENT_PORT} if found.ssh else {}
    expected = {**_GATEWAY, **served, **published, **signed}
    fixed(whole["gateway"], f"{NETWORK}:gateway", expected)
    for name, port in (
        ("dns", found.dns_port),
        ("tls", found.tls_port),
        ("service", found.service_port),
        ("ssh_agent", found.ssh_port),
    ):
        if port is not None:
            fixed(port, f"{gates.GATES}:{name}/listen", expected[f"{name}_port"])
    gateway = reach.Gateway(table, found)
    network = gateway.network()
    _rate(gateway, whole["net_bps"])
    return network, _index(whole["grants"], table, found), found


def _rate(gateway: reach.Gateway, bps: int | None) -> None:
    """Each direction passes one limit of this many bytes a second, whichever way it takes; or there is none."""
    rates = {rule.limit: rule for rule in gateway.table.rules() if rule.limit is not None}
    if bps is None:
        if rates:
            raise nft.refuse(next(iter(rates.values())).line, "a limit for an agent that has none")
        return
    if set(rates) != {min(bps, MAX_RATE)}:
        raise refuse(f"{NETWORK}:net_bps", f"it is {bps}, and the rules have {shown(sorted(map(str, rates)))}")
    up, down = gateway.limits()
    # Two rules of this rate on one direction would be twice the rate, one rule for both directions half of it.
    if len(up) != 1 or len(down) != 1 or up == down:
        raise refuse(nft.FIREWALL, "a direction has no limit of its own, or more than one")


def _index(value: list[Any], table: nft.Table, found: gates.Gates) -> Network:
    """The grants that network.json lists, with the sets and the counter of each, which people are shown."""
    where = f"{NETWORK}:grants"
    shape: documents.Shape = {
        "counter": (str, NoneType),
        "host": str,
        "id": str,
        "kind": str,
        "ports": list,
        "protocol": str,
        "sets": list,
    }
    names: list[tuple[str, Access]] = []
    held: list[tuple[str, Access]] = []
    spots: list[tuple[int, int, Access]] = []
    seen: set[str] = set()
    filled: dict[str, set[str]] = {}
    leased: dict[str, set[str]] = {}
    for item in value:
        grant = closed(item, where, shape)
        place = f"{where}/{shown(grant['id'])}"
        if grant["id"] in seen or not _ID.fullmatch(grant["id"]):
            raise refuse(place, "the id of a grant is malformed or stands twice")
        seen.add(grant["id"])
        sets = _sets(grant, table, place)
        protocol = PROTOCOLS[PROTOCOLS.index(documents.one_of(grant["protocol"], place, PROTOCOLS))]
        how = Access.of(protocol, gates.ports(grant["ports"], place))
        kind = documents.one_of(grant["kind"], place, ("address", "name", "asked"))
        if kind != "address":
            (names if kind == "name" else held).append((gates.pattern_of(grant["host"], place), how))
            (filled if kind == "name" else leased).setdefault(grant["host"], set()).update(sets)
        else:
            where_to = _where(grant["host"], place)
            if spans.minus(where_to, spans.join(span for name in sets for span in table.sets[name].spans)):
                raise refuse(place, "its sets do not hold its addresses")
            spots += ((first, last, how) for first, last in where_to)
    for own, gate in ((filled, found.dns), (leased, found.asked)):
        if own != {name: {*v4, *v6} for name, (v4, v6) in gate.items()}:
            raise refuse(where, "the DNS gate fills other sets than those of the grants")
    return Network.held(hostnames.join(names), addresses.join(spots), hostnames.join([*names, *held]))


def _sets(grant: dict[str, Any], table: nft.Table, place: str) -> list[str]:
    """The sets that a grant is held by: of the rules, and counted exactly when there are any."""
    sets = documents.names(grant["sets"], place)
    if set(sets) - table.sets.keys():
        raise refuse(place, "a set of it is not in the rules")
    if grant["counter"] not in (table.counters if sets else (None,)):
        raise refuse(place, "its counter is not in the rules")
    return sets


def _where(host: str, place: str) -> Spans:
    if host == ANY_PUBLIC_ADDRESS:
        return addresses.PUBLIC
    first, dash, last = host.partition("-")
    try:
        low = addresses.parse(first)
        high = addresses.parse(last) if dash else low
    except errors.ManifestError:
        low = high = None
    # A range is written with its first and last address, of one family and no blocks.
    if low is None or high is None or low > high or (dash and not _one_family(low, high)):
        raise refuse(place, f"{shown(host)} is no address")
    return ((low[0], high[1]),)


def _one_family(low: tuple[int, int], high: tuple[int, int]) -> bool:
    """Whether two spans are single addresses, both of IPv4 or both of IPv6."""
    return low[0] == low[1] and high[0] == high[1] and (low[0] < nft.BASE_V6) == (high[0] < nft.BASE_V6)
