"""Grants from their canonical JSON form: the inverse of ``Effective.canonical``, strict and closed.

What was written down (effective.json, a run's record) is compared with other grants only as a value of this lattice,
never as text. A document that ``canonical`` could not have given is refused.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from policy import errors
from policy.grants import skill_rules
from policy.grants import skills as skill_grants
from policy.grants.credentials import CredentialSet, InjectRule, InjectSet
from policy.grants.effective import DOMAINS, Effective
from policy.grants.executables import ExecutableSet
from policy.grants.identity import Identity
from policy.grants.lifetime import ON_EXPIRY, LifetimeGrant
from policy.grants.network import ANY_PUBLIC, Network
from policy.grants.paths import MODES, FilesystemGrants, PathSet
from policy.grants.resources import UNITS, Ceilings
from policy.grants.services import (
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
from policy.grants.sets import access, addresses, hostnames
from policy.grants.sets.access import PROTOCOLS, Access
from policy.grants.sets.domain import ANY, NameSet
from policy.grants.skills import SkillSet
from policy.grants.spawning import ON_PARENT_EXIT, MayGrant, Spawning
from policy.grants.syscalls import SyscallSet


def effective(document: Any) -> Effective:
    """The grants of a document.

    Raises:
        errors.ArtefactError: it is not what ``canonical`` gives for some grants.
    """
    later = {"services", "publish", "inject", "web", "host_ports", "ssh", "may_grant", "agents", "telemetry"}
    if type(document) is not dict or {*document, *later} != set(DOMAINS):
        raise _refuse("it has not exactly the known domains")
    try:
        found = Effective(**{name: _DOMAINS[name](document[name]) for name in DOMAINS if name in document})
        # As text: to Python, true is 1 and 1.0.
        same = json.dumps(found.canonical(), sort_keys=True) == json.dumps(document, sort_keys=True)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, errors.ManifestError) as e:
        raise _refuse("a value is of no such form") from e
    if not same:
        raise _refuse("it is not in canonical form")
    return found


def _refuse(what: str) -> errors.ArtefactError:
    return errors.ArtefactError(f"the written grants cannot be read: {what}")


Document = Mapping[str, Any]
T = TypeVar("T", bound=str)


def _names(listing: list[Any]) -> NameSet:
    if not all(type(name) is str for name in listing):
        raise TypeError("a name is no text")
    return NameSet.top() if listing == [ANY] else NameSet.of(listing)


def _filesystem(d: Document) -> FilesystemGrants:
    if d["mode"] not in MODES:
        raise ValueError("no such mode")
    found = FilesystemGrants.of(d["mode"], d["read"], d["write"], shared=d.get("shared", False))
    return replace(found, volumes=_names(d.get("volumes", [])))


def _network(d: Document) -> Network:
    names: list[tuple[str, Access]] = []
    reach: list[tuple[int, int, Access]] = []
    asked = [(hostnames.check(entry["host"]), _access(entry)) for entry in d.get("asked", [])]
    for entry in d["entries"]:
        how, host = _access(entry), entry["host"]
        if host == ANY_PUBLIC:
            names.append((hostnames.EVERY, how))
            reach += addresses.uniform(addresses.PUBLIC, how)
        elif "/" in host:
            # A manifest may not write a block that holds mapped addresses; what everywhere is made of does.
            reach.append((*addresses.span(ipaddress.ip_network(host)), how))
        else:
            names.append((host if host == hostnames.EVERY else hostnames.check(host), how))
    return Network.held(hostnames.join(names), addresses.join(reach), hostnames.join([*names, *asked]))


def _access(entry: Document) -> Access:
    if entry["protocol"] not in PROTOCOLS or not entry["ports"]:
        raise ValueError("no such protocol, or no port")
    for first, last in entry["ports"]:
        if not 0 < first <= last < 65536:
            raise ValueError("no such port")
    return access.Access.of(entry["protocol"], [(first, last) for first, last in entry["ports"]])


def _executables(d: Document) -> ExecutableSet:
    if d["allow"] == [ANY]:
        return ExecutableSet.top()
    trees = d.get("trees", [])
    if not all(type(tree) is str for tree in trees):
        raise TypeError("a tree is no text")
    return ExecutableSet.of(((one["path"], one["sha256"]) for one in d["allow"]), trees)


def _limit(value: Any) -> int | None:
    """A ceiling. By `type`: to Python, true is 1 and so is 1.0."""
    if value is not None and (type(value) is not int or value < 0):
        raise TypeError("a ceiling is no whole number")
    return value


def _resources(d: Document) -> Ceilings:
    return Ceilings(*(_limit(d[name]) for name in UNITS))


def _one_of(known: tuple[T, ...], value: Any) -> T:
    return known[known.index(value)]


def _skills(d: Document) -> SkillSet:
    written = {"calls": None, **d["limits"]} if "limits" in d else {}
    if set(d) - {"allow", "side_effects", "rules", "limits", "asked"} or set(written) not in (
        set(),
        set(skill_grants.LIMITS),
    ):
        raise ValueError("no such key")
    rules = skill_rules.restore(d["rules"]) if "rules" in d else ()
    limits = {name: _limit(value) for name, value in written.items()}
    asked = tuple(_names(d["asked"]).listing()) if "asked" in d else ()
    found = SkillSet(_names(d["allow"]), _names(d["side_effects"]), rules, asked=asked, **limits)
    if list(found.asked) != d.get("asked", []) or ("asked" in d and not asked):
        raise ValueError("a question about a tool that is not granted, or not in canonical form")
    return found


def _services(d: Document) -> ServiceSet:
    models = [(one["provider"], one["pattern"]) for one in d["models"]]
    if not models or not all(type(part) is str for one in models for part in one):
        raise TypeError("a model is no text")
    return ServiceSet.of(models, *(_limit(d[name]) for name in LIMITS))


def _publish(d: Document) -> PublishSet:
    if d["ports"] == [ANY]:
        return PublishSet.top()
    pairs = [(one["port"], one["to"]) for one in d["ports"]]
    if not pairs or not all(type(port) is int and type(to) is str for port, to in pairs):
        raise TypeError("a port is no number, or its place no text")
    return PublishSet.ports(pairs)


def _host_ports(d: Document) -> HostPorts:
    if d["ports"] == [ANY]:
        return HostPorts.top()
    if not d["ports"] or not all(type(port) is int for port in d["ports"]):
        raise TypeError("a port is no number")
    return HostPorts.ports(d["ports"])


def _ssh(d: Document) -> SshSet:
    if d["keys"] == [ANY]:
        return SshSet.top()
    rows = [(one["secret"], one["host"], one["key"]) for one in d["keys"]]
    if not rows or not all(type(part) is str for one in rows for part in one):
        raise TypeError("a part of a key is no text")
    return SshSet.rows(rows)


def _inject(d: Document) -> InjectSet:
    rules = [InjectRule(**one) for one in d["rules"]]
    asked = [InjectRule(**one) for one in d.get("asked", ())]
    if not (rules or asked) or not all(type(part) is str for one in (*rules, *asked) for part in one):
        raise TypeError("a part of a rule is no text")
    return InjectSet.of(rules, asked)


def _web(d: Document) -> WebSet:
    if not all(type(one) is str for one in (*d["search"], *d["fetch"])):
        raise TypeError("a provider or a host is no text")
    for host in d["fetch"]:
        if host != hostnames.EVERY:
            hostnames.check(host)
    return WebSet.of(d["search"], d["fetch"], *(_limit(d[name]) for name in WEB_LIMITS))


def _telemetry(d: Document) -> TelemetrySet:
    signals = [_one_of(SIGNALS, one) for one in d["signals"]]
    return TelemetrySet.of(signals, *(_limit(d[name]) for name in TELEMETRY_LIMITS))


def _set_of(kind: Any, key: str) -> Callable[[Document], Any]:
    def restore(d: Document) -> Any:
        names = _names(d[key])
        return kind(names.names, names.any)

    return restore


def _may_grant(d: Document) -> MayGrant:
    names, calls = _names(d["credentials"]), _names(d["syscalls"])
    found = MayGrant(
        _network(d["network"]),
        PathSet.of(d["read"]),
        CredentialSet(names.names, names.any),
        SyscallSet(calls.names, calls.any),
    )
    if not found or found.canonical() != d:
        raise ValueError("no rights, or not in canonical form")
    return found


def may_grant(document: Any) -> MayGrant:
    """The rights of ``spawn.may_grant`` from their canonical form.

    Raises:
        ValueError, TypeError, KeyError, errors.ManifestError: it is no canonical form.
    """
    if type(document) is not dict:
        raise TypeError("no document of rights")
    return _may_grant(document)


_DOMAINS: dict[str, Callable[[Document], Any]] = {
    "identity": lambda d: Identity(_names(d["roles"])),
    "filesystem": _filesystem,
    "network": _network,
    "syscalls": _set_of(SyscallSet, "names"),
    "executables": _executables,
    "resources": _resources,
    "credentials": _set_of(CredentialSet, "grants"),
    "skills": _skills,
    "spawning": lambda d: Spawning(
        _limit(d["max_depth"]), _limit(d["max_descendants"]), _one_of(ON_PARENT_EXIT, d["on_parent_exit"])
    ),
    "lifetime": lambda d: LifetimeGrant(_limit(d["ttl_seconds"]), _one_of(ON_EXPIRY, d["on_expiry"])),
    "services": _services,
    "publish": _publish,
    "inject": _inject,
    "web": _web,
    "host_ports": _host_ports,
    "ssh": _ssh,
    "may_grant": _may_grant,
    "agents": _set_of(AgentSet, "allow"),
    "telemetry": _telemetry,
}
assert tuple(_DOMAINS) == tuple(DOMAINS)
