"""The grants of a manifest one by one, each with the key that wrote it: so that a refusal names its line.

Each item is a value of its domain that holds this one grant; an item that is not within a ceiling is what exceeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from msgspec import Struct, structs

from policy.grants.credentials import CredentialSet, InjectSet
from policy.grants.effective import DOMAINS, Effective, asked_requests, inject_rules, ssh_rows
from policy.grants.executables import ExecutableSet
from policy.grants.lifetime import LifetimeGrant
from policy.grants.network import Network
from policy.grants.paths import FilesystemGrants, PathSet
from policy.grants.resources import UNITS, Ceilings
from policy.grants.services import (
    LIMITS,
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
from policy.grants.sets.domain import Domain, NameSet
from policy.grants.skills import SkillSet
from policy.grants.spawning import MayGrant, Spawning
from policy.grants.syscalls import SyscallSet
from policy.manifest.agent import Manifest

Items = Iterator[tuple[str, Any]]


class Excess(Struct, frozen=True):
    """A grant that a ceiling does not cover: its domain, the dotted key that wrote it, and what it says."""

    domain: str
    grant: str
    lines: tuple[str, ...]


def _identity(m: Manifest, e: Effective) -> Items:
    yield "agent.role", e.identity


def _filesystem(m: Manifest, e: Effective) -> Items:
    table = m.permissions.filesystem
    for key, one in m.volumes:
        yield key, FilesystemGrants(volumes=NameSet.of((one.grant,)))
    for i, path in table.write_paths:
        yield f"permissions.filesystem.write[{i}]", FilesystemGrants(write=PathSet((path,)))
    for i, path in enumerate(table.read):
        yield f"permissions.filesystem.read[{i}]", FilesystemGrants(read=PathSet((path,)))
    yield "permissions.filesystem.shared", FilesystemGrants(shared=table.shared)
    yield "sandbox.filesystem", FilesystemGrants(mode=e.filesystem.mode)


def _network(m: Manifest, e: Effective) -> Items:
    if not m.permissions.network:
        yield "resources.network", e.network
    for i, entry in enumerate(m.permissions.network):
        one = [(entry.host, entry.ports, entry.protocol)]
        if not entry.to_host:
            yield f"permissions.network[{i}]", Network.of((), one) if entry.asked else Network.of(one)


def _syscalls(m: Manifest, e: Effective) -> Items:
    allowed = m.permissions.syscalls.allow
    for i, name in enumerate(allowed):
        yield f"permissions.syscalls.allow[{i}]", SyscallSet.of((name,))
    yield "permissions.syscalls.profile", replace(e.syscalls, names=e.syscalls.names - frozenset(allowed))


def _executables(m: Manifest, e: Effective) -> Items:
    for i, entry in enumerate(m.permissions.executables.allow):
        single = ExecutableSet.of([], [entry.tree]) if entry.tree else ExecutableSet.of([(entry.path, entry.sha256)])
        yield f"permissions.executables.allow[{i}]", single


def _resources(m: Manifest, e: Effective) -> Items:
    for name in UNITS:
        yield f"resources.{name}", structs.replace(Ceilings.bottom(), **{name: getattr(e.resources, name)})


def _credentials(m: Manifest, e: Effective) -> Items:
    for i, name in enumerate(m.permissions.credentials.grants):
        yield f"permissions.credentials.grants[{i}]", CredentialSet.of((name,))


def _skills(m: Manifest, e: Effective) -> Items:
    for i, uri in enumerate(m.permissions.skills.allow):
        yield (
            f"permissions.skills.allow[{i}]",
            SkillSet(NameSet.of((uri,)), rules=e.skills.clauses(uri), asked=e.skills.asked),
        )
    for i, one in enumerate(m.tools.command):
        yield (
            f"tools.command[{i}]",
            SkillSet(NameSet.of((one.uri,)), rules=e.skills.clauses(one.uri), asked=e.skills.asked),
        )
    for i, name in enumerate(m.permissions.skills.side_effects):
        yield f"permissions.skills.side_effects[{i}]", SkillSet(side_effects=NameSet.of((name,)))
    for key, limit in e.skills.limits().items():
        yield f"permissions.skills.{key}", structs.replace(SkillSet.bottom(), **{key: limit})


def _spawning(m: Manifest, e: Effective) -> Items:
    own = e.spawning
    if own.allowed:
        yield "spawn.max_depth", Spawning(own.max_depth, 1)
        yield "spawn.max_descendants", Spawning(1, own.max_descendants)
    yield "spawn.on_parent_exit", Spawning(on_parent_exit=own.on_parent_exit)


def _lifetime(m: Manifest, e: Effective) -> Items:
    key = "lifetime.unlimited" if e.lifetime.unlimited else "lifetime.ttl_seconds"
    yield key, LifetimeGrant(e.lifetime.ttl_seconds)
    yield "lifetime.on_expiry", LifetimeGrant(on_expiry=e.lifetime.on_expiry)


def _services(m: Manifest, e: Effective) -> Items:
    for i, entry in enumerate(m.services.models.allow):
        models = ((entry.provider, pattern) for pattern in entry.models)
        yield f"services.models.allow[{i}]", ServiceSet.of(models, *(0 for _ in LIMITS))
    for name in LIMITS:
        yield f"services.models.{name}", structs.replace(ServiceSet.bottom(), **{name: getattr(e.services, name)})


def _publish(m: Manifest, e: Effective) -> Items:
    for i, entry in enumerate(m.publish):
        yield f"publish[{i}]", PublishSet.ports([(entry.port, entry.to)])


def _inject(m: Manifest, e: Effective) -> Items:
    for i, host, _ in m.permissions.injected:
        rules = (rule for rule in inject_rules(m.permissions) if rule.host == host)
        yield f"permissions.network[{i}].inject", InjectSet.of(rules)
        asked = (rule for rule in asked_requests(m.permissions) if rule.host == host)
        yield f"permissions.network[{i}].inject.on_deny", InjectSet.of((), asked)


def _web(m: Manifest, e: Effective) -> Items:
    none = (0,) * len(WEB_LIMITS)
    for i, provider in enumerate(m.services.search.allow):
        yield f"services.search.allow[{i}]", WebSet.of([provider], (), *none)
    for i, host in enumerate(m.services.fetch.hosts):
        yield f"services.fetch.hosts[{i}]", WebSet.of((), [host], *none)
    for name, (key, _) in WEB_LIMITS.items():
        yield key, structs.replace(WebSet.bottom(), **{name: getattr(e.web, name)})


def _agents(m: Manifest, e: Effective) -> Items:
    for i, one in enumerate(m.services.agents.allow):
        yield f"services.agents.allow[{i}]", AgentSet.of([one])


def _telemetry(m: Manifest, e: Effective) -> Items:
    for i, one in enumerate(m.services.telemetry.signals):
        yield f"services.telemetry.signals[{i}]", TelemetrySet.of([one], 0, 0)
    for name in TELEMETRY_LIMITS:
        value = structs.replace(TelemetrySet.bottom(), **{name: getattr(e.telemetry, name)})
        yield f"services.telemetry.{name}", value


def _host_ports(m: Manifest, e: Effective) -> Items:
    for i, port in m.permissions.host_ports:
        yield f"permissions.network[{i}]", HostPorts.ports([port])


def _ssh(m: Manifest, e: Effective) -> Items:
    for i, one in enumerate(m.services.ssh_agent):
        rows = (row for row in ssh_rows(m.services) if row[0] == one.secret)
        yield f"services.ssh_agent[{i}]", SshSet.rows(rows)


def _may_grant(m: Manifest, e: Effective) -> Items:
    for i, one in enumerate(m.spawn.may_grant):
        hosts = [(one.host, one.ports, one.protocol)] if one.host and one.protocol else []
        yield (
            f"spawn.may_grant[{i}]",
            MayGrant(
                Network.of(hosts),
                PathSet.of([one.read] if one.read else []),
                CredentialSet.of([one.secret] if one.secret else []),
                e.may_grant.syscalls if hosts else SyscallSet(),
            ),
        )


_ITEMS: dict[str, Callable[[Manifest, Effective], Items]] = {
    "identity": _identity,
    "filesystem": _filesystem,
    "network": _network,
    "syscalls": _syscalls,
    "executables": _executables,
    "resources": _resources,
    "credentials": _credentials,
    "skills": _skills,
    "spawning": _spawning,
    "lifetime": _lifetime,
    "services": _services,
    "publish": _publish,
    "inject": _inject,
    "web": _web,
    "host_ports": _host_ports,
    "ssh": _ssh,
    "may_grant": _may_grant,
    "agents": _agents,
    "telemetry": _telemetry,
}
assert tuple(_ITEMS) == tuple(DOMAINS)


def of_domain(domain: str, manifest: Manifest, requested: Effective) -> Iterator[tuple[str, Domain]]:
    """Every grant of one domain with its dotted key."""
    return _ITEMS[domain](manifest, requested)


def excess(manifest: Manifest, requested: Effective, ceiling: Effective) -> tuple[Excess, ...]:
    """Every grant of ``requested`` that ``ceiling`` does not cover, in the order of the domains; empty when a subset.

    A domain that exceeds as a whole and in no single item is reported as a whole: nothing that is not covered
    can be missing here (tests/property/policy/test_rules.py).
    """
    found: list[Excess] = []
    for domain, mine in requested.domains():
        bound = getattr(ceiling, domain)
        if mine.is_subset(bound):
            continue
        singles = [
            Excess(domain, key, item.difference(bound).describe())
            for key, item in of_domain(domain, manifest, requested)
            if not item.is_subset(bound)
        ]
        found += singles or [Excess(domain, domain, mine.difference(bound).describe())]
    return tuple(found)
