"""Pass a provider's answer to the agent: a stream part by part as it comes, another answer whole."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Final

import aiohttp
from aiohttp import web

from sandbox.network.service import mock
from sandbox.network.service.shapes import ModelCall, RefusedError
from sandbox.network.service.upstream import ProviderClient, passed_back
from sandbox.network.service.usage import BYTES_PER_TOKEN, StreamReader, TokenCount

ANSWER_BYTES: Final = 32 << 20
_STREAMS: Final = ("text/event-stream", "application/x-ndjson", "application/jsonl")


class AnswerRelay:
    """One answer on its way. ``status`` is the provider's, 0 before it answered; ``started`` once the agent has
    a part of it, ``whole`` once it has all."""

    def __init__(self, request: web.BaseRequest, call: ModelCall, *, asked_bytes: int, strip: bool) -> None:
        self._request, self._call, self._asked, self._strip = request, call, asked_bytes, strip
        self._count = TokenCount(call.route.shape)
        self._sent = 0
        self.status, self.started, self.whole = 0, False, False

    @property
    def tokens(self) -> tuple[int, int, bool]:
        """Tokens in and out, and whether the provider counted them: where not, they are guessed from the bytes."""
        if self._count.known or self.status not in (0, 200) or self._call.route.operation in ("count", "version"):
            return self._count.input, self._count.output, self._count.known
        return self._asked // BYTES_PER_TOKEN, self._sent // BYTES_PER_TOKEN, False

    async def answer(self, upstream: ProviderClient, response: aiohttp.ClientResponse | None) -> web.StreamResponse:
        """Pass it on; None is the answer of the mock.

        Raises:
            RefusedError: the provider's answer is none for an agent.
            aiohttp.ClientError, TimeoutError, ConnectionError: one of both sides is gone.
        """
        if response is None:
            self.status = 200
            kind, parts = mock.answer(self._call)
            if self._call.stream:
                return await self._streamed(kind, {}, _Parts(parts))
            return await self._at_once(kind, parts[0])
        self.status = response.status
        try:
            self._judge(response)
            kind = response.content_type
            if kind in _STREAMS and response.status == 200:
                return await self._streamed(kind, passed_back(response.headers), response.content)
            return await self._at_once(kind, await self._all(response), response, upstream.peer.key)
        finally:
            response.close() if not self.whole else response.release()

    def _judge(self, response: aiohttp.ClientResponse) -> None:
        if response.status in (401, 403):
            # Its words may quote a part of the key.
            raise RefusedError(502, "key_refused", "the provider refused the operator's key")
        if 300 <= response.status < 400:
            raise RefusedError(502, "provider_failed", "the provider answers with another address")
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise RefusedError(502, "provider_failed", "the provider answers in a form that was not asked for")

    async def _all(self, response: aiohttp.ClientResponse) -> bytes:
        data = bytearray()
        async for chunk in response.content.iter_any():
            data += chunk
            if len(data) > ANSWER_BYTES:
                raise RefusedError(502, "provider_failed", f"the answer has over {ANSWER_BYTES} bytes")
        return bytes(data)

    async def _at_once(
        self, kind: str, body: bytes, response: aiohttp.ClientResponse | None = None, key: str = ""
    ) -> web.StreamResponse:
        with contextlib.suppress(ValueError, RecursionError):
            self._count.take(json.loads(body.decode()))
        if key:
            body = body.replace(key.encode(), b"")
        self._sent = len(body)
        headers = {} if response is None else passed_back(response.headers)
        headers.pop("Content-Type", None)
        made = web.Response(status=self.status, body=body, headers={"Content-Type": kind, **headers})
        self.started = True
        await made.prepare(self._request)
        await made.write_eof()
        self.whole = True
        return made

    async def _streamed(
        self, kind: str, headers: dict[str, str], content: aiohttp.StreamReader | _Parts
    ) -> web.StreamResponse:
        made = web.StreamResponse(status=200, headers={"Cache-Control": "no-cache", **headers, "Content-Type": kind})
        self.started = True
        await made.prepare(self._request)
        reader = StreamReader(self._count, strip=self._strip)
        async for chunk in content.iter_any():
            self._sent += len(chunk)
            if passed := reader.feed(chunk):
                await made.write(passed)
        if passed := reader.end():
            await made.write(passed)
        await made.write_eof()
        self.whole = True
        return made


class _Parts:
    """The mock's answer as a stream."""

    def __init__(self, parts: list[bytes]) -> None:
        self._parts = parts

    async def iter_any(self) -> AsyncIterator[bytes]:
        """Its parts, one at a time."""
        for part in self._parts:
            await asyncio.sleep(0)
            yield part
