"""The tools of a run at the service gate: MCP over streamable HTTP, one message and one reply, without sessions.

The gate reads the frame of a request and passes its body on to the tool gate, which reads the message.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple, TypeAlias

from aiohttp import web

from sandbox.network.gate.call_line import CallLine, Frames
from sandbox.network.service.shapes import RefusedError
from sandbox.network.tools import wire

NAME: Final = "tools.covenant"
ORIGINS: Final = (f"http://{NAME}", f"http://{NAME}:80")
_PATH: Final = re.compile(r"/mcp(?:/([a-z0-9_-]{1,64}))?")
_JSON: Final = "application/json"
_STATUSES: Final = {wire.ANSWER: 200, wire.MALFORMED: 400, wire.NO_METHOD: 404}


class ToolMessage(NamedTuple):
    """A message of MCP to the server of an alias, or to the whole where the alias is empty, and its headers as JSON."""

    alias: str
    headers: bytes
    message: bytes


ToolLine: TypeAlias = CallLine[ToolMessage, tuple[int, bytes]]


def tool_line(fd: int) -> ToolLine:
    """Return the line of ``fd`` to the tool gate (sandbox.network.tools.wire). An answer has what is said of it."""
    return CallLine(fd, Frames(_call, _cancel, _answer))


def _call(number: int, call: ToolMessage) -> bytes:
    name = call.alias.encode()
    head = wire.REQUEST.pack(number, wire.MESSAGE, len(name), len(call.headers), len(call.message))
    return head + name + call.headers + call.message


def _cancel(number: int) -> bytes:
    return wire.REQUEST.pack(number, wire.CANCEL, 0, 0, 0)


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
        said, reply = await self._line.ask(ToolMessage(found[1] or "", _headers(request), body))
        if said == wire.UNKNOWN:
            raise RefusedError(404, "path_refused", "tools.json has no server of this alias")
        if said == wire.NOTHING:
            return web.Response(status=202)
        return web.Response(status=_STATUSES[said], body=reply, content_type=_JSON)

    def _check(self, request: web.BaseRequest) -> None:
        origins = request.headers.getall("Origin", [])
        if any(one.lower() not in ORIGINS for one in origins):
            raise RefusedError(403, "frame_refused", "the origin is another page")
        if request.content_type != _JSON:
            raise RefusedError(415, "frame_refused", f"a message is {_JSON}")


def _headers(request: web.BaseRequest) -> bytes:
    """Return the headers that a revision of MCP names. The tool gate compares them with the message."""
    found: dict[str, str] = {}
    for name, value in request.headers.items():
        if (key := name.lower()).startswith("mcp-"):
            if key in found:
                raise RefusedError(400, "frame_refused", f"the header {name} is given twice")
            found[key] = value
    raw = json.dumps(found).encode()
    if len(raw) > wire.HEADER_BYTES:
        raise RefusedError(431, "frame_refused", f"headers of MCP have at most {wire.HEADER_BYTES} bytes")
    return raw
