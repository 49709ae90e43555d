"""Effective grants: the product of the ten domains and of the services. What a manifest asks for, what a role or
parent bounds, and what an agent has are all values of this one type.

One law joins two domains: without an executables grant no ``execve`` is held, and ``execveat`` and
``memfd_create``, which start programs without a path, never are (decisions.md, "Filesystem and execution"). It
only takes away and is monotone, so the product of the meets stays a meet (tests/property/policy/test_grant_laws.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from msgspec import structs

from policy import errors
from policy.grants import skill_rules, source
from policy.grants import skills as skill_grants
from policy.grants.credentials import CredentialSet, InjectRule, InjectSet
from policy.grants.executables import ExecutableSet
from policy.grants.identity import Identity
from policy.grants.lifetime import LifetimeGrant
from policy.grants.network import Network
from policy.grants.paths import FilesystemGrants, PathSet
from policy.grants.resources import UNITS, Ceilings
from policy.grants.services import LIMITS, AgentSet, HostPorts, PublishSet, ServiceSet, SshSet, TelemetrySet, WebSet
from policy.grants.sets.domain import ANY, EMPTY, Domain
from policy.grants.skills import SkillSet
from policy.grants.spawning import MayGrant, Spawning
from policy.grants.syscalls import EXEC_CALL, NEVER_CALLS, SyscallSet

# The ten, in the order of the OctantOS table, then the services; every loop over domains takes them from here.
DOMAINS: dict[str, type[Domain]] = {
    "identity": Identity,
    "filesystem": FilesystemGrants,
    "network": Network,
    "syscalls": SyscallSet,
    "executables": ExecutableSet,
    "resources": Ceilings,
    "credentials": CredentialSet,
    "skills": SkillSet,
    "spawning": Spawning,
    "lifetime": LifetimeGrant,
    "services": ServiceSet,
    "publish": PublishSet,
    "inject": InjectSet,
    "web": WebSet,
    "host_ports": HostPorts,
    "ssh": SshSet,
    "may_grant": MayGrant,
    "agents": AgentSet,
    "telemetry": TelemetrySet,
}
# The profile that a runtime brings where the manifest names none.
RUNTIME_PROFILES = {"python3": "python3", "node": "node", "rust-bin": "static", "command": "command"}
NO_SERVICES: Final = ServiceSet.bottom()
NO_PORTS: Final = PublishSet.bottom()
NO_INJECT: Final = InjectSet.bottom()
NO_WEB: Final = WebSet.bottom()
NO_HOST: Final = HostPorts.bottom()
NO_SSH: Final = SshSet.bottom()
NO_RIGHTS: Final = MayGrant.bottom()
NO_AGENTS: Final = AgentSet.bottom()
NO_TELEMETRY: Final = TelemetrySet.bottom()
# Left out of documents where nothing of them is granted, as before there were any.
_LATER: Final[dict[str, Domain]] = {
    "services": NO_SERVICES,
    "publish": NO_PORTS,
    "inject": NO_INJECT,
    "web": NO_WEB,
    "host_ports": NO_HOST,
    "ssh": NO_SSH,
    "may_grant": NO_RIGHTS,
    "agents": NO_AGENTS,
    "telemetry": NO_TELEMETRY,
}
_NO_EXEC = NEVER_CALLS | {EXEC_CALL}

Lines = dict[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Effective:
    """Grants in all domains; everything not in it is denied."""

    identity: Identity
    filesystem: FilesystemGrants
    network: Network
    syscalls: SyscallSet
    executables: ExecutableSet
    resources: Ceilings
    credentials: CredentialSet
    skills: SkillSet
    spawning: Spawning
    lifetime: LifetimeGrant
    services: ServiceSet = NO_SERVICES
    publish: PublishSet = NO_PORTS
    inject: InjectSet = NO_INJECT
    web: WebSet = NO_WEB
    host_ports: HostPorts = NO_HOST
    ssh: SshSet = NO_SSH
    may_grant: MayGrant = NO_RIGHTS
    agents: AgentSet = NO_AGENTS
    telemetry: TelemetrySet = NO_TELEMETRY

    def __post_init__(self) -> None:
        calls = self.syscalls.without(NEVER_CALLS if self.executables else _NO_EXEC)
        if calls is not self.syscalls:
            object.__setattr__(self, "syscalls", calls)

    @classmethod
    def _of(cls, domains: Iterable[Any]) -> Self:
        """The product of one value a domain, in the order of ``DOMAINS``."""
        return cls(*domains)

    @classmethod
    def bottom(cls) -> Self:
        """Nothing in any domain."""
        return cls._of(domain.bottom() for domain in DOMAINS.values())

    @classmethod
    def top(cls) -> Self:
        """Everything in every domain; where a ceiling starts from."""
        return cls._of(domain.top() for domain in DOMAINS.values())

    @classmethod
    def from_manifest(
        cls,
        manifest: source.ManifestSections,
        *,
        profiles: Mapping[str, source.ProfileCalls],
        additions: Mapping[str, source.ProfileCalls] | None = None,
        below: Mapping[str, frozenset[str]] | None = None,
    ) -> Self:
        """Return the grants that ``manifest`` requests.

        ``profiles`` are the named sets of system calls; ``additions`` the sets that a grant of ``executables`` or
        ``network`` brings with it; ``below`` maps each role to itself and the roles below it. Without the last two
        less is granted, never more.

        Raises ManifestError for a profile that is not in ``profiles``.
        """
        table = manifest.permissions
        network = _network(manifest)
        executables = ExecutableSet.of(
            ((e.path, e.sha256) for e in table.executables.allow if not e.tree),
            (e.tree for e in table.executables.allow if e.tree),
        )
        services = _services(manifest.services)
        publish = PublishSet.ports((one.port, one.to) for one in manifest.publish)
        web = _web(manifest.services)
        host_ports = HostPorts.ports(port for _, port in table.host_ports)
        ssh = SshSet.rows(ssh_rows(manifest.services))
        agents = AgentSet.of(manifest.services.agents.allow)
        telemetry = _telemetry(manifest.services)
        tools = (*table.skills.allow, *manifest.tools.command)
        linked = network.mode != "off" or any((services, publish, web, tools, host_ports, ssh, agents, telemetry))
        brought = (("executables", bool(executables)), ("network", linked))
        names = frozenset[str]().union(
            *((additions or {})[k].names for k, on in brought if on and k in (additions or {}))
        )
        return cls(
            identity=Identity.of(manifest.agent.role, below or {}),
            filesystem=FilesystemGrants.of(
                manifest.sandbox.filesystem,
                table.filesystem.read,
                (path for _, path in table.filesystem.write_paths),
                shared=table.filesystem.shared,
                volumes=(one.grant for _, one in manifest.volumes),
            ),
            network=network,
            syscalls=_syscalls(manifest, profiles, names),
            executables=executables,
            resources=Ceilings(*(source.ceiling(manifest.resources, name) for name in UNITS)),
            credentials=CredentialSet.of(table.credentials.grants),
            skills=_skills(table.skills, manifest.tools.command),
            spawning=_spawning(manifest.spawn),
            lifetime=_lifetime(manifest.lifetime),
            services=services,
            publish=publish,
            inject=InjectSet.of(inject_rules(table), asked_requests(table)),
            web=web,
            host_ports=host_ports,
            ssh=ssh,
            may_grant=_may_grant(manifest.spawn, (additions or {}).get("network")),
            agents=agents,
            telemetry=telemetry,
        )

    def domains(self) -> tuple[tuple[str, Domain], ...]:
        """Name and value of each domain, in the order of ``DOMAINS``."""
        return tuple((name, getattr(self, name)) for name in DOMAINS)

    @property
    def linked(self) -> bool:
        """Whether the agent has a link to a gateway: for destinations, services, tools, or ports either way."""
        return self.network.mode != "off" or bool(self.served or self.publish or self.host_ports or self.ssh)

    @property
    def served(self) -> bool:
        """Whether the agent has a service gate: for models, searches, pages, tools, agents or telemetry."""
        return bool(self.services or self.web or self.agents or self.telemetry) or self.asks_tools

    @property
    def asks_tools(self) -> bool:
        """Whether the agent may call a tool."""
        return self.skills.allow != EMPTY

    def meet(self, other: Self, /) -> Self:
        """Return the grants that both allow, in every domain."""
        return self._of(mine.meet(getattr(other, name)) for name, mine in self.domains())

    def is_subset(self, other: Self, /) -> bool:
        """Whether ``other`` allows all of this."""
        return all(mine.is_subset(getattr(other, name)) for name, mine in self.domains())

    def difference(self, other: Self, /) -> dict[str, Domain]:
        """The grants of this that ``other`` does not cover, by domain; empty exactly when a subset."""
        left = ((name, mine.difference(getattr(other, name))) for name, mine in self.domains())
        return {name: domain for name, domain in left if domain != DOMAINS[name].bottom()}

    def describe(self) -> Lines:
        """The grants as lines, by domain; domains without a grant are left out."""
        return {name: lines for name, mine in self.domains() if (lines := mine.describe())}

    def canonical(self) -> dict[str, Any]:
        """The grants as JSON would hold them: sorted, stable, and what the policy digest covers."""
        return canonical(self.domains())

    def for_child(self, *, remaining_seconds: int | None) -> Self:
        """The ceiling of this agent's children: one level of spawning less, and no longer than what is left.

        ``remaining_seconds`` is what is left of this agent's life, None when it has no end.
        """
        return replace(self, **ceilings_of_children(self, remaining_seconds=remaining_seconds))


def ceilings_of_children(own: Any, *, remaining_seconds: int | None) -> dict[str, Any]:
    """The domains in which the ceiling of an agent's children differs from the agent's own grants.

    In those of ``spawn.may_grant`` it is what the agent has and what it may give, and so is what they may give on.
    ``own`` are grants by the names of ``DOMAINS``.
    """
    network, read, credentials = own.network, own.filesystem.readable(), own.credentials
    given = own.may_grant.union(MayGrant(network, read, CredentialSet(credentials.names, credentials.any)))
    ceilings = {
        "spawning": own.spawning.for_child(),
        "lifetime": LifetimeGrant(remaining_seconds, own.lifetime.on_expiry),
        "may_grant": structs.replace(given, syscalls=own.syscalls.union(own.may_grant.syscalls)),
    }
    if not own.may_grant:
        return ceilings
    return {
        **ceilings,
        "network": given.network,
        "filesystem": replace(own.filesystem, read=given.read),
        "credentials": given.credentials,
        "syscalls": own.syscalls.union(own.may_grant.syscalls),
    }


def canonical(domains: Iterable[tuple[str, Domain]]) -> dict[str, Any]:
    """Domains as JSON would hold them. Later domains are left out where nothing is granted."""
    return {name: mine.canonical() for name, mine in domains if mine != _LATER.get(name)}


def _services(sections: source.ServicesSection) -> ServiceSet:
    asked = sections.models
    models = ((one.provider, pattern) for one in asked.allow for pattern in one.models)
    return ServiceSet.of(models, *(getattr(asked, name) for name in LIMITS))


def inject_rules(table: source.PermissionsSection) -> Iterator[InjectRule]:
    """The requests to which the gate adds a secret, by entry, method and path."""
    for _, host, one in table.injected:
        for method in one.methods:
            for path in one.paths:
                yield InjectRule(host, one.secret, one.header, one.format, one.user, method, path)


def asked_requests(table: source.PermissionsSection) -> Iterator[InjectRule]:
    """The requests with a secret that an operator is asked about: all others to the host, by entry."""
    for _, host, one in table.injected:
        if one.asked:
            yield InjectRule(host, one.secret, one.header, one.format, one.user, ANY, f"/{ANY}")


def ssh_rows(sections: source.ServicesSection) -> Iterator[tuple[str, str, str]]:
    """The secrets that sign, each with a host and a key of it."""
    for one in sections.ssh_agent:
        for host in one.hosts:
            for key in host.keys:
                yield one.secret, host.name, key


def _web(sections: source.ServicesSection) -> WebSet:
    search, fetch = sections.search, sections.fetch
    limits = (search.requests_per_minute, search.max_results, fetch.requests_per_minute)
    return WebSet.of(search.allow, fetch.hosts, *limits)


def _telemetry(sections: source.ServicesSection) -> TelemetrySet:
    sent = sections.telemetry
    return TelemetrySet.of(sent.signals, sent.bytes_per_minute, sent.requests_per_minute)


def _network(manifest: source.ManifestSections) -> Network:
    # A table that is there and empty lists no destination; one that is absent leaves the mode's own.
    entries = manifest.permissions.network
    if not entries and not manifest.wrote("permissions.network"):
        return Network.without_table(manifest.resources.network)
    parts = [(one.asked, (one.host, one.ports, one.protocol)) for one in entries if not one.to_host]
    return Network.of((one for asked, one in parts if not asked), (one for asked, one in parts if asked))


def _syscalls(
    manifest: source.ManifestSections, profiles: Mapping[str, source.ProfileCalls], added: frozenset[str]
) -> SyscallSet:
    table = manifest.permissions.syscalls
    name = table.profile or RUNTIME_PROFILES.get(manifest.agent.runtime, "")
    if name and name not in profiles:
        raise errors.ManifestError(
            f"system call profile `{name}` is not known",
            hint=f"known profiles: {', '.join(sorted(profiles))}",
            where=manifest.where("permissions.syscalls.profile"),
        )
    base = profiles[name].names if name else frozenset()
    return SyscallSet((base | added | frozenset(table.allow)) - frozenset(table.deny), profile=name, profile_names=base)


def _skills(table: source.SkillsSection, commands: Sequence[source.CommandItem]) -> SkillSet:
    rows = (
        (
            one.tool,
            one.argument,
            skill_rules.alternatives(equals=one.equals, matches=one.matches, one_of=one.one_of),
        )
        for one in table.rule
    )
    called = ((one.uri, argument, _conditions(rule)) for one in commands for argument, rule in one.clauses())
    allow = (*table.allow, *(one.uri for one in commands))
    asked = (*table.ask, *(one.uri for one in commands if one.ask))
    # Without a tool there are no calls to limit.
    limits = {name: getattr(table, name) for name in skill_grants.LIMITS} if allow else {}
    return SkillSet.of(allow, table.side_effects, skill_rules.of((*rows, *called)), limits, asked)


def _conditions(rule: Any) -> Iterator[skill_rules.ToolCondition]:
    """The alternatives of a rule of a command: a number is how many arguments there are."""
    if isinstance(rule, int):
        return skill_rules.alternatives(equals=rule)
    return skill_rules.alternatives(equals=rule.equals, matches=rule.matches, one_of=rule.one_of)


def _spawning(table: source.SpawnSection) -> Spawning:
    if not table.allowed:
        return Spawning(on_parent_exit=table.on_parent_exit)
    return Spawning(table.max_depth, table.max_descendants, table.on_parent_exit)


def _may_grant(table: source.SpawnSection, network: source.ProfileCalls | None) -> MayGrant:
    rights = table.may_grant
    hosts = [(one.host, one.ports, one.protocol) for one in rights if one.host and one.protocol]
    return MayGrant(
        Network.of(hosts),
        PathSet.of(one.read for one in rights if one.read),
        CredentialSet.of(one.secret for one in rights if one.secret),
        SyscallSet(network.names) if hosts and network is not None else SyscallSet(),
    )


def _lifetime(table: source.LifetimeSection) -> LifetimeGrant:
    return LifetimeGrant(None if table.unlimited else table.ttl_seconds or 0, table.on_expiry)
