"""gates.json read back: what the gates of a gateway let by that its rules alone do not say.

The DNS gate answers for the names that a pattern covers and puts the addresses into that pattern's sets. The TLS gate
connects on for a ClientHello whose name a pattern covers on that port, and, for some addresses, for any ClientHello.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct

from policy import errors
from policy.decompile import documents
from policy.decompile.documents import Files, NoneType, closed, fixed, refuse, shown
from policy.decompile.network import nft
from policy.grants.credentials import EVERY as EVERY_REQUEST
from policy.grants.credentials import InjectRule, InjectSet
from policy.grants.services import (
    EVERY,
    LIMITS,
    SIGNALS,
    TELEMETRY_LIMITS,
    WEB_LIMITS,
    AgentSet,
    HostPorts,
    PublishSet,
    ServiceSet,
    SshSet,
    TelemetrySet,
    WebSet,
)
from policy.grants.sets import hostnames
from policy.grants.sets.domain import ANY
from policy.grants.sets.spans import Spans
from policy.ssh import wire

GATES = "gates.json"
VERSION: Final = 1
MAX_ASK_SECONDS: Final = 110
_WORD: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,252}")
_TOOLS: Final = "tools.covenant"
# The DNS gate is the same for every agent but for its names: what it answers, how often, and how long names and
# answers may be. Each is a bound on what can be said to the outside through it.
_DNS = {
    "burst": 40,
    "name_bytes": 253,
    "queries_per_second": 20,
    "ttl_seconds": [30, 3600],
    "types": ["A", "AAAA", "HTTPS"],
}


class Gates(Struct, frozen=True):
    """``dns`` maps a pattern to its sets for IPv4 and IPv6, ``inward`` to the private addresses of its answers, and
    ``tls`` to the ports for a ClientHello with its name. ``addresses`` are (first, last, ports) for any
    ClientHello, on the line of policy.grants.sets.addresses.

    ``asked`` and ``asked_tls`` are as ``dns`` and ``tls``, for names that need a lease.
    A port is None where the gate does not run. ``tools`` says whether the service gate answers for tools.
    """

    dns_port: int | None = None
    tls_port: int | None = None
    dns: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = msgspec.field(default_factory=dict)
    inward: Mapping[str, Spans] = msgspec.field(default_factory=dict)
    tls: Mapping[str, Spans] = msgspec.field(default_factory=dict)
    addresses: tuple[tuple[int, int, Spans], ...] = ()
    service_port: int | None = None
    services: ServiceSet = ServiceSet()
    tools: bool = False
    publish: PublishSet = PublishSet()
    inject: InjectSet = InjectSet()
    web: WebSet = WebSet()
    host: HostPorts = HostPorts()
    asked: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = msgspec.field(default_factory=dict)
    asked_tls: Mapping[str, Spans] = msgspec.field(default_factory=dict)
    ssh_port: int | None = None
    ssh: SshSet = SshSet()
    agents: AgentSet = AgentSet()
    telemetry: TelemetrySet = TelemetrySet()


def read(files: Files) -> Gates:
    """gates.json.

    Raises:
        errors.ArtefactError: it is not exactly of its form.
    """
    both = (dict, NoneType)
    document = documents.load(files, GATES)
    served = {"services": dict} if type(document) is dict and "services" in document else {}
    published = {"publish": list} if type(document) is dict and "publish" in document else {}
    hosted = {"host": list} if type(document) is dict and "host" in document else {}
    injected = {"inject": dict} if type(document) is dict and "inject" in document else {}
    signed = {"ssh": dict} if type(document) is dict and "ssh" in document else {}
    later = {**served, **published, **hosted, **injected, **signed}
    whole = closed(document, GATES, {"dns": both, "tls": both, "version": int, **later})
    fixed(whole["version"], f"{GATES}:version", VERSION)
    dns_port, dns, inward, asked = (None, {}, {}, {}) if whole["dns"] is None else _dns(whole["dns"])
    tls_port, tls, addresses, asked_tls = (None, {}, (), {}) if whole["tls"] is None else _tls(whole["tls"])
    if asked.keys() != asked_tls.keys():
        raise refuse(GATES, "the DNS gate asks about other names than the TLS gate")
    service_port, services, web, tools, agents, telemetry = (
        _services(whole["services"]) if served else (None, ServiceSet(), WebSet(), False, AgentSet(), TelemetrySet())
    )
    publish = _publish(whole["publish"]) if published else PublishSet.bottom()
    inject = _inject(whole["inject"]) if injected else InjectSet.bottom()
    host = _host(whole["host"]) if hosted else HostPorts.bottom()
    granted = (services, tools, publish, inject, web, host)
    ssh_port, ssh = _ssh(whole["ssh"]) if signed else (None, SshSet())
    later_sets = (asked, asked_tls, ssh_port, ssh, agents, telemetry)
    return Gates(dns_port, tls_port, dns, inward, tls, addresses, service_port, *granted, *later_sets)


_Sets = tuple[tuple[str, ...], tuple[str, ...]]


def _dns(value: dict[str, Any]) -> tuple[int, dict[str, _Sets], dict[str, Spans], dict[str, _Sets]]:
    where = f"{GATES}:dns"
    shape = {key: type(bound) for key, bound in _DNS.items()}
    held = {"asked": list} if "asked" in value else {}
    dns = closed(value, where, {**shape, "listen": int, "names": list, **held})
    for key, bound in _DNS.items():
        fixed(dns[key], f"{where}/{key}", bound)
    found: dict[str, _Sets] = {}
    inward: dict[str, Spans] = {}
    for item in dns["names"]:
        name = closed(item, where, {"inward": list, "pattern": str, "sets": dict})
        sets = closed(name["sets"], where, {"v4": list, "v6": list})
        pattern = _pattern(name["pattern"], where, found)
        found[pattern] = (_sets(sets["v4"], where), _sets(sets["v6"], where))
        inward[pattern] = _inward(name["inward"], where)
    asked = _asked(dns["asked"], where) if held else {}
    return documents.whole(dns["listen"], where, least=1, most=65535), found, inward, asked


def _asked(value: list[Any], where: str) -> dict[str, _Sets]:
    """The names that an operator is asked about, each with sets that no other name has."""
    found: dict[str, _Sets] = {}
    for item in value:
        name = closed(item, where, {"pattern": str, "seconds": int, "sets": dict})
        documents.whole(name["seconds"], where, least=1, most=MAX_ASK_SECONDS)
        sets = closed(name["sets"], where, {"v4": list, "v6": list})
        pattern = _pattern(name["pattern"], where, found)
        if pattern == hostnames.EVERY:
            raise refuse(where, "every host is asked about")
        found[pattern] = (_sets(sets["v4"], where), _sets(sets["v6"], where))
    if not found:
        raise refuse(where, "no name is asked about")
    return found


def _inward(value: list[Any], where: str) -> Spans:
    """Addresses beside the public ones: spans in order, none of which touch."""
    found: list[tuple[int, int]] = []
    for item in value:
        first, last = _span(closed(item, where, {"first": str, "last": str}), where)
        if found and first <= found[-1][1] + 1:
            raise refuse(where, f"{shown(item)} stands twice, or not in order")
        found.append((first, last))
    return tuple(found)


def _span(block: dict[str, Any], where: str) -> tuple[int, int]:
    first, last = _point(block["first"], where), _point(block["last"], where)
    if last < first or (first < nft.BASE_V6) != (last < nft.BASE_V6):
        raise refuse(where, f"{shown(block)} is no range of addresses")
    return first, last


_SENDS: Final[dict[str, Any]] = {"agents": list, "telemetry": dict}


def _services(value: dict[str, Any]) -> tuple[int, ServiceSet, WebSet, bool, AgentSet, TelemetrySet]:
    where = f"{GATES}:services"
    asks: documents.Shape = (
        {"models": list, **dict.fromkeys(LIMITS, documents.OPTIONAL_INT)} if "models" in value else {}
    )
    reads = {"web": dict} if "web" in value else {}
    sends: documents.Shape = {key: kind for key, kind in _SENDS.items() if key in value}
    found = closed(value, where, {"listen": int, "names": list, **asks, **reads, **sends})
    services = _models(found, where) if asks else ServiceSet()
    web = _web(found["web"], f"{where}/web") if reads else WebSet()
    agents = _agents(found["agents"], f"{where}/agents") if "agents" in sends else AgentSet()
    telemetry = _telemetry(found["telemetry"], f"{where}/telemetry") if "telemetry" in sends else TelemetrySet()
    tools = _TOOLS in documents.listed(found["names"], f"{where}/names", str)
    granted = (
        ("models", services),
        ("search", web.search),
        ("fetch", web.fetch),
        ("tools", tools),
        ("agents", agents),
        ("telemetry", telemetry),
    )
    fixed(found["names"], f"{where}/names", [f"{name}.covenant" for name, one in granted if one])
    if not found["names"]:
        raise refuse(where, "there is a gate that answers for nothing")
    return documents.whole(found["listen"], where, least=1, most=65535), services, web, tools, agents, telemetry


def _agents(value: list[Any], where: str) -> AgentSet:
    found = documents.listed(value, where, str)
    if not found or sorted(set(found)) != found or ANY in found:
        raise refuse(where, "the agents are not sorted, one is there twice, or there is none")
    return AgentSet.of(found)


def _telemetry(value: dict[str, Any], where: str) -> TelemetrySet:
    found = closed(value, where, {"signals": list, **dict.fromkeys(TELEMETRY_LIMITS, documents.OPTIONAL_INT)})
    signals = documents.listed(found["signals"], where, str)
    if not signals or signals != [one for one in SIGNALS if one in signals]:
        raise refuse(where, "the signals are not sorted, one is there twice or unknown, or there is none")
    limits = (found[name] for name in TELEMETRY_LIMITS)
    return TelemetrySet.of(signals, *(None if one is None else documents.whole(one, where, least=1) for one in limits))


def _web(value: dict[str, Any], where: str) -> WebSet:
    limits = dict.fromkeys(WEB_LIMITS, documents.OPTIONAL_INT)
    found = closed(value, where, {"fetch": list, "search": list, **limits})
    search, fetch = documents.listed(found["search"], where, str), documents.listed(found["fetch"], where, str)
    for host in fetch:
        if pattern_of(host, where) == hostnames.EVERY:
            raise refuse(where, "every host is granted")
    web = WebSet.of(search, fetch, *(found[name] for name in WEB_LIMITS))
    if not web or web.canonical() != found or ANY in web.search:
        raise refuse(where, "it is not in canonical form, or grants nothing")
    for name in WEB_LIMITS:
        if (web.fetch if name == "fetches_per_minute" else web.search) and found[name] is not None:
            documents.whole(found[name], f"{where}/{name}", least=1)
    return web


def _models(found: dict[str, Any], where: str) -> ServiceSet:
    models = []
    for item in found["models"]:
        one = closed(item, where, {"pattern": str, "provider": str})
        models.append((one["provider"], one["pattern"]))
    for name in LIMITS:
        if found[name] is not None:
            documents.whole(found[name], f"{where}/{name}", least=1)
    services = ServiceSet.of(models, *(found[name] for name in LIMITS))
    if not models or services.models != tuple(models) or EVERY in models:
        raise refuse(where, "the models are not sorted, one stands within another, or there is none")
    return services


def _publish(value: list[Any]) -> PublishSet:
    where, pairs = f"{GATES}:publish", []
    for item in value:
        one = closed(item, where, {"port": int, "to": str})
        pairs.append((documents.whole(one["port"], where, least=1, most=65535), one["to"]))
    if not pairs or sorted(dict(pairs).items()) != pairs:
        raise refuse(where, "the ports are not sorted, one is there twice, or there is none")
    return PublishSet.ports(pairs)


def _host(value: list[Any]) -> HostPorts:
    where = f"{GATES}:host"
    found = [documents.whole(one, where, least=1024, most=65535) for one in documents.listed(value, where, int)]
    if not found or sorted(set(found)) != found:
        raise refuse(where, "the ports are not sorted, one is there twice, or there is none")
    return HostPorts.ports(found)


def _ssh(value: dict[str, Any]) -> tuple[int, SshSet]:
    where, rows = f"{GATES}:ssh", []
    found = closed(value, where, {"keys": list, "listen": int})
    for item in found["keys"]:
        one = closed(item, where, {"host": str, "key": str, "secret": str})
        try:
            wire.read_line(one["key"])
        except wire.WireError as e:
            raise refuse(where, f"{shown(one['key'])} is no key of a host: {e}") from e
        if not _WORD.fullmatch(one["secret"]) or not _WORD.fullmatch(one["host"]):
            raise refuse(where, f"{shown(one)} names no secret or no host")
        rows.append((one["secret"], one["host"], one["key"]))
    if not rows or sorted(set(rows)) != rows:
        raise refuse(where, "the keys are not sorted, one is there twice, or there is none")
    return documents.whole(found["listen"], where, least=1, most=65535), SshSet.rows(rows)


def _inject(value: dict[str, Any]) -> InjectSet:
    where, shape = f"{GATES}:inject", dict.fromkeys(InjectRule._fields, str)
    held = {"asked": list} if "asked" in value else {}
    found = closed(value, where, {"rules": list, **held})
    rules, asked = ([InjectRule(**closed(item, where, shape)) for item in found.get(k, ())] for k in ("rules", "asked"))
    inject, every = InjectSet.of(rules, asked), (*rules, *asked)
    if not inject or inject != InjectSet(tuple(rules), tuple(asked)) or EVERY_REQUEST in every or (held and not asked):
        raise refuse(where, "the rules are not sorted, one stands within another, or there is none")
    if any(pattern_of(one.host, where).startswith(hostnames.EVERY) for one in every):
        raise refuse(where, "a host is no exact name")
    if len({one.added for one in every}) != len(inject.hosts):
        raise refuse(where, "a host has two secrets")
    return inject


def _tls(
    value: dict[str, Any],
) -> tuple[int, dict[str, Spans], tuple[tuple[int, int, Spans], ...], dict[str, Spans]]:
    where = f"{GATES}:tls"
    held = {"asked": list} if "asked" in value else {}
    tls = closed(value, where, {"addresses": list, "listen": int, "names": list, **held})
    names, asked = _with_ports(tls["names"], where), _with_ports(tls.get("asked", []), where)
    addresses: list[tuple[int, int, Spans]] = []
    for item in tls["addresses"]:
        block = closed(item, where, {"first": str, "last": str, "ports": list})
        first, last = _span(block, where)
        allowed = ports(block["ports"], where)
        # By ports, then by address, and apart: each set of ranges has one form.
        if addresses and (allowed, first) <= (addresses[-1][2], addresses[-1][1]):
            raise refuse(where, f"{shown(block)} stands twice, or not in order")
        addresses.append((first, last, allowed))
    return documents.whole(tls["listen"], where, least=1, most=65535), names, tuple(addresses), asked


def _with_ports(value: list[Any], where: str) -> dict[str, Spans]:
    names: dict[str, Spans] = {}
    for item in value:
        name = closed(item, where, {"pattern": str, "ports": list})
        names[_pattern(name["pattern"], where, names)] = ports(name["ports"], where)
    return names


def _sets(value: object, where: str) -> tuple[str, ...]:
    found = documents.listed(value, where, str)
    if len(set(found)) != len(found):
        raise refuse(where, "a set stands twice")
    return tuple(found)


def _pattern(value: str, where: str, known: dict[str, Any]) -> str:
    pattern = pattern_of(value, where)
    if known and pattern <= next(reversed(known)):
        raise refuse(where, f"pattern {shown(pattern)} stands twice, or not in order")
    return pattern


def pattern_of(value: str, where: str) -> str:
    """``value`` as a name, ``*.name`` or ``*``.

    Raises:
        errors.ArtefactError: it is none.
    """
    try:
        return value if value == hostnames.EVERY else hostnames.check(value)
    except errors.ManifestError:
        raise refuse(where, f"{shown(value)} is no pattern of names") from None


def _point(value: str, where: str) -> int:
    try:
        address = ipaddress.ip_address(value)
    except ValueError:
        raise refuse(where, f"{shown(value)} is no address") from None
    if str(address) != value:
        raise refuse(where, f"{shown(value)} is not how {address} is written")
    return int(address) + (nft.BASE_V6 if address.version == 6 else 0)


def ports(value: object, where: str) -> Spans:
    """A list of spans of ports, ``[[first, last], ...]``, sorted, apart, none empty.

    Raises:
        errors.ArtefactError: it is none.
    """
    found: list[tuple[int, int]] = []
    before = -2
    for item in documents.listed(value, where, list):
        low, high = item if len(item) == 2 else (None, None)
        # Spans that touch would be one span: each set of ports has one form.
        if type(low) is not int or type(high) is not int or not before + 1 < low <= high <= 65535:
            raise refuse(where, f"{shown(value)} are no ports")
        found.append((low, high))
        before = high
    if not found:
        raise refuse(where, "a list of ports is empty")
    return tuple(found)
