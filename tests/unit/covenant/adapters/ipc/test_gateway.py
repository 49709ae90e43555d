"""Check the socket: the handshake, answers in order, streams, and that no client suffers from bytes of another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from covenant.adapters.ipc import limits
from covenant.wire import frames, requests, responses
from covenant.wire.types import MemoryRecord, Tier
from tests import ipc_kit
from tests.golden.ipc_kit import RECORD

PING = {"kind": "ping"}
PONG = {"kind": "pong"}


pytestmark = pytest.mark.anyio


class Gate:
    """A handler that waits for the test's signal, and counts its requests."""

    def __init__(self) -> None:
        self.open = anyio.Event()
        self.came = 0

    async def __call__(self, server: Any, caller: Any, asked: requests.Request) -> responses.Response:
        self.came += 1
        await self.open.wait()
        return responses.MemoryPurged(purged=self.came)


def records(count: int, *, text: str = "x") -> Any:
    one = MemoryRecord.model_validate_json(json.dumps(RECORD))

    async def answer(server: Any, caller: Any, asked: requests.RecentMemory) -> responses.Memories:
        return responses.Memories(
            records=tuple(one.model_copy(update={"text": text, "id": str(n)}) for n in range(count))
        )

    return answer


# The handshake --------------------------------------------------------------------------------------------------


async def test_whoever_has_token_comes_in_after_any_number_of_questions(covenant_home: Path) -> None:
    async with ipc_kit.running(covenant_home) as adapter, adapter.client() as client:
        for _ in range(3):
            info = await client.ask({"kind": "protocol_info"})
            assert info["info"] == {"protocol": "covenant.ipc", "version": 1, "min_supported": 1, "max_supported": 2}
        await client.enter()
        assert await client.ask(PING) == PONG


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (PING, "missing token: the first request was `ping`"),
        ({"kind": "authenticate", "token_b58": "nobody's"}, "malformed token"),
        ({"kind": "authenticate", "token_b58": "1" * 31}, "malformed token"),
        ({"kind": "authenticate", "token_b58": "1" * 32}, "unknown token"),
        ({"kind": "authenticate", "token_b58": ""}, "missing token"),
        ({"kind": "authenticate", "token_b58": "1" * 5000}, "malformed token"),
        ({"kind": "authenticate"}, "malformed: `token_b58`: field required"),
        ({"kind": "nonsense"}, "malformed: no request has the kind `nonsense`"),
        (b"not json", "malformed: not JSON at line 1 column 1"),
        (b"[" * 1000, "malformed: nested deeper than 64 levels"),
    ],
)
async def test_any_other_first_frame_ends_connection_and_is_written(
    covenant_home: Path, first: Any, reason: str
) -> None:
    async with ipc_kit.running(covenant_home) as adapter, adapter.client() as client:
        assert await client.ask(first) == {"kind": "authentication_failed", "reason": reason}
        assert await client.receive() is None
        assert adapter.audit.of("authentication_failed") == [{"transport": "ipc", "reason": reason}]


async def test_stranger_may_not_send_much(covenant_home: Path) -> None:
    bounds = limits.IpcBounds(handshake_bytes=100)
    async with ipc_kit.running(covenant_home, bounds=bounds) as adapter, adapter.client() as client:
        await client.stream.send((101).to_bytes(4, "big"))
        assert (await client.receive())["kind"] == "authentication_failed"
        assert await client.receive() is None
    async with ipc_kit.running(covenant_home / "2", bounds=bounds) as adapter, adapter.client() as client:
        await client.enter()
        assert (await client.ask({**PING, "x": "y" * 200})) == PONG


async def test_who_does_not_say_who_it_is_in_time_goes(covenant_home: Path) -> None:
    bounds = limits.IpcBounds(handshake_seconds=0.1)
    async with ipc_kit.running(covenant_home, bounds=bounds) as adapter, adapter.client() as client:
        assert await client.receive() == {"kind": "authentication_failed", "reason": "missing token: none came in time"}
        assert await client.receive() is None
        assert len(adapter.audit.of("authentication_failed")) == 1


async def test_flood_of_wrong_tokens_has_few_rows_and_is_counted(covenant_home: Path) -> None:
    bounds = limits.IpcBounds(refusals=2, refusal_seconds=3600.0)
    wrong = {"kind": "authenticate", "token_b58": "nobody's"}
    async with ipc_kit.running(covenant_home, bounds=bounds) as adapter:
        for _ in range(30):
            async with adapter.client() as client:
                assert (await client.ask(wrong))["kind"] == "authentication_failed"
                assert await client.receive() is None
        async with adapter.client() as client:
            await client.enter()
            assert await client.ask(PING) == PONG
        assert len(adapter.audit.of("authentication_failed")) == 2
        adapter.gateway.group.cancel_scope.cancel()
    reasons = [row["reason"] for row in adapter.audit.of("authentication_failed")]
    alone = "malformed token"
    assert reasons == [alone, alone, f"28 more were refused and not written one by one; the last: {alone}"]


async def test_who_only_looks_in_leaves_no_row(covenant_home: Path) -> None:
    async with ipc_kit.running(covenant_home) as adapter:
        async with adapter.client() as client:
            await client.ask({"kind": "protocol_info"})
        while adapter.gateway.connections:
            await anyio.lowlevel.checkpoint()
        assert adapter.audit.rows == []


async def test_nobody_authenticates_twice(covenant_home: Path) -> None:
    async with ipc_kit.running(covenant_home) as adapter, adapter.client() as client:
        await client.enter()
        answer = await client.ask({"kind": "authenticate", "token_b58": ipc_kit.YOUR_TOKEN})
        assert (answer["kind"], answer["code"]) == ("error", "authentication_failed")
        assert await client.ask(PING) == PONG


# Answers --------------------------------------------------------------------------------------------------------


async def test_answers_come_in_order_of_requests(covenant_home: Path) -> None:
    async with ipc_kit.running(covenant_home) as adapter, adapter.client() as client:
        await client.enter()
        kinds = ["ping", "protocol_info", "sap_status", "nonsense"] * 500
        async with anyio.create_task_group() as group:
            group.start_soon(client.send, *({"kind": kind} for kind in kinds))
            answers = [await client.receive() for _ in kinds]
        expected = ["pong", "protocol_info", "unsupported", "unknown_kind"] * 500
        assert [answer.get("code", answer["kind"]) for answer in answers] == expected


async def test_what_was_answered_does_not_wait_for_what_takes_long(covenant_home: Path) -> None:
    gate = Gate()
    async with ipc_kit.running(covenant_home, handlers={"purge_memory": gate}) as adapter, adapter.client() as client:
        await client.enter()
        await client.send(PING, {"kind": "purge_memory", "before_ms": 1}, PING)
        assert await client.receive() == PONG
        async with adapter.client() as other:
            await other.enter(ipc_kit.YOUR_TOKEN)
            assert await other.ask(PING) == PONG
        gate.open.set()
        assert await client.receive() == {"kind": "memory_purged", "purged": 1}
        assert await client.receive() == PONG


async def test_whoever_has_said_all_still_gets_its_answers(covenant_home: Path) -> None:
    async with ipc_kit.running(covenant_home) as adapter, adapter.client() as client:
        await client.enter()
        await client.send(PING, PING)
        await client.stream.send_eof()
        assert [await client.receive() for _ in range(3)] == [PONG, PONG, None]


async def test_what_was_begun_is_done_although_whoever_asked_has_gone(covenant_home: Path) -> None:
    gate, done = Gate(), anyio.Event()

    async def purge(server: Any, caller: Any, asked: Any) -> responses.Response:
        answer = await gate(server, caller, asked)
        done.set()
        return answer

    async with ipc_kit.running(covenant_home, handlers={"purge_memory": purge}) as adapter:
        async with adapter.client() as client:
            await client.enter()
            await client.send({"kind": "purge_memory", "before_ms": 1})
            while not gate.came:
                await anyio.lowlevel.checkpoint()
        gate.open.set()
        with anyio.fail_after(60):
            await done.wait()


async def test_fault_of_ours_is_answer_and_connection_goes_on(
    covenant_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(server: Any, caller: Any, asked: Any) -> responses.Response:
        raise ZeroDivisionError

    async with ipc_kit.running(covenant_home, handlers={"list_tools": broken}) as adapter, adapter.client() as client:
        await client.enter()
        answer = await client.ask({"kind": "list_tools"})
        assert (answer["kind"], answer["code"]) == ("error", "internal")
        assert "ZeroDivisionError" in caplog.text
        assert await client.ask(PING) == PONG


async def test_answer_that_no_frame_holds_is_refused(covenant_home: Path) -> None:
    big = records(9, text="x" * (1 << 20))
    async with ipc_kit.running(covenant_home, handlers={"recent_memory": big}) as adapter, adapter.client() as client:
        await client.enter()
        assert (await client.ask({"kind": "recent_memory"}))["code"] == "answer_too_large"
        assert await client.ask(PING) == PONG


async def test_stream_has_beginning_chunks_and_end(covenant_home: Path) -> None:
    async with (
        ipc_kit.running(covenant_home, handlers={"recent_memory": records(3)}) as adapter,
        adapter.client() as client,
    ):
        await client.enter()
        seen: set[str] = set()
        for number in range(1, 3):
            await client.send({"kind": "recent_memory", "prefer_stream": True})
            parts = [await client.receive() for _ in range(5)]
            assert [part["kind"] for part in parts] == ["stream_begin", *["stream_chunk"] * 3, "stream_end"]
            seen |= {part["stream_id"] for part in parts}
            assert len(seen) == number
            assert parts[0]["response_kind"] == "memories"
            assert [(part["sequence"], part["chunk"]["id"]) for part in parts[1:4]] == [(0, "0"), (1, "1"), (2, "2")]
        assert (await client.ask({"kind": "recent_memory"}))["kind"] == "memories"


async def test_what_no_frame_holds_comes_as_stream(covenant_home: Path) -> None:
    big = records(9, text="x" * (1 << 20))
    async with ipc_kit.running(covenant_home, handlers={"recent_memory": big}) as adapter, adapter.client() as client:
        await client.enter()
        await client.send({"kind": "recent_memory", "prefer_stream": True})
        parts = [await client.receive() for _ in range(11)]
        assert [len(part["chunk"]["text"]) for part in parts[1:-1]] == [1 << 20] * 9


async def test_refusal_of_stream_is_one_error(covenant_home: Path) -> None:
    async with (
        ipc_kit.running(covenant_home, handlers={"recent_audit": refuses}) as adapter,
        adapter.client() as client,
    ):
        await client.enter()
        assert (await client.ask({"kind": "recent_audit", "prefer_stream": True}))["kind"] == "error"
        assert await client.ask(PING) == PONG


async def refuses(server: Any, caller: Any, asked: Any) -> responses.Response:
    from policy import errors

    raise errors.UnsupportedError("no")


# Hostile clients ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"", "malformed_request"),
        (b"{", "malformed_request"),
        (b"\xff\xfe", "malformed_request"),
        (b"null", "malformed_request"),
        (b"[]", "malformed_request"),
        (b"{}", "unknown_kind"),
        (b'{"kind":1}', "unknown_kind"),
        (b'{"kind":"ping","kind":"ping"}', "malformed_request"),
        (b'{"kind":"ping","x":NaN}', "malformed_request"),
        (b'{"kind":"ping","x":1e999}', "malformed_request"),
        (b'{"kind":"submit_intent","text":"\\ud800"}', "malformed_request"),
        (b'{"kind":"submit_intent","text":7}', "malformed_request"),
        (b'{"kind":"call_tool","name":"x","arguments":' + b"[" * 64 + b"]" * 64 + b"}", "malformed_request"),
        (b'{"kind":"call_tool","name":"x","arguments":' + b"[" * 63 + b"]" * 63 + b"}", "unsupported"),
        (b'{"kind":"call_tool","name":"x","arguments":' + b"[" * 50_000, "malformed_request"),
        (b'{"kind":"recent_memory","limit":-1}', "malformed_request"),
        (b'{"kind":"recent_memory","limit":' + b"9" * 5000 + b"}", "malformed_request"),
        (b'{"kind":"ping"}' + b" " * 300_000 + b"x", "malformed_request"),
    ],
)
async def test_frame_no_request_is_error_and_next_one_is_answered(covenant_home: Path, raw: bytes, code: str) -> None:
    handlers = {"call_tool": refuses}
    async with ipc_kit.running(covenant_home, handlers=handlers) as adapter, adapter.client() as client:
        await client.enter()
        answer = await client.ask(raw)
        assert (answer["kind"], answer["code"]) == ("error", code)
        assert await client.ask(PING) == PONG


async def test_frame_too_long_ends_its_own_connection_only(covenant_home: Path) -> None:
    async with ipc_kit.running(covenant_home) as adapter, adapter.client() as other, adapter.client() as client:
        await other.enter(ipc_kit.YOUR_TOKEN)
        await client.enter()
        await client.stream.send((frames.MAX_BYTES + 1).to_bytes(4, "big"))
        assert (await client.receive())["code"] == "bad_frame"
        assert await client.receive() is None
        assert await other.ask(PING) == PONG


async def test_longest_frame_is_taken(covenant_home: Path) -> None:
    raw = b'{"kind":"ping","x":"' + b"y" * (frames.MAX_BYTES - 22) + b'"}'
    assert len(raw) == frames.MAX_BYTES
    async with ipc_kit.running(covenant_home) as adapter, adapter.client() as client:
        await client.enter()
        assert await client.ask(raw) == PONG


async def test_half_frame_ends_its_own_connection_only(covenant_home: Path) -> None:
    bounds = limits.IpcBounds(frame_seconds=1)
    async with (
        ipc_kit.running(covenant_home, bounds=bounds) as adapter,
        adapter.client() as other,
        adapter.client() as client,
    ):
        await other.enter(ipc_kit.YOUR_TOKEN)
        await client.enter()
        await client.stream.send(ipc_kit.frame(PING)[:-1])
        assert (await client.receive())["code"] == "bad_frame"
        assert await client.receive() is None
        assert await other.ask(PING) == PONG


async def test_frame_cut_off_is_said_to_be(covenant_home: Path) -> None:
    async with ipc_kit.running(covenant_home) as adapter, adapter.client() as client:
        await client.enter()
        await client.stream.send(ipc_kit.frame(PING)[:-1])
        await client.stream.send_eof()
        assert (await client.receive())["message"] == "the last frame was cut off"
        assert await client.receive() is None


async def test_frame_may_come_byte_by_byte(covenant_home: Path) -> None:
    async with ipc_kit.running(covenant_home) as adapter, adapter.client() as client:
        await client.enter()
        for byte in ipc_kit.frame(PING) * 2:
            await client.stream.send(bytes([byte]))
        assert [await client.receive() for _ in range(2)] == [PONG, PONG]


async def test_large_frames_of_one_peer_wait_for_each_other_and_for_no_other(covenant_home: Path) -> None:
    bounds = limits.IpcBounds(small_bytes=1000, large_frames=1)
    # Larger than one read of asyncio.
    large = ipc_kit.frame({**PING, "x": "y" * (1 << 20)})
    async with (
        ipc_kit.running(covenant_home, bounds=bounds) as adapter,
        adapter.client() as first,
        adapter.client() as second,
        adapter.client() as other,
        anyio.create_task_group() as group,
    ):
        await first.enter()
        await second.enter()
        await other.enter(ipc_kit.YOUR_TOKEN)
        places = adapter.gateway.peers[ipc_kit.ME.pubkey].large
        await first.stream.send(large[:-1])
        while places.value:
            await anyio.lowlevel.checkpoint()
        group.start_soon(second.stream.send, large)
        while not places.statistics().tasks_waiting:
            await anyio.lowlevel.checkpoint()
        await other.stream.send(large)
        assert await other.receive() == PONG
        assert places.statistics().tasks_waiting == 1
        await first.stream.send(large[-1:])
        assert await first.receive() == PONG
        assert await second.receive() == PONG


async def test_one_that_reads_nothing_holds_up_nobody_and_goes(covenant_home: Path) -> None:
    bounds = limits.IpcBounds(frame_seconds=1)
    async with (
        ipc_kit.running(
            covenant_home, bounds=bounds, handlers={"recent_memory": records(2, text="z" * 500_000)}
        ) as adapter,
        adapter.client() as other,
        adapter.client() as client,
    ):
        await other.enter(ipc_kit.YOUR_TOKEN)
        await client.enter()
        await client.send(*({"kind": "recent_memory"} for _ in range(50)))
        for _ in range(20):
            assert await other.ask(PING) == PONG
        with anyio.fail_after(60):
            while len(adapter.gateway.connections) > 1:
                await anyio.lowlevel.checkpoint()
        assert await other.ask(PING) == PONG


async def test_flood_of_requests_leaves_others_their_turn(covenant_home: Path) -> None:
    async with ipc_kit.running(covenant_home) as adapter, adapter.client() as other, adapter.client() as client:
        await other.enter(ipc_kit.YOUR_TOKEN)
        await client.enter()
        flood = ipc_kit.frame(PING) * 20_000
        async with anyio.create_task_group() as group:
            group.start_soon(client.stream.send, flood)
            assert await other.ask(PING) == PONG
            for _ in range(20_000):
                assert await client.receive() == PONG


async def test_strangers_make_room_for_strangers_and_take_none_from_those_inside(covenant_home: Path) -> None:
    bounds = limits.IpcBounds(strangers=4)
    async with ipc_kit.running(covenant_home, bounds=bounds) as adapter, adapter.client() as inside:
        await inside.enter()
        async with anyio.create_task_group() as group, adapter.client() as first:
            await first.ask({"kind": "protocol_info"})
            idle = [await anyio.connect_unix(adapter.path) for _ in range(4)]
            told = await first.receive()
            assert told is not None
            assert told["code"] == "too_many_requests"
            assert await first.receive() is None
            async with adapter.client() as late:
                await late.enter(ipc_kit.YOUR_TOKEN)
                assert await late.ask(PING) == PONG
            assert await inside.ask(PING) == PONG
            for one in idle:
                group.start_soon(one.aclose)


async def test_more_connections_than_there_may_be_are_told_so(covenant_home: Path) -> None:
    bounds = limits.IpcBounds(connections=2)
    async with (
        ipc_kit.running(covenant_home, bounds=bounds) as adapter,
        adapter.client() as first,
        adapter.client() as second,
    ):
        await first.enter()
        await second.enter(ipc_kit.YOUR_TOKEN)
        async with adapter.client() as third:
            assert (await third.receive())["code"] == "too_many_requests"
            assert await third.receive() is None
        assert await first.ask(PING) == PONG


async def test_one_peer_has_bound_of_its_own(covenant_home: Path) -> None:
    bounds = limits.IpcBounds(of_one_peer=1)
    async with (
        ipc_kit.running(covenant_home, bounds=bounds) as adapter,
        adapter.client() as first,
        adapter.client() as second,
        adapter.client() as other,
    ):
        await first.enter()
        refused = await second.ask({"kind": "authenticate", "token_b58": ipc_kit.MY_TOKEN})
        assert refused["code"] == "too_many_requests"
        assert await second.receive() is None
        await other.enter(ipc_kit.YOUR_TOKEN)
        assert await first.ask(PING) == PONG
    assert adapter.gateway.peers == {}


# The end --------------------------------------------------------------------------------------------------------


async def test_stop_lets_what_has_begun_be_answered(covenant_home: Path) -> None:
    gate = Gate()
    async with ipc_kit.running(covenant_home, handlers={"purge_memory": gate}) as adapter, adapter.client() as client:
        await client.enter()
        async with adapter.client() as idle:
            await idle.enter(ipc_kit.YOUR_TOKEN)
            await client.send({"kind": "purge_memory", "before_ms": 1})
            while not gate.came:
                await anyio.lowlevel.checkpoint()
            async with anyio.create_task_group() as group:
                group.start_soon(stop, adapter, 5.0)
                assert await idle.receive() is None
                gate.open.set()
                assert await client.receive() == {"kind": "memory_purged", "purged": 1}
                assert await client.receive() is None


async def stop(adapter: ipc_kit.Running, grace_seconds: float) -> None:
    await adapter.gateway.stop(grace_seconds=grace_seconds)


async def test_stop_ends_what_takes_longer_than_its_grace(covenant_home: Path) -> None:
    gate = Gate()
    async with ipc_kit.running(covenant_home, handlers={"purge_memory": gate}) as adapter, adapter.client() as client:
        await client.enter()
        await client.send({"kind": "purge_memory", "before_ms": 1})
        while not gate.came:
            await anyio.lowlevel.checkpoint()
        await adapter.gateway.stop(grace_seconds=0.05)
        assert await client.receive() is None


def test_tiers_of_version_1_have_aliases() -> None:
    for name in ("longterm", "long-term", "long_term"):
        read = requests.parse(json.dumps({"kind": "recent_memory", "tier": name}).encode())
        assert isinstance(read, requests.RecentMemory)
        assert read.tier is Tier.LONGTERM
