"""Pass a host's answer to the agent, part by part as it comes, without the secrets that are in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import aiohttp
import multidict
from aiohttp import web

from sandbox.network.inject import judge, scrub
from sandbox.network.inject.judge import RequestRefusedError
from sandbox.network.inject.line import InjectEntry

JSON: Final = "application/json"
FORM: Final = "application/x-www-form-urlencoded"
_NO_BODY: Final = frozenset({204, 304})


class HostAnswer:
    """One answer on its way. ``hidden`` are the bytes that stay outside, ``group`` owns the tokens that come in it."""

    def __init__(self, tokens: scrub.TokenPlaceholders, group: str, hidden: Sequence[bytes]) -> None:
        self._tokens, self._group, self._hidden = tokens, group, hidden

    async def passed_on(
        self, request: web.BaseRequest, response: aiohttp.ClientResponse, entry: InjectEntry
    ) -> web.StreamResponse:
        """Pass it on.

        Raises:
            RequestRefusedError: the answer is none for an agent.
            ConnectionError: one of both sides is gone.
        """
        _judge(response)
        made = web.StreamResponse(
            status=response.status, reason=self._clean(response.reason or ""), headers=self._headers(response)
        )
        length = response.headers.get("Content-Length")
        if length is not None and length.isdecimal():
            made.content_length = int(length)
        elif request.method != "HEAD" and response.status not in _NO_BODY:
            made.enable_chunked_encoding()
        if response.version != (1, 1) or response.headers.get("Connection", "").strip().lower() == "close":
            made.force_close()  # and the agent is told, as it would be by the host
        await made.prepare(request)
        scrubber, reader = scrub.Scrubber(self._hidden), self._reader(response)
        try:
            async for chunk in response.content.iter_any():
                await _write(made, scrubber.feed(chunk if reader is None else reader.feed(chunk)), entry)
        except (aiohttp.ClientError, TimeoutError) as e:
            raise ConnectionResetError(str(e)) from e  # the agent's connection ends where the host's did
        rest = b"" if reader is None else reader.end()
        await _write(made, scrubber.feed(rest) + scrubber.end(), entry)
        await made.write_eof()
        entry.whole = True
        return made

    def _headers(self, response: aiohttp.ClientResponse) -> multidict.CIMultiDict[str]:
        raw = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in response.raw_headers]
        return multidict.CIMultiDict((name, self._clean(value)) for name, value in judge.passed_back(raw))

    def _clean(self, value: str) -> str:
        scrubber = scrub.Scrubber(self._hidden)
        return (scrubber.feed(value.encode("latin-1", "replace")) + scrubber.end()).decode("latin-1")

    def _reader(self, response: aiohttp.ClientResponse) -> scrub.TokenReader | None:
        kind = judge.kind_of(response.headers)
        if kind != JSON and kind != FORM and not kind.endswith("+json"):
            return None
        return scrub.TokenReader(self._hide, form=kind == FORM)

    def _hide(self, token: str, size: int) -> str:
        return self._tokens.hide(self._group, token, size)


def _judge(response: aiohttp.ClientResponse) -> None:
    if response.status < 200:
        raise RequestRefusedError(502, "host_failed", "the host asks for another protocol")
    if response.headers.get("Content-Encoding", "").strip().lower() not in ("identity", ""):
        raise RequestRefusedError(502, "answer_refused", "the host's answer is in a form that was not asked for")


async def _write(made: web.StreamResponse, data: bytes, entry: InjectEntry) -> None:
    if data:
        entry.inward += len(data)
        await made.write(data)
