"""The rules of the artefacts that are not the process's own config: network, firewall, gates, vault, supervisor.

Each reader yields (``artefact:place``, what it says). Every document is closed: an unknown key or line would be a
rule without an explanation.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from policy import errors
from policy.compile.artefacts import Artefacts
from policy.compile.network import firewall
from policy.grants import restore
from policy.grants.credentials import InjectRule
from policy.grants.services import LIMITS, TELEMETRY_LIMITS, WEB_LIMITS
from policy.grants.skills import ASKED

Rules = Iterator[tuple[str, str]]

_NETWORK_KEYS = {"version", "mode", "interfaces", "gateway", "net_bps", "grants"}
_GRANT_KEYS = {"id", "kind", "host", "protocol", "ports", "sets", "counter"}
_GATEWAY = {
    "agent": firewall.AGENT,
    "uplink": firewall.UPLINK,
    "dns_port": firewall.DNS_PORT,
    "tls_port": firewall.TLS_PORT,
    "gate_uid": firewall.GATE_UID,
}
_DNS_KEYS = {"listen", "types", "queries_per_second", "burst", "name_bytes", "ttl_seconds", "names"}
_SUPERVISION_KEYS = {"version", "roles", "spawn", "lifetime", "task", "skills"}
_SKILL_KEYS = {"allow", "side_effects", "rules", "limits", "asked"}
# What the supervisor holds, by section: value -> how it reads when it is None.
_SUPERVISED = {
    "spawn": {"max_depth": "not limited", "max_descendants": "not limited", "on_parent_exit": ""},
    "lifetime": {"ttl_seconds": "no end", "on_expiry": ""},
    "task": {"wall_ms": "not limited", "cpu_time_ms": "not limited"},
}
_BLOCK = re.compile(r"\t(set|counter|chain) ([a-z][a-z0-9_]*) \{")
_SET_LINE = re.compile(r"type ipv[46]_addr|flags (?:interval|timeout)|size [0-9]+|elements = \{ [0-9a-f.:, -]+ \}")
_SHOWN_ELEMENTS = 8


def closed(name: str, document: Mapping[str, Any], keys: Collection[str]) -> None:
    """Refuse a document whose keys are not exactly these.

    Raises:
        errors.UnexplainedError: one more or one less.
    """
    if difference := sorted(set(document) ^ set(keys)):
        word = "is not known here" if difference[0] in document else "is missing"
        raise errors.UnexplainedError(f"`{difference[0]}` of {name} {word}", where=name)


def network(document: dict[str, Any]) -> Rules:
    """network.json.

    Raises:
        errors.UnexplainedError: its keys are not those known here.
    """
    closed("network.json", document, _NETWORK_KEYS)
    yield "network.json:mode", f"{document['mode']}, interfaces {', '.join(document['interfaces'])}"
    if document["gateway"] is not None:
        served = {"service_port": firewall.SERVICE_PORT} if "service_port" in document["gateway"] else {}
        published = {"publish_uid": firewall.PUBLISH_UID} if "publish_uid" in document["gateway"] else {}
        signed = {"ssh_agent_port": firewall.SSH_AGENT_PORT} if "ssh_agent_port" in document["gateway"] else {}
        if document["gateway"] != _GATEWAY | served | published | signed:
            raise errors.UnexplainedError("the gateway is not the one known here", where="network.json")
        yield "network.json:gateway", ", ".join(f"{key} {value}" for key, value in document["gateway"].items())
    if document["net_bps"] is not None:
        yield "network.json:net_bps", f"{document['net_bps']} bytes a second each way"
    for grant in document["grants"]:
        closed("a grant of network.json", grant, _GRANT_KEYS)
        held = ", ".join(grant["sets"]) or "no set of its own"
        yield f"network.json:grant/{grant['id']}", f"{grant['host']} {_ports(grant)}: {held}"


def ruleset(artefacts: Artefacts) -> Rules:
    """firewall.nft, line by line; its sets and counters must be those that network.json names.

    Raises:
        errors.UnexplainedError: there is one without a gateway, none with one, or a set or counter without a grant.
    """
    raw = artefacts.files["firewall.nft"]
    off = artefacts.json("network.json")["gateway"] is None
    if off != (raw == b""):
        raise errors.UnexplainedError("a firewall stands where the network is off, or is missing", where="firewall.nft")
    if off:
        return
    named: set[str] = set()
    for kind, name, body in _blocks(raw):
        named.add(name)
        yield from _block(kind, name, body)
    listed = {name for grant in artefacts.json("network.json")["grants"] for name in grant["sets"]}
    listed |= {grant["counter"] for grant in artefacts.json("network.json")["grants"] if grant["counter"]}
    own = {name for name in named if re.match(r"[acn][46]?_", name)}
    # A group may have addresses of one version only; what stands in the ruleset must be named, and the reverse.
    if difference := sorted(own ^ listed):
        message = f"network.json and firewall.nft differ in `{difference[0]}`"
        raise errors.UnexplainedError(message, where="firewall.nft")


def _blocks(raw: bytes) -> Iterator[tuple[str, str, list[str]]]:
    """Kind, name and body lines of each block of the one table."""
    lines = raw.decode("ascii", "replace").split("\n")
    if lines[:1] != ["table inet covenant {"] or lines[-2:] != ["}", ""]:
        raise errors.UnexplainedError("the ruleset is not one table", where="firewall.nft")
    head: re.Match[str] | None = None
    body: list[str] = []
    for line in lines[1:-2]:
        if head is None and (found := _BLOCK.fullmatch(line)):
            head, body = found, []
        elif head is not None and line == "\t}":
            yield head[1], head[2], body
            head = None
        elif head is not None and line.startswith("\t\t") and line[2:].strip() == line[2:] != "":
            body.append(line[2:])
        else:
            raise errors.UnexplainedError(f"line `{line.strip()[:80]}` is no statement", where="firewall.nft")
    if head is not None:
        raise errors.UnexplainedError(f"block `{head[2]}` has no end", where="firewall.nft")


def _block(kind: str, name: str, body: list[str]) -> Rules:
    if kind == "counter":
        if body:
            raise errors.UnexplainedError(f"counter `{name}` holds something", where="firewall.nft")
        yield f"firewall.nft:counter/{name}", "counts"
    elif kind == "set":
        for line in body:
            if not _SET_LINE.fullmatch(line):
                raise errors.UnexplainedError(f"line `{line[:80]}` of set `{name}` is not known", where="firewall.nft")
        yield f"firewall.nft:set/{name}", "; ".join(_short(line) for line in body)
    else:
        if body and body[0].startswith("type "):
            yield f"firewall.nft:chain/{name}", body.pop(0)
        for index, rule in enumerate(body):
            yield f"firewall.nft:chain/{name}/{index}", rule


def _short(line: str) -> str:
    elements = line.removeprefix("elements = { ").removesuffix(" }").split(", ")
    if len(elements) <= _SHOWN_ELEMENTS:
        return line
    return f"{len(elements)} elements from {elements[0]} to {elements[-1]}"


def gates(document: dict[str, Any]) -> Rules:
    """gates.json."""
    served = {"services", "publish", "inject", "host", "ssh"} & set(document)
    closed("gates.json", document, {"version", "dns", "tls", *served})
    if "services" in served:
        yield from _services(document["services"])
    for entry in document.get("publish", ()):
        closed("a port of gates.json", entry, {"port", "to"})
        yield f"gates.json:publish/{entry['port']}", f"port {entry['port']} of the agent, at {entry['to']}"
    for port in document.get("host", ()):
        yield f"gates.json:host/{port}", f"port {port} of this host's loopback"
    if "ssh" in served:
        closed("ssh of gates.json", document["ssh"], {"listen", "keys"})
        for entry in document["ssh"]["keys"]:
            closed("a key of gates.json", entry, {"host", "key", "secret"})
            says = f"{entry['secret']} signs logins at {entry['host']}"
            yield f"gates.json:ssh/{entry['secret']}/{entry['host']}/{entry['key']}", says
    if "inject" in served:
        inject = document["inject"]
        closed("inject of gates.json", inject, {"rules", *({"asked"} & set(inject))})
        for place, key, says in (("inject", "rules", ""), ("inject/asked", "asked", ASKED)):
            for entry in inject.get(key, ()):
                closed("a rule of gates.json", entry, InjectRule._fields)
                rule = InjectRule(**entry)
                yield f"gates.json:{place}/{rule.host}/{rule.method}{rule.path}", rule.describe() + says
    if document["dns"] is not None:
        yield from _dns(document["dns"])
    if document["tls"] is not None:
        yield from _tls(document["tls"])


def _dns(dns: dict[str, Any]) -> Rules:
    closed("dns of gates.json", dns, {*_DNS_KEYS, *({"asked"} & set(dns))})
    rate = f"{dns['queries_per_second']} a second and {dns['burst']} at once"
    kept = f"kept {dns['ttl_seconds'][0]} to {dns['ttl_seconds'][1]} s"
    says = f"port {dns['listen']}, {', '.join(dns['types'])}, {rate}, names of {dns['name_bytes']} bytes, {kept}"
    yield "gates.json:dns", says
    for entry in dns["names"]:
        closed("a name of gates.json", entry, {"inward", "pattern", "sets"})
        closed("sets of gates.json", entry["sets"], {"v4", "v6"})
        sets = ", ".join((*entry["sets"]["v4"], *entry["sets"]["v6"]))
        inward = "".join(f", may lead to {one['first']}-{one['last']}" for one in entry["inward"])
        says = f"resolves {entry['pattern']} into {sets or 'no set'}{inward}"
        yield f"gates.json:dns/name/{entry['pattern']}", says
    for entry in dns.get("asked", ()):
        closed("an asked name of gates.json", entry, {"pattern", "seconds", "sets"})
        closed("sets of gates.json", entry["sets"], {"v4", "v6"})
        sets = ", ".join((*entry["sets"]["v4"], *entry["sets"]["v6"]))
        says = f"asks an operator about {entry['pattern']} for {entry['seconds']} s, then resolves it into {sets}"
        yield f"gates.json:dns/asked/{entry['pattern']}", says


def _tls(tls: dict[str, Any]) -> Rules:
    closed("tls of gates.json", tls, {"listen", "names", "addresses", *({"asked"} & set(tls))})
    yield "gates.json:tls", f"port {tls['listen']}"
    for entry in tls["names"]:
        closed("a name of gates.json", entry, {"pattern", "ports"})
        yield f"gates.json:tls/name/{entry['pattern']}", f"server name {entry['pattern']}, ports {_spans(entry)}"
    for entry in tls.get("asked", ()):
        closed("an asked name of gates.json", entry, {"pattern", "ports"})
        says = f"server name {entry['pattern']} under a lease, ports {_spans(entry)}"
        yield f"gates.json:tls/asked/{entry['pattern']}", says
    for entry in tls["addresses"]:
        closed("an address of gates.json", entry, {"first", "last", "ports"})
        span = f"{entry['first']}-{entry['last']}"
        yield f"gates.json:tls/address/{span}", f"any server name at {span}, ports {_spans(entry)}"


def _services(document: dict[str, Any]) -> Rules:
    asks = {"models", *LIMITS} if "models" in document else set()
    reads = {"web"} & set(document)
    sends = {"agents", "telemetry"} & set(document)
    closed("services of gates.json", document, {"listen", "names", *asks, *reads, *sends})
    yield "gates.json:services", f"port {document['listen']}, {', '.join(document['names'])}"
    if reads:
        yield from _web(document["web"])
    for one in document.get("agents", ()):
        yield f"gates.json:services/agent/{one}", f"messages to agent {one}"
    if "telemetry" in document:
        yield from _telemetry(document["telemetry"])
    if not asks:
        return
    for entry in document["models"]:
        closed("a model of gates.json", entry, {"provider", "pattern"})
        place = f"{entry['provider']}/{entry['pattern']}"
        yield f"gates.json:services/model/{place}", f"model {place}"
    for name, unit in LIMITS.items():
        value = document[name]
        yield f"gates.json:services/{name}", "not limited" if value is None else f"{value} {unit}"


def _telemetry(document: dict[str, Any]) -> Rules:
    closed("telemetry of gates.json", document, {"signals", *TELEMETRY_LIMITS})
    for signal in document["signals"]:
        yield f"gates.json:services/telemetry/{signal}", f"{signal} by OTLP, for the operator's collector"
    for name, unit in TELEMETRY_LIMITS.items():
        value = document[name]
        yield f"gates.json:services/telemetry/{name}", "not limited" if value is None else f"{value} {unit}"


def _web(document: dict[str, Any]) -> Rules:
    closed("web of gates.json", document, {"search", "fetch", *WEB_LIMITS})
    for provider in document["search"]:
        yield f"gates.json:services/search/{provider}", f"search by {provider}"
    for host in document["fetch"]:
        yield f"gates.json:services/fetch/{host}", f"pages of {host}, by https"
    for name, (_, unit) in WEB_LIMITS.items():
        value = document[name]
        yield f"gates.json:services/{name}", "not limited" if value is None else f"{value} {unit}"


def credentials(document: dict[str, Any]) -> Rules:
    """credentials.json."""
    closed("credentials.json", document, {"version", "names"})
    for name in document["names"]:
        yield f"credentials.json:{name}", "the vault gives it to this run"


def supervision(document: dict[str, Any]) -> Rules:
    """supervision.json."""
    closed("supervision.json", {"process": {}, **document}, {*_SUPERVISION_KEYS, "process"})
    if "process" in document:
        closed("process of supervision.json", document["process"], {"contract", "intent"})
        for name, value in document["process"].items():
            yield f"supervision.json:process/{name}", value
    yield "supervision.json:roles", ", ".join(document["roles"]) or "none"
    for section, values in _SUPERVISED.items():
        later = {"may_grant"} & set(document[section])
        closed(f"{section} of supervision.json", document[section], {*values, *later})
        for name, without in values.items():
            value = document[section][name]
            yield f"supervision.json:{section}/{name}", without if value is None else str(value)
    if "may_grant" in document["spawn"]:
        rights = restore.may_grant(document["spawn"]["may_grant"])
        yield "supervision.json:spawn/may_grant", "; ".join(rights.describe())
    skills = document["skills"]
    closed("skills of supervision.json", {"rules": [], "limits": {}, "asked": [], **skills}, _SKILL_KEYS)
    for index, rule in enumerate(skills.get("rules", ())):
        closed("a rule of supervision.json", rule, {"tool", "argument", "alternatives"})
        said = (one["equals"] if "equals" in one else f"/{one['matches']}/" for one in rule["alternatives"])
        line = f"{rule['tool']} {rule['argument']} = {' or '.join(said) or 'nothing'}"
        yield f"supervision.json:skills/rules/{index}", line
    for name, value in skills.get("limits", {}).items():
        yield f"supervision.json:skills/limits/{name}", "not limited" if value is None else str(value)
    for uri in skills.get("asked", ()):
        yield f"supervision.json:skills/asked/{uri}", f"{uri}: each call is held for an operator"
    for name in ("allow", "side_effects"):
        for one in document["skills"][name]:
            yield f"supervision.json:skills/{name}/{one}", one


def _ports(grant: Mapping[str, Any]) -> str:
    return f"{grant['protocol']} {_spans(grant)}"


def _spans(entry: Mapping[str, Any]) -> str:
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in entry["ports"])
