"""A client of version 1 decodes the daemon's answers, row by row of covenant-v1-differences.md."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest

from policy import errors
from policy.audit_log import chain
from tests import daemon_kit, v1_client
from tests.daemon_kit import Daemon
from tests.doubles import async_client
from tests.mailbox_kit import MANIFEST

pytestmark = pytest.mark.anyio


async def _ask(daemon: Daemon, kind: str, **fields: Any) -> dict[str, Any]:
    answer = await daemon.client.ask(kind, **fields)
    v1_client.RESPONSE(answer)
    return answer


def test_decoders_refuse_what_version_1_refuses() -> None:
    unknown = {"id": "x", "timestamp_ms": 1, "issuer": {"display": "a", "pubkey": "b"}, "kind": {"type": "run_usage"}}
    for wrong in (
        {"kind": "audit_events", "events": [unknown]},
        {"kind": "chain_status", "status": {"cluster": None, "ready": False, "missing": []}},
        {"kind": "a2_a_result_posted"},
        {"kind": "peer_enrolled", "token_b58": "t", "granted": [{"action": "x"}]},
    ):
        with pytest.raises(AssertionError):
            v1_client.RESPONSE(wrong)
    with pytest.raises(AssertionError):
        v1_client.STREAM({"kind": "stream_end", "stream_id": 0, "summary": {"count": 1}})


async def test_audit_has_only_version_1s_kinds(covenant_home: Path) -> None:
    async with daemon_kit.running(covenant_home) as daemon:
        await daemon.grant("memory.write")
        await daemon.client.ask("put_memory", tier="longterm", text="a note")
        found = await _ask(daemon, "recent_audit", limit=100)
        assert {row["kind"]["type"] for row in found["events"]} >= {"capability_granted", "capability_check"}
        extended = await daemon.client.ask("recent_audit", limit=100, extended=True)
        assert "memory_written" in {row["kind"]["type"] for row in extended["events"]}
        asked = await daemon.client.ask("recent_audit", limit=100, types=["memory_written"])
        assert {row["kind"]["type"] for row in asked["events"]} == {"memory_written"}
        streamed = [part async for part in daemon.client.stream("recent_audit", limit=5)]
        for part in streamed:
            v1_client.STREAM(part)
        assert streamed[-1] == {"kind": "stream_end", "stream_id": streamed[0]["stream_id"]}


async def test_settlement_and_capabilities_decode(covenant_home: Path) -> None:
    async with daemon_kit.running(covenant_home) as daemon:
        await _ask(daemon, "chain_status")
        await daemon.grant("memory.write", "memory.read")
        ends = daemon.server.now_ms() + 3000
        await daemon.client.ask("grant_capability", action="tool.call.echo", scope={}, expires_at=ends)
        held = (await _ask(daemon, "capability_usage"))["grants"]
        await daemon.client.ask("revoke_capability", signature_b58=held[-1]["signature_b58"])
        await anyio.sleep((ends - daemon.server.now_ms()) / 1000 + 0.1)  # a grant that ends at t still holds at t
        words = {row["effective"] for row in (await _ask(daemon, "capability_usage"))["grants"]}
        assert words == {"live", "revoked", "expired"}


async def test_peers_decode(covenant_home: Path) -> None:
    async with daemon_kit.running(covenant_home) as daemon:
        made = await _ask(daemon, "enroll_peer", display="ada@laptop", actions=["memory.read"])
        assert made["granted"] == ["memory.read"]
        prefix = made["token_b58"][:6]
        own = daemon.server.peers.of(daemon.server.identity.agent.pubkey)[0].token_prefix
        for wanted, asked in (
            ("self_revoke_forbidden", own),
            ("revoked", prefix),
            ("already_revoked", prefix),
            ("not_found", "zzzzzz"),
        ):
            outcome = (await _ask(daemon, "revoke_peer", token_prefix=asked))["outcome"]
            assert outcome["type"] == wanted


async def test_mailbox_decodes(covenant_home: Path) -> None:
    async with daemon_kit.running(covenant_home) as daemon:
        me = daemon.server.identity.agent
        await daemon.grant(
            f"a2a.send.{me.display}",
            f"a2a.recv.{me.display}",
            f"a2a.respond.{me.display}",
            "a2a.repair.requeue",
            "a2a.repair.force_error",
        )
        who = me.model_dump()
        one, two, three = (str(uuid.UUID(int=number)) for number in (1, 2, 3))
        for task_id in (one, two, three):
            task = {"id": task_id, "sender": who, "recipient": who, "intent_text": "x"}
            await daemon.client.ask("send_a2_a_task", task=task)
        for task_id, command in (
            (one, {"action": "requeue", "duplicate_risk": "operator-accepted"}),
            (two, {"action": "force_error", "message": "no"}),
        ):
            await daemon.client.ask("try_recv_a2_a_task")
            request = {"task_id": task_id, "command": command, "reason": "test"}
            await _ask(daemon, "repair_a2_a_task", request=request)
        await daemon.client.ask("try_recv_a2_a_task")
        result = {"task_id": three, "status": "ok", "content": []}
        assert (await _ask(daemon, "post_a2_a_result", result=result))["task_id"] == three
        report = (await _ask(daemon, "retry_a2_a_stale", policy={}))["report"]
        assert report["considered"] == len(report["skipped"]) == 1


async def test_inclusion_follows_the_chain(covenant_home: Path) -> None:
    async with daemon_kit.running(covenant_home) as daemon:
        await daemon.grant("memory.write", "memory.read")
        row = (await _ask(daemon, "recent_audit", limit=1))["events"][0]
        await daemon.grant("memory.purge")
        proof = (await _ask(daemon, "prove_audit_inclusion", event_id=row["id"]))["proof"]
        root = chain.chain_hash(proof["previous_hash_hex"], proof["event_hash_hex"])
        for one in proof["suffix_event_hashes_hex"]:
            root = chain.chain_hash(root, one)
        report = await daemon.client.ask("verify_audit_integrity")
        assert root == proof["root_hash_hex"]
        assert len(proof["suffix_event_hashes_hex"]) == report["report"]["events"] - proof["leaf_index"] - 1
        assert (await _ask(daemon, "prove_audit_inclusion", event_id="none"))["proof"] is None
        merkle = await daemon.client.ask("prove_audit_inclusion", event_id=row["id"], extended=True)
        assert merkle["proof"]["tree_size"]


async def test_requests_without_our_fields_are_taken(covenant_home: Path) -> None:
    async with daemon_kit.running(covenant_home) as daemon:
        await daemon.grant("chain.batches", "chain.flush", "memory.backfill.apply", "settlement.backfill.apply")
        assert (await daemon.client.ask("receipt_batches"))["kind"] == "receipt_batches"
        with pytest.raises(errors.NothingToSettleError):  # the request itself is taken, with its default limit
            await daemon.client.ask("flush_receipts")
        assert (await daemon.client.ask("backfill_memory_records"))["dry_run"] is False
        assert (await daemon.client.ask("backfill_settlement_receipts"))["dry_run"] is False


async def test_http_bodies_of_version_1_are_taken(covenant_home: Path) -> None:
    async with daemon_kit.running(covenant_home, http_port=0) as daemon:
        await daemon.grant("capabilities.purge", "memory.backfill.apply", "settlement.backfill.apply")
        token = (covenant_home / "peers" / "operator.token").read_text().strip()
        headers = {"Authorization": f"Bearer {token}"}
        base = f"http://127.0.0.1:{daemon.http_port}"
        async with aiohttp.ClientSession(base, headers=headers, timeout=aiohttp.ClientTimeout(60)) as session:
            for path, body, kind in (
                ("/capabilities/purge", {"older_than_ms": 1}, "capabilities_purged"),
                ("/memory/records/backfill", {}, "memory_records_backfilled"),
                ("/settlement/receipts/backfill", {}, "settlement_receipts_backfilled"),
            ):
                async with session.post(path, json=body) as answer:
                    found = await answer.json()
                    assert (answer.status, found["kind"]) == (200, kind), found


async def test_stored_grants_with_nulls_hold(covenant_home: Path) -> None:
    """The scopes of version 1's golden files: memory.json with nulls, secret.json with `name`."""
    memory = {"version": 1, "tiers": ["longterm"], "before_ms": None, "record_id": None, "apply": None}
    async with daemon_kit.running(covenant_home) as daemon:
        await daemon.grant("memory.write")
        await daemon.grant("memory.read", scope=memory)
        await daemon.grant("secret.access", scope={"version": 1, "name": "mail"})
    # From its file, as a home of version 1 has it.
    stored = (covenant_home / "capabilities" / "granted.jsonl").read_text()
    assert '"record_id":null' in stored
    async with daemon_kit.running(covenant_home) as daemon:
        await daemon.client.ask("put_memory", tier="longterm", text="a note about ships")
        assert (await daemon.client.ask("recent_memory", tier="longterm", limit=5))["records"]
        with pytest.raises(errors.CovenantError):
            await daemon.client.ask("recent_memory", tier="working", limit=5)
        now_ms, me = daemon.server.now_ms(), daemon.server.identity.agent.pubkey
        # What it admits: tests/unit/policy/capabilities/test_scopes.py.
        assert daemon.server.capabilities.find(me, "secret.access", now_ms) is not None


async def test_stream_of_an_intent_decodes(covenant_home: Path) -> None:
    place = covenant_home / "agents" / "hello"
    covenant_home.mkdir(mode=0o700, exist_ok=True)
    place.mkdir(parents=True, mode=0o700)
    (place / "agent.toml").write_text(MANIFEST.format(id="hello", required="[]"))
    async with daemon_kit.running(covenant_home) as daemon:
        await daemon.grant("memory.write")
        parts = [part async for part in daemon.client.stream("submit_intent", text="zzz")]
        assert len({part["stream_id"] for part in parts}) == 1
        for part in parts:
            v1_client.STREAM(part)


async def test_refused_tokens_have_version_1s_words(covenant_home: Path) -> None:
    """Both transports say the word: `unknown` for a well-formed token, also for one that was revoked."""
    async with daemon_kit.running(covenant_home, http_port=0) as daemon:
        gone = (await daemon.ask("enroll_peer", display="ada@laptop", actions=[]))["token_b58"]
        await daemon.ask("revoke_peer", token_prefix=gone[:6])
        tokens = {"": "missing", "no-base58": "malformed", "1" * 31: "malformed", "1" * 32: "unknown", gone: "unknown"}
        for token, word in tokens.items():
            with pytest.raises(errors.AuthenticationError, match=f": {word}"):
                async with async_client.connected(covenant_home, token=token):
                    pass
        async with aiohttp.ClientSession(f"http://127.0.0.1:{daemon.http_port}") as session:
            for token in tokens:
                headers = {"Authorization": f"Bearer {token}"} if token else {}
                async with session.get("/tools", headers=headers) as answer:
                    assert answer.status == 401
        rows = (await daemon.ask("recent_audit", limit=100))["events"]
        kinds = [row["kind"] for row in rows if row["kind"]["type"] == "authentication_failed"]
        for transport in ("ipc", "http"):
            reasons = [kind["reason"].split()[0] for kind in kinds if kind["transport"] == transport]
            assert sorted(reasons) == sorted(tokens.values())
