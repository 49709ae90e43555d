"""Pages by https from the gate's process, which can open no connection itself: the connector resolves and connects.

The connector refuses names that are not granted and addresses that are not public. Redirects are followed here, to
granted hosts alone.
"""

from __future__ import annotations

import asyncio
import codecs
import re
import socket
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import aiohttp
import yarl
from aiohttp.client_proto import ResponseHandler
from msgspec import Struct

from sandbox.network.gate.sealed_reader import SealedReader
from sandbox.network.service import connector_wire
from sandbox.network.service.shapes import RefusedError
from sandbox.network.service.upstream import Connector
from sandbox.network.service.web import reader

SECONDS: Final = 30
_CONNECT_SECONDS: Final = 15
_READ_SECONDS: Final = 10
REDIRECTS: Final = 5
URL_CHARACTERS: Final = 2048
_HTML: Final = frozenset({"text/html", "application/xhtml+xml"})
_TEXT: Final = frozenset({"application/json", "application/xml", "application/yaml", "application/toml"})
# Looked up here: a codec is a module, and the sealed gate can open none. Others can take long for their text.
_CHARSETS: Final = frozenset({
    "utf-8", "utf8", "us-ascii", "ascii", "iso-8859-1", "latin-1", "latin1", "iso-8859-2", "iso-8859-15",
    "windows-1250", "windows-1251", "windows-1252", "koi8-r", "shift_jis", "euc-jp", "euc-kr", "gb2312", "gbk",
    "gb18030", "big5", "utf-16",
})  # fmt: skip
_CODECS: Final = [codecs.lookup(name) for name in sorted(_CHARSETS)]
_HOST: Final = re.compile(r"[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})+")
_MOVED: Final = frozenset({301, 302, 303, 307, 308})
MOCK: Final = (
    "<html><head><title>Mock page</title><script>ignored()</script></head><body><h1>About {path}</h1>"
    "<p>This page of {host} is a mock: it has no other content.</p></body></html>"
)


class PagePlace(Struct, frozen=True):
    """The operator's word about one host: a file of certificates, or that its pages are mocks."""

    ca: str = ""
    mock: bool = False


class FetchedPage(Struct, frozen=True):
    """A page that was read. ``size`` is in bytes, as the host sent it."""

    url: str
    status: int
    kind: str
    body: bytes


def address(text: str) -> yarl.URL:
    """Return the URL of a page without its fragment.

    Raises:
        RefusedError: it is no plain https URL of a name.
    """
    if not 1 <= len(text) <= URL_CHARACTERS or not text.isascii() or not text.isprintable() or " " in text:
        raise RefusedError(400, "malformed", f"url is a URL of at most {URL_CHARACTERS} ASCII characters")
    try:
        url = yarl.URL(text, encoded=True).with_fragment(None)
        host, port = url.host or "", url.port
    except ValueError as e:
        raise RefusedError(400, "malformed", "url is no URL") from e
    if url.scheme != "https" or port != 443 or url.user is not None or url.password is not None:
        raise RefusedError(400, "malformed", "url must be https://HOST/..., at port 443 and without a user")
    if not host or "\\" in text or "@" in url.authority:
        raise RefusedError(400, "malformed", "url has no host, or one that can be read in two ways")
    return url


def is_name(host: str | None) -> bool:
    """Whether a host is a name that can be granted and looked up."""
    return host is not None and len(host) <= connector_wire.NAME_BYTES and _HOST.fullmatch(host) is not None


class _Hosts(aiohttp.BaseConnector):
    """Connections to hosts by name, each made by the connector's process."""

    def __init__(self, line: Connector, contexts: Mapping[str, ssl.SSLContext], system: ssl.SSLContext) -> None:
        super().__init__(limit=0, limit_per_host=0, force_close=True)
        self._line, self._contexts, self._system = line, contexts, system

    async def _create_connection(self, req: Any, traces: Any, timeout: Any) -> ResponseHandler:  # noqa: ASYNC109
        host = str(req.url.host)
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                made = await self._line.connect(connector_wire.BY_NAME, host)
                context = self._contexts.get(host, self._system)
                _, protocol = await self._loop.create_connection(
                    self._factory, sock=made, ssl=context, server_hostname=host
                )
        except PermissionError:
            raise
        except (OSError, TimeoutError) as e:
            raise aiohttp.ClientConnectionError(str(e)) from e
        return protocol


class PageClient:
    """Gets pages. Made before the gate is sealed: it opens files of certificates."""

    def __init__(self, line: Connector, places: Mapping[str, PagePlace], system_ca: str) -> None:
        self._places = places
        contexts = {host: ssl.create_default_context(cafile=place.ca) for host, place in places.items() if place.ca}
        system = ssl.create_default_context(cafile=system_ca if Path(system_ca).exists() else None)
        self._session = aiohttp.ClientSession(
            connector=_Hosts(line, contexts, system),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept-Encoding"),
            timeout=aiohttp.ClientTimeout(total=None, sock_read=_READ_SECONDS),
        )

    async def get(self, url: yarl.URL) -> tuple[FetchedPage, str]:
        """Return the page at a URL, and where it redirects to: empty where it does not.

        Raises:
            RefusedError: the host does not answer, or not with text.
        """
        place = self._places.get(url.host or "", PagePlace())
        if place.mock:
            return FetchedPage(
                str(url), 200, "text/html", MOCK.format(host=url.host, path=_escaped(url.path)).encode()
            ), ""
        headers = {"Accept": "text/html, text/*;q=0.9, application/json;q=0.8", "Accept-Encoding": "identity"}
        headers["User-Agent"] = "covenant"
        try:
            async with self._session.get(url, headers=headers, allow_redirects=False) as response:
                if response.status in _MOVED:
                    return FetchedPage(str(url), response.status, "", b""), response.headers.get("Location", "")
                return await _read(url, response), ""
        except PermissionError as e:
            raise RefusedError(403, "address_refused", f"{url.host} has no public address") from e
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as e:
            raise RefusedError(502, "provider_failed", f"{url.host} does not answer") from e


async def _read(url: yarl.URL, response: aiohttp.ClientResponse) -> FetchedPage:
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise RefusedError(502, "provider_failed", "the page comes in a form that was not asked for")
    kind = response.content_type
    if kind not in _HTML | _TEXT and not kind.startswith("text/"):
        raise RefusedError(502, "content_refused", "the page is no text")
    data = bytearray()
    async for chunk in response.content.iter_any():
        data += chunk
        if len(data) > reader.PAGE_BYTES:
            raise RefusedError(502, "content_refused", f"the page has over {reader.PAGE_BYTES} bytes")
    charset = (response.charset or "utf-8").lower()
    if charset not in _CHARSETS:
        raise RefusedError(502, "content_refused", "the page has an unknown charset")
    body = bytes(data) if charset in ("utf-8", "utf8") else bytes(data).decode(charset, "replace").encode()
    return FetchedPage(str(url), response.status, kind, body)


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")


class PageReader:
    """Asks the sealed reader of pages."""

    def __init__(self, line: socket.socket) -> None:
        self._reader = SealedReader(
            line, name="pages", request="page", max_bytes=reader.TEXT_BYTES, timeout_seconds=_READ_SECONDS
        )

    async def text(self, page: bytes) -> bytes:
        """Return the text of an HTML page.

        Raises:
            RefusedError: the reader does not answer in time.
        """
        try:
            return await self._reader.ask(page)
        except TimeoutError as e:
            raise RefusedError(503, "provider_failed", str(e)) from e


Moved = Callable[[str], bool]


def following(url: yarl.URL, location: str, granted: Moved) -> yarl.URL:
    """Return the URL that a redirect leads to.

    Raises:
        RefusedError: it leads to a host that is not granted, or to no page.
    """
    try:
        joined = str(url.join(yarl.URL(location, encoded=True)))
    except ValueError as e:
        raise RefusedError(502, "provider_failed", "the page redirects to no URL") from e
    try:
        found = address(joined)
    except RefusedError as e:
        raise RefusedError(502, "host_not_granted", "the page redirects to what is no https URL") from e
    if not granted(str(found.host)):
        raise RefusedError(403, "host_not_granted", "the page redirects to a host that is not granted")
    return found
