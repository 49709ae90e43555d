"""The form of a table of roles, from TOML to ceilings. Strict and closed: every key of a role is written.

Paths, hosts, programs, secrets and tools are open or closed as a whole (decisions.md, Roles): which of them an
agent gets is for its manifest. An operator's own roles (a later version) come in the same form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from policy.grants import paths
from policy.grants.credentials import CredentialSet, InjectSet
from policy.grants.effective import Effective
from policy.grants.executables import ExecutableSet
from policy.grants.identity import Identity
from policy.grants.lifetime import ON_EXPIRY, LifetimeGrant
from policy.grants.network import Network
from policy.grants.paths import FilesystemGrants, PathSet
from policy.grants.resources import UNITS, Ceilings
from policy.grants.roles import Role, Roles
from policy.grants.services import AgentSet, HostPorts, PublishSet, ServiceSet, SshSet, TelemetrySet, WebSet
from policy.grants.sets import access
from policy.grants.sets.domain import NameSet
from policy.grants.skills import SIDE_EFFECTS, SkillSet
from policy.grants.spawning import ON_PARENT_EXIT, MayGrant, Spawning
from policy.grants.syscalls import SyscallSet

UNLIMITED = "unlimited"
# What a role may reach. `https` and `any-public` keep private addresses closed; only `any` opens them.
REACH: Mapping[str, Network] = {
    "off": Network.bottom(),
    "https": Network.any(access.HTTPS),
    "any-public": Network.without_table("full"),
    "any": Network.top(),
}


class RoleTableError(ValueError):
    """The table is malformed: the file, the role and the key."""


class _Row:
    """One role's table, each key taken once; what is left over is an error."""

    def __init__(self, name: str, table: Mapping[str, Any]) -> None:
        self.name, self.left = name, dict(table)

    def wrong(self, key: str, said: object) -> RoleTableError:
        return RoleTableError(f"role `{self.name}`: `{key}` cannot be `{said}`")

    def take(self, key: str, kind: type) -> Any:
        if key not in self.left or type(self.left[key]) is not kind:
            raise self.wrong(key, self.left.get(key, "missing"))
        return self.left.pop(key)

    def one_of(self, key: str, values: tuple[Any, ...] | Mapping[str, Any]) -> Any:
        value = self.take(key, str)
        if value not in values:
            raise self.wrong(key, value)
        return value

    def opened(self, key: str) -> bool:
        """`any` or `none`."""
        return bool(self.one_of(key, ("none", "any")) == "any")

    def number(self, key: str) -> int | None:
        """A ceiling, None for the word `unlimited`."""
        value = self.left.pop(key, None)
        if value == UNLIMITED:
            return None
        if type(value) is not int or value < 0:
            raise self.wrong(key, value)
        return value


def _opened(
    row: _Row,
    key: str,
    domain: type[
        AgentSet
        | CredentialSet
        | ExecutableSet
        | HostPorts
        | InjectSet
        | PublishSet
        | ServiceSet
        | SshSet
        | SyscallSet
        | TelemetrySet
        | WebSet
    ],
) -> Any:
    return domain.top() if row.opened(key) else domain.bottom()


def _filesystem(row: _Row) -> FilesystemGrants:
    every, none = PathSet.top(), PathSet()
    mode = row.one_of("filesystem", paths.MODES)
    read, write = row.opened("read"), row.opened("write")
    # A role that may write may write volumes, and share what it writes.
    volumes = NameSet.top() if write else NameSet()
    return FilesystemGrants(mode, every if read else none, every if write else none, shared=write, volumes=volumes)


def _skills(row: _Row) -> SkillSet:
    effects = row.take("side_effects", list)
    if not all(effect in SIDE_EFFECTS for effect in effects):
        raise row.wrong("side_effects", effects)
    return SkillSet.ceiling(NameSet.top() if row.opened("skills") else NameSet(), NameSet.of(effects))


def _spawning(row: _Row) -> Spawning:
    depth, number = row.number("max_depth"), row.number("max_descendants")
    return Spawning(depth, number, row.one_of("on_parent_exit", ON_PARENT_EXIT))


def _lifetime(row: _Row) -> LifetimeGrant:
    return LifetimeGrant(row.number("ttl_seconds"), row.one_of("on_expiry", ON_EXPIRY))


_DOMAINS: dict[str, Callable[[_Row], Any]] = {
    "filesystem": _filesystem,
    "network": lambda row: REACH[row.one_of("network", REACH)],
    "syscalls": lambda row: _opened(row, "syscalls", SyscallSet),
    "executables": lambda row: _opened(row, "executables", ExecutableSet),
    "resources": lambda row: Ceilings(*(row.number(name) for name in UNITS)),
    "credentials": lambda row: _opened(row, "credentials", CredentialSet),
    "skills": _skills,
    "spawning": _spawning,
    "lifetime": _lifetime,
    "services": lambda row: _opened(row, "models", ServiceSet),
    "publish": lambda row: _opened(row, "publish", PublishSet),
    # A role whose agents may have a secret may have it added by the gate, which gives them less.
    "inject": lambda row: _opened(row, "inject", InjectSet),
    "web": lambda row: _opened(row, "web", WebSet),
    "host_ports": lambda row: _opened(row, "host_ports", HostPorts),
    # As inject: a key that only signs logins is less than a secret that is given.
    "ssh": lambda row: _opened(row, "ssh", SshSet),
    # An agent that is asked acts with its own rights, so only roles that direct others may ask.
    "agents": lambda row: _opened(row, "agents", AgentSet),
    # Words of the agent that leave the machine, as those to a model do.
    "telemetry": lambda row: _opened(row, "telemetry", TelemetrySet),
}


def _role(name: str, table: Mapping[str, Any]) -> Role:
    row = _Row(name, table)
    reason = row.take("reason", str).strip()
    if not reason:
        raise row.wrong("reason", "empty")
    own = Effective(identity=Identity.bottom(), **{domain: read(row) for domain, read in _DOMAINS.items()})
    # Children stay within the role of their parent, which gives them nothing that the role has not. A role that starts
    # no agents gives nothing.
    rights = MayGrant(own.network, own.filesystem.read, own.credentials, own.syscalls)
    ceiling = replace(own, may_grant=rights) if own.spawning.allowed else own
    if row.left:
        raise RoleTableError(f"role `{name}`: `{min(row.left)}` is not a key of a role")
    return Role(name, reason, ceiling)


def read(version: int, table: Mapping[str, Mapping[str, Any]]) -> Roles:
    """The roles of a table, with their order.

    Raises RoleTableError for a missing, unknown or wrong key.
    """
    return Roles.of(version, (_role(name, row) for name, row in table.items()))
