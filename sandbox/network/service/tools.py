"""The tools of a run at the service gate: MCP over streamable HTTP, one message and one reply, without sessions.

The gate reads the frame of a request and passes its body on to the tool gate, which reads the message.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple, TypeAlias

from aiohttp import web

from sandbox.network.gate.call_line import CallLine, Frames
from sandbox.network.service.shapes import RefusedError
from sandbox.network.tools import wire

NAME: Final = "tools.covenant"
ORIGINS: Final = (f"http://{NAME}", f"http://{NAME}:80")
# Revisions whose messages are those of the tool gate (sandbox.network.tools.mcp_session).
SPOKEN: Final = frozenset({"2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"})
_PATH: Final = re.compile(r"/mcp(?:/([a-z0-9_-]{1,64}))?")
_JSON: Final = "application/json"


class ToolMessage(NamedTuple):
    """A message of MCP to the server of an alias, or to the whole where the alias is empty."""

    alias: str
    message: bytes


ToolLine: TypeAlias = CallLine[ToolMessage, tuple[int, bytes]]


def tool_line(fd: int) -> ToolLine:
    """Return the line of ``fd`` to the tool gate (sandbox.network.tools.wire). An answer has what is said of it."""
    return CallLine(fd, Frames(_call, _cancel, _answer))


def _call(number: int, call: ToolMessage) -> bytes:
    name = call.alias.encode()
    return wire.REQUEST.pack(number, wire.MESSAGE, len(name), len(call.message)) + name + call.message


def _cancel(number: int) -> bytes:
    return wire.REQUEST.pack(number, wire.CANCEL, 0, 0)


async def _answer(reader: asyncio.StreamReader) -> tuple[int, tuple[int, bytes]]:
    number, said, size = wire.REPLY.unpack(await reader.readexactly(wire.REPLY.size))
    return number, (said, await reader.readexactly(size))


class ToolEndpoint:
    """Answers the requests of one agent to ``http://tools.covenant``."""

    def __init__(self, line: ToolLine, body: Callable[[web.BaseRequest], Awaitable[bytes]]) -> None:
        self._line, self._body = line, body

    async def handle(self, request: web.BaseRequest) -> web.Response:
        """Answer one request, whose frame was looked at.

        Raises:
            RefusedError: it is none of MCP over streamable HTTP.
        """
        found = _PATH.fullmatch(request.raw_path)
        if found is None:
            raise RefusedError(404, "path_refused", "tools are at /mcp, those of one server at /mcp/ALIAS")
        if request.method != "POST":
            # No stream is offered, and there is no session to end.
            return web.Response(status=405, headers={"Allow": "POST"})
        self._check(request)
        body = await self._body(request)
        if len(body) > wire.MESSAGE_BYTES:
            raise RefusedError(413, "frame_refused", f"a message has at most {wire.MESSAGE_BYTES} bytes")
        said, reply = await self._line.ask(ToolMessage(found[1] or "", body))
        if said == wire.UNKNOWN:
            raise RefusedError(404, "path_refused", "tools.json has no server of this alias")
        if said == wire.NOTHING:
            return web.Response(status=202)
        return web.Response(status=400 if said == wire.MALFORMED else 200, body=reply, content_type=_JSON)

    def _check(self, request: web.BaseRequest) -> None:
        origins = request.headers.getall("Origin", [])
        if any(one.lower() not in ORIGINS for one in origins):
            raise RefusedError(403, "frame_refused", "the origin is another page")
        if request.content_type != _JSON:
            raise RefusedError(415, "frame_refused", f"a message is {_JSON}")
        versions = request.headers.getall("MCP-Protocol-Version", [])
        if any(one not in SPOKEN for one in versions) or len(versions) > 1:
            raise RefusedError(400, "frame_refused", f"revisions of MCP are {', '.join(sorted(SPOKEN))}")
