"""``covenant mcp``: the daemon as an MCP server over stdin and stdout, in the client's own process."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any, Final

import click

from covenant.cli.daemon import client
from policy import errors

if TYPE_CHECKING:
    from covenant.wire.client import Client
    from covenant.wire.mcp_server import McpCall

_LINE_BYTES: Final = 8 * 1024 * 1024


@click.command(epilog=client.examples("covenant mcp", "COVENANT_TOKEN_FILE=peer.token covenant mcp"))
def mcp() -> None:
    """Serve intents, memory, audit, agents and tools of the daemon to an MCP client over stdin and stdout.

    It acts as the operator, or as the peer of COVENANT_TOKEN_FILE, and each call needs that caller's grants. An MCP
    client is told to start this command.
    """
    with client.daemon() as daemon:
        while line := sys.stdin.buffer.readline(_LINE_BYTES):
            if len(line) == _LINE_BYTES and not line.endswith(b"\n"):
                raise errors.UsageError(f"a message has {_LINE_BYTES} bytes or more")
            if not line.strip():
                continue
            if reply := _reply(daemon, line):
                sys.stdout.buffer.write(reply + b"\n")
                sys.stdout.buffer.flush()


def _reply(daemon: Client, line: bytes) -> bytes:
    """Return the reply to a line, which may be nothing."""
    from covenant.wire import mcp_server

    try:
        found = mcp_server.take(line)
    except errors.MalformedRequestError as e:
        return mcp_server.malformed(e)
    if isinstance(found, mcp_server.McpReply):
        return found.message
    return b"" if found is None else mcp_server.answer(found, _asked(daemon, found))


def _asked(daemon: Client, asked: McpCall) -> dict[str, Any]:
    """Return the daemon's response, which may be an error.

    Raises:
        errors.DaemonSilentError: the daemon ended.
    """
    fields = json.loads(asked.request.model_dump_json(exclude={"kind"}, exclude_unset=True))
    try:
        return daemon.ask(asked.request.kind, **fields)
    except errors.DaemonSilentError:
        raise
    except errors.CovenantError as e:
        return e.to_json()
