"""`POST /a2a/peer-tasks`: tasks of other hosts, by signed envelopes instead of tokens.

The bounds come before the body: each envelope costs a check of a signature and a row of the log, and its sender is not
known until then. The response says accepted or rejected, and not why.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import anyio
from aiohttp import web

from covenant.handlers.mailbox import cross_host
from covenant.handlers.server import Server
from covenant.wire import cross_host as envelopes
from policy import errors

PER_SECOND: Final = 20.0
BURST: Final = 100.0


class PeerTasks:
    """The route of one daemon, with its token bucket."""

    def __init__(self, server: Server, body: Callable[[web.Request], Awaitable[bytes]]) -> None:
        self._server, self._body = server, body
        self._left, self._at = BURST, 0.0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Take an envelope.

        Raises:
            errors.HttpRefusedError: no other host is known (503), the body is too large (413), or too many came (429).
            errors.MalformedRequestError: it is no envelope.
        """
        hosts = self._server.other_hosts
        if hosts is None:
            # The body is not read: there is no key that could verify another host's envelope.
            raise errors.HttpRefusedError(
                "tasks of other hosts are not taken by this daemon",
                hint="write known-hosts.toml (docs/a2a.md), and restart covenantd",
                status=503,
            )
        if request.content_length is None or request.content_length > envelopes.BODY_BYTES:
            raise errors.HttpRefusedError("an envelope has a length, and 64 KiB at most", status=413)
        if not self._take():
            raise errors.HttpRefusedError("too many envelopes came", hint="wait a second", status=429)
        envelope = envelopes.read(await self._body(request))
        if await cross_host.admit(self._server, hosts, envelope):
            return web.json_response(envelopes.ACCEPTED, status=202)
        return web.json_response(envelopes.REJECTED, status=403)

    def _take(self) -> bool:
        now = anyio.current_time()
        self._left = min(BURST, self._left + (now - self._at) * PER_SECOND) if self._at else BURST
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True
