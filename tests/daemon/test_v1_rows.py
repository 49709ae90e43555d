"""Clauses of covenant-v1-differences.md that need a whole daemon, and no daemon of their own: over the socket, over
HTTP and by the command."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import aiohttp
import anyio
import click
import pytest

from covenant.cli.daemon import settlement
from covenant.cli.main import cli
from covenant.providers.tools import Answer
from covenant.wire import client
from covenant.wire.types import MemoryRecord, SettlementReceipt, Tier, ToolSpec
from policy import contract, errors
from tests import cli_daemon_kit, v1_client
from tests.cli_daemon_kit import Daemon, answered, exit_status
from tests.cli_kit import call, done

TASK = str(uuid.UUID(int=21))


class Picture:
    """A tool whose answer has a block that version 1 does not know."""

    spec = ToolSpec(name="picture", description="draws", input_schema={"type": "object"})

    async def call(self, arguments: Mapping[str, Any]) -> Answer:
        return Answer(({"type": "text", "text": "seen"}, {"type": "image", "data": "AA==", "mimeType": "image/png"}))


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    home = tmp_path_factory.mktemp("home")
    home.chmod(0o700)
    cli_daemon_kit.package(home, "hello")
    with cli_daemon_kit.granted(home, http_port=0) as one:
        one.server.tools.add(Picture())
        yield one


@pytest.fixture(autouse=True)
def _home(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COVENANT_HOME", str(daemon.home))
    monkeypatch.delenv("COVENANT_TOKEN_FILE", raising=False)


def asked(daemon: Daemon, kind: str, **fields: Any) -> dict[str, Any]:
    """The answer over the socket, decoded as version 1 does."""
    with client.connected(daemon.home) as one:
        answer = one.ask(kind, **fields)
    v1_client.RESPONSE(answer)
    return answer


def fetched(daemon: Daemon, method: str, path: str, body: Any = None) -> dict[str, Any]:
    """The answer over HTTP, decoded as version 1 does."""

    async def go() -> Any:
        token = (daemon.home / "peers" / "operator.token").read_text().strip()
        headers, timeout = {"Authorization": f"Bearer {token}"}, aiohttp.ClientTimeout(60)
        async with (
            aiohttp.ClientSession(f"http://127.0.0.1:{daemon.http_port}", headers=headers, timeout=timeout) as session,
            session.request(method, path, json=body) as answer,
        ):
            return answer.status, await answer.json()

    status, answer = anyio.run(go)
    assert status == 200, answer
    v1_client.RESPONSE(answer)
    assert isinstance(answer, dict)
    return answer


# --- sections 1 and 4 ---------------------------------------------------------------------------------------------


def test_http_answers_decode(daemon: Daemon) -> None:
    call("intent", "--agent", "hello", "so that there is a receipt")
    event = fetched(daemon, "GET", "/audit/recent?limit=1")["events"][0]["id"]
    for method, path, body, kind in (
        ("GET", "/chain/status", None, "chain_status"),
        ("GET", f"/audit/inclusion/{event}", None, "audit_inclusion"),
        ("GET", "/audit/verify", None, "audit_integrity"),
        ("GET", "/memory/recent", None, "memories"),
        ("GET", "/memory/search?q=receipt", None, "memories"),
        ("GET", "/receipts/recent", None, "receipts"),
        ("GET", "/capabilities/recent", None, "capabilities"),
        ("GET", "/tools", None, "tool_list"),
        ("GET", "/verify", None, "verify_report"),
        ("GET", "/a2a/queue", None, "a2_a_queue"),
        ("GET", "/peers/list", None, "peer_list"),
        ("GET", "/budget/debits", None, "debits"),
        ("POST", "/chain/flush-receipts", {}, "receipt_batch_flushed"),
        ("GET", "/chain/receipt-batches", None, "receipt_batches"),
        ("POST", "/identity/sign", {"message_b58": "3mJr7A", "ts": daemon.server.now_ms()}, "identity_attestation"),
    ):
        answer = fetched(daemon, method, path, body)
        assert answer["kind"] == kind, answer


def test_extended_asks_for_our_kinds_on_all_three(daemon: Daemon) -> None:
    # Each has rows of version 1's kinds, of which there are then more than the 30 that are asked for.
    for _ in range(8):
        asked(daemon, "submit_intent", text="zzz")
    with client.connected(daemon.home) as one:
        over_socket = one.ask("recent_audit", limit=500, extended=True)["events"]
    by_command = answered("audit", "recent", "-n", "500", "--extended")["events"]
    since = answered("audit", "recent", "-n", "500", "--since", "1h")["events"]
    for rows in (over_socket, by_command, since):
        assert {row["kind"]["type"] for row in rows} - set(v1_client.KINDS)
    # Without it an answer has as many rows as were asked for, each of them version 1's.
    assert len(asked(daemon, "recent_audit", limit=30)["events"]) == 30
    assert len(answered("audit", "recent", "-n", "30")["events"]) == 30
    for row in answered("audit", "recent", "-n", "30")["events"]:
        v1_client.EVENT(row)
    lines = done("audit", "recent", "--stream", "--json", "-n", "30").splitlines()
    for part in map(json.loads, lines):
        v1_client.STREAM(part)
        if part["kind"] == "stream_chunk":
            v1_client.EVENT(part["chunk"])


def test_stream_says_that_rows_are_left_out(daemon: Daemon) -> None:
    asked(daemon, "submit_intent", text="zzz")
    words = ("audit", "recent", "--stream", "--json", "-n", "500")

    def kinds(lines: str) -> set[str]:
        parts = map(json.loads, lines.splitlines())
        return {part["chunk"]["kind"]["type"] for part in parts if part["kind"] == "stream_chunk"}

    said = call(*words)
    assert said.stderr == "rows of kinds that version 1 has not are left out; `--extended` shows them\n"
    assert kinds(said.stdout) <= set(v1_client.KINDS)
    # The fix.
    said = call(*words, "--extended")
    assert said.stderr == ""
    assert kinds(said.stdout) - set(v1_client.KINDS)


def test_stream_of_memory_decodes(daemon: Daemon) -> None:
    done("memory", "put", "a note")
    with client.connected(daemon.home) as one:
        parts = list(one.stream("recent_memory", limit=2))
    for part in parts:
        v1_client.STREAM(part)
        if part["kind"] == "stream_chunk":
            v1_client.RECORD(part["chunk"])
    assert (parts[0]["kind"], set(parts[-1])) == ("stream_begin", {"kind", "stream_id"})


def test_used_up_grant_is_exhausted(daemon: Daemon) -> None:
    held = answered("capabilities", "grant", "tool.call.clock", "--scope", '{"version":1,"max_uses":1}')
    done("capabilities", "revoke", _signature_of("tool.call.clock", scope={}))
    done("tools", "call", "clock")
    (used,) = [
        one for one in asked(daemon, "capability_usage")["grants"] if one["signature_b58"] == held["signature_b58"]
    ]
    assert (used["effective"], used["budget"]) == ("exhausted", {"max_uses": 1, "used": 1, "remaining": 0})


def _signature_of(action: str, *, scope: Any) -> str:
    held = answered("capabilities", "recent", "-n", "1000")["capabilities"]
    found = [one for one in held if (one["capability"]["action"], one["capability"]["scope"]) == (action, scope)]
    return str(found[0]["signature"])


def test_ambiguous_prefix_decodes(daemon: Daemon) -> None:
    # Of 59 tokens two begin with the same of base58's 58 characters.
    made = [asked(daemon, "enroll_peer", display=f"p{number}@many", actions=[])["token_b58"][0] for number in range(59)]
    twice = next(first for first in made if made.count(first) > 1)
    outcome = asked(daemon, "revoke_peer", token_prefix=twice)["outcome"]
    assert (outcome["type"], len(outcome["matches"]) > 1) == ("ambiguous", True)


def test_blocks_that_version_1_lacks_are_json(daemon: Daemon) -> None:
    done("capabilities", "grant", "tool.call.picture")
    for answer in (
        asked(daemon, "call_tool", name="picture", arguments={}),
        fetched(daemon, "POST", "/tools/call", {"name": "picture", "arguments": {}}),
        answered("tools", "call", "picture"),
    ):
        text, image = answer["content"]
        assert (text["text"], image["type"], image["value"]["type"]) == ("seen", "json", "image")
    with client.connected(daemon.home) as one:
        raw = one.ask("call_tool", name="picture", arguments={}, extended=True)
    assert raw["content"][1]["type"] == "image"


@pytest.mark.parametrize("path", ["/audit/recent?follow=false", "/memory/recent?follow=false"])
def test_event_stream_decodes(daemon: Daemon, path: str) -> None:
    async def go() -> list[str]:
        token = (daemon.home / "peers" / "operator.token").read_text().strip()
        headers = {"Authorization": f"Bearer {token}", "Accept": "text/event-stream"}
        async with (
            aiohttp.ClientSession(f"http://127.0.0.1:{daemon.http_port}", timeout=aiohttp.ClientTimeout(60)) as session,
            session.get(path, headers=headers) as answer,
        ):
            return [line.decode() async for line in answer.content]

    done("memory", "put", "a note for the stream")
    found = [json.loads(line.removeprefix("data: ")) for line in anyio.run(go) if line.startswith("data: ")]
    for part in found:
        v1_client.STREAM(part)
        if part["kind"] == "stream_chunk":
            (v1_client.EVENT if "audit" in path else v1_client.RECORD)(part["chunk"])
    assert (found[0]["kind"], found[-1]["kind"], len(found) > 2) == ("stream_begin", "stream_end", True)


def test_row_of_a_hermes_run_is_an_event_of_its_intent(daemon: Daemon) -> None:
    server, intent = daemon.server, str(uuid.UUID(int=51))
    about = {"intent_id": intent, "run_id": "r"}

    async def go() -> list[str]:
        token = (daemon.home / "peers" / "operator.token").read_text().strip()
        server.live.say(intent, server.identity.agent.pubkey, "submitted", 1)
        asking = {**about, "choices": ["once"]}
        await server.audit.append("hermes_approval_requested", asking, server.identity.agent)
        async with (
            aiohttp.ClientSession(f"http://127.0.0.1:{daemon.http_port}", timeout=aiohttp.ClientTimeout(60)) as session,
            session.get(f"/intents/{intent}/events", headers={"Authorization": f"Bearer {token}"}) as answer,
        ):
            written = {**about, "path": "out.txt", "bytes": 3}
            await server.audit.append("hermes_file_written", written, server.identity.agent)
            server.live.say(intent, server.identity.agent.pubkey, "ended", 2, status="ok")
            return [line.decode() async for line in answer.content]

    lines = daemon.portal.call(go)
    assert not [line for line in lines if line.startswith("event:")]
    found = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    for one in found:
        v1_client.AGENT_EVENT(one)
    assert [(one["type"], one.get("tool"), one.get("path")) for one in found] == [
        ("tool_call", "approval", None),
        ("file_write", None, "out.txt"),
    ]


# --- section 2 ----------------------------------------------------------------------------------------------------


def test_repair_needs_no_declaration_of_the_task(daemon: Daemon) -> None:
    me = daemon.server.identity.agent.model_dump()
    asked(daemon, "send_a2_a_task", task={"id": TASK, "sender": me, "recipient": me, "intent_text": "x"})
    assert asked(daemon, "try_recv_a2_a_task")["task"]["id"] == TASK
    assert [one["state"] for one in asked(daemon, "a2_a_queue")["tasks"]] == ["in_flight"]
    command = {"action": "requeue", "duplicate_risk": "idempotent"}
    outcome = asked(daemon, "repair_a2_a_task", request={"task_id": TASK, "command": command, "reason": "test"})
    assert (outcome["outcome"]["action"], outcome["outcome"]["state"]) == ("requeued", "queued")
    asked(daemon, "try_recv_a2_a_task")
    asked(daemon, "post_a2_a_result", result={"task_id": TASK, "status": "ok", "content": []})
    assert asked(daemon, "try_recv_a2_a_result")["result"]["status"] == "ok"


def test_intent_over_the_bound_names_it(daemon: Daemon) -> None:
    whole = "x" * contract.INTENT_BYTES
    assert asked(daemon, "submit_intent", text=whole)["status"] == "ok"
    with pytest.raises(errors.CovenantError, match="at most 1048576") as raised, client.connected(daemon.home) as one:
        one.ask("submit_intent", text=f"{whole}x")
    assert "record of memory" in raised.value.hint
    # The fix.
    assert answered("memory", "put", "--tier", "longterm", f"{whole}x"[:60_000])["record"]["tier"] == "longterm"


def test_longer_prefix_is_none_and_says_so(daemon: Daemon) -> None:
    token = answered("peers", "enroll", "long@prefix")["token_b58"]
    assert answered("peers", "revoke", token[:9], status=1)["outcome"] == {
        "type": "not_found",
        "matches": [],
        "truncated": False,
    }
    assert "fix: give 6 characters or the whole token" in call("peers", "revoke", token[:9]).stderr
    # The fix.
    assert answered("peers", "revoke", token)["outcome"]["type"] == "revoked"


# --- section 5 ----------------------------------------------------------------------------------------------------


def test_words_need_no_quotes(daemon: Daemon) -> None:
    assert done("intent", "--agent", "hello", "say", "hello", "there") == "SAY HELLO THERE\n"
    assert answered("memory", "search", "hello", "there")["query"] == "hello there"
    assert answered("ignore", "check", "what", "is", "rust")["ignored"] is False


def test_tier_has_one_name_in_documents(daemon: Daemon) -> None:
    for name in ("long-term", "long_term"):
        for words in (("memory", "recent", "--tier", name), ("memory", "purge", "--tier", name, "--before-ms", "1")):
            document = answered(*words)
            v1_client.CLI[document["kind"]](document)
            assert document["tier"] == "longterm"


def test_plan_pairs_old_receipts_with_records(daemon: Daemon) -> None:
    me = daemon.server.identity.agent
    records = [str(uuid.UUID(int=number)) for number in (41, 42)]
    for record in records:
        daemon.portal.call(
            daemon.server.memory.put,
            MemoryRecord(id=record, tier=Tier.WORKING, owner=me, text="x", created_at=daemon.server.now_ms()),
        )
    other = me.model_copy(update={"pubkey": "8opHzTAnfzRpPEx21XtnrVTX28YQuCpAjcn1PczScKh", "display": "gone@local"})
    for number, payer in ((31, me), (32, other)):
        receipt = SettlementReceipt(
            id=str(uuid.UUID(int=number)), payer=payer, resource="memory", credits_consumed=1, settled_at=1
        )
        daemon.portal.call(daemon.server.receipts.append, receipt)
    plan = answered("memory", "plan-receipt-backfill", "--limit", "1000")
    v1_client.CLI[plan["kind"]](plan)
    (pair,) = plan["records"]
    (alone,) = plan["unmatched_legacy_receipts"]
    assert (pair["receipt_id"], alone["receipt_id"]) == (str(uuid.UUID(int=31)), str(uuid.UUID(int=32)))
    lacking = {one["memory_record_id"] for one in plan["unmatched_memory_records"]}
    assert {pair["memory_record_id"], *lacking} == set(records)
    assert "settlement backfill-receipts" in plan["refusal"]["reason"]


@pytest.mark.parametrize("name", settlement.SIGNERS)
def test_signer_verb_names_what_to_use(name: str) -> None:
    refused = answered("chain", name, "--keypair", "k", "--cluster", "devnet", status=1)
    assert (refused["code"], "of version 1 is not served here" in refused["message"]) == ("unsupported", True)
    assert "the chain's own tools" in refused["hint"]
    # What it names is there.
    assert exit_status(call("chain", "flush-receipts", "--help")) == 0


# Each verb and flag of the usage in covenant-v1.md, section 6.
USAGE = {
    "ping": "--json",
    "version": "",
    "bootstrap": "--json",
    "intent": "--json --stream",
    "memory recent": "--tier -n --limit --json --stream",
    "memory search": "--tier --limit --min-relevance --json",
    "memory purge": "--tier --before-ms --older-than-ms --json",
    "memory compact": "--reason --apply --detach-stale-parents --delete-working-before-ms"
    " --delete-working-older-than-ms --delete-episodic-before-ms --delete-episodic-older-than-ms"
    " --mark-longterm-stale-before-ms --mark-longterm-stale-older-than-ms --marked-at-ms --json",
    "memory plan-compaction": "--reason --detach-stale-parents --delete-working-before-ms"
    " --delete-working-older-than-ms --delete-episodic-before-ms --delete-episodic-older-than-ms"
    " --mark-longterm-stale-before-ms --mark-longterm-stale-older-than-ms --marked-at-ms --json",
    "memory plan-receipt-backfill": "--limit",
    "memory backfill-receipt-correlation": "--dry-run",
    "memory repair detach-parent": "--reason --expected-parent --apply",
    "memory repair delete": "--reason --apply",
    "memory repair backfill-provenance": "--reason --provenance --apply",
    "capabilities recent": "--json",
    "capabilities grant": "--scope --expires-at --json",
    "capabilities revoke": "--json",
    "capabilities purge": "--before-ms --older-than-ms --json",
    "receipts recent": "--limit --since-ms",
    "settlement backfill-receipts": "--dry-run",
    "chain status": "--json",
    "chain flush-receipts": "--json",
    "chain receipt-batches": "--json",
    "verify": "--window --json",
    "ignore check": "--json",
    "tools list": "",
    "tools call": "--args",
    "audit recent": "--limit --since-ms --stream",
    "audit verify": "",
    "audit purge": "",
    "a2a status": "--limit --min-lease-age-ms --deadline-within-ms --state",
    "a2a requeue": "--reason --duplicate-risk --lease-id",
    "a2a force-error": "--reason --message --lease-id",
    "a2a retry-stale": "--enable --min-lease-age-ms --max-attempts --max-requeues --scan-limit",
    "a2a compact": "",
    "peers purge": "",
    "peers rotate": "",
    "peers list": "--limit --prefix --live-only --revoked-only",
    "peers revoke": "--force --limit-matches",
    "intents resume": "",
    **{f"chain {name}": "" for name in settlement.SIGNERS},
}


@pytest.mark.parametrize(("words", "flags"), USAGE.items())
def test_usage_of_version_1_is_there(words: str, flags: str) -> None:
    command: click.Command = cli
    context = click.Context(cli)
    for word in words.split():
        found = cast("click.Group", command).get_command(context, word)
        assert found is not None, words
        command = found
    known = {name for one in command.params for name in one.opts}
    assert set(flags.split()) <= known


def test_apply_is_refused_where_only_a_plan_is_made() -> None:
    said = call("memory", "plan-compaction", "--reason", "x", "--detach-stale-parents", "--apply")
    assert exit_status(said) == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("audit", "verify"), lambda text: "daemon log" in text),
        (("audit", "recent", "-n", "1"), lambda text: text.count("\n") == 1 and not text.startswith("{")),
    ],
)
def test_without_json_it_is_prose(words: tuple[str, ...], told: Callable[[str], bool]) -> None:
    """By decision (ADR 0159): a script gives --json."""
    assert told(done(*words))
