"""The daemon's tools for a run that it starts: a pair of sockets, one end of which goes with the request.

The other end is served while the supervisor is asked. It is the whole right to these tools: there is no token, no
address, and nothing that another run could use.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import anyio
import anyio.to_thread

from covenant.runtime.packages import Card, OpenPackage
from covenant.runtime.runner import Intent
from covenant.wire.types import AgentId
from policy import errors
from policy.manifest.tools import document


class ToolServer(Protocol):
    """The daemon as an MCP server of runs."""

    def allowed(self, caller: AgentId) -> list[str]:
        """Return the tools that the caller may use now, by their names."""

    async def serve(self, sock: socket.socket, caller: AgentId, *, intent_id: str, agent_id: str) -> None:
        """Answer the calls of a run for this intent of the caller, until the other end is closed."""


@dataclass(frozen=True, slots=True)
class RunLine:
    """The line of one run. ``theirs`` goes with the request, ``tools`` are named in it."""

    ours: socket.socket
    theirs: socket.socket
    tools: list[str]


@contextlib.contextmanager
def opened(server: ToolServer, caller: AgentId) -> Iterator[RunLine]:
    """Open the line of a run for the caller, which ends with the block."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        ours.setblocking(False)
        yield RunLine(ours, theirs, server.allowed(caller))


async def while_served(
    server: ToolServer,
    line: RunLine,
    ask: Callable[[], Awaitable[dict[str, Any]]],
    *,
    intent: Intent,
    caller: AgentId,
    card: Card,
) -> dict[str, Any]:
    """Return what ``ask`` returns, and serve the line until then.

    Raises:
        errors.CovenantError: by ``ask``.
    """
    refused: errors.CovenantError | None = None
    answer: dict[str, Any] = {}
    async with anyio.create_task_group() as group:

        async def serve() -> None:
            await server.serve(line.ours, caller, intent_id=intent.id, agent_id=card.id)

        group.start_soon(serve)
        try:
            answer = await ask()
        except errors.CovenantError as e:
            refused = e  # a task group would raise it as a group
        group.cancel_scope.cancel()
    if refused is not None:
        raise refused
    return answer


async def declares(card: Card, package: OpenPackage) -> bool:
    """Whether an agent's package declares tools of the daemon. It is not verified: the supervisor does that."""
    if not card.manifest.permissions.skills.allow:
        return False
    return await anyio.to_thread.run_sync(_declares, package)


def _declares(package: OpenPackage) -> bool:
    try:
        raw = package.read(document.FILE)
        tools = None if raw is None else document.parse(raw)
    except (errors.PackageError, errors.ToolsError):
        return False  # the run is refused for it
    return tools is not None and any(server.transport == "daemon" for server in tools.servers)
