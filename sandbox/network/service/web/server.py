"""Answer ``search.covenant`` and ``fetch.covenant`` in the service gate's process.

GET http://search.covenant/search?q=WORDS&count=N   -> {"results": [{"title", "url", "snippet"}, ...]}
GET http://fetch.covenant/fetch?url=https://HOST/... -> the page's text; its last URL is in Content-Location
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import aiohttp
import yarl
from aiohttp import web

from policy.grants.services import SENTENCES, WEB_LIMITS, WebSet
from sandbox.network.gate.main import GateInput
from sandbox.network.service.book import Book
from sandbox.network.service.limits import CreditLimit, ModelLimits
from sandbox.network.service.shapes import RefusedError
from sandbox.network.service.upstream import Connector, ProviderClient
from sandbox.network.service.web import pages, search

SEARCH, FETCH = "search.covenant", "fetch.covenant"
NAMES: Final = frozenset({SEARCH, FETCH})
_PATHS: Final = {SEARCH: "/search", FETCH: "/fetch"}
_ANSWER_BYTES: Final = 4 << 20
_SEARCH_SECONDS: Final = 60


class WebServer:
    """Searches and fetches of one agent."""

    def __init__(
        self,
        gate: GateInput,
        connector: Connector,
        upstreams: Mapping[str, ProviderClient],
        book: Book,
        credits_: CreditLimit,
    ) -> None:
        plan: Mapping[str, Any] = gate.plan.get("web") or WebSet().canonical()
        self.denied: Callable[[str, str], None] = lambda target, code: None
        self._granted = WebSet.of(plan["search"], plan["fetch"], *(plan[name] for name in WEB_LIMITS))
        self._upstreams = [one for name, one in upstreams.items() if name in self._granted.search]
        self._book, self._credits = book, credits_
        self._searches = ModelLimits(plan["searches_per_minute"], None, clock=time.monotonic)
        self._fetches = ModelLimits(plan["fetches_per_minute"], None, clock=time.monotonic)
        self._pages: pages.PageClient | None = None
        if self._granted.fetch:
            places = {host: pages.PagePlace(**one) for host, one in gate.plan["pages"].items()}
            self._pages = pages.PageClient(connector, places, str(gate.plan["system_ca"]))
            self._reader = pages.PageReader(socket.socket(fileno=gate.fds["reader"]))

    async def answer(self, name: str, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request to one of the two names.

        Raises:
            RefusedError: it is not granted, over a limit, or no provider answers it.
        """
        if request.method != "GET" or request.raw_path.partition("?")[0] != _PATHS[name]:
            raise RefusedError(404, "path_refused", f"{name} answers to GET {_PATHS[name]}")
        if request.can_read_body:
            raise RefusedError(400, "frame_refused", "the request has a body")
        query = request.query
        if any(len(query.getall(one)) > 1 for one in query):
            raise RefusedError(400, "malformed", "a parameter is there twice")
        if name == SEARCH:
            return await self._search(dict(query))
        return await self._fetch(dict(query))

    # --- searches -------------------------------------------------------------------------------------------

    async def _search(self, query: dict[str, str]) -> web.Response:
        asked = search.question(query, self._granted.max_results)
        if not self._upstreams:
            raise RefusedError(403, "search_not_granted", "no provider of searches is granted")
        await self._searches.begin(None)
        status = 0
        for upstream in self._upstreams:
            status, found = await self._one(upstream, asked)
            if found is not None:
                return web.Response(body=json.dumps({"results": found}).encode(), content_type="application/json")
            self.denied(f"provider {upstream.peer.name}: status {status}", "provider_failed")
        if status in (401, 403):
            raise RefusedError(502, "key_refused", "the provider refused the operator's key")
        raise RefusedError(502, "no_provider", f"no provider of searches answers (the last: status {status})")

    async def _one(self, upstream: ProviderClient, asked: search.Question) -> tuple[int, list[dict[str, str]] | None]:
        """Ask one provider. Returns its status, and its results if it has given any answer that is one."""
        held = await self._credits.begin(upstream.peer.request_price)
        entry = self._book.begin_web("search", upstream.peer.name)
        found: list[dict[str, str]] | None = None
        status, body = 0, b""
        try:
            if upstream.peer.kind == "mock":
                status, found = 200, search.mock(asked)
            else:
                status, body = await self._asked(upstream, asked)
                if status == 200:
                    found = search.results(upstream.peer.kind, body, asked.count)
        except RefusedError:
            return status, None
        finally:
            self._book.end_web(entry, status, len(found or ()), len(body))
            await self._credits.end(held, upstream.peer.request_price if status == 200 else 0)
        return status, found

    async def _asked(self, upstream: ProviderClient, asked: search.Question) -> tuple[int, bytes]:
        """Status and body of a provider's answer: 0 where there is none."""
        call = search.call(upstream.peer.kind, asked, upstream.peer.key)
        try:
            async with asyncio.timeout(min(_SEARCH_SECONDS, upstream.peer.timeout_seconds)):
                return await upstream.get(call.path, call.parameters, call.headers, _ANSWER_BYTES)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return 0, b""

    # --- pages ----------------------------------------------------------------------------------------------

    async def _fetch(self, query: dict[str, str]) -> web.Response:
        if set(query) != {"url"}:
            raise RefusedError(400, "malformed", "a fetch has the parameter url")
        url = pages.address(query["url"])
        client = self._pages
        if client is None or not self._may(str(url.host)):
            raise RefusedError(403, "host_not_granted", SENTENCES["host_not_granted"].format(url.host))
        await self._fetches.begin(None)
        try:
            async with asyncio.timeout(pages.SECONDS):
                page = await self._followed(client, url)
                text = page.body
                if page.kind in ("text/html", "application/xhtml+xml"):
                    text = await self._reader.text(page.body)
        except TimeoutError as e:
            raise RefusedError(504, "provider_failed", f"the page took over {pages.SECONDS} s") from e
        if not 200 <= page.status < 300 and page.status not in (404, 410):
            raise RefusedError(502, "provider_failed", f"{url.host} answers with status {page.status}")
        headers = {"Content-Type": "text/plain; charset=utf-8", "Content-Location": page.url}
        return web.Response(status=page.status if page.status > 299 else 200, body=text, headers=headers)

    def _may(self, host: str) -> bool:
        return pages.is_name(host) and self._granted.holds(host)

    async def _followed(self, client: pages.PageClient, url: yarl.URL) -> pages.FetchedPage:
        for _ in range(pages.REDIRECTS + 1):
            entry = self._book.begin_web("fetch", str(url.host))
            status, size = 0, 0
            try:
                page, location = await client.get(url)
                status, size = page.status, len(page.body)
            finally:
                self._book.end_web(entry, status, 0, size)
            if not location:
                return page
            url = pages.following(url, location, self._may)
        raise RefusedError(502, "provider_failed", f"the page redirects over {pages.REDIRECTS} times")
