"""The error documents of the gateway: one JSON shape for refusals of the daemon and of the HTTP server below it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

from aiohttp import web

from covenant.wire import responses
from policy import errors

JSON: Final = "application/json"
# A response must not reach another page or a cache, nor be type-sniffed, nor name its server software.
ALWAYS: Final[Mapping[str, str]] = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Server": "covenantd",
    "X-Content-Type-Options": "nosniff",
}


def refusal(status: int, error: errors.CovenantError) -> web.Response:
    """Return the response of a refused request, which ends its connection."""
    response = web.Response(status=status, body=responses.Error.of(error).to_bytes(), content_type=JSON)
    # The unread rest of a refused request must not be read as the next one.
    response.force_close()
    return response


def fault(message: str) -> web.Response:
    """Return version 1's response of a failed daemon."""
    return web.Response(status=500, body=json.dumps({"error": message}).encode(), content_type=JSON)


class Protocol(web.RequestHandler):
    """aiohttp's protocol of one connection, with JSON documents for the errors that no handler sees.

    aiohttp answers unreadable heads and unknown expectations itself, in plain text that quotes the request. The
    request may contain a token, so the document does not quote it.
    """

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Replace a response of aiohttp's own; the gateway prepares each of its responses itself."""
        if not resp.prepared:
            resp = _own(resp.status)
        return await super().finish_response(request, resp, start_time)


def protocol(server: web.Server, **how: Any) -> asyncio.Protocol:
    """Return the protocol of a new connection. ``how`` are the arguments of aiohttp's protocol."""
    return Protocol(server, loop=asyncio.get_running_loop(), **how)


def _own(status: int) -> web.Response:
    if status == HTTPStatus.BAD_REQUEST:
        error = errors.HttpRefusedError("this is no request of HTTP/1.1", hint="send one as RFC 9112 has it")
    elif status == HTTPStatus.EXPECTATION_FAILED:
        error = errors.HttpRefusedError("the header Expect is not understood", hint="send none, or `100-continue`")
    else:
        error = errors.HttpRefusedError(HTTPStatus(status).phrase.lower())
    internal = status == HTTPStatus.INTERNAL_SERVER_ERROR
    response = fault("the daemon failed at this; its log has more") if internal else refusal(status, error)
    response.force_close()
    response.headers.update(ALWAYS)
    return response
