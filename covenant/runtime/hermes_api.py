"""A client of the published Hermes API: start, query, follow, stop and approve runs over HTTP.

The server is not trusted: no redirect is followed, no environment setting is used, every request is limited to 30
seconds and every response in size. Its text is data; it is cut to a limit before it is shown or stored.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import urlsplit

import aiohttp

from policy import contract, errors, json_bounds

REQUEST_SECONDS: Final = 30.0
# The API sends keep-alives more often than this; a stream that is silent for longer is broken.
_SILENT_SECONDS: Final = 120.0
# A response of 4 MiB in which every character is an escape, plus the fields around it.
_ANSWER_BYTES: Final = 6 * contract.RESULT_BYTES + (1 << 16)
_EVENT_BYTES: Final = 1 << 20
_WORDS: Final = 300
# Ids of runs are part of URL paths, and come from the API.
_RUN_ID: Final = re.compile(r"[A-Za-z0-9_.-]{1,200}\Z")
NEEDED: Final = ("run_submission", "run_events_sse", "run_stop")


class HermesApi:
    """One API; use as an async context manager. ``base_url`` already ends in ``/v1``."""

    def __init__(self, base_url: str, key: str | None) -> None:
        """Check the address.

        Raises:
            errors.SettingError: runs cannot be sent to the address.
        """
        self._base = _checked(base_url)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            headers=self._headers, trust_env=False, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def missing(self) -> tuple[str, ...]:
        """Return the features that the API lacks and a run needs.

        Raises:
            errors.HermesError: it does not list its features.
        """
        features = (await self._json("GET", "/capabilities")).get("features")
        if not isinstance(features, Mapping):
            raise errors.HermesError("the Hermes API does not say what it can do", hint="hermes-agent 0.12 or later")
        return tuple(name for name in NEEDED if features.get(name) is not True)

    async def start(self, text: str, *, intent_id: str) -> str:
        """Start a run and return its id. The same intent twice is one run (`Idempotency-Key`)."""
        document = {"input": text, "session_id": f"covenant-{intent_id}"}
        answer = await self._json("POST", "/runs", document, headers={"Idempotency-Key": intent_id})
        run_id = answer.get("run_id")
        if not isinstance(run_id, str) or not _RUN_ID.match(run_id) or not run_id.strip("."):
            raise errors.HermesError("the Hermes API started a run without an id")
        return run_id

    async def status(self, run_id: str) -> dict[str, Any]:
        """Return the current status of the run."""
        return await self._json("GET", f"/runs/{run_id}")

    async def stop(self, run_id: str) -> None:
        """Ask the run to stop at its next safe point."""
        await self._json("POST", f"/runs/{run_id}/stop", {})

    async def approve(self, run_id: str, choice: str, request_id: str | None = None) -> int:
        """Answer a waiting approval. Returns the number of requests that this resolved."""
        document = {"choice": choice, **({} if request_id is None else {"request_id": request_id})}
        resolved = (await self._json("POST", f"/runs/{run_id}/approval", document)).get("resolved", 0)
        return resolved if type(resolved) is int and resolved >= 0 else 0

    async def events(self, run_id: str) -> AsyncIterator[dict[str, Any]]:
        """Yield the events of the run until its stream ends.

        Raises:
            errors.HermesError: the stream cannot be opened, breaks off, or is no stream of events.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=REQUEST_SECONDS, sock_read=_SILENT_SECONDS)
        try:
            async with self._open().request(
                "GET",
                f"{self._base}/runs/{run_id}/events",
                headers={"Accept": "text/event-stream"},
                allow_redirects=False,
                timeout=timeout,
            ) as response:
                _check_status(response)
                async for event in _events(response.content):
                    yield event
        except (aiohttp.ClientError, TimeoutError, OSError) as e:
            raise errors.HermesError(f"the events of a run break off: {_said(e)}", where=self._base) from e

    async def _json(
        self,
        method: str,
        path: str,
        document: Mapping[str, Any] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        try:
            async with self._open().request(
                method,
                self._base + path,
                json=document,
                headers=headers,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=REQUEST_SECONDS),
            ) as response:
                _check_status(response)
                raw = await _bounded(response.content)
        except (aiohttp.ClientError, TimeoutError, OSError) as e:
            raise errors.HermesError(f"the Hermes API does not answer: {_said(e)}", where=self._base) from e
        return json_object(raw)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise errors.HermesError("the Hermes API is closed")
        return self._session


def shown(value: Any) -> str:
    """Return text of the API, cut to the limit of a message or a row; empty if it is no text."""
    return value[:_WORDS] if isinstance(value, str) else ""


def _checked(base_url: str) -> str:
    try:
        parts = urlsplit(base_url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        usable = usable and not (parts.username or parts.password or parts.query or parts.fragment)
    except ValueError:
        usable = False
    if not usable:
        raise errors.SettingError(
            "HERMES_API_BASE_URL is no http or https address without user, query and fragment",
            hint="such as http://127.0.0.1:8642/v1",
        )
    return base_url.rstrip("/")


def _check_status(response: aiohttp.ClientResponse) -> None:
    if not 200 <= response.status < 300:
        # The body may be long, and its author is unknown.
        raise errors.HermesError(f"the Hermes API answered with status {response.status}", status=response.status)


def _said(error: BaseException) -> str:
    return "no answer in time" if isinstance(error, TimeoutError) else shown(str(error)) or type(error).__name__


async def _bounded(content: aiohttp.StreamReader) -> bytes:
    raw = bytearray()
    async for part in content.iter_any():
        raw += part
        if len(raw) > _ANSWER_BYTES:
            raise errors.HermesError(f"the Hermes API answered with more than {_ANSWER_BYTES} bytes")
    return bytes(raw)


def json_object(raw: bytes) -> dict[str, Any]:
    """Return the JSON object in the bytes.

    Raises:
        errors.HermesError: the bytes hold no object, or too many values.
    """
    # Parsing blocks the daemon's loop, for a time that depends on the number of values, not of bytes.
    if json_bounds.exceeds(raw, json_bounds.DOCUMENT_VALUES):
        raise errors.HermesError(f"the Hermes API answered with more than {json_bounds.DOCUMENT_VALUES} values")
    try:
        value = json.loads(raw)
        # A lone surrogate survives parsing as an escape, but could not be encoded later.
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise errors.HermesError("the Hermes API answered with something that is no JSON object")
    return value


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """Yield the objects of a stream of server-sent events (HTML, section 9.2): `data` lines up to an empty one."""
    data: list[bytes] = []
    size = 0
    async for line in _lines(content):
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
            size += len(line)
            if size > _EVENT_BYTES:
                raise errors.HermesError(f"an event of a run has more than {_EVENT_BYTES} bytes")
        elif not line and data:
            yield json_object(b"\n".join(data))
            data, size = [], 0


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    rest = b""
    async for part in content.iter_any():
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            yield line.removesuffix(b"\r")
        if len(rest) > _EVENT_BYTES:
            raise errors.HermesError(f"a line of a run's events has more than {_EVENT_BYTES} bytes")
