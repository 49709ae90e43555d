"""Answer ``agents.covenant`` in the service gate's process: each granted agent is an A2A server at a path of its own.

    GET  http://agents.covenant/AGENT/.well-known/agent-card.json    its card
    POST http://agents.covenant/AGENT                                JSON-RPC of version 1.0 or 0.3

A call goes on to the operator's daemon with the token that this agent has there, which never enters the sandbox. The
daemon makes a task of its mailbox of it, and holds it to the capabilities of that token.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, Final

import aiohttp
from aiohttp import web

from policy.grants.services import SENTENCES
from sandbox.network.service.a2a import messages
from sandbox.network.service.a2a.messages import AgentCall
from sandbox.network.service.book import Book
from sandbox.network.service.limits import ModelLimits
from sandbox.network.service.shapes import RefusedError
from sandbox.network.service.upstream import ProviderClient

NAME: Final = "agents.covenant"
CALLS_PER_MINUTE: Final = 600
BODY_BYTES: Final = 1 << 20
_CARD_BYTES: Final = 1 << 20
_PATH: Final = re.compile(r"/([A-Za-z0-9_-][A-Za-z0-9_.-]{0,127})(?:/(\.well-known/agent-card\.json)?)?")
_JSON: Final = "application/json"
_STREAM: Final = "text/event-stream"
_PASSED_ON: Final = ("A2A-Version", "Last-Event-ID")
_VALUE: Final = re.compile(r"[\x20-\x7e]{1,64}")


class AgentEndpoint:
    """Answers the calls of one agent to others."""

    def __init__(
        self,
        granted: Collection[str],
        upstreams: Collection[ProviderClient],
        book: Book,
        body: Callable[[web.BaseRequest], Awaitable[bytes]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.denied: Callable[[str, str], None] = lambda target, code: None
        self._granted, self._book, self._body = frozenset(granted), book, body
        self._upstream = next((one for one in upstreams if one.peer.kind == "a2a"), None)
        self._limits = ModelLimits(CALLS_PER_MINUTE, None, clock=clock)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request, whose frame was looked at."""
        call: AgentCall | None = None
        try:
            agent, is_card = self._place(request)
            if is_card:
                return await self._card(request, agent)
            if request.content_type != _JSON or "Origin" in request.headers:
                raise RefusedError(415, "frame_refused", f"a call is {_JSON}, and of no page")
            body = await self._body(request)
            if len(body) > BODY_BYTES:
                raise RefusedError(413, "frame_refused", f"a call has at most {BODY_BYTES} bytes")
            call = messages.read(body)
            return await self._pass_on(request, agent, call)
        except RefusedError as e:
            self.denied(f"{request.method[:16]} {request.path[:200]}: {e.message}"[:400], e.code)
            retry = {} if e.retry_seconds is None else {"Retry-After": str(e.retry_seconds)}
            said = messages.refusal(e, None if call is None else call.number)
            refused = web.Response(status=messages.status(e), body=said, content_type=_JSON, headers=retry)
            if e.code == "frame_refused":
                refused.force_close()
            return refused

    def _place(self, request: web.BaseRequest) -> tuple[str, bool]:
        """The agent that a request is for, and whether its card is asked for."""
        found = _PATH.fullmatch(request.raw_path)
        if found is None or request.method != ("GET" if found[2] else "POST"):
            raise RefusedError(404, "path_refused", f"agents are at POST /AGENT and GET /AGENT/{messages.WELL_KNOWN}")
        if found[1] not in self._granted:
            raise RefusedError(403, "agent_not_granted", SENTENCES["agent_not_granted"].format(found[1]))
        return found[1], found[2] is not None

    async def _card(self, request: web.BaseRequest, agent: str) -> web.Response:
        response, end = await self._asked(request, agent, AgentCall(None, messages.CARD, b""))
        size, body = 0, bytearray()
        try:
            async with response:
                async for part in response.content.iter_any():
                    size += len(part)
                    body += part
                    if size > _CARD_BYTES:
                        raise ValueError(f"a card has at most {_CARD_BYTES} bytes")
            if response.status != 200:
                raise RefusedError(502, "provider_failed", f"there is no card, and the status {response.status}")
            said = messages.card(bytes(body), f"http://{NAME}/{agent}")
            return web.Response(body=said, content_type=_JSON)
        except (aiohttp.ClientError, TimeoutError, ValueError) as e:
            raise RefusedError(502, "provider_failed", "the daemon's answer is no card") from e
        finally:
            end(response.status, size)

    async def _pass_on(self, request: web.BaseRequest, agent: str, call: AgentCall) -> web.StreamResponse:
        response, end = await self._asked(request, agent, call)
        size, answer = 0, web.StreamResponse(status=response.status, headers=_headers(response))
        try:
            async with response:
                await answer.prepare(request)
                async for part in response.content.iter_any():
                    size += len(part)
                    await answer.write(part)
            await answer.write_eof()
            return answer
        except (aiohttp.ClientError, TimeoutError) as e:
            raise ConnectionResetError(str(e)) from e  # the agent's connection ends where the daemon's did
        finally:
            end(response.status, size)

    async def _asked(
        self, request: web.BaseRequest, agent: str, call: AgentCall
    ) -> tuple[aiohttp.ClientResponse, Callable[[int, int], None]]:
        """Ask the daemon. Returns its answer, whose body is not read yet, and a function that ends the call's row."""
        await self._limits.begin(None)
        if self._upstream is None:
            raise RefusedError(502, "no_provider", "the operator names no server of agents")
        entry = self._book.begin_agent(agent, call.method, hashlib.sha256(call.message).hexdigest())
        status = 0
        try:
            headers = {name: _one(request.headers, name) for name in _PASSED_ON if name in request.headers}
            path = f"/a2a/agents/{agent}" + (f"/{messages.WELL_KNOWN}" if call.method == messages.CARD else "")
            response = await self._upstream.ask_agent(path, headers, call.message)
            status = response.status
            if status == 401:
                response.close()
                raise RefusedError(502, "key_refused", "the daemon refused the token of this agent")
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as e:
            self._book.end_agent(entry, 0, 0)
            raise RefusedError(502, "no_provider", "the daemon does not answer") from e
        except BaseException:
            self._book.end_agent(entry, status, 0)
            raise
        return response, lambda said, size: self._book.end_agent(entry, said, size)


def _one(headers: Mapping[str, Any], name: str) -> str:
    value = str(headers[name])
    if not _VALUE.fullmatch(value):
        raise RefusedError(400, "frame_refused", f"the header {name} is not taken")
    return value


def _headers(response: aiohttp.ClientResponse) -> dict[str, str]:
    kind = _STREAM if response.content_type == _STREAM else _JSON
    retry = {name: response.headers[name] for name in ("Retry-After",) if name in response.headers}
    return {"Content-Type": kind, "Cache-Control": "no-cache", **retry}
