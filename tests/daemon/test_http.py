"""The gateway on the loopback: its answers to each client, over a server with scripted handlers."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest

from covenant.adapters.http import listen, openapi, routes
from covenant.adapters.http.gateway import HttpGateway
from covenant.adapters.http.routes import Route
from covenant.handlers.caller import Caller
from covenant.handlers.server import Server
from covenant.handlers.state import intent_progress
from covenant.wire import requests, responses
from policy import errors
from tests import http_kit, prometheus_text, server_kit, v1_client

pytestmark = pytest.mark.anyio

JSON = {"Content-Type": "application/json"}


@dataclass
class World:
    server: Server
    gateway: HttpGateway
    peers: http_kit.Peers
    audit: http_kit.Rows
    echo: http_kit.Echo


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    peers, audit, echo = http_kit.Peers(), http_kit.Rows(), http_kit.Echo()
    server = server_kit.make(home=tmp_path, peers=peers, audit=audit, identity=http_kit.Identity(), handlers=echo)
    async with http_kit.serving(server, wrong_tokens=5, wrong_seconds=3600.0) as gateway:
        yield World(server, gateway, peers, audit, echo)


DOCUMENT = openapi.document()


def least(schema: dict[str, Any]) -> Any:
    """The least that a schema of the document takes."""
    if "$ref" in schema:
        return least(DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]])
    for alternatives in ("oneOf", "anyOf", "allOf"):
        if alternatives in schema:
            return least(schema[alternatives][0])
    if "const" in schema or "enum" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    if "pattern" in schema:
        return next(text for text in ("a@b", "1") if re.match(schema["pattern"], text))
    if schema.get("type") == "object":
        return {name: least(schema["properties"][name]) for name in schema.get("required", ())}
    return {"string": "x", "integer": 1, "number": 0.5, "boolean": True, "array": []}[schema["type"]]


def asked_for(route: Route) -> tuple[str, Any]:
    """A path and a body by which the route can be asked."""
    operation = DOCUMENT["paths"][route.path][route.method.lower()]
    query = [one["name"] for one in operation.get("parameters", ()) if one["in"] == "query" and one.get("required")]
    path = route.path.replace("{", "").replace("}", "") + "".join(f"?{name}=x" for name in query)
    body = operation.get("requestBody")
    return path, None if body is None else least(body["content"]["application/json"]["schema"])


@pytest.mark.parametrize("route", [one for one in routes.TABLE if one.kind], ids=lambda one: one.operation)
async def test_each_route_asks_its_kind_as_its_caller(world: World, route: Route) -> None:
    path, body = asked_for(route)
    async with http_kit.client(world.gateway) as client, client.request(route.method, path, json=body) as answer:
        assert answer.status == 200, await answer.text()
        assert answer.content_type == "application/json"
        assert await answer.json() == {"kind": "pong"}
    ((caller, asked),) = world.echo.asked
    assert asked.kind == route.kind
    assert caller == Caller(agent=http_kit.ME, operator=True, token_prefix=http_kit.TOKEN[:6], transport="http")


async def test_what_needs_no_token(world: World) -> None:
    async with http_kit.client(world.gateway, token=None) as client:
        async with client.get("/health") as answer:
            assert (answer.status, await answer.json()) == (200, {"status": "ok"})
        async with client.get("/version") as answer:
            told = await answer.json()
            assert (answer.status, told["name"]) == (200, "covenantd")
            # As version 1 answers it.
            v1_client.struct(kind=v1_client.one_of("protocol_info"), info=v1_client.PROTOCOL)(told)
        async with client.get("/openapi.json") as answer:
            assert (await answer.json())["openapi"] == "3.1.0"
        async with client.post(
            "/a2a/peer-tasks", data=b"x" * 9, headers={"Content-Type": "application/json"}
        ) as answer:
            assert (answer.status, (await answer.json())["code"]) == (503, "http_refused")
    assert world.audit.rows == []


@pytest.mark.parametrize("route", [one for one in routes.TABLE if not one.open], ids=lambda one: one.operation)
async def test_everything_else_does(world: World, route: Route) -> None:
    path, body = asked_for(route)
    async with (
        http_kit.client(world.gateway, token=None) as client,
        client.request(route.method, path, json=body) as one,
    ):
        assert one.status == 401
        assert one.headers["WWW-Authenticate"] == "Bearer"
        assert (await one.json())["kind"] == "error"
    assert [kind for kind, _ in world.audit.rows] == ["authentication_failed"]
    assert world.echo.asked == []


async def test_wrong_token_is_written_down_and_scheme_has_no_case(world: World) -> None:
    async with http_kit.client(world.gateway, token="1" * 32) as client, client.get("/tools") as answer:
        assert answer.status == 401
    assert world.audit.rows == [("authentication_failed", {"transport": "http", "reason": "unknown token"})]
    cased = {"Authorization": f"bEaReR {http_kit.TOKEN}"}
    async with http_kit.client(world.gateway, token=None) as client, client.get("/tools", headers=cased) as answer:
        assert answer.status == 200


async def test_token_that_was_rotated_is_refused_on_connection_there(world: World) -> None:
    async with http_kit.client(world.gateway) as client:
        async with client.get("/tools") as answer:
            assert answer.status == 200
        del world.peers.tokens[http_kit.TOKEN]
        async with client.get("/tools") as answer:
            assert answer.status == 401


async def test_registry_that_cannot_be_read_lets_nobody_in(world: World) -> None:
    world.peers.broken = OSError(5, "Input/output error")
    async with http_kit.client(world.gateway) as client, client.get("/tools") as answer:
        assert (answer.status, (await answer.json())["kind"]) == (503, "error")
    assert world.echo.asked == []


async def test_refusal_that_cannot_be_written_down_is_503(world: World) -> None:
    world.audit.broken = OSError(28, "No space left on device")
    async with http_kit.client(world.gateway, token="1" * 32) as client, client.get("/tools") as answer:
        assert (answer.status, (await answer.json())["kind"]) == (503, "error")


async def test_tokens_tried_fill_no_disk_and_keep_nobody_out(world: World) -> None:
    found = []
    async with http_kit.client(world.gateway, token="1" * 32) as client:
        for _ in range(20):
            async with client.get("/tools") as answer:
                found.append(answer.status)
    assert found == [401] * 5 + [429] * 15
    assert len(world.audit.rows) == 5
    async with http_kit.client(world.gateway) as client, client.get("/tools") as answer:
        assert answer.status == 200


async def test_what_has_no_row_of_its_own_is_number_in_log_and_for_operator(tmp_path: Path) -> None:
    audit = http_kit.Rows()
    server = server_kit.make(home=tmp_path, peers=http_kit.Peers(), audit=audit, identity=http_kit.Identity())
    async with http_kit.serving(server, wrong_tokens=2, wrong_seconds=3600.0) as gateway:
        found = []
        async with http_kit.client(gateway, token="1" * 32) as client:
            for _ in range(7):
                async with client.get("/tools") as answer:
                    found.append(answer.status)
        assert found == [401] * 2 + [429] * 5
        async with http_kit.client(gateway) as client, client.get("/metrics") as answer:
            numbers = prometheus_text.parse(await answer.text())
            assert numbers["covenant_refusals_unwritten_total"] == {'transport="http"': 5.0, 'transport="ipc"': 0.0}
        assert len(audit.rows) == 2
    # No refusal came after them: the count is written at the end of the period, or of the daemon.
    assert [row[1]["transport"] for row in audit.rows] == ["http"] * 3
    assert audit.rows[-1][1]["reason"].startswith("5 more were refused and not written one by one; the last: ")


async def test_handlers_refusal_is_200_and_fault_500(world: World, caplog: pytest.LogCaptureFixture) -> None:
    async def refuse(server: Server, caller: Caller, asked: requests.Request) -> responses.Response:
        raise errors.NoMemoryError("there is none", hint="look elsewhere")

    async def fail(server: Server, caller: Caller, asked: requests.Request) -> responses.Response:
        raise ZeroDivisionError("a fault of ours")

    world.echo.answers = {"list_tools": refuse, "list_agents": fail}
    async with http_kit.client(world.gateway) as client:
        async with client.get("/tools") as answer:
            document = await answer.json()
            assert (answer.status, document["kind"], document["code"]) == (200, "error", errors.NoMemoryError.code)
        with caplog.at_level(logging.ERROR):
            async with client.get("/agents") as answer:
                assert answer.status == 500
                assert list(await answer.json()) == ["error"]
    assert "a fault of ours" in caplog.text
    assert "a fault of ours" not in json.dumps(document)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        *(("GET", "/nothing", 404), ("GET", "/intent", 405), ("POST", "/tools", 405), ("PUT", "/intent", 405)),
        *(("DELETE", "/tools", 405), ("HEAD", "/intent", 405), ("TRACE", "/tools", 405), ("GET", "/tools/", 404)),
        *(
            ("GET", "/memory/search", 400),
            ("GET", "/memory/recent?limit=x", 400),
            ("GET", "/audit/recent?limit=1&limit=2", 400),
        ),
    ],
)
async def test_what_is_no_request(world: World, method: str, path: str, status: int) -> None:
    async with http_kit.client(world.gateway) as client, client.request(method, path) as answer:
        assert answer.status == status
        if method != "HEAD":
            assert (await answer.json())["kind"] == "error"
    assert world.echo.asked == []


async def test_head_is_answered_as_get_without_body(world: World) -> None:
    async with http_kit.client(world.gateway) as client:
        for path in ("/health", "/version", "/tools"):
            async with client.get(path) as got, client.head(path) as answer:
                assert (answer.status, await answer.read()) == (200, b"")
                assert answer.headers["Content-Type"] == got.headers["Content-Type"]


async def test_preflights_are_answered_to_listed_origins_alone(world: World) -> None:
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    async with http_kit.client(world.gateway, token=None) as client:
        async with client.options("/intent", headers={**ask, "Origin": http_kit.CONSOLE}) as answer:
            assert answer.status == 204
            assert answer.headers["Access-Control-Allow-Origin"] == http_kit.CONSOLE
            assert "authorization" in answer.headers["Access-Control-Allow-Headers"]
        async with client.options("/intent", headers={**ask, "Origin": "http://evil.example"}) as answer:
            assert answer.status == 403
            assert not [name for name in answer.headers if name.startswith("Access-Control-")]
    page = {"Origin": http_kit.CONSOLE}
    async with http_kit.client(world.gateway) as client, client.get("/tools", headers=page) as answer:
        assert answer.headers["Access-Control-Allow-Origin"] == http_kit.CONSOLE
        assert answer.headers["Access-Control-Allow-Credentials"] == "true"
        assert answer.headers["Vary"] == "Origin"


async def test_every_answer_is_for_its_asker_alone(world: World) -> None:
    async with http_kit.client(world.gateway) as client:
        for path in ("/tools", "/nothing", "/health", "/metrics"):
            async with client.get(path) as answer:
                assert answer.headers["Cache-Control"] == "no-store", path
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
                assert answer.headers["Server"] == "covenantd"


async def test_numbers(world: World) -> None:
    world.server.live.say("i", "key", "submitted", 1)
    world.server.live.say("j", "key", "submitted", 1)
    world.server.live.say("j", "key", intent_progress.ENDED, 2, status="ok")
    await world.server.budget.set_capacity(http_kit.OTHER, 7)
    async with http_kit.client(world.gateway) as client:
        for path in ("/tools", "/tools", "/nothing"):
            async with client.get(path):
                pass
        async with client.get("/metrics") as answer:
            assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            found = prometheus_text.parse(await answer.text())
    assert found["covenant_requests_total"] == {'kind="list_tools",outcome="ok"': 2.0}
    assert found["covenant_request_seconds"]['_countkind="list_tools"'] == 2.0
    assert found["covenant_http_refusals_total"] == {'status="404"': 1.0}
    assert (found["covenant_intents_running"], found["covenant_intents_total"]) == ({"": 1.0}, {'status="ok"': 1.0})
    assert found["covenant_events_total"]['topic="intent"'] == 3.0
    assert found["covenant_budget_credits"] == {f'agent="{http_kit.OTHER.pubkey}"': 7.0}
    assert found["covenant_memory_rows"] == {f'tier="{tier}"': 0.0 for tier in ("working", "episodic", "longterm")}
    assert found["process_resident_memory_bytes"][""] > 1 << 20
    assert found["process_open_fds"][""] > 3


async def test_no_budget_is_no_empty_budget(world: World) -> None:
    """An alert on few credits would never end where no agent has a budget."""
    async with http_kit.client(world.gateway, http_kit.OTHER_TOKEN) as client, client.get("/metrics") as answer:
        text = await answer.text()
    assert prometheus_text.parse(text).get("covenant_budget_credits", {}) == {}
    assert "covenant_clock_behind_seconds 0.0\n" in text
    unwritten = prometheus_text.parse(text)["covenant_refusals_unwritten_total"]
    assert unwritten == {'transport="http"': 0.0, 'transport="ipc"': 0.0}


async def test_numbers_of_agents_are_for_operator(world: World) -> None:
    for agent, credits_ in ((http_kit.OTHER, 7), (http_kit.ME, 5)):
        await world.server.budget.set_capacity(agent, credits_)
    told = {}
    for token in (http_kit.TOKEN, http_kit.OTHER_TOKEN):
        async with http_kit.client(world.gateway, token) as client, client.get("/metrics") as answer:
            told[token] = await answer.text()
    of_operator, of_other = (prometheus_text.parse(text)["covenant_budget_credits"] for text in told.values())
    assert len(of_operator) == 2
    assert of_other == {"": 12.0}
    assert http_kit.ME.pubkey not in told[http_kit.OTHER_TOKEN]
    assert "agent=" not in told[http_kit.OTHER_TOKEN]


async def test_body_comes_whole_in_its_time(tmp_path: Path) -> None:
    echo = http_kit.Echo()
    server = http_kit.server(tmp_path, echo)
    async with http_kit.serving(server, body_seconds=0.2) as gateway:
        begun = http_kit.head(gateway, "POST /intent HTTP/1.1", "Content-Type: application/json", "Content-Length: 15")
        assert http_kit.statuses(await http_kit.raw(gateway, begun + b'{"text": ')) == [408]
    assert echo.asked == []


async def test_large_body_is_taken_and_larger_one_is_not(world: World) -> None:
    text = "x" * (8 * 1024 * 1024 - 20)
    async with http_kit.client(world.gateway) as client:
        async with client.post("/intent", data=io.BytesIO(b'{"text": "%s"}' % text.encode()), headers=JSON) as answer:
            assert answer.status == 200
        ((_, asked),) = world.echo.asked
        assert asked.text == text
        whole = io.BytesIO(b'{"text": "%s"}' % (text.encode() + b"x" * 100))
        async with client.post("/intent", data=whole, headers=JSON) as answer:
            assert answer.status == 413

        async def endless() -> AsyncIterator[bytes]:
            for _ in range(9):
                yield b" " * (1024 * 1024)

        async with client.post("/intent", data=endless(), headers=JSON) as answer:
            assert answer.status == 413
    assert len(world.echo.asked) == 1


async def test_stopping_lets_what_has_begun_be_answered(tmp_path: Path) -> None:
    echo, begun, go_on = http_kit.Echo(), anyio.Event(), anyio.Event()

    async def slow(server: Server, caller: Caller, asked: requests.Request) -> responses.Response:
        begun.set()
        await go_on.wait()
        return responses.Pong()

    echo.answers["list_tools"] = slow
    server = http_kit.server(tmp_path, echo)
    found: list[int] = []

    async def ask() -> None:
        async with http_kit.client(gateway) as client, client.get("/tools") as answer:
            found.append(answer.status)

    async with anyio.create_task_group() as group:
        gateway = HttpGateway(server, group)
        await gateway.listen(listen.bind("127.0.0.1", 0))
        group.start_soon(ask)
        await begun.wait()
        async with anyio.create_task_group() as stopping:
            stopping.start_soon(lambda: gateway.stop(grace_seconds=10))
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(OSError, match=r".*"):
                await http_kit.raw(gateway, b"GET /health HTTP/1.1\r\n\r\n")
            go_on.set()
    assert found == [200]


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "192.0.2.1", "example.org", "", "127.0.0.1 ", "224.0.0.1"])
async def test_only_loopback_is_bound(address: str) -> None:
    with pytest.raises(errors.SettingError):
        listen.bind(address, 0)


async def test_port_taken_is_said_so() -> None:
    with listen.bind("localhost", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(errors.SettingError) as refused:
            listen.bind("127.0.0.1", port)
    assert str(port) in refused.value.message


async def test_bad_origin_is_dropped_with_warning(world: World, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        async with anyio.create_task_group() as group:
            HttpGateway(world.server, group, origins=["*", "http://localhost:3000"])
    assert "`*` is no origin" in caplog.text
