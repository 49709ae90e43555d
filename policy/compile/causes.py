"""From a rule to where it comes from: a key that the manifest wrote, or a default; and what a parent's ceiling took.

The compilers work on the effective grants, which a parent may have narrowed: a path below the one that the manifest
wrote, a lower ceiling, a narrower range of ports. Each such grant is traced to the key of the manifest that covers it.
One that no key covers has no right to be there, and nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from policy import errors
from policy.compile.artefacts import Cause
from policy.grants.effective import Effective
from policy.manifest import parse, text
from policy.manifest.agent import Manifest

_DEFAULT = "absent means the stated default"


@dataclass(frozen=True)
class Origins:
    """Where the rules of one compilation come from.

    ``requested`` is what the manifest asks for, where a parent's ceiling may have taken some of it, else None.
    """

    manifest: Manifest
    effective: Effective
    requested: Effective | None = None

    def of(self, key: str, *, reason: str = "", parent: str = "") -> Cause:
        """The cause for a key such as ``resources.memory_mb``: written by the file, or a default of ours."""
        if key in self._written:
            return Cause("manifest", key, reason, parent)
        return Cause("default", key, self._reasons.get(key, _DEFAULT), parent)

    def value(self, domain: str, name: str, key: str) -> Cause:
        """The cause for one value of a domain, such as the ceiling ``memory_mb`` of ``resources``."""
        parent = ""
        if self.requested is not None:
            asked = getattr(getattr(self.requested, domain), name)
            if asked != getattr(getattr(self.effective, domain), name):
                parent = f"asked for {'no limit' if asked is None else asked}"
        return self.of(key, parent=parent)

    def value_of_domain(self, domain: str, key: str) -> Cause:
        """The cause for a whole domain, which one key of the manifest wrote."""
        narrowed = self.requested is not None and getattr(self.requested, domain) != getattr(self.effective, domain)
        return self.of(key, parent="asked for more" if narrowed else "")

    def resource(self, name: str) -> Cause:
        """The cause for one ceiling of ``[resources]``."""
        return self.value("resources", name, f"resources.{name}")

    def item(self, key: str, written: Sequence[str], one: str) -> Cause:
        """The cause for an item of a list that the manifest wrote, such as a credential's name.

        Raises:
            errors.UnexplainedError: the list does not hold it.
        """
        if one not in written:
            raise self.uncovered(key, one)
        return Cause("manifest", f"{key}[{written.index(one)}]", one)

    def published(self, port: int, to: str) -> Cause:
        """The cause for a published port.

        Raises:
            errors.UnexplainedError: no ``[[publish]]`` names it.
        """
        for index, one in enumerate(self.manifest.publish):
            if (one.port, one.to) == (port, to):
                return Cause("manifest", f"publish[{index}]", f"port {port}")
        raise self.uncovered("publish", f"{port} at {to}")

    def host_port(self, port: int) -> Cause:
        """The cause for a port of this host.

        Raises:
            errors.UnexplainedError: no entry of the network names it.
        """
        for index, one in self.manifest.permissions.host_ports:
            if one == port:
                return Cause("manifest", f"permissions.network[{index}]", f"port {port} of this host")
        raise self.uncovered("permissions.network", f"port {port} of this host")

    def ssh_key(self, secret: str, host: str, key: str) -> Cause:
        """The cause for a key of SSH at a host.

        Raises:
            errors.UnexplainedError: no ``[[services.ssh_agent]]`` names them.
        """
        for index, one in enumerate(self.manifest.services.ssh_agent):
            if one.secret == secret and any(at.name == host and key in at.keys for at in one.hosts):
                return Cause("manifest", f"services.ssh_agent[{index}]", f"{secret} at {host}")
        raise self.uncovered("services.ssh_agent", f"{secret} at {host}")

    def path(self, key: str, written: Sequence[str], path: str) -> Cause:
        """The cause for a path: the item that is this path or lies above it.

        Raises:
            errors.UnexplainedError: no item of the list covers it.
        """
        if path in written:
            return Cause("manifest", f"{key}[{written.index(path)}]", path)
        above = next((item for item in written if _above(item, path)), None)
        if above is None:
            raise self.uncovered(key, path)
        return Cause("manifest", f"{key}[{written.index(above)}]", path, f"asked for {above}")

    def uncovered(self, key: str, grant: str) -> errors.UnexplainedError:
        """The error for a grant that the manifest does not cover: a mistake of ours, not of its author."""
        return errors.UnexplainedError(f"no key of the manifest covers {text.quote(grant)} of `{key}`", where=key)

    @cached_property
    def _written(self) -> frozenset[str]:
        return self.manifest.written

    @cached_property
    def _reasons(self) -> Mapping[str, str]:
        return {key: reason for key, _, reason in parse.defaults_applied(self.manifest)}


def holds_path(written: Sequence[str], path: str) -> bool:
    """Whether an item of a list of paths is this path or lies above it."""
    return path in written or any(_above(item, path) for item in written)


def _above(item: str, path: str) -> bool:
    return path.startswith(item.rstrip("/") + "/")
