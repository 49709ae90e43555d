"""A home as version 1 leaves it, made by hand: one command closes its modes, then it opens and keeps what it holds."""

from __future__ import annotations

import hashlib
import json
import shlex
import sqlite3
import struct
import uuid
from pathlib import Path
from typing import Any

import pytest
import rfc8785
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from covenant.cli.daemon import settlement
from covenant.wire import requests
from policy import base58
from tests import cli_daemon_kit, daemon_kit
from tests.cli_kit import call, done
from tests.house.test_docs import commands
from tests.mailbox_kit import MANIFEST

pytestmark = pytest.mark.anyio

SENTENCES = {
    "find recent papers on agent memory": "research",
    "what is rust": "research",
    "search the news": "research",
    "say hi": "hello-agent",
    "echo this": "hello-agent",
    "ping": "hello-agent",
    "the agent": None,
}
PAGE = (Path(__file__).parents[2] / "docs" / "version-1.md").read_text()
KEY = Ed25519PrivateKey.from_private_bytes(b"1" * 32)
PUBLIC = KEY.public_key().public_bytes_raw()
ME = {"display": "user@local", "pubkey": base58.encode(PUBLIC)}
TOKEN, OLD_TOKEN, NOW = base58.encode(b"t" * 32), base58.encode(b"o" * 32), 1_700_000_000_000
MEMORY = str(uuid.UUID(int=7))
_TABLE = (
    "CREATE TABLE memories (id TEXT PRIMARY KEY, tier TEXT NOT NULL, owner_display TEXT NOT NULL, owner_pubkey TEXT NOT"
    " NULL, text TEXT NOT NULL, embedding BLOB NOT NULL, metadata TEXT NOT NULL, created_at INTEGER NOT NULL, parent"
    " TEXT)"
)


def _grant(action: str, scope: Any) -> dict[str, Any]:
    """Sign version 1's canonical bytes of a grant without an end."""
    canonical = rfc8785.dumps(scope)
    message = PUBLIC + struct.pack(">I", len(action)) + action.encode()
    message += struct.pack(">I", len(canonical)) + canonical + PUBLIC + b"\0" + struct.pack(">Q", 0)
    held = {"subject": ME, "action": action, "scope": scope, "granted_by": ME, "expires_at": None}
    return {"capability": held, "signature": base58.encode(KEY.sign(message))}


def _log(kinds: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Return the lines of both files of version 1's log."""
    events, chain, previous = [], [], "0" * 64
    for index, kind in enumerate(kinds):
        row = {"id": str(uuid.UUID(int=100 + index)), "timestamp_ms": NOW + index, "issuer": ME, "kind": kind}
        events.append(json.dumps(row, separators=(",", ":")))
        event = hashlib.sha256(events[-1].encode()).hexdigest()
        linked = hashlib.sha256(f"{previous}\n{event}".encode()).hexdigest()
        chain.append(json.dumps({
            "index": index, "event_id": row["id"], "timestamp_ms": NOW + index, "event_hash_hex": event,
            "previous_hash_hex": previous, "chain_hash_hex": linked,
        }, separators=(",", ":")))  # fmt: skip
        previous = linked
    return events, chain


def _lines(path: Path, *rows: Any) -> None:
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    path.chmod(0o644)


def _make(home: Path) -> None:
    (home / "identity").mkdir(parents=True, mode=0o700)
    home.chmod(0o755)
    (home / "identity" / "local.key").write_bytes(KEY.private_bytes_raw())
    (home / "identity" / "local.key").chmod(0o600)
    read = {"version": 1, "tiers": ["working"], "before_ms": None, "record_id": None, "apply": None}
    gone = _grant("audit.purge", {})
    grants = [
        _grant("memory.read", read),
        _grant("chain.receipts", {}),
        _grant("secret.access", {"version": 1, "name": "mail"}),
        gone,
    ]
    _lines(home / "capabilities" / "granted.jsonl", *grants)
    _lines(home / "capabilities" / "revoked.jsonl", {"signature": gone["signature"], "revoked_at": NOW})
    _lines(
        home / "peers" / "registry.jsonl",
        {"type": "registered", "token": OLD_TOKEN, "agent_id": ME, "registered_at": NOW - 2},
        {"type": "registered", "token": TOKEN, "agent_id": ME, "registered_at": NOW - 1},
        {"type": "revoked", "token": OLD_TOKEN, "revoked_at": NOW},
    )
    (home / "peers" / "operator.token").write_text(TOKEN)
    (home / "peers" / "operator.token").chmod(0o600)
    done = {"intent_id": MEMORY, "intent_text": "papers", "matched_agent": "r", "result_hash_hex": "0", "status": "ok"}
    rows: list[dict[str, Any]] = [{"type": "intent_dispatched", **done}, {"type": "a_later_kind", "x": 1}]
    for name, lines in zip(("events", "events.chain"), _log(rows), strict=True):
        _lines(home / "audit" / f"{name}.jsonl", *lines)
    nulls = dict.fromkeys(("chain", "cluster", "batch_id", "merkle_root", "tx_sig", "slot", "confirmed_at"))
    paid = {"resource": "memory", "memory_record_id": MEMORY, "credits_consumed": 1, "settled_at": NOW}
    _lines(home / "receipts" / "working.jsonl", {"id": str(uuid.UUID(int=8)), "payer": ME, **paid, **nulls})
    agent = {"display": "r@agent", "pubkey": ME["pubkey"]}
    _lines(home / "budget" / "ledger.jsonl", {"type": "capacity_set", "agent": agent, "capacity": 10, "at_ms": NOW})
    task = {"id": str(uuid.UUID(int=9)), "sender": ME, "recipient": ME, "intent_text": "do it"}
    _lines(home / "a2a" / "events.jsonl", {"type": "task_sent", "task": task})
    database = sqlite3.connect(home / "memory.db")
    with database:
        database.execute(_TABLE)
        record = (MEMORY, "working", *ME.values(), "three papers", struct.pack("<3f", 1, 0, 0), "{}", NOW, None)
        database.execute("INSERT INTO memories VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", record)
    database.close()


def test_page_can_be_followed(covenant_home: Path) -> None:
    """docs/version-1.md: its commands, the first two before the daemon is started; then nothing disagrees."""
    _make(covenant_home)
    first, then, *rest = [tuple(shlex.split(line))[1:] for line in commands(PAGE)]
    assert (call(*first).exit_code, call(*then).exit_code) == (3, 0)
    with cli_daemon_kit.running(covenant_home):
        for words in rest:
            done(*words)


def test_sentences_of_version_1_find_its_packages(covenant_home: Path) -> None:
    """Section 6: the two example packages of version 1, which have no description."""
    covenant_home.mkdir(mode=0o700, exist_ok=True)
    for agent_id, name, action in (
        ("research", "Research", "tool.web_search"),
        ("hello-agent", "Hello", "intent.subscribe"),
    ):
        manifest = MANIFEST.format(id=agent_id, required=json.dumps([action]))
        manifest = manifest.replace(f'name = "{agent_id}"', f'name = "{name} Agent"')
        cli_daemon_kit.package(covenant_home, agent_id, manifest)
    with cli_daemon_kit.running(covenant_home):
        done("bootstrap")
        found = {text: call("intent", text, "--json") for text in SENTENCES}
        answered = {text: json.loads(one.stdout).get("agent_id") for text, one in found.items()}
    assert answered == SENTENCES


def test_page_names_what_is_not_served() -> None:
    kinds = [kind for kind, model in requests.KINDS.items() if model is requests.Unsupported]
    for name in (*kinds, *settlement.SIGNERS, "running_here", "deadline_exceeded", "idempotency_key_empty"):
        forms = (name, f"chain {name}", f"{name.partition('_')[0]}_*", f"{name.rpartition('_')[0]}_*")
        assert any(f"`{form}`" in PAGE for form in forms), name


async def test_home_of_version_1_opens_after_one_command(covenant_home: Path) -> None:
    _make(covenant_home)
    named = call("state", "modes")
    assert (named.exit_code, "0644 needs 0600" in named.stdout) == (3, True)
    assert call("state", "modes", "--apply").exit_code == 0
    async with daemon_kit.running(covenant_home) as daemon:
        assert [one["text"] for one in (await daemon.ask("recent_memory", limit=5))["records"]] == ["three papers"]
        usage = (await daemon.ask("capability_usage"))["grants"]
        assert {(one["action"], one["effective"]) for one in usage} >= {
            ("memory.read", "live"), ("secret.access", "live"), ("audit.purge", "revoked"),
        }  # fmt: skip
        assert [one["state"] for one in (await daemon.ask("a2_a_queue", limit=5))["tasks"]] == ["queued"]
        assert (await daemon.ask("verify_audit_integrity"))["report"]["valid"]
        kinds = [one["kind"]["type"] for one in (await daemon.ask("recent_audit", limit=50))["events"]]
        assert {"intent_dispatched", "a_later_kind"} <= set(kinds)
        assert len((await daemon.ask("recent_receipts", limit=5))["receipts"]) == 1
        status = {one["token_prefix"]: one["revoked_at"] for one in (await daemon.ask("list_peers"))["peers"]}
        assert (status[TOKEN[:6]], status[OLD_TOKEN[:6]]) == (None, NOW)
    assert TOKEN not in (covenant_home / "peers" / "registry.jsonl").read_text()
