"""Speak to a host over one connection that the TLS gate made: HTTP/1.1 over TLS that is verified in full."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp
import multidict
import yarl
from aiohttp.client_proto import ResponseHandler

# A host that says nothing for so long has failed.
ANSWER_SECONDS: Final = 600
HANDSHAKE_SECONDS: Final = 30
HEADER_BYTES: Final = 64 << 10
_AUTOMATIC: Final = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")


def verifying(bundles: Sequence[str]) -> ssl.SSLContext:
    """A context that takes only certificates of these files' authorities, and offers HTTP/1.1 alone."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for one in bundles:
        if Path(one).exists():
            context.load_verify_locations(one)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


class _Watched(ResponseHandler):
    """A connection that says when it is over."""

    def __init__(self, loop: asyncio.AbstractEventLoop, over: Callable[[], None]) -> None:
        super().__init__(loop=loop)
        self._over = over

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._over()


class _OneConnection(aiohttp.BaseConnector):
    """The connection, which is made once."""

    def __init__(self, made: socket.socket, host: str, context: ssl.SSLContext, over: Callable[[], None]) -> None:
        super().__init__(limit=1, keepalive_timeout=86_400)
        self._made: socket.socket | None = made
        self._host, self._tls, self._over = host, context, over

    async def _create_connection(self, req: Any, traces: Any, timeout: Any) -> ResponseHandler:  # noqa: ASYNC109
        made, self._made = self._made, None
        if made is None:
            raise aiohttp.ClientConnectionError("the host has closed the connection")
        try:
            _, protocol = await self._loop.create_connection(
                lambda: _Watched(self._loop, self._over),
                sock=made,
                ssl=self._tls,
                server_hostname=self._host,
                ssl_handshake_timeout=HANDSHAKE_SECONDS,
            )
        except (OSError, TimeoutError) as e:
            made.close()
            raise aiohttp.ClientConnectionError(str(e)) from e
        return protocol

    def drop(self) -> None:
        """Close what no request used."""
        made, self._made = self._made, None
        if made is not None:
            made.close()


class HostClient:
    """The client of one connection. ``over`` is called when the host ends it."""

    def __init__(
        self, made: socket.socket, host: str, port: int, context: ssl.SSLContext, over: Callable[[], None]
    ) -> None:
        self._base = f"https://{host}" + ("" if port == 443 else f":{port}")
        self._connector = _OneConnection(made, host, context, over)
        self._session = aiohttp.ClientSession(
            connector=self._connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=_AUTOMATIC,
            timeout=aiohttp.ClientTimeout(total=None, sock_read=ANSWER_SECONDS),
            max_line_size=HEADER_BYTES,
            max_field_size=HEADER_BYTES,
        )

    async def send(
        self, method: str, raw_path: str, headers: Sequence[tuple[str, str]], body: bytes | AsyncIterator[bytes] | None
    ) -> aiohttp.ClientResponse:
        """Send a request. Returns the answer, whose body is not read yet.

        Raises:
            aiohttp.ClientError, TimeoutError: the host cannot be verified, or does not answer.
        """
        return await self._session.request(
            method,
            yarl.URL(self._base + raw_path, encoded=True),
            headers=multidict.CIMultiDict(headers),
            data=body,
            allow_redirects=False,
        )

    async def close(self) -> None:
        """End the connection."""
        self._connector.drop()
        await self._session.close()
