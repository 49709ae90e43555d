"""The supervisor's part of a run's tools: its checked tools.json, its servers, and the rows of its calls."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from policy import denials, errors
from policy.decide import Decision
from policy.denials import Denial
from policy.grants.skills import SkillSet
from policy.manifest import parse
from policy.manifest.tools import checks, document, http_relay, server_package
from policy.package import Package
from policy.signing import trust
from sandbox.audit.run_events import RunEvents
from sandbox.broker.children import Spawn
from sandbox.broker.mcp_calls import McpCalls
from sandbox.broker.server import Broker
from sandbox.broker.tool_servers import ServerRequest, ToolServers
from sandbox.config import Config
from sandbox.lifecycle.types import DaemonTools, Request, ToolSource
from sandbox.network.tools.ledger import StartedServer, ToolTerms


def of(
    decision: Decision,
    request: Request,
    config: Config,
    rows: RunEvents,
    denied: denials.Told,
    *,
    start: Callable[[ToolSource, ServerRequest], None],
    keep: Collection[int],
    spawn: Spawn | None,
    broker: Broker | None,
    stack: contextlib.ExitStack,
) -> ToolTerms:
    """Return the terms of one run. Servers that were started end with ``stack``.

    Raises:
        errors.ToolsError: the tools of the package are not as described, pinned and granted.
        errors.VaultError: a server is to be given a secret, and no operator signed for the agent that has it.
        errors.ConfigError: a file of `[tls] ca` cannot be read.
    """
    package, manifest = request.package, decision.manifest
    raw = package.files[document.FILE]
    tools = document.parse(raw)
    for finding in checks.verify(package, manifest, tools):
        raise errors.ToolsError(finding.message, hint=finding.hint, where=finding.where)
    assert isinstance(decision.trusted, trust.TrustedPackage)
    # One number for all runs of a manifest, so that each server has one policy. It ends with its agent before that.
    seconds = -(-manifest.resources.cpu_ms_per_task // 1000)
    source = ToolSource(tools, decision.trusted, seconds=seconds, authorities=config.tls.authorities())
    allowed = decision.effective.skills.allow
    aliases = [one.alias for one in tools.servers if any(allowed.holds(str(one.uri(tool))) for tool in one.tools)]
    _check_hosts(decision, package, tools, aliases)
    if request.is_dev:
        _refuse_secrets(tools, aliases)
    daemons = frozenset(one.alias for one in tools.servers if one.transport == "daemon")
    servers = ToolServers([one for one in aliases if one not in daemons], functools.partial(start, source), keep=keep)
    stack.callback(servers.close)

    def log(kind: str, fields: Mapping[str, Any]) -> None:
        rows.tool(kind, fields)
        if kind == "tool_refused":
            denied(_denial(fields, decision.effective.skills), count=fields["count"])

    asks = None if broker is None else McpCalls(broker).line
    grants, name = decision.effective.canonical(), manifest.agent.id
    return ToolTerms(
        *(grants, raw.decode(), name, log, functools.partial(_started, daemons, request.daemon, servers)),
        *(rows.sync, spawn),
        asks=asks,
        closed=dict(_closed(tools, request.daemon)),
        settle=rows.settle,
    )


def _denial(row: Mapping[str, Any], skills: SkillSet) -> Denial:
    """Return the denial of a row ``tool_refused``, under the id that the agent was told.

    The row has no argument. The id says which argument of the manifest's rules it was.
    """
    uri, code = str(row["uri"]), str(row["code"])
    named = (Denial("tool", f"{uri} {rule.argument}", code) for rule in skills.rules if rule.tool == uri)
    return next((one for one in named if one.id == row["denial"]), Denial("tool", uri, code))


def _started(
    daemons: Collection[str], daemon: DaemonTools | None, servers: ToolServers, alias: str
) -> StartedServer | None:
    """Start a server. The daemon is there already, so that its line is given."""
    if alias not in daemons:
        return servers.start(alias)
    if daemon is None:
        return None
    return StartedServer(os.dup(daemon.fd), os.dup(daemon.fd), -1)


def _closed(tools: document.ToolManifest, daemon: DaemonTools | None) -> Iterator[tuple[str, str]]:
    """Yield the tools of the daemon that this run does not have, by their URIs, with the reason."""
    for server in tools.servers:
        for tool in server.tools if server.transport == "daemon" else ():
            if daemon is None:
                yield str(server.uri(tool)), "no daemon started this run"
            elif tool.name not in daemon.tools:
                yield str(server.uri(tool)), "the daemon's caller has no capability of it"


def secrets_of(package: Package) -> frozenset[str]:
    """Return the secrets that a package's tool servers are given. None where its tools.json is none."""
    try:
        tools = document.parse(package.files.get(document.FILE, b""))
    except errors.ToolsError:
        return frozenset()  # the run is refused for it
    return frozenset(name for server in tools.servers for _, name in server.credentials())


def _refuse_secrets(tools: document.ToolManifest, aliases: Collection[str]) -> None:
    for number, server in enumerate(tools.servers):
        for path, name in server.credentials() if server.alias in aliases else ():
            raise errors.VaultError(
                f"server `{server.alias}` is given secret `{name}`, and what `covenant dev` signed is given none",
                hint="have an operator sign the package, and run it",
                where=tools.where(("servers", number, *path)),
            )


def _check_hosts(decision: Decision, package: Package, tools: document.ToolManifest, aliases: Collection[str]) -> None:
    """Refuse a server of the transport http whose host the run itself may not reach."""
    for number, server in enumerate(tools.servers):
        if server.transport != "http" or server.alias not in aliases:
            continue
        host, port, _ = http_relay.address(server)
        if not decision.effective.network.to_name(host).allows("tls", port):
            raise errors.ToolsError(
                f"server `{server.alias}` is at {host} port {port}, which the run may not reach",
                hint=f'grant it in [[permissions.network]]: host = "{host}", ports = [{port}], protocol = "tls"',
                where=tools.where(("servers", number, "endpoint")),
            )
        made = server_package.package_of(package, tools, server, seconds=1, with_secrets=True)
        try:
            parse.parse(made.manifest)
        except errors.ManifestError as e:
            where = tools.where(("servers", number, "headers"))
            raise errors.ToolsError(f"server `{server.alias}`: {e.message}", hint=e.hint, where=where) from None
