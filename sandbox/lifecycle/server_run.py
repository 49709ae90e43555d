"""Run one tool server in its own process, forked from the shim of its agent's run.

Its package is cut out of the agent's verified package (policy.manifest.tools.server_package). Of what its agent is
granted it has the secrets that its variables name, and it ends with its agent.
"""

from __future__ import annotations

import contextlib
import time

from policy import errors
from policy.manifest.tools import server_package
from policy.manifest.tools.document import ToolManifest
from policy.signing import trust
from sandbox.broker.tool_servers import ServerRequest
from sandbox.lifecycle.context import RunContext
from sandbox.lifecycle.run import Request, Run, RunDependencies
from sandbox.lifecycle.types import ToolSource
from sandbox.run_io import CallerStreams


def run_server(dependencies: RunDependencies, parent: Request, source: ToolSource, asked: ServerRequest) -> None:
    """Run a server until it or its agent ends. Every outcome is in the log.

    ``dependencies`` are opened in this process; ``parent`` is the request by which the agent runs.
    """
    tools: ToolManifest = source.tools
    server = next(one for one in tools.servers if one.alias == asked.alias)
    with contextlib.ExitStack() as stack, contextlib.suppress(errors.CovenantError):
        package = server_package.package_of(
            parent.package,
            tools,
            server,
            seconds=source.seconds,
            with_secrets=True,
            authorities=source.authorities,
        )
        name = server_package.agent_id(tools, server)
        request = Request(
            package=package,
            text="",
            issuer=parent.issuer,
            dev=parent.dev,
            package_name=f"{parent.package_name} {asked.alias}",
            behalf=parent.behalf,
            uid=parent.uid,
            caller=CallerStreams(asked.stdin, asked.stdout, asked.stderr),
            idle=asked.calls,
            secrets_of=tools.agent_id,
            part=trust.part(source.trusted, package, name),
        )
        watches = {**dependencies.watches, **asked.watches(stack)}
        own = RunDependencies(
            dependencies.path,
            dependencies.config,
            dependencies.ledger,
            dependencies.state,
            dependencies.never_granted,
            dependencies.policies,
            isolated=dependencies.isolated,
            watches=watches,
        )
        Run(RunContext(own, request, now_ms=int(time.time() * 1000))).go()
