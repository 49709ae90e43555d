"""The source of the grants: the part of a manifest that ``Effective.from_manifest`` reads.

Grants lie below manifests (design.md), so the shape is stated here and ``policy.manifest`` has it; mypy compares.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from policy.grants.lifetime import OnExpiry
from policy.grants.network import Mode as NetworkMode
from policy.grants.paths import Mode as FilesystemMode
from policy.grants.sets.access import Protocol as Transport
from policy.grants.spawning import OnParentExit


class AgentSection(Protocol):
    """``[agent]``."""

    @property
    def runtime(self) -> str: ...
    @property
    def role(self) -> str | None: ...


class ResourcesSection(Protocol):
    """``[resources]``: the ceilings by the names of ``policy.grants.resources.UNITS``, and the network mode."""

    @property
    def network(self) -> NetworkMode: ...
    @property
    def cpu_ms_per_task(self) -> int: ...
    @property
    def memory_mb(self) -> int: ...
    @property
    def disk_mb(self) -> int: ...


class SandboxSection(Protocol):
    """``[sandbox]``."""

    @property
    def filesystem(self) -> FilesystemMode: ...


class VolumeItem(Protocol):
    """A volume with its place."""

    @property
    def grant(self) -> str: ...


class FilesystemSection(Protocol):
    """``[permissions.filesystem]``."""

    @property
    def read(self) -> Sequence[str]: ...
    @property
    def write_paths(self) -> Sequence[tuple[int, str]]: ...
    @property
    def shared(self) -> bool: ...


class NetworkItem(Protocol):
    """``[[permissions.network]]``."""

    @property
    def host(self) -> str: ...
    @property
    def ports(self) -> Sequence[tuple[int, int]]: ...
    @property
    def protocol(self) -> Transport: ...
    @property
    def to_host(self) -> bool: ...
    @property
    def asked(self) -> bool: ...


class InjectItem(Protocol):
    """``inject`` of an entry."""

    @property
    def secret(self) -> str: ...
    @property
    def header(self) -> str: ...
    @property
    def format(self) -> str: ...
    @property
    def user(self) -> str: ...
    @property
    def methods(self) -> Sequence[str]: ...
    @property
    def paths(self) -> Sequence[str]: ...
    @property
    def asked(self) -> bool: ...


class SyscallsSection(Protocol):
    """``[permissions.syscalls]``."""

    @property
    def profile(self) -> str | None: ...
    @property
    def allow(self) -> Sequence[str]: ...
    @property
    def deny(self) -> Sequence[str]: ...


class ExecutableItem(Protocol):
    """An item of ``permissions.executables.allow``."""

    @property
    def path(self) -> str: ...
    @property
    def sha256(self) -> str | None: ...
    @property
    def tree(self) -> str: ...


class ExecutablesSection(Protocol):
    """``[permissions.executables]``."""

    @property
    def allow(self) -> Sequence[ExecutableItem]: ...


class CredentialsSection(Protocol):
    """``[permissions.credentials]``."""

    @property
    def grants(self) -> Sequence[str]: ...


class SkillRuleItem(Protocol):
    """``[[permissions.skills.rule]]``."""

    @property
    def tool(self) -> str: ...
    @property
    def argument(self) -> str: ...
    @property
    def equals(self) -> str | int | bool | None: ...
    @property
    def matches(self) -> str | None: ...
    @property
    def one_of(self) -> Sequence[str | int | bool]: ...


class SkillsSection(Protocol):
    """``[permissions.skills]``."""

    @property
    def allow(self) -> Sequence[str]: ...
    @property
    def side_effects(self) -> Sequence[str]: ...
    @property
    def ask(self) -> Sequence[str]: ...
    @property
    def rule(self) -> Sequence[SkillRuleItem]: ...


class PermissionsSection(Protocol):
    """``[permissions]``."""

    @property
    def filesystem(self) -> FilesystemSection: ...
    @property
    def network(self) -> Sequence[NetworkItem]: ...
    @property
    def host_ports(self) -> Sequence[tuple[int, int]]: ...
    @property
    def injected(self) -> Sequence[tuple[int, str, InjectItem]]: ...
    @property
    def syscalls(self) -> SyscallsSection: ...
    @property
    def executables(self) -> ExecutablesSection: ...
    @property
    def credentials(self) -> CredentialsSection: ...
    @property
    def skills(self) -> SkillsSection: ...


class ModelsItem(Protocol):
    """An item of ``services.models.allow``."""

    @property
    def provider(self) -> str: ...
    @property
    def models(self) -> Sequence[str]: ...


class ModelsSection(Protocol):
    """``[services.models]``."""

    @property
    def allow(self) -> Sequence[ModelsItem]: ...
    @property
    def requests_per_minute(self) -> int | None: ...
    @property
    def tokens_per_hour(self) -> int | None: ...
    @property
    def max_output_tokens(self) -> int | None: ...


class SearchSection(Protocol):
    """``[services.search]``."""

    @property
    def allow(self) -> Sequence[str]: ...
    @property
    def requests_per_minute(self) -> int | None: ...
    @property
    def max_results(self) -> int | None: ...


class FetchSection(Protocol):
    """``[services.fetch]``."""

    @property
    def hosts(self) -> Sequence[str]: ...
    @property
    def requests_per_minute(self) -> int | None: ...


class AgentsSection(Protocol):
    """``[services.agents]``."""

    @property
    def allow(self) -> Sequence[str]: ...


class TelemetrySection(Protocol):
    """``[services.telemetry]``."""

    @property
    def signals(self) -> Sequence[str]: ...
    @property
    def bytes_per_minute(self) -> int | None: ...
    @property
    def requests_per_minute(self) -> int | None: ...


class SshHostItem(Protocol):
    """A host of ``services.ssh_agent``."""

    @property
    def name(self) -> str: ...
    @property
    def keys(self) -> Sequence[str]: ...


class SshAgentItem(Protocol):
    """One ``[[services.ssh_agent]]``."""

    @property
    def secret(self) -> str: ...
    @property
    def hosts(self) -> Sequence[SshHostItem]: ...


class ServicesSection(Protocol):
    """``[services]``."""

    @property
    def models(self) -> ModelsSection: ...
    @property
    def search(self) -> SearchSection: ...
    @property
    def fetch(self) -> FetchSection: ...
    @property
    def agents(self) -> AgentsSection: ...
    @property
    def telemetry(self) -> TelemetrySection: ...
    @property
    def ssh_agent(self) -> Sequence[SshAgentItem]: ...


class PublishItem(Protocol):
    """One ``[[publish]]``."""

    @property
    def port(self) -> int: ...
    @property
    def to(self) -> str: ...


class MayGrantItem(Protocol):
    """An item of ``spawn.may_grant``: one of the three."""

    @property
    def host(self) -> str | None: ...
    @property
    def ports(self) -> Sequence[tuple[int, int]]: ...
    @property
    def protocol(self) -> Any: ...
    @property
    def read(self) -> str | None: ...
    @property
    def secret(self) -> str | None: ...


class CommandItem(Protocol):
    """One ``[[tools.command]]``."""

    @property
    def uri(self) -> str: ...
    @property
    def ask(self) -> bool: ...
    def clauses(self) -> Iterator[tuple[str, Any]]: ...


class ToolsSection(Protocol):
    """``[tools]``."""

    @property
    def command(self) -> Sequence[CommandItem]: ...


class SpawnSection(Protocol):
    """``[spawn]``."""

    @property
    def allowed(self) -> bool: ...
    @property
    def max_depth(self) -> int: ...
    @property
    def max_descendants(self) -> int: ...
    @property
    def on_parent_exit(self) -> OnParentExit: ...
    @property
    def may_grant(self) -> Sequence[MayGrantItem]: ...


class LifetimeSection(Protocol):
    """``[lifetime]``."""

    @property
    def ttl_seconds(self) -> int | None: ...
    @property
    def unlimited(self) -> bool: ...
    @property
    def on_expiry(self) -> OnExpiry: ...


class ManifestSections(Protocol):
    """A manifest."""

    @property
    def agent(self) -> AgentSection: ...
    @property
    def resources(self) -> ResourcesSection: ...
    @property
    def sandbox(self) -> SandboxSection: ...
    @property
    def permissions(self) -> PermissionsSection: ...
    @property
    def spawn(self) -> SpawnSection: ...
    @property
    def lifetime(self) -> LifetimeSection: ...
    @property
    def services(self) -> ServicesSection: ...
    @property
    def volumes(self) -> Sequence[tuple[str, VolumeItem]]: ...
    @property
    def publish(self) -> Sequence[PublishItem]: ...
    @property
    def tools(self) -> ToolsSection: ...

    def wrote(self, dotted: str, /) -> bool: ...
    def where(self, dotted: str, /) -> str: ...


class ProfileCalls(Protocol):
    """A named set of system calls: ``policy.data.types.Profile``."""

    @property
    def names(self) -> frozenset[str]: ...


def ceiling(section: ResourcesSection, name: str) -> Any:
    """The ceiling ``name`` of ``[resources]``, None when the file leaves it open."""
    return getattr(section, name)
