"""Streams: past events, then new ones, none twice, none missing, only for their reader, and with an end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from covenant.adapters.http.gateway import HttpGateway
from covenant.adapters.http.streams import Pace
from covenant.handlers.caller import Caller
from covenant.handlers.server import Server
from covenant.handlers.state import intent_progress
from covenant.wire import requests, responses, types
from covenant.wire.parts import AuditEvent
from tests import http_kit, v1_client
from tests.http_kit import event

pytestmark = pytest.mark.anyio

STREAM = {"Accept": "text/event-stream"}


@pytest.fixture
async def gateway(tmp_path: Path, echo: http_kit.Echo) -> AsyncIterator[HttpGateway]:
    server = http_kit.server(tmp_path, echo)
    async with http_kit.serving(server, pace=Pace(write_seconds=5, idle_seconds=0.05)) as one:
        yield one


def record(record_id: str, tier: types.Tier = types.Tier.WORKING, owner: types.AgentId = http_kit.ME) -> Any:
    return types.MemoryRecord(id=record_id, tier=tier, owner=owner, text="t", created_at=1)


async def taken(stream: AsyncIterator[http_kit.Event], count: int) -> list[http_kit.Event]:
    with anyio.fail_after(60):
        return [await anext(stream) for _ in range(count)]


async def test_rows_that_were_and_rows_that_come(gateway: HttpGateway, echo: http_kit.Echo) -> None:
    echo.answers["recent_audit"] = responses.AuditEvents(events=(event("b"), event("a")))
    async with (
        http_kit.client(gateway) as client,
        client.get("/audit/recent?extended=true&limit=2", headers=STREAM) as answer,
    ):
        assert answer.status == 200
        assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["Cache-Control"] == "no-cache, no-store"
        assert answer.headers["X-Accel-Buffering"] == "no"
        stream = http_kit.events(answer)
        first, *was = await taken(stream, 3)
        assert (first.data["kind"], first.data["response_kind"]) == ("stream_begin", "audit_events")
        assert [(one.event, one.id, one.data["sequence"]) for one in was] == [
            ("stream_chunk", "a", 0),
            ("stream_chunk", "b", 1),
        ]
        assert was[0].data["chunk"] == event("a").model_dump(mode="json")
        # One event that was already sent, one of another peer, and a new one.
        for row in (event("b"), event("theirs", owner=http_kit.OTHER), event("c", text="line\nbreak")):
            gateway.server.feed.publish("audit", row)
        (new,) = await taken(stream, 1)
        assert (new.id, new.data["sequence"], new.data["chunk"]["kind"]["text"]) == ("c", 2, "line\nbreak")


async def test_nothing_falls_between_what_was_and_what_comes(gateway: HttpGateway, echo: http_kit.Echo) -> None:
    async def recent(server: Server, caller: Caller, asked: requests.RecentAudit) -> responses.AuditEvents:
        found = responses.AuditEvents(events=(event("a"),))
        # Written after the look and before the answer is on its way.
        server.feed.publish("audit", event("b"))
        return found

    echo.answers["recent_audit"] = recent
    async with http_kit.client(gateway) as client, client.get("/audit/recent?extended=true", headers=STREAM) as answer:
        found = await taken(http_kit.events(answer), 3)
        assert [one.id for one in found] == ["", "a", "b"]


async def test_who_comes_again_gets_what_is_newer(gateway: HttpGateway, echo: http_kit.Echo) -> None:
    echo.answers["recent_audit"] = responses.AuditEvents(events=(event("c"), event("b"), event("a")))
    path = "/audit/recent?extended=true&follow=false"
    async with http_kit.client(gateway) as client:
        for seen, wanted in (("b", ["c"]), ("c", []), ("unknown", ["a", "b", "c"])):
            async with client.get(path, headers={**STREAM, "Last-Event-ID": seen}) as answer:
                found = [one async for one in http_kit.events(answer)]
            assert [one.id for one in found[1:-1]] == wanted, seen
            assert found[-1].data == {"kind": "stream_end", "stream_id": found[0].data["stream_id"]}


async def test_records_that_request_and_its_grant_admit(gateway: HttpGateway, echo: http_kit.Echo) -> None:
    echo.answers["recent_memory"] = responses.Memories(records=())
    held = http_kit.Grants()
    gateway.server.capabilities = cast("Any", held)
    held.grant(http_kit.OTHER, "memory.read", {"version": 1, "tiers": ["working"], "record_id": "w"})
    shown = [record("l", types.Tier.LONGTERM), record("x", owner=http_kit.OTHER), record("w")]
    async with http_kit.client(gateway, token=http_kit.OTHER_TOKEN) as client:  # noqa: SIM117 (as two lines)
        async with client.get("/memory/recent?tier=working", headers=STREAM) as answer:
            stream = http_kit.events(answer)
            await taken(stream, 1)
            for one in (*shown, record("w", owner=http_kit.OTHER)):
                gateway.server.feed.publish("memory", one)
            (new,) = await taken(stream, 1)
            assert (new.id, new.data["chunk"]["owner"]) == ("w", http_kit.OTHER.model_dump())
            # And a grant that was taken back ends the stream.
            held.grants.clear()
            (last,) = await taken(stream, 1)
            assert last.event == "stream_error"


async def test_operator_sees_everybodys_records(gateway: HttpGateway, echo: http_kit.Echo) -> None:
    echo.answers["recent_memory"] = responses.Memories(records=())
    held = http_kit.Grants()
    gateway.server.capabilities = cast("Any", held)
    held.grant(http_kit.ME, "memory.read", {})
    async with http_kit.client(gateway) as client, client.get("/memory/recent", headers=STREAM) as answer:
        stream = http_kit.events(answer)
        await taken(stream, 1)
        gateway.server.feed.publish("memory", record("theirs", owner=http_kit.OTHER))
        (new,) = await taken(stream, 1)
        assert new.id == "theirs"


async def test_refusal_is_answer_of_version_1(gateway: HttpGateway, echo: http_kit.Echo) -> None:
    echo.answers["recent_memory"] = responses.Error(message="no grant")
    async with http_kit.client(gateway) as client, client.get("/memory/recent", headers=STREAM) as answer:
        assert (answer.status, await answer.json()) == (200, {"kind": "error", "message": "no grant"})


async def test_token_that_ends_ends_its_streams(gateway: HttpGateway, echo: http_kit.Echo) -> None:
    echo.answers["recent_audit"] = responses.AuditEvents(events=())
    async with http_kit.client(gateway) as client, client.get("/audit/recent?extended=true", headers=STREAM) as answer:
        stream = http_kit.events(answer)
        await taken(stream, 1)
        del cast("http_kit.Peers", gateway.server.peers).tokens[http_kit.TOKEN]
        gateway.server.feed.publish("audit", event("not for you any more"))
        (last,) = await taken(stream, 1)
        assert last.event == "stream_error"
        assert [one async for one in stream] == []


async def test_who_falls_behind_is_told(gateway: HttpGateway, echo: http_kit.Echo) -> None:
    echo.answers["recent_audit"] = responses.AuditEvents(events=())
    async with http_kit.client(gateway) as client, client.get("/audit/recent?extended=true", headers=STREAM) as answer:
        stream = http_kit.events(answer)
        await taken(stream, 1)
        # All at once: no reader could take one between two of them.
        for number in range(2000):
            gateway.server.feed.publish("audit", event(str(number)))
        with anyio.fail_after(60):
            found = [one async for one in stream]
    # The events that fit the queue, and perhaps the one that the stream waited for: a beginning without a gap.
    assert [one.id for one in found[:-1]] == [str(number) for number in range(len(found) - 1)]
    assert len(found) - 1 in (1024, 1025)
    assert (found[-1].event, found[-1].data["message"]) == ("stream_error", "this stream fell behind and was ended")


async def test_daemon_that_stops_says_so(gateway: HttpGateway, echo: http_kit.Echo) -> None:
    echo.answers["recent_audit"] = responses.AuditEvents(events=())
    async with http_kit.client(gateway) as client, client.get("/audit/recent?extended=true", headers=STREAM) as answer:
        stream = http_kit.events(answer)
        await taken(stream, 1)
        await gateway.stop(grace_seconds=5)
        with anyio.fail_after(60):
            (last,) = [one async for one in stream]
        assert (last.data["kind"], last.data["summary"]) == ("stream_end", {"reason": "the daemon stops"})


async def test_intent_is_one_chunk_and_its_end(gateway: HttpGateway, echo: http_kit.Echo) -> None:
    go_on = anyio.Event()

    async def submit(server: Server, caller: Caller, asked: requests.SubmitIntent) -> responses.IntentResult:
        server.live.say("i-1", caller.agent.pubkey, "submitted", 1)
        await go_on.wait()
        server.live.say("i-1", caller.agent.pubkey, intent_progress.ENDED, 2, status="ok")
        return responses.IntentResult(intent_id="i-1", status="ok", text="done", sources=("s",))

    echo.answers["submit_intent"] = submit
    async with http_kit.client(gateway) as client:  # noqa: SIM117 (two requests of one client)
        async with client.post("/intent", json={"text": "t"}, headers=STREAM) as answer:
            stream = http_kit.events(answer)
            (begin,) = await taken(stream, 1)
            assert (begin.event, begin.id, begin.data["response_kind"]) == ("stream_begin", "i-1", "intent_result")
            # By the id of the beginning, its events are followed while it lives: what it did, and what it does.
            async with client.get("/intents/i-1/events?extended=true", headers=STREAM) as watched:
                second = http_kit.events(watched)
                assert [one.data.get("chunk", {}).get("type") for one in await taken(second, 2)] == [None, "submitted"]
                go_on.set()
                ended, end = await taken(second, 2)
                assert ended.data["chunk"] == {
                    "intent_id": "i-1",
                    "sequence": 1,
                    "type": "ended",
                    "at_ms": 2,
                    "status": "ok",
                }
                assert end.data["summary"] == {"intent_id": "i-1", "status": "ok"}
            chunk, last = await taken(stream, 2)
            assert chunk.data["chunk"] == {"text": "done", "sources": ["s"]}
            assert (last.event, last.data["summary"]["intent_id"], last.data["summary"]["status"]) == (
                *("stream_end", "i-1"),
                "ok",
            )
            assert [one async for one in stream] == []


async def test_intent_refused_ends_its_stream_with_that(gateway: HttpGateway, echo: http_kit.Echo) -> None:
    echo.answers["submit_intent"] = responses.Error(message="no grant for memory.write")
    body = {"text": "t"}
    async with http_kit.client(gateway) as client, client.post("/intent", json=body, headers=STREAM) as answer:
        found = [one async for one in http_kit.events(answer)]
    assert [(one.event, one.data.get("message")) for one in found] == [
        ("stream_begin", None),
        ("stream_error", "no grant for memory.write"),
    ]


async def test_intent_goes_on_when_its_client_leaves(gateway: HttpGateway, echo: http_kit.Echo) -> None:
    begun, go_on, ended = anyio.Event(), anyio.Event(), anyio.Event()

    async def submit(server: Server, caller: Caller, asked: requests.SubmitIntent) -> responses.IntentResult:
        begun.set()
        await go_on.wait()
        ended.set()
        return responses.IntentResult(intent_id="i-1", status="ok", text="done")

    echo.answers["submit_intent"] = submit
    for headers in (STREAM, {}):
        begun, go_on, ended = anyio.Event(), anyio.Event(), anyio.Event()
        async with http_kit.client(gateway) as client:
            with anyio.fail_after(60):
                async with anyio.create_task_group() as group:
                    group.start_soon(_post_and_leave, client, headers)
                    await begun.wait()
                    # Long enough that the gateway writes to no client.
                    await anyio.sleep(0.2)
                    group.cancel_scope.cancel()
        go_on.set()
        with anyio.fail_after(60):
            await ended.wait()


async def _post_and_leave(client: Any, headers: dict[str, str]) -> None:
    async with client.post("/intent", json={"text": "t"}, headers=headers) as answer:
        await answer.read()


async def test_what_intent_does_is_for_whoever_submitted_it(gateway: HttpGateway, echo: http_kit.Echo) -> None:
    echo.answers["get_intent_result"] = responses.Error(message="no result of an intent `i-2` is kept")
    gateway.server.live.say("i-2", http_kit.OTHER.pubkey, "submitted", 1)
    gateway.server.live.say("i-3", http_kit.ME.pubkey, "submitted", 1)
    async with http_kit.client(gateway, token=http_kit.OTHER_TOKEN) as client:
        async with client.get("/intents/i-3/events?extended=true", headers=STREAM) as answer:
            assert (answer.content_type, (await answer.json())["kind"]) == ("application/json", "error")
        async with client.get("/intents/i-2/events?extended=true", headers=STREAM) as answer:
            stream = http_kit.events(answer)
            assert len(await taken(stream, 2)) == 2
            # And of what comes, its own alone.
            for number, intent_id in enumerate(("i-3", "i-2", "i-3", "i-2")):
                gateway.server.live.say(intent_id, "", f"step {number}", 2)
            came = [(one.data["chunk"]["intent_id"], one.data["chunk"]["type"]) for one in await taken(stream, 2)]
            assert came == [("i-2", "step 1"), ("i-2", "step 3")]
    # The operator may see everybody's.
    async with (
        http_kit.client(gateway) as client,
        client.get("/intents/i-2/events?extended=true", headers=STREAM) as answer,
    ):
        assert len(await taken(http_kit.events(answer), 4)) == 4


async def test_intent_that_has_ended_has_only_end(gateway: HttpGateway, echo: http_kit.Echo) -> None:
    echo.answers["get_intent_result"] = responses.IntentResult(intent_id="i-1", status="ok", text="done")
    async with (
        http_kit.client(gateway) as client,
        client.get("/intents/i-1/events?extended=true", headers=STREAM) as answer,
    ):
        found = [one async for one in http_kit.events(answer)]
    assert [one.event for one in found] == ["stream_begin", "stream_end"]
    assert found[1].data["summary"] == {"intent_id": "i-1", "status": "ok"}


async def test_how_it_is_followed_is_yes_or_no(gateway: HttpGateway, echo: http_kit.Echo) -> None:
    async with http_kit.client(gateway) as client:
        for word, headers in (("x", STREAM), ("x", {}), ("true&follow=false", STREAM)):
            async with client.get(f"/audit/recent?extended=true&follow={word}", headers=headers) as answer:
                assert answer.status == 400
    assert gateway.server.feed.subscribers == 0


async def test_client_of_version_1_gets_acts_without_envelopes(gateway: HttpGateway, echo: http_kit.Echo) -> None:
    live = gateway.server.live
    acts: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"type": "hermes_tool_invoked", "tool": "t", "preview_hash_hex": "ab"}, {"type": "tool_call", "tool": "t"}),
        ({"type": "hermes_tool_completed", "tool": "t", "duration_ms": 2}, {"type": "tool_result", "duration_ms": 2}),
        ({"type": "hermes_approval_requested", "choices": ["once"]}, {"type": "tool_call", "tool": "approval"}),
        ({"type": "hermes_approval_resolved", "choice": "once"}, {"type": "tool_result", "tool": "approval"}),
        ({"type": "hermes_file_written", "path": "a", "bytes": 1}, {"type": "file_write", "path": "a", "bytes": 1}),
    ]
    live.say("i-1", http_kit.ME.pubkey, "submitted", 1)
    async with http_kit.client(gateway) as client, client.get("/intents/i-1/events", headers=STREAM) as answer:
        assert answer.content_type == "text/event-stream"
        for row, _ in acts:
            for about in ("i-1", "of another"):
                kind = {**row, "intent_id": about, "run_id": "r"}
                live.heard(types_row(kind))
        live.say("i-1", http_kit.ME.pubkey, intent_progress.ENDED, 2, status="ok")
        found = [one async for one in http_kit.events(answer)]
    # An event without a name is the only kind that `onmessage` of a browser gets.
    assert {one.event for one in found} == {""}
    for one, (_, wanted) in zip(found, acts, strict=True):
        v1_client.AGENT_EVENT(one.data)
        assert wanted.items() <= one.data.items()
    assert len(live) == 0


def types_row(kind: dict[str, Any]) -> AuditEvent:
    return AuditEvent(id="e", timestamp_ms=7, issuer=http_kit.ME, kind=kind)
