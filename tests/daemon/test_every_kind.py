"""Every request of the wire, asked of a whole daemon: each is answered, and none by a fault of the daemon's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import pytest

from covenant.wire import requests, responses
from policy import errors
from tests import daemon_kit, v1_client
from tests.doubles import async_client
from tests.doubles.async_client import AsyncClient
from tests.golden import ipc_kit

pytestmark = pytest.mark.anyio

# What each kind is answered with where nothing stands in its way; `error` where the sample names what is not there.
ANSWERS = {
    "a2_a_queue": "a2_a_queue",
    "authenticate": "error",
    "backfill_memory_records": "memory_records_backfilled",
    "backfill_settlement_receipts": "settlement_receipts_backfilled",
    "call_tool": "tool_result",
    "cancel_a2_a_task": "error",
    "capability_usage": "capability_usage",
    "chain_status": "chain_status",
    "compact_a2_a": "a2_a_compacted",
    "compact_memory": "memory_compacted",
    "cosign_audit_checkpoint": "error",
    "enroll_peer": "peer_enrolled",
    "flush_receipts": "error",
    "get_intent_result": "error",
    "get_secret": "error",
    "grant_capability": "error",
    "ignore_check": "ignore_report",
    "list_agents": "agents",
    "list_expiries": "expiries",
    "set_clock": "clock_set",
    # That daemon has no HTTP.
    "open_console": "error",
    "list_approvals": "approvals",
    "list_peers": "peer_list",
    "list_tools": "tool_list",
    "ping": "pong",
    "post_a2_a_result": "error",
    "promote_memory": "error",
    "protocol_info": "protocol_info",
    "prove_audit_inclusion": "audit_inclusion",
    "purge_audit": "audit_purged",
    "purge_capabilities": "capabilities_purged",
    "purge_memory": "memory_purged",
    "purge_peers": "peers_purged",
    "put_memory": "error",
    "query_provenance": "provenance_actions",
    "receipt_batches": "receipt_batches",
    "recent_a2_a_results": "a2_a_results",
    "recent_a2_a_tasks": "a2_a_tasks",
    "recent_audit": "audit_events",
    "recent_capabilities": "capabilities",
    "recent_debits": "debits",
    "recent_denials": "denials",
    "recent_memory": "memories",
    "recent_receipts": "receipts",
    "reload_agents": "agents",
    "repair_a2_a_task": "error",
    "repair_memory": "error",
    "resolve_approval": "error",
    "resume_intent": "error",
    "retry_a2_a_stale": "a2_a_auto_retried",
    "revoke_capability": "capability_revoked",
    "revoke_peer": "peer_revoked",
    "rotate_operator_token": "operator_token_rotated",
    "search_memory": "memories",
    "send_a2_a_task": "error",
    "sign_attestation": "error",
    "submit_intent": "intent_result",
    "try_recv_a2_a_result": "a2_a_result_opt",
    "try_recv_a2_a_task": "a2_a_task_opt",
    "verify": "verify_report",
    "verify_audit_integrity": "audit_integrity",
}
HELD = (
    "a2a.compact",
    "a2a.repair.requeue",
    "audit.purge",
    "capabilities.purge",
    "chain.batches",
    "chain.flush",
    "chain.receipts",
    "memory.backfill.dry_run",
    "memory.compact.apply",
    "memory.purge",
    "memory.read",
    "memory.write",
    "memory.repair.dry_run",
    "peers.purge",
    "settlement.backfill.apply",
    "tool.call.echo",
)


def test_table_has_every_kind_served() -> None:
    served = {kind for kind, model in requests.KINDS.items() if model is not requests.Unsupported}
    assert set(ANSWERS) == served


async def answered(client: AsyncClient, kind: str) -> dict[str, Any]:
    fields = {**ipc_kit.REQUESTS[kind]} | ({"prefer_stream": False} if kind == "submit_intent" else {})
    try:
        return await client.ask(kind, **fields)
    except errors.CovenantError as e:
        return e.to_json()


async def test_every_kind_is_answered(covenant_home: Path) -> None:
    async with daemon_kit.running(covenant_home) as daemon:
        await daemon.grant(*HELD)
        found: dict[str, Any] = {}
        for kind in ANSWERS:
            found[kind] = await answered(daemon.client, kind)
        # In the order of the table, so that what failed first is seen first.
        assert {kind: answer for kind, answer in found.items() if answer.get("code") == "internal"} == {}
        assert {kind: answer["kind"] for kind, answer in found.items()} == ANSWERS
        for answer in found.values():
            responses.parse(json.dumps(answer).encode())
            if answer["kind"] in v1_client.RESPONSES:
                v1_client.RESPONSE(answer)


async def test_what_is_not_served_says_so(covenant_home: Path) -> None:
    async with daemon_kit.running(covenant_home) as daemon:
        for kind in sorted(set(requests.KINDS) - set(ANSWERS)):
            assert (await answered(daemon.client, kind))["code"] == "unsupported"


async def test_client_of_version_1_sees_what_it_expects(covenant_home: Path) -> None:
    """The bytes of a client that knows nothing of ours: bootstrap, an intent, its memory, its rows."""
    async with daemon_kit.running(covenant_home) as daemon:
        granted = await daemon.ask("grant_capability", action="memory.write", scope={})
        assert set(granted) == {"kind", "signature_b58", "subject_display", "action"}
        result = await daemon.ask("submit_intent", text="hello there")
        assert result["status"] == "ok"
        assert "hello there" in result["text"]
        await daemon.grant("memory.read")
        (record,) = (await daemon.ask("recent_memory"))["records"]
        assert (record["id"], record["tier"]) == (result["intent_id"], "working")
        (hit,) = (await daemon.ask("search_memory", query="hello"))["records"]
        assert hit["id"] == record["id"]
        kinds = [row["kind"]["type"] for row in (await daemon.ask("recent_audit", limit=100))["events"]]
        assert {"intent_dispatched", "capability_check", "capability_granted"} <= set(kinds)
        assert (await daemon.ask("verify_audit_integrity"))["report"]["valid"] is True


async def test_stream_of_intent_has_one_chunk(covenant_home: Path) -> None:
    async with daemon_kit.running(covenant_home) as daemon:
        await daemon.grant("memory.write")
        await daemon.client.send("submit_intent", text="hello there", prefer_stream=True)
        begin, chunk, end = [await daemon.client.receive() for _ in range(3)]
        assert (begin["kind"], begin["response_kind"]) == ("stream_begin", "intent_result")
        assert set(chunk["chunk"]) == {"text", "sources"}
        assert {"intent_id", "status", "settlement"} <= set(end["summary"])


async def test_clients_side_by_side_each_get_their_own(covenant_home: Path) -> None:
    async with daemon_kit.running(covenant_home) as daemon:
        await daemon.grant("memory.write")

        async def submit(number: int) -> None:
            async with async_client.connected(covenant_home) as client:
                for turn in range(3):
                    text = f"number {number} turn {turn}"
                    assert text in (await client.ask("submit_intent", text=text))["text"]

        async with anyio.create_task_group() as group:
            for number in range(16):
                group.start_soon(submit, number)
