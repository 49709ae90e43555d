"""gates.json: the names that the DNS gate resolves, and their sets; the hosts of the TLS gate; the services of the
service gate; the ports of the publish gate; the ports of this host; the keys of SSH."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from policy.compile.artefacts import Cause, Provenance, built_in
from policy.compile.causes import Origins
from policy.compile.network import quoting
from policy.compile.network.destinations import Group, Name
from policy.compile.network.firewall import DNS_PORT, SERVICE_PORT, SSH_AGENT_PORT, TLS_PORT
from policy.compile.network.routes import Traced
from policy.grants.credentials import InjectRule
from policy.grants.effective import Effective, asked_requests, inject_rules
from policy.grants.services import LIMITS, TELEMETRY_LIMITS, WEB_LIMITS, covers, fetches
from policy.grants.sets import addresses, hostnames, spans
from policy.grants.sets.spans import Spans

TYPES = ("A", "AAAA", "HTTPS")
# The least that an agent needs: a name is also a message to the server that answers for it.
QUERIES_PER_SECOND, BURST = 20, 40
NAME_BYTES = 253
# A shorter time would end while the agent still holds the answer, a longer one outlives the owner's change.
TTL_SECONDS = (30, 3600)
_DNS = built_in("dns gate", "resolves granted names alone, within a rate and a length")
_SERVICES = built_in(
    "service gate", "answers for granted models, searches, pages, tools, agents and telemetry at its own address alone"
)
_TLS = built_in("tls gate", "wants a ClientHello, and a granted name in it where a name was granted")


def compile(effective: Effective, traced: Traced, origins: Origins, provenance: Provenance) -> dict[str, Any]:
    """gates.json; ``dns`` is None without a name grant, ``tls`` without a tls grant; without services,
    published ports, ports of this host, keys of SSH or injected secrets there is no key for them.

    Raises:
        errors.UnexplainedError: no item of the manifest covers a model.
    """
    document: dict[str, Any] = {"version": 1, "dns": _dns(traced, provenance), "tls": _tls(traced, provenance)}
    if effective.served:
        document["services"] = _services(effective, origins, provenance)
    if effective.inject:
        document["inject"] = _inject(effective, origins, provenance)
    if effective.host_ports:
        document["host"] = _host(effective, origins, provenance)
    if effective.ssh:
        document["ssh"] = _ssh(effective, origins, provenance)
    if effective.publish:
        document["publish"] = _publish(effective, origins, provenance)
    return document


def _inject(effective: Effective, origins: Origins, provenance: Provenance) -> dict[str, Any]:
    inject = effective.inject
    held = ((rule, "inject/asked") for rule in inject.asked)
    for rule, place in (*((rule, "inject") for rule in inject.rules), *held):
        above = next((i for i, own in _written(origins) if own.covers(rule)), None)
        if above is None:
            raise origins.uncovered("permissions.network", rule.describe())
        cause = Cause("manifest", f"permissions.network[{above}].inject", rule.secret)
        provenance.add(f"gates.json:{place}/{rule.host}/{rule.method}{rule.path}", cause)
    return effective.inject.canonical()


def _written(origins: Origins) -> Iterator[tuple[int, InjectRule]]:
    """The rules of the manifest and its questions, each with the index of its entry."""
    table = origins.manifest.permissions
    indexes = {host: index for index, host, _ in table.injected}
    return ((indexes[rule.host], rule) for rule in (*inject_rules(table), *asked_requests(table)))


def _host(effective: Effective, origins: Origins, provenance: Provenance) -> list[int]:
    ports = effective.host_ports.numbers()
    for port in ports:
        provenance.add(f"gates.json:host/{port}", origins.host_port(port))
    return ports


def _ssh(effective: Effective, origins: Origins, provenance: Provenance) -> dict[str, Any]:
    for secret, host, key in effective.ssh.triples():
        provenance.add(f"gates.json:ssh/{secret}/{host}/{key}", origins.ssh_key(secret, host, key))
    return {"listen": SSH_AGENT_PORT, **effective.ssh.canonical()}


def _publish(effective: Effective, origins: Origins, provenance: Provenance) -> list[dict[str, Any]]:
    pairs = effective.publish.pairs()
    for port, to in pairs:
        provenance.add(f"gates.json:publish/{port}", origins.published(port, to))
    return [{"port": port, "to": to} for port, to in pairs]


def _services(effective: Effective, origins: Origins, provenance: Provenance) -> dict[str, Any]:
    provenance.add("gates.json:services", _SERVICES)
    web = effective.web
    granted = (
        ("models", effective.services),
        ("search", web.search),
        ("fetch", web.fetch),
        ("tools", effective.asks_tools),
        ("agents", effective.agents),
        ("telemetry", effective.telemetry),
    )
    document: dict[str, Any] = {"listen": SERVICE_PORT, "names": [f"{name}.covenant" for name, one in granted if one]}
    if effective.services:
        document |= _models(effective, origins, provenance)
    if web:
        document["web"] = _web(effective, origins, provenance)
    if effective.agents:
        document["agents"] = _agents(effective, origins, provenance)
    if effective.telemetry:
        document["telemetry"] = _telemetry(effective, origins, provenance)
    return document


def _agents(effective: Effective, origins: Origins, provenance: Provenance) -> list[str]:
    written, key = origins.manifest.services.agents.allow, "services.agents.allow"
    for one in effective.agents.listing():
        if one not in written:
            raise origins.uncovered(key, one)
        provenance.add(f"gates.json:services/agent/{one}", Cause("manifest", f"{key}[{written.index(one)}]", one))
    return effective.agents.listing()


def _telemetry(effective: Effective, origins: Origins, provenance: Provenance) -> dict[str, Any]:
    written, key = list(origins.manifest.services.telemetry.signals), "services.telemetry.signals"
    for one in effective.telemetry.signals:
        if one not in written:
            raise origins.uncovered(key, one)
        provenance.add(f"gates.json:services/telemetry/{one}", Cause("manifest", f"{key}[{written.index(one)}]", one))
    for name in TELEMETRY_LIMITS:
        cause = origins.value("telemetry", name, f"services.telemetry.{name}")
        provenance.add(f"gates.json:services/telemetry/{name}", cause)
    return effective.telemetry.canonical()


def _web(effective: Effective, origins: Origins, provenance: Provenance) -> dict[str, Any]:
    asked = origins.manifest.services
    for part, key, written, granted in (
        ("search", "services.search.allow", asked.search.allow, effective.web.search),
        ("fetch", "services.fetch.hosts", asked.fetch.hosts, effective.web.fetch),
    ):
        for one in granted:
            above = next((other for other in written if fetches(other, one)), None)
            if above is None:
                raise origins.uncovered(key, one)
            parent = "" if above == one else f"asked for {above}"
            cause = Cause("manifest", f"{key}[{written.index(above)}]", one, parent)
            provenance.add(f"gates.json:services/{part}/{one}", cause)
    for name, (key, _) in WEB_LIMITS.items():
        provenance.add(f"gates.json:services/{name}", origins.value("web", name, key))
    return effective.web.canonical()


def _models(effective: Effective, origins: Origins, provenance: Provenance) -> dict[str, Any]:
    granted, key = effective.services, "services.models.allow"
    written = [(one.provider, pattern) for one in origins.manifest.services.models.allow for pattern in one.models]
    items = [one.provider for one in origins.manifest.services.models.allow]
    for model in granted.models:
        above = next((one for one in written if covers(one, model)), None)
        if above is None:
            raise origins.uncovered(key, f"{model[0]}/{model[1]}")
        parent = "" if above == model else f"asked for {above[0]}/{above[1]}"
        cause = Cause("manifest", f"{key}[{items.index(above[0])}]", "/".join(model), parent)
        provenance.add(f"gates.json:services/model/{model[0]}/{model[1]}", cause)
    for name in LIMITS:
        provenance.add(f"gates.json:services/{name}", origins.value("services", name, f"services.models.{name}"))
    return granted.canonical()


def _dns(traced: Traced, provenance: Provenance) -> dict[str, Any] | None:
    if not traced.found.names:
        return None
    provenance.add("gates.json:dns", _DNS)
    patterns: dict[str, dict[str, list[str]]] = {}
    inward: dict[str, Spans] = {}
    for one in traced.found.names:
        if one.asked:
            continue
        provenance.add(f"gates.json:dns/name/{one.pattern}", traced.causes[one.key])
        inward[one.pattern] = spans.union(inward.get(one.pattern, ()), _inward(one, traced.found.groups))
        sets = patterns.setdefault(one.pattern, {"v4": [], "v6": []})
        for version, name in zip(("v4", "v6"), one.sets, strict=False):
            sets[version].append(name)
    return {
        "listen": DNS_PORT,
        "types": list(TYPES),
        "queries_per_second": QUERIES_PER_SECOND,
        "burst": BURST,
        "name_bytes": NAME_BYTES,
        "ttl_seconds": list(TTL_SECONDS),
        "names": [
            {"pattern": pattern, "sets": sets, "inward": [_range(span) for span in inward[pattern]]}
            for pattern, sets in patterns.items()
        ],
        **_asked(traced, provenance),
    }


def _asked(traced: Traced, provenance: Provenance) -> dict[str, Any]:
    """The names that are resolved under a lease alone, and how long a question about one is held."""
    found: dict[str, dict[str, Any]] = {}
    for one in traced.found.names:
        if one.asked:
            provenance.add(f"gates.json:dns/asked/{one.pattern}", traced.causes[one.key])
            row = found.setdefault(
                one.pattern, {"pattern": one.pattern, "seconds": traced.seconds[one.key], "sets": {"v4": [], "v6": []}}
            )
            for version, name in zip(("v4", "v6"), one.sets, strict=False):
                row["sets"][version].append(name)
    return {"asked": list(found.values())} if found else {}


def _inward(name: Name, groups: tuple[Group, ...]) -> Spans:
    """The addresses that are not public and that answers for a name may hold: those that the manifest grants beside it.

    An entry grants them by address, on a port that the name is granted on too. The rules decide about them by that
    entry alone, so an answer adds no reach. A name that only `*` covers never leads inwards.
    """
    if name.pattern == hostnames.EVERY:
        return ()
    udp = name.protocol == "udp"
    beside = (one for one in groups if (one.protocol == "udp") is udp and spans.meet(one.ports, name.ports))
    return spans.minus(spans.join(span for one in beside for span in one.where), addresses.PUBLIC)


def _range(span: tuple[int, int]) -> dict[str, str]:
    first, last = _ends(span)
    return {"first": first, "last": last}


def _tls(traced: Traced, provenance: Provenance) -> dict[str, Any] | None:
    rows = [row for row in traced.rows if row.protocol == "tls"]
    if not rows:
        return None
    provenance.add("gates.json:tls", _TLS)
    names, blocks, asked = [], [], []
    for row in rows:
        ports = [list(span) for span in row.ports]
        if row.kind == "name":
            provenance.add(f"gates.json:tls/name/{row.host}", traced.causes[row.key])
            names.append({"pattern": row.host, "ports": ports})
        if row.kind == "asked":
            provenance.add(f"gates.json:tls/asked/{row.host}", traced.causes[row.key])
            asked.append({"pattern": row.host, "ports": ports})
        for first, last in map(_ends, row.where):
            provenance.add(f"gates.json:tls/address/{first}-{last}", traced.causes[row.key])
            blocks.append({"first": first, "last": last, "ports": ports})
    return {"listen": TLS_PORT, "names": names, "addresses": blocks, **({"asked": asked} if asked else {})}


def _ends(span: tuple[int, int]) -> tuple[str, str]:
    return quoting.address(span[0]), quoting.address(span[1])
