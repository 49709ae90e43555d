"""The tools of a run at the service gate: MCP over streamable HTTP, one message and one reply, without sessions.

The gate reads the frame of a request and passes its body on to the tool gate, which reads the message.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import web

from sandbox.network.service.shapes import RefusedError
from sandbox.network.tools import wire

NAME: Final = "tools.covenant"
ORIGINS: Final = (f"http://{NAME}", f"http://{NAME}:80")
# Revisions whose messages are those of the tool gate (sandbox.network.tools.mcp_session).
SPOKEN: Final = frozenset({"2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"})
_PATH: Final = re.compile(r"/mcp(?:/([a-z0-9_-]{1,64}))?")
_JSON: Final = "application/json"


class ToolLine:
    """The line to the tool gate, with the requests that have no reply yet."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._waiting: dict[int, asyncio.Future[tuple[int, bytes]]] = {}
        self._next = 0
        self._task: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def start(self) -> None:
        """Begin to take replies."""
        reader, self._writer = await asyncio.open_connection(sock=self._socket)
        self._task = asyncio.create_task(self._read(reader))

    async def ask(self, alias: str, message: bytes) -> tuple[int, bytes]:
        """Return the reply to a message. A request that is given up is cancelled."""
        assert self._writer is not None
        self._next = (self._next + 1) & 0xFFFFFFFF
        number, name = self._next, alias.encode()
        reply: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = reply
        try:
            head = wire.REQUEST.pack(number, wire.MESSAGE, len(name), len(message))
            self._writer.write(head + name + message)
            await self._writer.drain()
            return await reply
        except asyncio.CancelledError:
            self._writer.write(wire.REQUEST.pack(number, wire.CANCEL, 0, 0))
            raise
        finally:
            del self._waiting[number]

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                number, said, size = wire.REPLY.unpack(await reader.readexactly(wire.REPLY.size))
                message = await reader.readexactly(size)
                waiting = self._waiting.get(number)
                if waiting is not None and not waiting.done():
                    waiting.set_result((said, message))
        except (OSError, asyncio.IncompleteReadError):
            raise SystemExit("the tool gate is gone") from None


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
        said, reply = await self._line.ask(found[1] or "", body)
        if said == wire.UNKNOWN:
            raise RefusedError(404, "path_refused", "tools.json has no stdio server of this alias")
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
