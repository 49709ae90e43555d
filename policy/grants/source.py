"""The source of the grants: the part of a manifest that ``Effective.from_manifest`` reads.

Grants lie below manifests (design.md), so the shape is stated here and ``policy.manifest`` has it; mypy compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from policy.grants.lifetime import OnExpiry
from policy.grants.network import Mode as NetworkMode
from policy.grants.paths import Mode as FilesystemMode
from policy.grants.sets.access import Protocol as Transport
from policy.grants.spawning import OnParentExit


class Agent(Protocol):
    """``[agent]``."""

    @property
    def runtime(self) -> str: ...
    @property
    def role(self) -> str | None: ...


class Resources(Protocol):
    """``[resources]``: the ceilings by the names of ``policy.grants.resources.UNITS``, and the network mode."""

    @property
    def network(self) -> NetworkMode: ...
    @property
    def cpu_ms_per_task(self) -> int: ...
    @property
    def memory_mb(self) -> int: ...
    @property
    def disk_mb(self) -> int: ...


class Sandbox(Protocol):
    """``[sandbox]``."""

    @property
    def filesystem(self) -> FilesystemMode: ...


class Filesystem(Protocol):
    """``[permissions.filesystem]``."""

    @property
    def read(self) -> Sequence[str]: ...
    @property
    def write(self) -> Sequence[str]: ...


class NetworkEntry(Protocol):
    """``[[permissions.network]]``."""

    @property
    def host(self) -> str: ...
    @property
    def ports(self) -> Sequence[tuple[int, int]]: ...
    @property
    def protocol(self) -> Transport: ...


class Syscalls(Protocol):
    """``[permissions.syscalls]``."""

    @property
    def profile(self) -> str | None: ...
    @property
    def allow(self) -> Sequence[str]: ...
    @property
    def deny(self) -> Sequence[str]: ...


class ExecutableEntry(Protocol):
    """An item of ``permissions.executables.allow``."""

    @property
    def path(self) -> str: ...
    @property
    def sha256(self) -> str | None: ...


class Executables(Protocol):
    """``[permissions.executables]``."""

    @property
    def allow(self) -> Sequence[ExecutableEntry]: ...


class Credentials(Protocol):
    """``[permissions.credentials]``."""

    @property
    def grants(self) -> Sequence[str]: ...


class Skills(Protocol):
    """``[permissions.skills]``."""

    @property
    def allow(self) -> Sequence[str]: ...
    @property
    def side_effects(self) -> Sequence[str]: ...


class Permissions(Protocol):
    """``[permissions]``."""

    @property
    def filesystem(self) -> Filesystem: ...
    @property
    def network(self) -> Sequence[NetworkEntry]: ...
    @property
    def syscalls(self) -> Syscalls: ...
    @property
    def executables(self) -> Executables: ...
    @property
    def credentials(self) -> Credentials: ...
    @property
    def skills(self) -> Skills: ...


class Spawn(Protocol):
    """``[spawn]``."""

    @property
    def allowed(self) -> bool: ...
    @property
    def max_depth(self) -> int: ...
    @property
    def max_descendants(self) -> int: ...
    @property
    def on_parent_exit(self) -> OnParentExit: ...


class Lifetime(Protocol):
    """``[lifetime]``."""

    @property
    def ttl_seconds(self) -> int | None: ...
    @property
    def unlimited(self) -> bool: ...
    @property
    def on_expiry(self) -> OnExpiry: ...


class Source(Protocol):
    """A manifest."""

    @property
    def agent(self) -> Agent: ...
    @property
    def resources(self) -> Resources: ...
    @property
    def sandbox(self) -> Sandbox: ...
    @property
    def permissions(self) -> Permissions: ...
    @property
    def spawn(self) -> Spawn: ...
    @property
    def lifetime(self) -> Lifetime: ...

    def wrote(self, dotted: str, /) -> bool: ...
    def where(self, dotted: str, /) -> str: ...


class Calls(Protocol):
    """A named set of system calls: ``policy.data.types.Profile``."""

    @property
    def names(self) -> frozenset[str]: ...


def ceiling(section: Resources, name: str) -> Any:
    """The ceiling ``name`` of ``[resources]``, None when the file leaves it open."""
    return getattr(section, name)
