"""Grants that can do nothing where covenant-supervisor has no network of the host. Not one of the nine rules.

A shim of the supervisor is in an empty network namespace, unless the operator named an uplink, a proxy or a vault that
is a server. The connectors of a run's gates are then in that namespace as well, and reach no address: not of a
provider, and not of this host's loopback. ``covenant run`` without the supervisor is in the caller's network.

What the operator declares as a ``mock`` needs no network. It is no stand-in: a manifest that grants a provider and a
mock is refused, since each answer would be made up (docs/models.md). So is one that grants pages of a host and of a
mock: those of the host would all fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from policy import errors
from policy.grants.effective import Effective
from policy.host import HostFacts
from policy.manifest.services import LOOPBACK


def refusals(
    effective: Effective, host: HostFacts, *, where: Callable[[str], str], file: str = "config.toml"
) -> Iterator[errors.NotEnforceableError]:
    """Yield an error for each grant that needs the host's network. ``file`` is the operator's configuration."""
    for grant, wanted, instead in _needing(effective, host):
        yield errors.NotEnforceableError(
            f"{wanted} the host's network, and the supervisor is not in it",
            hint=f'write uplink = "NAME", an interface that `ip link` shows, or a [proxy] in {file} '
            f"and reload the supervisor{instead}",
            grant=grant,
            where=where(grant),
        )


def _needing(effective: Effective, host: HostFacts) -> Iterator[tuple[str, str, str]]:
    """Yield the key of each such grant, the beginning of its error, and another fix."""
    named = {
        "services.models": {name for name, _ in effective.services.models},
        "services.search": set(effective.web.search),
    }
    for key, names in named.items():
        # A provider that is not configured is another error (enforceable.py).
        for name in sorted(names & {*host.providers, *host.searchers} - {*host.made_up_providers}):
            yield f"{key}.allow", f"provider `{name}` is reached by", ""
    # A pattern also holds hosts that are no mock.
    for name in sorted({*effective.web.fetch} - {*host.made_up_pages}):
        yield "services.fetch.hosts", f"pages of `{name}` are fetched by", ""
    if effective.agents:
        yield "services.agents.allow", "agents are asked by", ""
    if effective.telemetry:
        yield "services.telemetry.signals", "the collector of telemetry is reached by", ""
    for port in effective.host_ports.numbers():
        yield "permissions.network", f"port {port} of host.covenant is in", ""
    for _, to in effective.publish.pairs():
        if to.startswith(LOOPBACK):
            yield "publish", f"publishing at {to} needs", ", or publish at unix:/PATH"
