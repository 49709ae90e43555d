"""Every verb of the daemon: its exit status and its envelope, against a daemon that runs.

The names in each envelope are in cli_envelopes.json; regenerate it with
COVENANT_REGENERATE=1 .venv/bin/pytest -n0 tests/daemon/test_cli_verbs.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import cli_daemon_kit, v1_client
from tests.cli_daemon_kit import Daemon, Envelopes, answered, exit_status
from tests.cli_kit import call, done

ENVELOPES = Envelopes(Path(__file__).parent / "cli_envelopes.json")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    home = tmp_path_factory.mktemp("home")
    home.chmod(0o700)
    cli_daemon_kit.package(home, "hello")
    cli_daemon_kit.package(home, "broken", "[agent]\nid = 1\n")
    with cli_daemon_kit.granted(home) as one:
        yield one


@pytest.fixture(autouse=True)
def _home(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COVENANT_HOME", str(daemon.home))
    monkeypatch.delenv("COVENANT_TOKEN_FILE", raising=False)


def verb(kind: str, *arguments: str) -> dict[str, Any]:
    """A verb with --json: its document is of this kind or schema, never both, and has the names that it had."""
    document = answered(*arguments)
    assert document["kind" if "kind" in document else "schema"] == kind
    assert ("kind" in document) != ("schema" in document)
    ENVELOPES.hold(kind + (f" {document['mode']}" if "mode" in document else ""), document)
    return document


def test_there_is_another() -> None:
    assert verb("daemon_ping", "ping") == {"kind": "daemon_ping", "status": "ok"}
    assert verb("version", "version")["daemon"]["version"] == 1
    assert "answers" in done("ping")
    assert done("version").splitlines()[1] == "daemon: covenant.ipc 1, versions 1 to 2"


def test_bootstrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    cli_daemon_kit.package(home, "hello")
    monkeypatch.setenv("COVENANT_HOME", str(home))
    with cli_daemon_kit.running(home):
        first = verb("bootstrap_result", "bootstrap")
        assert [one["action"] for one in first["granted"]] == ["memory.write", "tool.web_search"]
        held = {one["signature"] for one in answered("capabilities", "recent")["capabilities"]}
        assert {one["signature_b58"] for one in first["granted"]} == held
        again = answered("bootstrap")
        assert (again["granted"], again["already_granted"]) == ([], ["memory.write", "tool.web_search"])
        assert done("bootstrap").splitlines() == ["memory.write: held already", "tool.web_search: held already"]
        # one that is bounded is no substitute
        done("capabilities", "revoke", answered("capabilities", "recent")["capabilities"][0]["signature"])
        done("capabilities", "grant", "tool.web_search", "--expires-at", "99999999999999")
        assert [one["action"] for one in answered("bootstrap")["granted"]] == ["tool.web_search"]
    # and without a daemon it is said what is missing
    assert answered("ping", status=1)["code"] == "daemon_silent"


def test_capabilities() -> None:
    assert verb("capability_granted", "capabilities", "grant", "memory.read")["action"] == "memory.read"
    bounded = answered("capabilities", "grant", "tool.call.echo", "--scope", '{"version":1,"max_uses":2}')
    assert len(verb("capability_list", "capabilities", "recent", "-n", "3")["capabilities"]) == 3
    assert "tool.call.echo" in done("capabilities", "recent")
    grants = verb("capability_usage", "capabilities", "usage")["grants"]
    assert grants[0]["budget"] == {"max_uses": 2, "used": 0, "remaining": 2}
    assert "0 of 2" in done("capabilities", "usage")
    signature = bounded["signature_b58"]
    assert verb("capability_revoked", "capabilities", "revoke", signature)["removed"] is True
    # a wrong signature is not reported as revoked
    for said in (call("capabilities", "revoke", signature), call("capabilities", "revoke", "1" * 20)):
        assert (said.exit_code, said.stdout) == (0, "there is no such grant that holds\n")
    assert answered("capabilities", "revoke", "1" * 20)["removed"] is False
    # the signature as a narrow terminal shows it; a prefix without a match is refused
    again = answered("capabilities", "grant", "tool.call.nothing")["signature_b58"]
    assert answered("capabilities", "revoke", f"{again[:9]}…")["signature_b58"] == again
    assert verb("capabilities_purged", "capabilities", "purge", "--before-ms", "0")["purged"] == 0
    assert exit_status(call("capabilities", "purge")) == 2
    assert exit_status(call("capabilities", "purge", "--before-ms", "0", "--older-than-ms", "1")) == 2
    assert exit_status(call("capabilities", "grant", "x", "--scope", "{")) == 2
    # a misspelt bound is none
    typo = call("capabilities", "grant", "memory.purge", "--scope", '{"version": 1, "tier": ["working"]}')
    warning = "warning: `tier` bounds nothing in a grant of memory.purge; did you mean `tiers`?\n"
    assert (exit_status(typo), typo.stderr.startswith(warning)) == (0, True)
    meant = call("capabilities", "grant", "memory.purge", "--scope", '{"version": 1, "tiers": ["working"]}')
    assert "warning" not in meant.stderr
    # an action that nothing needs is granted, with a warning
    for action, about in (
        ("memroy.read", "; did you mean `memory.read`?"),
        ("a2a.sned.ada@laptop", "; did you mean `a2a.send.ada@laptop`?"),
        ("tool.cal.echo", "; did you mean `tool.call.echo`?"),
        ("audit.read", ""),
    ):
        odd = call("capabilities", "grant", action)
        warning = f"warning: no request and no package here needs `{action}`{about}\n"
        assert (exit_status(odd), odd.stdout, odd.stderr.startswith(warning)) == (
            0,
            f"operator@local may {action}\n",
            True,
        )
    for action in ("memory.read", "tool.call.ecko", "tool.web_search", "a2a.send.ada@laptop", "weather.read"):
        assert "warning" not in call("capabilities", "grant", action).stderr, action
    assert answered("capabilities", "grant", "tool.call.echo", "--expires-at", "1", status=1)["kind"] == "error"


def test_intents(daemon: Daemon) -> None:
    answer = verb("intent_result", "intent", "--agent", "hello", "say hello")
    assert (answer["text"], answer["agent_id"], answer["status"]) == ("SAY HELLO", "hello", "ok")
    result = call("intent", "--agent", "hello", "one\nmore")
    assert result.stdout == "ONE\nMORE\n"
    assert result.stderr.startswith("hello, intent ")
    assert call("intent", "--stream", "--agent", "hello", "two").stdout == "TWO\n"
    parts = [json.loads(line) for line in done("intent", "--stream", "--json", "--agent", "hello", "x").splitlines()]
    assert [part["kind"] for part in parts] == ["stream_begin", "stream_chunk", "stream_end"]
    assert verb("intent_result", "intents", "result", answer["intent_id"])["text"] == "SAY HELLO"
    unknown = answered("intents", "result", answer["intent_id"][:8], status=1)
    assert unknown["hint"].startswith("give a whole id: covenant audit recent --kind intent_dispatched ")
    assert answer["intent_id"] in done("audit", "recent", "--kind", "intent_dispatched")
    same = [answered("intent", "--key", "k", "--agent", "hello", "thrice")["intent_id"] for _ in range(2)]
    assert same[0] == same[1]
    ignored = call("intent", "cat /srv/.env")
    assert (ignored.exit_code, ignored.stdout) == (0, "")
    assert ignored.stderr.startswith("ignored: ")
    assert answered("intent", "--agent", "nobody", "x", status=1)["code"] == "no_such_agent"
    # what an agent says cannot steer the terminal
    assert done("intent", "--agent", "hello", "\x1b[31mred") == "\\x1b[31MRED\n"


def test_resume() -> None:
    def refused(*words: str) -> str:
        document = answered("intents", "resume", *words, status=1)
        assert (document["kind"], document["ok"]) == ("intents_resume", False)
        v1_client.CLI["intents_resume"](document)
        code: str = document["error"]["code"]
        return code

    assert refused("latest") == refused("--latest") == "no_budget_exhausted_row"
    assert refused() == "missing_intent_id"
    assert refused("x") == "invalid_intent_id"
    assert refused("x", "--latest") == "conflicting_flags"
    assert refused("6f0c3c2e-5f4b-4d0a-9a54-1c1f6e0f7a11") == "daemon_error"
    assert exit_status(call("intents", "resume")) == 1


def test_memory() -> None:
    done("memory", "put", "the ferry leaves at seven")
    stored = verb("memory_stored", "memory", "put", "--tier", "episodic", "the harbour opens at six")
    record = stored["record"]["id"]
    assert verb("memory_promoted", "memory", "promote", record, "--tier", "long-term")
    recent = verb("memory_read", "memory", "recent", "--tier", "longterm")
    assert (recent["mode"], recent["records"][0]["id"]) == ("recent", record)
    found = verb("memory_read", "memory", "search", "harbour", "--min-relevance", "0.1")
    assert (found["mode"], found["records"][0]["id"]) == ("search", record)
    assert "the harbour opens at six" in done("memory", "search", "harbour")
    assert "the harbour" in done("memory", "recent", "--stream")
    parts = [
        json.loads(line)["kind"] for line in done("memory", "recent", "--stream", "--json", "-n", "2").splitlines()
    ]
    assert parts == ["stream_begin", "stream_chunk", "stream_chunk", "stream_end"]
    assert verb("memory_purged", "memory", "purge", "--tier", "working", "--before-ms", "1")["purged"] == 0
    assert exit_status(call("memory", "purge")) == 2
    assert exit_status(call("memory", "recent", "--tier", "eternal")) == 2


def test_upkeep_of_memory() -> None:
    record = answered("memory", "put", "something", "--metadata", '{"a": 1}')["record"]["id"]
    why = ("--reason", "test")
    plan = verb("memory_compaction_plan", "memory", "plan-compaction", *why, "--delete-working-before-ms", "1")
    assert plan["outcome"]["mode"] == "dry_run"
    assert exit_status(call("memory", "plan-compaction", *why, "--apply")) == 2
    dry = verb("memory_compacted", "memory", "compact", *why, "--delete-working-older-than-ms", "0")
    assert (dry["outcome"]["mode"], dry["outcome"]["changed"]) == ("dry_run", False)
    assert record in dry["outcome"]["deleted"]
    both = ("--delete-working-before-ms", "1", "--delete-working-older-than-ms", "1")
    assert exit_status(call("memory", "compact", *why, *both)) == 2
    assert answered("memory", "compact", *why, status=1)["code"] == "memory_invalid"
    applied = answered("memory", "compact", *why, "--detach-stale-parents", "--apply")
    assert applied["outcome"]["mode"] == "apply"
    repaired = verb("memory_repaired", "memory", "repair", "detach-parent", record, *why)
    assert repaired["outcome"]["would_change"] is False
    origin = ("--provenance", '{"from": "test"}')
    assert answered("memory", "repair", "backfill-provenance", record, *why, *origin, "--apply")["outcome"]["changed"]
    result = call("memory", "repair", "delete", record, *why)
    assert result.stderr == "nothing was done: --apply does it\n"
    assert answered("memory", "repair", "delete", record, *why, "--apply")["outcome"]["changed"] is True
    assert answered("memory", "repair", "delete", record, *why, status=1)["code"] == "no_such_memory"
    assert verb("memory_receipt_backfill_plan", "memory", "plan-receipt-backfill")["limit"] == 100
    schema = "covenant.memory.backfill.v1"
    assert verb(schema, "memory", "backfill-receipt-correlation", "--dry-run")["dry_run"] is True


def test_settlement() -> None:
    answered("intent", "--agent", "hello", "so that there is something")
    assert verb("receipt_list", "receipts", "recent")["receipts"]
    assert "memory" in done("receipts", "recent")
    schema = "covenant.settlement.backfill.v1"
    assert verb(schema, "settlement", "backfill-receipts", "--dry-run")["dry_run"] is True
    assert verb("chain_status", "chain", "status")["status"]["ready"] is False
    flushed = verb("receipt_batch_flushed", "chain", "flush-receipts", "--limit", "1000")
    assert flushed["receipts_updated"] == flushed["batch"]["receipt_count"] > 0
    batches = verb("receipt_batch_list", "chain", "receipt-batches")["batches"]
    assert batches[0]["batch_id"] == flushed["batch"]["batch_id"]
    assert batches[0]["batch_id"] in done("chain", "receipt-batches")
    assert answered("chain", "flush-receipts", status=1)["code"] == "nothing_to_settle"
    assert answered("chain", "buy-credits", status=1)["code"] == "unsupported"
    assert verb("debit_list", "budget", "debits")["debits"] == []


def test_checks(daemon: Daemon) -> None:
    assert verb("ignore_report", "ignore", "check", "hello")["ignored"] is False
    assert answered("ignore", "check", "/srv/.env", status=1)["matched_pattern"] == "**/.env"
    assert done("ignore", "check", "hello").startswith("not ignored by any of ")
    assert verb("verify_report", "verify", "--window", "50")["window"] == 50
    # what no agent did and has a key leaves a receipt of nothing, which is none that is wrong
    unlike = answered("intent", "--key", "nobody's", "wholly unlike any word", status=3)
    assert (unlike["settlement"]["resource"], unlike["settlement"]["credits_consumed"]) == ("compute", 0)
    told = done("verify")
    assert "no drift" in told
    assert told.endswith("0 disagreements in the last 100 of each; of 0 of them the other half is missing\n")


def test_agents(daemon: Daemon) -> None:
    listed = verb("agents", "agents", "list")["agents"]
    assert [(one["id"], one["routable"]) for one in listed] == [("hello", True), (None, False)]
    cli_daemon_kit.package(daemon.home, "later")
    assert [one["id"] for one in verb("agents", "agents", "reload")["agents"]] == ["hello", "later", None]
    assert "routable" in done("agents", "list")
    assert answered("approvals", "list")["hermes"] == []
    assert answered("approvals", "deny", "nothing", status=1)["code"] == "no_such_approval"


def test_tools() -> None:
    assert [one["name"] for one in verb("tool_list", "tools", "list")["tools"]] == ["clock", "echo"]
    text = '{"text": "hi"}'
    assert verb("tool_result", "tools", "call", "echo", "--args", text)["content"][0]["text"] == "hi"
    assert done("tools", "call", "echo", "--args", text) == "hi\n"
    assert "epoch_ms" in done("tools", "call", "clock")
    refused = answered("tools", "call", "echo", "--args", "{}", status=1)
    assert (refused["code"], refused["where"]) == ("tool_arguments", "/")
    assert exit_status(call("tools", "call", "echo", "--args", "{")) == 2
    assert answered("tools", "call", "nothing", status=1)["code"] == "no_such_tool"


def test_audit() -> None:
    # More kinds than a script of version 1 decodes are asked for.
    assert set(answered("audit", "recent", "--extended")) == {"kind", "limit", "since_ms", "events", "logs"}
    for verb_of_v1, names in (("recent", {"kind", "limit", "since_ms", "events"}), ("verify", {"kind", "report"})):
        document = answered("audit", verb_of_v1)
        assert set(document) == names
        v1_client.CLI[document["kind"]](document)
    rows = answered("audit", "recent", "-n", "5")["events"]
    assert len(rows) == 5
    late = answered("audit", "recent", "--since-ms", str(rows[-1]["timestamp_ms"]))["events"]
    assert late
    assert all(one["timestamp_ms"] >= rows[-1]["timestamp_ms"] for one in late)
    parts = [json.loads(line)["kind"] for line in done("audit", "recent", "--stream", "--json", "-n", "2").splitlines()]
    assert parts == ["stream_begin", "stream_chunk", "stream_chunk", "stream_end"]
    assert len(done("audit", "recent", "--stream", "-n", "2").splitlines()) == 2
    actions = verb("provenance_actions", "audit", "provenance", "-n", "3")["actions"]
    assert len(actions) == 3
    assert "operator@local" in done("audit", "provenance")


def test_unmatched_intent_ends_with_3(daemon: Daemon) -> None:
    said = call("intent", "zzz wholly unlike")
    assert (exit_status(said), "[no_agent_matched]" in said.stderr) == (3, True)
    assert "covenant agents list" in said.stderr
    found = answered("intent", "zzz wholly unlike", status=3)
    assert (found["kind"], found["code"], found["status"]) == ("intent_result", "no_agent_matched", "ok")
    # The fix.
    assert exit_status(call("intent", "--agent", "hello", "zzz wholly unlike")) == 0


def test_streamed_unmatched_intent_ends_with_3(daemon: Daemon) -> None:
    said = call("intent", "--stream", "zzz wholly unlike")
    assert (exit_status(said), "[no_agent_matched]" in said.stderr, said.stdout) == (3, True, "")
    parts = call("intent", "--stream", "--json", "zzz wholly unlike")
    last = json.loads(parts.stdout.splitlines()[-1])
    assert (exit_status(parts), last["kind"], last["summary"]["code"]) == (3, "stream_end", "no_agent_matched")
    assert exit_status(call("intent", "--stream", "--agent", "hello", "zzz wholly unlike")) == 0


@pytest.mark.parametrize(
    ("words", "echo"),
    [
        ("memory recent --tier working -n 3", {"tier": "working", "limit": 3, "query": None, "min_relevance": None}),
        (
            "memory search ships --min-relevance 0.5 -n 2",
            {"tier": None, "limit": 2, "query": "ships", "min_relevance": 0.5},
        ),
        ("memory purge --tier working --before-ms 7", {"tier": "working", "before_ms": 7}),
        ("capabilities purge --before-ms 8", {"before_ms": 8}),
        ("capabilities recent -n 4", {"limit": 4}),
        ("peers purge --before-ms 9", {"before_ms": 9}),
        ("peers list --prefix abc --limit 5", {"limit": 5, "filter_pubkey_prefix": "abc", "matched_count": 0}),
        ("receipts recent -n 6 --since-ms 1", {"limit": 6, "since_ms": 1}),
        ("chain receipt-batches -n 7", {"limit": 7}),
        ("budget debits -n 8", {"limit": 8}),
        ("audit recent -n 9 --since-ms 2", {"limit": 9, "since_ms": 2}),
        (
            "a2a status --limit 3 --min-lease-age-ms 4 --deadline-within-ms 5 --state queued",
            {"limit": 3, "min_lease_age_ms": 4, "deadline_within_ms": 5, "state_filter": "queued"},
        ),
        (
            "capabilities grant tool.call.echo --expires-at 99999999999999",
            {"scope": None, "expires_at": 99999999999999},
        ),
    ],
)
def test_envelope_repeats_what_was_asked(words: str, echo: dict[str, Any]) -> None:
    document = answered(*words.split())
    v1_client.CLI[document["kind"]](document)
    assert {name: document[name] for name in echo} == echo
