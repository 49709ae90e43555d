"""Check that each argument and option of a daemon's verb reaches its request, under version 1's name."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Iterator
from typing import Any

import click
import pytest

from covenant.cli import main, times
from covenant.cli.daemon import capabilities
from covenant.wire import client, requests
from policy import base58, errors

NOW = 1_700_000_000_000
KEY = base58.encode(bytes(range(32)))
NAME = "6f0c3c2e-5f4b-4d0a-9a54-1c1f6e0f7a11"
REASON = {"reason": "r"}
BEFORE = """--detach-stale-parents --delete-working-before-ms 1 --delete-episodic-before-ms 2
    --mark-longterm-stale-before-ms 3 --marked-at-ms 4"""
OLDER = """--delete-working-older-than-ms 1 --delete-episodic-older-than-ms 2
    --mark-longterm-stale-older-than-ms 3"""
POLICY = {
    "delete_working_before_ms": None,
    "delete_episodic_before_ms": None,
    "mark_longterm_stale_before_ms": None,
    "detach_stale_parents": False,
    "marked_at_ms": None,
}


def _compaction(mode: str, **policy: Any) -> dict[str, Any]:
    return {"request": {"mode": mode, "policy": {**POLICY, **policy}, **REASON}}


def _repair(mode: str, action: str, **more: Any) -> dict[str, Any]:
    return {"request": {"mode": mode, "command": {"action": action, "id": NAME, **more}, **REASON}}


def _mended(action: str, **more: str) -> dict[str, Any]:
    return {"request": {"task_id": "t", "command": {"action": action, "lease_id": "l", **more}, **REASON}}


# The verb, its arguments, and the first request to the daemon.
TABLE: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("intent", "hi --agent a --priority low --key k", "submit_intent",
     {"text": "hi", "agent": "a", "priority": "low", "idempotency_key": "k"}),
    ("intents result", NAME, "get_intent_result", {"intent_id": NAME}),
    ("intents resume", NAME, "resume_intent", {"intent_id": NAME}),
    ("agents list", "", "list_agents", {"signatures": True}),
    ("agents reload", "", "reload_agents", {"signatures": True}),
    ("approvals list", "", "list_approvals", {}),
    ("memory recent", "--tier episodic --limit 7", "recent_memory", {"tier": "episodic", "limit": 7}),
    ("memory search", "q --tier working --limit 7 --min-relevance 0.5", "search_memory",
     {"query": "q", "tier": "working", "limit": 7, "min_relevance": 0.5}),
    ("memory put", f"""t --tier long_term --metadata '{{"a": 1}}' --parent {NAME}""", "put_memory",
     {"text": "t", "tier": "longterm", "metadata": {"a": 1}, "parent": NAME}),
    ("memory promote", f"{NAME} --tier episodic", "promote_memory", {"id": NAME, "tier": "episodic"}),
    ("memory purge", "--tier working --before-ms 5", "purge_memory", {"tier": "working", "before_ms": 5}),
    ("memory purge", "--older-than-ms 1000", "purge_memory", {"tier": None, "before_ms": NOW - 1000}),
    ("memory compact", "--reason r", "compact_memory", _compaction("dry_run")),
    ("memory compact", f"--reason r --apply {BEFORE}", "compact_memory",
     _compaction("apply", delete_working_before_ms=1, delete_episodic_before_ms=2, mark_longterm_stale_before_ms=3,
                 detach_stale_parents=True, marked_at_ms=4)),
    ("memory compact", f"--reason r {OLDER}", "compact_memory",
     _compaction("dry_run", delete_working_before_ms=NOW - 1, delete_episodic_before_ms=NOW - 2,
                 mark_longterm_stale_before_ms=NOW - 3)),
    ("memory plan-compaction", f"--reason r {BEFORE}", "compact_memory",
     _compaction("dry_run", delete_working_before_ms=1, delete_episodic_before_ms=2, mark_longterm_stale_before_ms=3,
                 detach_stale_parents=True, marked_at_ms=4)),
    ("memory plan-compaction", f"--reason r {OLDER}", "compact_memory",
     _compaction("dry_run", delete_working_before_ms=NOW - 1, delete_episodic_before_ms=NOW - 2,
                 mark_longterm_stale_before_ms=NOW - 3)),
    ("memory plan-receipt-backfill", "--limit 7", "recent_memory", {"limit": 7}),
    ("memory backfill-receipt-correlation", "--dry-run", "backfill_memory_records", {"dry_run": True}),
    ("memory backfill-receipt-correlation", "", "backfill_memory_records", {"dry_run": False}),
    ("memory repair delete", f"{NAME} --reason r", "repair_memory", _repair("dry_run", "delete_record")),
    ("memory repair delete", f"{NAME} --reason r --apply", "repair_memory", _repair("apply", "delete_record")),
    ("memory repair detach-parent", f"{NAME} --reason r --apply --expected-parent p", "repair_memory",
     _repair("apply", "detach_parent", expected_parent="p")),
    ("memory repair backfill-provenance", f"""{NAME} --reason r --apply --provenance '{{"by": "me"}}'""",
     "repair_memory", _repair("apply", "backfill_provenance", provenance={"by": "me"})),
    ("ignore check", "t", "ignore_check", {"text": "t"}),
    ("capabilities recent", "--limit 7", "recent_capabilities", {"limit": 7}),
    ("capabilities usage", "--limit 7", "capability_usage", {"limit": 7}),
    ("capabilities grant", "tool.call.echo --scope '{\"version\": 1}' --expires-at 9 --parent s --subject ada@laptop",
     "grant_capability", {"action": "tool.call.echo", "scope": {"version": 1}, "expires_at": 9, "parent_b58": "s",
                          "subject": "ada@laptop"}),
    ("capabilities revoke", "s", "revoke_capability", {"signature_b58": "s"}),
    ("capabilities purge", "--before-ms 5", "purge_capabilities", {"before_ms": 5}),
    ("capabilities purge", "--older-than-ms 5", "purge_capabilities", {"before_ms": NOW - 5}),
    ("peers list", "--limit 7 --prefix 4u --live-only", "list_peers",
     {"limit": 7, "pubkey_prefix": "4u", "status_filter": "live"}),
    ("peers list", "--revoked-only", "list_peers", {"limit": 20, "pubkey_prefix": None, "status_filter": "revoked"}),
    ("peers enroll", f"ada@laptop --action a.b --action c.d --expires-at 9 --pubkey {KEY}", "enroll_peer",
     {"display": "ada@laptop", "actions": ["a.b", "c.d"], "expires_at": 9, "pubkey": KEY}),
    ("peers revoke", "4u --force --limit-matches 3", "revoke_peer",
     {"token_prefix": "4u", "force": True, "match_limit": 3}),
    ("peers rotate", "", "rotate_operator_token", {}),
    ("peers purge", "--before-ms 5", "purge_peers", {"before_ms": 5}),
    ("peers purge", "--older-than-ms 5", "purge_peers", {"before_ms": NOW - 5}),
    ("tools call", "echo --args '{\"text\": \"t\"}'", "call_tool",
     {"name": "echo", "arguments": {"text": "t"}, "extended": True}),
    ("a2a status", "--limit 7 --min-lease-age-ms 1 --deadline-within-ms 2 --state in_flight", "a2_a_queue",
     {"limit": 7, "min_lease_age_ms": 1, "deadline_within_ms": 2, "state_filter": "in_flight"}),
    ("a2a recv", "", "try_recv_a2_a_task", {}),
    ("a2a result", "", "try_recv_a2_a_result", {}),
    ("a2a answer", "t --error no", "post_a2_a_result",
     {"result": {"task_id": "t", "status": "error", "content": [], "error_message": "no"}}),
    ("a2a answer", "t half --partial", "post_a2_a_result",
     {"result": {"task_id": "t", "status": "partial", "content": [{"type": "text", "text": "half"}]}}),
    ("a2a cancel", "t --reason r", "cancel_a2_a_task", {"task_id": "t", **REASON}),
    ("a2a compact", "", "compact_a2_a", {}),
    ("a2a requeue", "t --reason r --duplicate-risk operator-accepted --lease-id l", "repair_a2_a_task",
     _mended("requeue", duplicate_risk="operator-accepted")),
    ("a2a force-error", "t --reason r --message m --lease-id l", "repair_a2_a_task",
     _mended("force_error", message="m")),
    ("a2a retry-stale", "--enable --min-lease-age-ms 1 --max-attempts 2 --max-requeues 3 --scan-limit 4",
     "retry_a2_a_stale",
     {"policy": {"enabled": True, "min_lease_age_ms": 1, "max_attempts": 2, "max_requeues": 3, "scan_limit": 4}}),
    ("receipts recent", "--limit 7 --since-ms 5", "recent_receipts", {"limit": 7, "since_ms": 5}),
    ("settlement backfill-receipts", "--dry-run", "backfill_settlement_receipts", {"dry_run": True}),
    ("settlement backfill-receipts", "", "backfill_settlement_receipts", {"dry_run": False}),
    ("chain status", "", "chain_status", {}),
    ("chain flush-receipts", "--limit 7", "flush_receipts", {"limit": 7}),
    ("chain receipt-batches", "--limit 7", "receipt_batches", {"limit": 7}),
    ("budget debits", "--limit 7", "recent_debits", {"limit": 7}),
    ("verify", "--window 7", "verify", {"window": 7}),
    ("audit purge", "--before-ms 5", "purge_audit", {"before_ms": 5}),
    ("audit purge", "--older-than-ms 5", "purge_audit", {"before_ms": NOW - 5}),
    ("audit prove", f"{NAME} --log daemon", "prove_audit_inclusion", {"event_id": NAME, "extended": True}),
    ("audit provenance", "--limit 7 --since-ms 1 --until-ms 2 --actor a --approver b --rule c --outcome d",
     "query_provenance",
     {"limit": 7, "since_ms": 1, "until_ms": 2, "actor": "a", "approver": "b", "rule": "c", "outcome": "d"}),
)  # fmt: skip

# Options that change the output or the wait; tests/daemon/test_cli_verbs.py and test_cli_mail cover them.
ELSEWHERE = {("intent", "--stream"), ("memory recent", "--stream"), ("intents resume", "--latest")} | {
    ("tools call", "--package"), ("tools call", "--timeout"),
}  # fmt: skip
# Verbs that read files in place, that send several requests, or that are refused here.
OTHERS = {
    "audit archive", "audit checkpoint", "audit cosign", "audit cosigned", "audit recent", "audit show", "audit verify",
    "bootstrap", "a2a send", "tools advertised", "tools describe", "tools list", "tools pin", "tools serve",
    "tools verify",
}  # fmt: skip
GROUPS = (
    "intent", "intents", "agents", "memory", "ignore", "capabilities", "peers", "tools", "a2a", "receipts",
    "settlement", "chain", "budget", "verify", "audit", "bootstrap",
)  # fmt: skip


class _Heard(Exception):
    """Raised with the request in place of an answer."""


class _Daemon:
    def ask(self, kind: str, /, **fields: Any) -> dict[str, Any]:
        raise _Heard(kind, fields)

    def stream(self, kind: str, /, **fields: Any) -> Iterator[dict[str, Any]]:
        raise _Heard(kind, fields)


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def connected(*_: object, **__: object) -> Iterator[_Daemon]:
        yield _Daemon()

    monkeypatch.setattr(client, "connected", connected)
    monkeypatch.setattr(times, "now_ms", lambda: NOW)


@pytest.mark.parametrize(("verb", "more", "kind", "wanted"), TABLE, ids=lambda one: one if isinstance(one, str) else "")
def test_what_is_said_is_asked(verb: str, more: str, kind: str, wanted: dict[str, Any]) -> None:
    with pytest.raises(_Heard) as caught:
        main.cli.main([*verb.split(), *shlex.split(more)], standalone_mode=False)
    asked, fields = caught.value.args
    assert asked == kind
    sent = {name: value for name, value in fields.items() if value is not None}
    # As the daemon parses it, with defaults for omitted fields.
    read = requests.parse(json.dumps({"kind": kind, **sent}).encode())
    same = requests.parse(json.dumps({"kind": kind, **{k: v for k, v in wanted.items() if v is not None}}).encode())
    assert read == same
    # The daemon would silently drop an unknown field.
    assert set(sent) <= set(type(read).model_fields)


def _leaves(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    if not isinstance(command, click.Group):
        yield name, command
        return
    context = click.Context(command, info_name=name)
    for each in command.list_commands(context):
        found = command.get_command(context, each)
        assert found is not None
        yield from _leaves(found, f"{name} {each}")


def test_table_has_every_option_of_every_verb() -> None:
    context = click.Context(main.cli)
    missing = set()
    for group in GROUPS:
        command = main.cli.get_command(context, group)
        assert command is not None
        for verb, found in _leaves(command, group):
            if verb in OTHERS or found.hidden:
                continue
            said = [shlex.split(more) for known, more, _, _ in TABLE if known == verb]
            missing |= set() if said else {(verb, "")}
            for option in found.params:
                names = {*option.opts, *option.secondary_opts} if isinstance(option, click.Option) else set()
                long = max(names, key=len, default="")
                if names and "--json" not in names and not any(names & set(words) for words in said):
                    missing.add((verb, long))
    assert missing == ELSEWHERE


def test_grant_is_taken_back_by_how_it_begins_only_where_one() -> None:
    grants = ["abcdef" + "1" * 80, "abcdef" + "2" * 80, "zyxwvu" + "1" * 80]
    for shown, begins, whole in (
        (grants, "zyxwvu", grants[2]),
        (grants, "abcdef1…", grants[0]),
        (grants, "abcdef", None),
        (grants, "zyxwv", "zyxwv"),  # too short to select one
        (grants, "nobody's", "nobody's"),
        (grants * 334, "zyxwvu", None),  # there may be more than the listing shows
        (grants * 334, grants[2], grants[2]),
    ):

        class Daemon:
            def ask(self, kind: str, shown: list[str] = shown, **_: Any) -> dict[str, Any]:
                return {"kind": kind, "capabilities": [{"signature": one} for one in shown]}

        if whole is None:
            with pytest.raises(errors.UsageError, match="more than one grant may begin"):
                capabilities.whole_signature(Daemon(), begins)
        else:
            assert capabilities.whole_signature(Daemon(), begins) == whole
