"""Attacks by a client that can reach the port, as the bytes that it sends; each is beside a request that passes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from covenant.adapters.http.gateway import HttpGateway
from covenant.adapters.http.streams import Pace
from covenant.handlers.caller import Caller
from covenant.handlers.server import Server
from covenant.wire import requests, responses
from tests import http_kit
from tests.http_kit import TOKEN, head, raw, statuses

pytestmark = pytest.mark.anyio

JSON = "Content-Type: application/json"
ASK = b'{"text": "t"}'


@pytest.fixture
async def gateway(tmp_path: Path, echo: http_kit.Echo) -> AsyncIterator[HttpGateway]:
    server = http_kit.server(tmp_path, echo)
    pace = Pace(write_seconds=2.0, idle_seconds=0.1)
    async with http_kit.serving(server, streams_of_one=4, head_seconds=3.0, pace=pace) as one:
        yield one


async def alive(gateway: HttpGateway) -> bool:
    """Whether the gateway answers another client."""
    return statuses(await raw(gateway, head(gateway, "GET /tools HTTP/1.1", "Connection: close"))) == [200]


async def until(done: Callable[[], bool]) -> None:
    """Poll until `done`, for conditions that send no notification."""
    with anyio.fail_after(60):
        while not done():  # noqa: ASYNC110
            await anyio.sleep(0.02)


def post(gateway: HttpGateway, *headers: str, body: bytes = ASK, token: str | None = TOKEN) -> bytes:
    return head(gateway, "POST /intent HTTP/1.1", *headers, "Connection: close", token=token) + body


# A browser that was lured ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8421", "127.0.0.1", "127.0.0.1:1", "localhost"])
async def test_name_that_was_bound_to_this_machine_is_not_its_name(
    gateway: HttpGateway, echo: http_kit.Echo, host: str
) -> None:
    data = f"GET /tools HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
    assert statuses(await raw(gateway, data)) == [421]
    assert echo.asked == []
    assert await alive(gateway)


async def test_page_of_another_origin_does_nothing(gateway: HttpGateway, echo: http_kit.Echo) -> None:
    plain = "Content-Type: text/plain"
    length = f"Content-Length: {len(ASK)}"
    for headers, status in (
        ((plain, length, "Origin: http://evil.example"), 403),
        ((JSON, length, "Origin: http://evil.example"), 403),
        ((JSON, length, "Origin: null"), 403),
        ((JSON, length, "Sec-Fetch-Site: cross-site"), 403),
        ((plain, length), 415),
        ((plain, length, "Origin: http://localhost:3000"), 415),
        (("Content-Type: application/x-www-form-urlencoded", length), 415),
        ((length,), 415),
    ):
        assert statuses(await raw(gateway, post(gateway, *headers))) == [status], headers
    assert echo.asked == []
    assert statuses(await raw(gateway, post(gateway, JSON, length, "Origin: http://localhost:3000"))) == [200]


async def test_get_with_effects_is_none_for_another_page(gateway: HttpGateway, echo: http_kit.Echo) -> None:
    line = "GET /a2a/tasks/next HTTP/1.1"
    for header in ("Origin: http://evil.example", "Sec-Fetch-Site: cross-site", "Sec-Fetch-Site: same-site"):
        assert statuses(await raw(gateway, head(gateway, line, header))) == [403], header
    assert echo.asked == []


@pytest.mark.parametrize("name", ["token", "access_token", "Authorization", "bearer"])
async def test_token_in_query_is_refused_also_beside_good_one(
    gateway: HttpGateway, echo: http_kit.Echo, name: str
) -> None:
    for token in (None, TOKEN):
        data = head(gateway, f"GET /tools?{name}={TOKEN} HTTP/1.1", token=token)
        answer = await raw(gateway, data)
        assert statuses(answer) == [400]
        assert TOKEN.encode() not in answer
    assert echo.asked == []


# Paths and headers that mean more than they say ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        *("/intents/../metrics", "/intents/%2e%2e/result", "/intents/..%2f..%2fetc%2fpasswd/result"),
        *("/intents/a%00b/result", "/intents/a%0d%0aX:1/result", "/intents/a%2fb/result", "/intents//result"),
        *("/intents/%252e%252e/result", "/intents/.../result", "//tools", "/tools/.", "/./tools", "/%74ools%2f.."),
        *("/intents/" + "a" * 129 + "/result", "/audit/prove/..", "/tools;x=1", "/tools%3f", "\\tools"),
    ],
)
async def test_no_path_leads_anywhere_but_where_it_says(gateway: HttpGateway, echo: http_kit.Echo, path: str) -> None:
    assert statuses(await raw(gateway, head(gateway, f"GET {path} HTTP/1.1"))) in ([400], [404])
    assert echo.asked == []


async def test_id_is_what_it_is(gateway: HttpGateway, echo: http_kit.Echo) -> None:
    line = "GET /intents/0b9f2f0a-5a3c-4c8e-9a51-8d1a4f0f2a11/result HTTP/1.1"
    assert statuses(await raw(gateway, head(gateway, line, "Connection: close"))) == [200]
    assert echo.asked[0][1] == requests.GetIntentResult(intent_id="0b9f2f0a-5a3c-4c8e-9a51-8d1a4f0f2a11")


@pytest.mark.parametrize(
    "header",
    [
        *("X: a\rInjected: b", "X : a", "X\x00: a", "X: a\x00b", " X: a", "X: a\r\n folded", "Ünicode: a", "X"),
        *("Host: evil.example", "Authorization: Bearer x", "Origin: http://localhost:3000\r\nOrigin: null"),
    ],
)
async def test_header_that_two_would_read_differently_is_refused(
    gateway: HttpGateway, echo: http_kit.Echo, header: str
) -> None:
    data = head(gateway, "GET /tools HTTP/1.1", header)
    answer = await raw(gateway, data)
    assert all(status in (400, 401) for status in statuses(answer))
    assert b"\r\nInjected" not in answer
    assert echo.asked == []


async def test_nothing_of_request_comes_back_as_header(gateway: HttpGateway) -> None:
    for path in (
        "/nothing%0d%0aInjected:%20yes",
        "/tools?x=%0d%0aInjected:%20yes",
        "/memory/recent?tier=%0d%0aInjected:1",
    ):
        answer = await raw(gateway, head(gateway, f"GET {path} HTTP/1.1", "Connection: close"))
        before_body = answer.partition(b"\r\n\r\n")[0]
        assert b"Injected" not in before_body, path


# Two requests in one, or one in two ---------------------------------------------------------------------------------

SMUGGLED = b"POST /peers/rotate HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize(
    "framing",
    [
        ("Content-Length: 5", "Transfer-Encoding: chunked"),
        ("Transfer-Encoding: chunked", "Content-Length: 5"),
        ("Content-Length: 5", "Content-Length: 50"),
        ("Content-Length: 5, 50",),
        ("Content-Length: +5",),
        ("Content-Length: 0x5",),
        ("Content-Length: -5",),
        ("Content-Length: 5 5",),
        ("Content-Length:",),
        ("Transfer-Encoding: xchunked",),
        ("Transfer-Encoding: chunked, identity",),
        ("Transfer-Encoding: identity",),
        ("Transfer-Encoding : chunked",),
        ("Transfer-Encoding: chunked", "Transfer-Encoding: x"),
        ("Transfer-Encoding:\x0bchunked",),
    ],
)
async def test_body_has_one_end(gateway: HttpGateway, echo: http_kit.Echo, framing: tuple[str, ...]) -> None:
    data = head(gateway, "POST /peers/rotate HTTP/1.1", JSON, *framing) + b"0\r\n\r\n" + SMUGGLED
    answer = await raw(gateway, data)
    assert 200 not in statuses(answer)
    assert len(statuses(answer)) <= 1, "what follows a request that is refused is not read as another"
    assert echo.asked == []
    assert await alive(gateway)


@pytest.mark.parametrize(
    "chunk", ['5;x="\r\n', "0x5\r\n", "-1\r\n", "ffffffffffffffffff\r\n", "5\n", "5 \r\n", "+5\r\n"]
)
async def test_chunk_says_its_length_one_way(gateway: HttpGateway, echo: http_kit.Echo, chunk: str) -> None:
    data = head(gateway, "POST /intent HTTP/1.1", JSON, "Transfer-Encoding: chunked", "Connection: close")
    answer = await raw(gateway, data + chunk.encode() + b"hello\r\n0\r\n\r\n" + SMUGGLED)
    assert statuses(answer) in ([], [400])
    assert echo.asked == []
    assert await alive(gateway)


async def test_body_not_wanted_is_not_next_request(gateway: HttpGateway, echo: http_kit.Echo) -> None:
    """The classic: the server refuses by the head and goes on reading where the body begins."""
    for line in (
        "POST /nothing HTTP/1.1",
        "GET /tools HTTP/1.1",
        "POST /a2a/peer-tasks HTTP/1.1",
        "PUT /tools HTTP/1.1",
    ):
        data = head(gateway, line, JSON, f"Content-Length: {len(SMUGGLED)}") + SMUGGLED
        assert len(statuses(await raw(gateway, data))) == 1, line
    assert echo.asked == []


@pytest.mark.parametrize(
    "line", ["GET http://evil.example/tools HTTP/1.1", "OPTIONS * HTTP/1.1", "CONNECT a:1 HTTP/1.1"]
)
async def test_target_is_path_here(gateway: HttpGateway, echo: http_kit.Echo, line: str) -> None:
    assert statuses(await raw(gateway, head(gateway, line)))[0] in (400, 404, 405)
    assert echo.asked == []


@pytest.mark.parametrize("line", ["GET /tools", "GET /tools HTTP/9.9", "\x16\x03\x01", "PRI * HTTP/2.0"])
async def test_what_is_not_http_ends(gateway: HttpGateway, echo: http_kit.Echo, line: str) -> None:
    answer = await raw(gateway, head(gateway, line))
    assert 200 not in statuses(answer)
    assert echo.asked == []
    assert await alive(gateway)


def _error_of(answer: bytes) -> dict[str, Any]:
    """The document of one refusal, whose headers are those of every answer."""
    start, _, body = answer.partition(b"\r\n\r\n")
    assert b"\r\nContent-Type: application/json" in start, start
    assert b"\r\nServer: covenantd" in start
    assert b"\r\nCache-Control: no-store" in start
    assert TOKEN.encode() not in answer
    found: dict[str, Any] = json.loads(body)
    assert found["kind"] == "error"
    assert found["code"] == "http_refused"
    return found


@pytest.mark.parametrize(
    ("line", "header", "status"),
    [
        *(("GET /tools HTTP/9.9", "X: a", 400), ("\x16\x03\x01", "X: a", 400), ("GET /tools HTTP/1.1", "X : a", 400)),
        *(("GET /tools HTTP/1.1", "X", 400), ("G\x00T /tools HTTP/1.1", "X: a", 400)),
        *(("GET /nothing HTTP/1.1", "Expect: tea", 417), ("PUT /tools HTTP/1.1", "Expect: tea", 417)),
        *(("GET /nothing HTTP/1.1", "X: a", 404), ("PUT /tools HTTP/1.1", "X: a", 405)),
        ("POST /intent HTTP/1.1", f"{JSON}\r\nContent-Length: 9000000", 413),
        ("POST /intent HTTP/1.1", "Content-Type: text/plain\r\nContent-Length: 3", 415),
    ],
)
async def test_refusal_of_http_itself_is_json(gateway: HttpGateway, line: str, header: str, status: int) -> None:
    answer = await raw(gateway, head(gateway, line, header, "Connection: close"))
    assert statuses(answer) == [status]
    assert _error_of(answer)["message"]


async def test_another_protocol_is_not_switched_to(gateway: HttpGateway, echo: http_kit.Echo) -> None:
    upgrade = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Key: x", "Sec-WebSocket-Version: 13")
    answer = await raw(gateway, head(gateway, "GET /tools HTTP/1.1", *upgrade) + SMUGGLED)
    assert statuses(answer) == [400]
    assert echo.asked == []


# Huge, slow and many ------------------------------------------------------------------------------------------------


async def test_heads_have_end(gateway: HttpGateway) -> None:
    for data in (
        head(gateway, "GET /" + "a" * 20_000 + " HTTP/1.1"),
        head(gateway, "GET /tools HTTP/1.1", "X: " + "a" * 20_000),
        head(gateway, "GET /tools HTTP/1.1", *(f"X-{number}: a" for number in range(500))),
    ):
        # What was not read yet makes the kernel reset the connection, and the answer may go with it.
        assert statuses(await raw(gateway, data)) in ([400], [])
    assert await alive(gateway)


async def test_head_that_never_ends_ends_its_connection(gateway: HttpGateway) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    try:
        writer.write(b"GET /tools HTTP/1.1\r\n")
        with anyio.fail_after(60):
            while not reader.at_eof():
                # A byte now and then, as slow as it pleases.
                writer.write(b"X: a\r\n")
                with anyio.move_on_after(0.1):
                    await reader.read(1)
    except ConnectionError:
        pass
    finally:
        writer.close()
    assert await alive(gateway)


async def test_who_is_nobody_is_not_listened_to(gateway: HttpGateway) -> None:
    """A body is read after its token: strangers cannot make the daemon hold megabytes."""
    begun = post(gateway, JSON, "Content-Length: 8000000", body=b"{", token=None)
    assert statuses(await raw(gateway, begun)) == [401]


async def test_client_that_asks_first_is_told_to_go_on_when_it_is_let_in(
    gateway: HttpGateway, echo: http_kit.Echo
) -> None:
    headers = (JSON, f"Content-Length: {len(ASK)}", "Expect: 100-continue")
    assert statuses(await raw(gateway, post(gateway, *headers, body=b"", token=None))) == [401]
    answer = await raw(gateway, post(gateway, *headers))
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")
    assert len(echo.asked) == 1


async def test_answer_that_nobody_reads_is_let_go(gateway: HttpGateway, echo: http_kit.Echo) -> None:
    async def much(server: Server, caller: Caller, asked: requests.Request) -> responses.Response:
        return responses.Error(message="x" * (32 * 1024 * 1024))

    echo.answers["list_tools"] = much
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    try:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(head(gateway, "GET /tools HTTP/1.1"))
        await until(lambda: bool(echo.asked) and not gateway.busy)
    finally:
        writer.transport.abort()
    del echo.answers["list_tools"]
    assert await alive(gateway)


async def test_more_connections_than_there_may_be_go_at_once_and_others_come_again(
    tmp_path: Path, echo: http_kit.Echo
) -> None:
    server = http_kit.server(tmp_path, echo)
    async with http_kit.serving(server, connections=8, head_seconds=600.0) as gateway:
        gone: list[int] = []

        async def hold(number: int) -> None:
            with contextlib.suppress(ConnectionError):
                reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
                try:
                    await reader.read(1)
                finally:
                    writer.close()
            gone.append(number)

        async with anyio.create_task_group() as group:
            for number in range(20):
                group.start_soon(hold, number)
            await until(lambda: len(gone) == 12)
            # The oldest of those over which no token came makes room for who has one.
            assert await alive(gateway)
            await until(lambda: len(gone) == 13)
            group.cancel_scope.cancel()
        with anyio.fail_after(60):
            while not await alive(gateway):  # noqa: ASYNC110
                await anyio.sleep(0.02)


async def test_flood_of_streams_leaves_place_for_others(gateway: HttpGateway, echo: http_kit.Echo) -> None:
    echo.answers["recent_audit"] = responses.AuditEvents(events=())
    follow = head(gateway, "GET /audit/recent?extended=true HTTP/1.1", "Accept: text/event-stream")
    held = []
    try:
        found = []
        for _ in range(6):
            # One after the other: a connection has three seconds for its head.
            held.append(await asyncio.open_connection("127.0.0.1", gateway.port))
            reader, writer = held[-1]
            writer.write(follow)
            with anyio.fail_after(60):
                found.append(statuses(await reader.readuntil(b"\r\n")))
        assert found == [[200]] * 4 + [[429]] * 2
        # Another peer has its own places.
        others = head(
            gateway, "GET /audit/recent?extended=true HTTP/1.1", "Accept: text/event-stream", token=http_kit.OTHER_TOKEN
        )
        assert statuses(await raw(gateway, others, until_end=False)) == [200]
    finally:
        for _, writer in held:
            writer.close()
    await until(lambda: not gateway.server.feed.subscribers)


async def test_stream_that_nobody_reads_holds_up_nobody(gateway: HttpGateway, echo: http_kit.Echo) -> None:
    echo.answers["recent_audit"] = responses.AuditEvents(events=())
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    try:
        writer.write(head(gateway, "GET /audit/recent?extended=true HTTP/1.1", "Accept: text/event-stream"))
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        row = http_kit.event("e", text="x" * 50_000)
        with anyio.fail_after(60):
            while gateway.server.feed.subscribers:
                for _ in range(50):
                    gateway.server.feed.publish("audit", row)
                await anyio.sleep(0.01)
    finally:
        writer.transport.abort()
    assert await alive(gateway)


# Tokens -------------------------------------------------------------------------------------------------------------


async def test_no_token_is_ever_in_log(
    gateway: HttpGateway, echo: http_kit.Echo, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(server: Server, caller: Caller, asked: requests.Request) -> responses.Response:
        raise ZeroDivisionError

    echo.answers["list_agents"] = fail
    wrong = "9" * 43
    with caplog.at_level(logging.DEBUG):
        logging.getLogger("aiohttp").setLevel(logging.DEBUG)
        for data in (
            head(gateway, "GET /tools HTTP/1.1", "Connection: close"),
            head(gateway, "GET /tools HTTP/1.1", "Connection: close", token=wrong),
            head(gateway, "GET /agents HTTP/1.1", "Connection: close"),
            head(gateway, "GET /tools HTTP/9.9"),
            head(gateway, f"GET /tools?token={TOKEN} HTTP/1.1"),
            head(gateway, f"GET /{TOKEN} HTTP/1.1"),
            head(gateway, "GET /tools HTTP/1.1", f"Bad Header {TOKEN}: x"),
            head(gateway, "GET /tools HTTP/1.1", f"Authorization: Bearer\x00{TOKEN}"),
            f"Authorization: Bearer {TOKEN}\r\n\r\n".encode(),
            post(gateway, JSON, "Content-Length: 99", body=f'{{"text": 1, "token": "{TOKEN}"}}'.encode().ljust(99)),
        ):
            await raw(gateway, data)
    rows = str(cast("http_kit.Rows", gateway.server.audit).rows)
    assert "authentication_failed" in rows
    assert caplog.records
    for text in (caplog.text, rows):
        assert TOKEN not in text
        assert wrong not in text
    assert TOKEN not in str(echo.asked)
