"""Rules across keys and sections: what is well-formed field by field and still means nothing.

Each rule yields (dotted key, message, hint). They read a manifest whose fields are already in range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from pydantic_core import PydanticCustomError

from policy.manifest import text

if TYPE_CHECKING:
    from policy.manifest.agent import Manifest

Problem = tuple[str, str, str]
SUBPROCESS_RUNTIMES = frozenset({"rust-bin", "python3", "node"})
APPROVAL_POLICIES = ("operator-prompt", "auto-deny", "auto-once")
PERMISSION_DOMAINS = ("filesystem", "network", "syscalls", "executables", "credentials", "skills")


def problems(m: Manifest) -> Iterator[Problem]:
    """Every broken rule of a manifest, in the order of the rules."""
    for rule in RULES:
        yield from rule(m)


def _entry(m: Manifest) -> Iterator[Problem]:
    """``agent.entry`` is written and not empty for rust-bin, python3 and node; hermes ignores it."""
    if m.agent.runtime in SUBPROCESS_RUNTIMES and not m.agent.entry:
        message = f"`agent.entry` is missing, which the runtime `{m.agent.runtime}` needs"
        yield "agent.entry", message, "write the program or script, relative to the package"


def _sandbox(m: Manifest) -> Iterator[Problem]:
    """``sandbox.required`` and ``sandbox.standby`` need ``backend = "linux-gvisor"``."""
    if m.sandbox.backend != "trusted-local":
        return
    mend = 'write backend = "linux-gvisor"'
    if m.sandbox.required:
        yield "sandbox.required", "sandbox.required is `true` while the backend is `trusted-local`", mend
    if m.sandbox.standby:
        yield "sandbox.standby", f"standby is `{m.sandbox.standby}` while the backend is `trusted-local`", mend


def _hermes(m: Manifest) -> Iterator[Problem]:
    """A hermes agent has no ``[permissions.*]`` and no ``sandbox.required``; for it alone ``[hermes]`` is
    checked by value."""
    if m.agent.runtime != "hermes":
        return
    if m.hermes.approval_policy not in APPROVAL_POLICIES:
        message = f"approval_policy {text.quote(m.hermes.approval_policy)} is not known"
        yield "hermes.approval_policy", message, f"one of {', '.join(APPROVAL_POLICIES)}"
    for index, tool in enumerate(m.hermes.tools_allowed):
        try:
            text.plain(tool)
        except PydanticCustomError as e:
            yield f"hermes.tools_allowed[{index}]", e.context["message"], e.context["hint"]  # type: ignore[index]
    outside = "a hermes agent runs outside this machine: nothing here can hold it to that"
    if m.sandbox.required:
        yield "sandbox.required", "sandbox.required is `true` while the runtime is `hermes`", outside
    for domain in PERMISSION_DOMAINS:
        if domain in m.permissions.model_fields_set:
            message = f"`permissions.{domain}` is written while the runtime is `hermes`"
            yield f"permissions.{domain}", message, outside


def _network(m: Manifest) -> Iterator[Problem]:
    """``[[permissions.network]]`` stays within ``resources.network``: none with off, port 443 and tls with
    outbound-https-only; an empty list is only for off."""
    entries, mode = m.permissions.network, m.resources.network
    if mode != "off" and "network" in m.permissions.model_fields_set and not entries:
        yield (
            "permissions.network",
            f"`permissions.network` is an empty list while resources.network is `{mode}`",
            'without a table the whole mode is granted: leave it out, or write resources.network = "off"',
        )
    for index, entry in enumerate(entries):
        at = f"permissions.network[{index}]"
        if mode == "off":
            message = f"host {text.quote(entry.host)} is granted while resources.network is `off`"
            yield at, message, 'remove the table, or write resources.network = "full" or "outbound-https-only"'
        elif mode == "outbound-https-only":
            yield from _https_only(at, entry.ports, entry.protocol)


def _https_only(at: str, ports: tuple[tuple[int, int], ...], protocol: str) -> Iterator[Problem]:
    mend = 'write it as ports = [443] and protocol = "tls", or resources.network = "full"'
    if ports != ((443, 443),):
        bad = next(f"{lo}" if lo == hi else f"{lo}-{hi}" for lo, hi in ports if (lo, hi) != (443, 443))
        yield f"{at}.ports", f"port `{bad}` is outside the network mode `outbound-https-only`", mend
    if protocol != "tls":
        yield f"{at}.protocol", f"protocol `{protocol}` is outside the network mode `outbound-https-only`", mend


def _filesystem(m: Manifest) -> Iterator[Problem]:
    """Write paths need ``filesystem = "host"``; ephemeral and host need a ``disk_mb`` of at least 1."""
    mode = m.sandbox.filesystem
    if mode != "host":
        for index, path in enumerate(m.permissions.filesystem.write):
            message = f"write path {text.quote(path)} is granted while sandbox.filesystem is `{mode}`"
            yield f"permissions.filesystem.write[{index}]", message, 'write sandbox.filesystem = "host"'
    # tmpfs takes size=0 for no limit at all (tmpfs(5)): a ceiling of nothing must not become one of everything.
    if mode != "read-only-package" and m.resources.disk_mb == 0:
        message = f"disk_mb is `0` while sandbox.filesystem is `{mode}`"
        yield "resources.disk_mb", message, 'give at least 1, or write filesystem = "read-only-package"'


def _syscalls(m: Manifest) -> Iterator[Problem]:
    """No system call is both allowed and denied."""
    allowed = m.permissions.syscalls.allow
    for index, name in enumerate(m.permissions.syscalls.deny):
        if name in allowed:
            message = f"system call `{name}` is both allowed and denied"
            yield f"permissions.syscalls.deny[{index}]", message, "keep it in one list"


def _spawn(m: Manifest) -> Iterator[Problem]:
    """``spawn.allowed`` goes with ``max_depth`` and ``max_descendants`` of at least 1, its absence with 0."""
    for key in ("max_depth", "max_descendants"):
        value: int = getattr(m.spawn, key)
        if m.spawn.allowed and value == 0:
            message = f"spawn.allowed is `true` while {key} is `0`"
            yield f"spawn.{key}", message, f"give {key} at least 1"
        elif value and not m.spawn.allowed:
            message = f"{key} is `{value}` while spawn.allowed is `false`"
            yield f"spawn.{key}", message, "write allowed = true, or 0"


def _lifetime(m: Manifest) -> Iterator[Problem]:
    """``[lifetime]``, when written, has either ``ttl_seconds`` or ``unlimited = true``."""
    if "lifetime" not in m.model_fields_set:
        return
    either = "write either ttl_seconds or unlimited = true; without the section the run ends with its task"
    if m.lifetime.ttl_seconds is None and not m.lifetime.unlimited:
        yield "lifetime", "[lifetime] has neither ttl_seconds nor unlimited = true", either
    if m.lifetime.ttl_seconds is not None and m.lifetime.unlimited:
        message = f"ttl_seconds is `{m.lifetime.ttl_seconds}` while unlimited is `true`"
        yield "lifetime.ttl_seconds", message, either


RULES: tuple[Callable[[Manifest], Iterator[Problem]], ...] = (
    _entry,
    _sandbox,
    _hermes,
    _network,
    _filesystem,
    _syscalls,
    _spawn,
    _lifetime,
)
