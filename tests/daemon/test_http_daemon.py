"""HTTP in front of a whole daemon: its own tokens, its own stores, and what happens in them as it happens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest

from tests import daemon_kit, http_kit, prometheus_text
from tests.daemon_kit import Daemon

pytestmark = pytest.mark.anyio

STREAM = {"Accept": "text/event-stream"}


@asynccontextmanager
async def client(daemon: Daemon, token: str | None = None) -> AsyncIterator[aiohttp.ClientSession]:
    token = token or (daemon.home / "peers" / "operator.token").read_text().strip()
    headers = {"Authorization": f"Bearer {token}"}
    timeout = aiohttp.ClientTimeout(total=60)
    base = f"http://127.0.0.1:{daemon.http_port}"
    async with aiohttp.ClientSession(base, headers=headers, timeout=timeout) as session:
        yield session


async def asked(session: aiohttp.ClientSession, method: str, path: str, **body: Any) -> dict[str, Any]:
    async with session.request(method, path, json=body or None) as answer:
        assert answer.status == 200, await answer.text()
        found: dict[str, Any] = await answer.json()
        return found


async def until(stream: AsyncIterator[http_kit.Event], wanted: Any) -> http_kit.Event:
    with anyio.fail_after(60):
        async for one in stream:
            if wanted(one):
                return one
    raise AssertionError("the stream ended")


async def test_intent_is_seen_in_every_stream_and_asked_for_later(covenant_home: Path) -> None:
    async with daemon_kit.running(covenant_home, http_port=0) as daemon:
        await daemon.grant("memory.write", "memory.read")
        async with client(daemon) as session:
            async with (
                session.get("/audit/recent?extended=true", headers=STREAM) as rows,
                session.get("/memory/recent", headers=STREAM) as records,
            ):
                told, kept = http_kit.events(rows), http_kit.events(records)
                done = await asked(session, "POST", "/intent", text="say something")
                assert (done["kind"], done["status"]) == ("intent_result", "ok")
                intent_id = done["intent_id"]
                record = await until(kept, lambda one: one.id == intent_id)
                assert record.data["chunk"]["text"] == done["text"]
                row = await until(told, lambda one: _kind(one).get("type") == "intent_dispatched")
                assert _kind(row)["intent_id"] == intent_id
            later = await asked(session, "GET", f"/intents/{intent_id}/result")
            assert {name: later[name] for name in ("intent_id", "status", "text")} == {
                name: done[name] for name in ("intent_id", "status", "text")
            }
            found = await asked(session, "GET", "/memory/search?q=something")
            assert [one["id"] for one in found["records"]] == [intent_id]
            assert (await asked(session, "GET", "/audit/verify"))["report"]["valid"] is True


@pytest.mark.parametrize("told", [None, ("https://console.example", "*")])
async def test_pages_that_may_ask_are_those_that_it_was_told(covenant_home: Path, told: tuple[str, ...] | None) -> None:
    listed = "http://localhost:3000" if told is None else told[0]
    given: dict[str, Any] = {} if told is None else {"http_origins": told}
    async with daemon_kit.running(covenant_home, http_port=0, **given) as daemon, client(daemon) as session:
        for origin in ("http://localhost:3000", "https://console.example", "https://evil.example"):
            async with session.get("/tools", headers={"Origin": origin}) as answer:
                allowed = answer.headers.get("Access-Control-Allow-Origin")
                assert (answer.status, allowed) == ((200, origin) if origin == listed else (403, None))


def _kind(one: http_kit.Event) -> dict[str, Any]:
    kind: dict[str, Any] = (one.data.get("chunk") or {}).get("kind", {})
    return kind


async def test_stream_of_intent_says_its_id_first(covenant_home: Path) -> None:
    async with daemon_kit.running(covenant_home, http_port=0) as daemon:
        await daemon.grant("memory.write")
        async with client(daemon) as session, session.post("/intent", json={"text": "t"}, headers=STREAM) as answer:
            begin, chunk, end = [one async for one in http_kit.events(answer)]
        assert begin.id == end.data["summary"]["intent_id"]
        assert chunk.data["chunk"]["text"].endswith("t")


async def test_token_that_was_rotated_lets_nobody_in_and_ends_its_streams(covenant_home: Path) -> None:
    async with daemon_kit.running(covenant_home, http_port=0) as daemon, client(daemon) as old:  # noqa: SIM117
        async with old.get("/audit/recent?extended=true", headers=STREAM) as answer:
            stream = http_kit.events(answer)
            await until(stream, lambda one: one.event == "stream_begin")
            token = (await asked(old, "POST", "/peers/rotate"))["token_b58"]
            async with old.get("/tools") as refused:
                assert refused.status == 401
            async with client(daemon, token) as new:
                assert (await asked(new, "GET", "/tools"))["kind"] == "tool_list"
            last = await until(stream, lambda one: one.event in ("stream_error", "stream_end"))
            assert last.event == "stream_error"


async def test_peer_sees_its_own_and_is_refused_rest(covenant_home: Path) -> None:
    async with daemon_kit.running(covenant_home, http_port=0) as daemon, client(daemon) as operator:
        body = {"display": "peer@local", "actions": ["memory.write", "memory.read"]}
        peer = await asked(operator, "POST", "/peers/enroll", **body)
        await daemon.grant("memory.write", "memory.read")
        await asked(operator, "POST", "/intent", text="the operator's")
        async with client(daemon, peer["token_b58"]) as session:
            mine = await asked(session, "POST", "/intent", text="the peer's")
            found = await asked(session, "GET", "/memory/recent")
            assert [one["id"] for one in found["records"]] == [mine["intent_id"]]
            assert (await asked(session, "GET", "/audit/verify"))["kind"] == "error"
            theirs = await asked(operator, "GET", "/memory/recent")
            others = [one["id"] for one in theirs["records"] if one["id"] != mine["intent_id"]]
            assert (await asked(session, "GET", f"/intents/{others[0]}/result"))["code"] == "no_such_memory"


async def test_what_cannot_be_let_in_is_in_log(covenant_home: Path) -> None:
    async with daemon_kit.running(covenant_home, http_port=0) as daemon:
        async with client(daemon, "1" * 32) as session, session.get("/tools") as answer:
            assert answer.status == 401
        found = await daemon.ask("recent_audit", limit=100)
    refused = [one["kind"] for one in found["events"] if one["kind"]["type"] == "authentication_failed"]
    assert [(one["transport"], one["reason"]) for one in refused] == [("http", "unknown token")]


async def test_numbers_of_both_doors(covenant_home: Path) -> None:
    async with daemon_kit.running(covenant_home, http_port=0) as daemon, client(daemon) as session:
        await daemon.ask("list_tools")
        await asked(session, "GET", "/tools")
        async with session.get("/metrics") as answer:
            found = prometheus_text.parse(await answer.text())
    assert found["covenant_requests_total"]['kind="list_tools",outcome="ok"'] == 2.0
    assert found["covenant_events_total"]['topic="audit"'] > 0


async def test_daemon_that_stops_ends_its_streams_and_leaves_its_port(covenant_home: Path) -> None:
    begun, found = anyio.Event(), list[http_kit.Event]()

    async def watch(daemon: Daemon) -> None:
        async with client(daemon) as session, session.get("/audit/recent?extended=true", headers=STREAM) as answer:
            async for one in http_kit.events(answer):
                begun.set()
                found.append(one)

    async with anyio.create_task_group() as group, daemon_kit.running(covenant_home, http_port=0) as daemon:
        port = daemon.http_port
        group.start_soon(watch, daemon)
        await begun.wait()
    assert (found[-1].data["kind"], found[-1].data["summary"]) == ("stream_end", {"reason": "the daemon stops"})
    with pytest.raises(OSError, match=r".*"):
        await anyio.connect_tcp("127.0.0.1", port)
