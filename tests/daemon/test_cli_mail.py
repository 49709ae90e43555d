"""The verbs of the mailbox and of peers, against a daemon that runs: their exit statuses and envelopes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from covenant.cli.daemon import client
from covenant.stores.mailbox.interface import MAX_RESULT_BYTES
from tests import cli_daemon_kit, v1_client
from tests.cli_daemon_kit import Daemon, Envelopes, answered, exit_status
from tests.cli_kit import call, done

ENVELOPES = Envelopes(Path(__file__).parent / "cli_envelopes_mail.json")
ME = "operator@local"
# Version 1's clients decode ids of tasks that are UUIDs only.
T1 = "6f0c3c2e-5f4b-4d0a-9a54-1c1f6e0f7a11"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    home = tmp_path_factory.mktemp("home")
    home.chmod(0o700)
    cli_daemon_kit.package(home, "hello")
    with cli_daemon_kit.granted(home) as one:
        yield one


@pytest.fixture(autouse=True)
def _home(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("COVENANT_HOME", str(daemon.home))
    monkeypatch.delenv("COVENANT_TOKEN_FILE", raising=False)
    yield
    # Each test leaves an empty mailbox to the next.
    monkeypatch.delenv("COVENANT_TOKEN_FILE", raising=False)
    daemon.runs.hold = None
    for entry in daemon.server.mailbox.open_entries():
        call("a2a", "cancel", entry.task.id)
    while exit_status(call("a2a", "result")) == 0:
        pass


def verb(kind: str, *arguments: str, status: int = 0) -> dict[str, Any]:
    document = answered(*arguments, status=status)
    assert document["kind"] == kind
    ENVELOPES.hold(kind, document)
    return document


def test_agent_of_this_host_does_what_it_is_sent(daemon: Daemon) -> None:
    sent = verb("a2a_task_queued", "a2a", "send", "hello@agent", "say hello", "--wait", "--timeout", "20")
    assert sent["result"]["content"][0]["text"] == "SAY HELLO"
    assert verb("a2a_result", "a2a", "result")["result"]["task_id"] == sent["task_id"]
    assert answered("a2a", "result", status=3)["result"] is None
    assert done("a2a", "send", "hello@agent", "again", "--wait", "--timeout", "20") == "AGAIN\n"
    shown = call("a2a", "result")
    assert (shown.stdout, shown.exit_code) == ("AGAIN\n", 0)
    assert exit_status(call("a2a", "send", "nobody@agent", "x")) == 2
    assert exit_status(call("a2a", "send", "nobody@elsewhere", "x")) == 2
    assert exit_status(call("a2a", "send", "hello@agent", "x", "--unsafe", "--idempotency-key", "k")) == 2


def test_answer_is_found_behind_as_many_long_ones_as_no_listing_has_room_for(daemon: Daemon) -> None:
    daemon.runs.hold = anyio.Event()
    early = answered("a2a", "send", "hello@agent", "be early")["task_id"]
    answered("a2a", "force-error", early, "--reason", "a test", "--message", "the early one")
    for _ in range(2):
        late = answered("a2a", "send", ME, "be late")["task_id"]
        answered("a2a", "force-error", late, "--reason", "a test", "--message", "x" * (MAX_RESULT_BYTES - 200))
    listed = client.ask("recent_a2_a_results", limit=1000)["results"]
    assert early not in [one["task_id"] for one in listed]
    again = ("a2a", "send", "hello@agent", "be early", "--id", early, "--wait", "--timeout", "20")
    assert answered(*again, status=1)["result"]["error_message"] == "the early one"


def test_agent_that_fails_is_failure(daemon: Daemon) -> None:
    sent = answered("a2a", "send", "hello@agent", "read /srv/.env", "--wait", "--timeout", "20", status=1)
    assert sent["result"]["error_message"].startswith("ignored: ")
    daemon.runs.hold = anyio.Event()
    late = answered("a2a", "send", "hello@agent", "x", "--wait", "--timeout", "0.1", status=1)
    assert late["code"] == "daemon_silent"


def test_run_is_ended_with_its_task(daemon: Daemon) -> None:
    daemon.runs.hold = anyio.Event()
    task = answered("a2a", "send", "hello@agent", "wait for me")["task_id"]
    cancelled = verb("a2a_cancelled", "a2a", "cancel", task, "--reason", "no need")
    assert cancelled["cancelled"] is True
    assert answered("a2a", "cancel", task, status=1)["cancelled"] is False
    assert answered("a2a", "cancel", "nothing", status=1)["code"] == "no_such_task"


def test_tasks_of_ones_own(daemon: Daemon) -> None:
    """Sent to oneself, received, answered, repaired."""
    whole = ("--kind", "note", "--deadline-in-ms", "600000", "--idempotency-key", "one", "--id", T1)
    assert answered("a2a", "send", ME, "look at this", *whole)["task_id"] == T1
    given = verb("a2a_task", "a2a", "recv")
    assert (given["task"]["intent_text"], given["task"]["task_kind"]) == ("look at this", "note")
    assert answered("a2a", "recv", status=3)["task"] is None
    status = verb("a2a_status", "a2a", "status")
    assert [(one["task"]["id"], one["state"]) for one in status["tasks"]] == [(T1, "in_flight")]
    for filters in (("--state", "queued"), ("--min-lease-age-ms", "600000"), ("--deadline-within-ms", "1")):
        assert answered("a2a", "status", *filters)["tasks"] == []
    assert "look at this" in done("a2a", "status")
    retry = verb("a2a_auto_retry", "a2a", "retry-stale", "--min-lease-age-ms", "0")["report"]
    assert (retry["policy"]["enabled"], retry["requeued"], retry["skipped_by_reason"]) == (
        False,
        [],
        {"disabled": 1},
    )
    assert call("a2a", "retry-stale", "--min-lease-age-ms", "0").stderr == "nothing was done: --enable does it\n"
    retried = answered("a2a", "retry-stale", "--enable", "--min-lease-age-ms", "0")
    v1_client.CLI["a2a_auto_retry"](retried)
    (again,) = retried["report"]["requeued"]
    assert (again["lease_id"], again["idempotency_key"]) == (given["lease_id"], "one")
    lease = answered("a2a", "recv")["lease_id"]
    why = ("--reason", "test")
    wrong = ("--duplicate-risk", "idempotent", "--lease-id", given["lease_id"])
    assert answered("a2a", "requeue", T1, *why, *wrong, status=1)["code"] == "lease_mismatch"
    right = ("--duplicate-risk", "operator-accepted", "--lease-id", lease)
    assert verb("a2a_repaired", "a2a", "requeue", T1, *why, *right)["outcome"]["action"] == "requeued"
    assert exit_status(call("a2a", "requeue", T1, *why)) == 2
    done("a2a", "recv")
    told = done("a2a", "requeue", T1, *why, "--duplicate-risk", "operator-accepted")
    assert told.startswith(f"{T1} waits again, after ")
    done("a2a", "recv")
    assert verb("a2a_result_posted", "a2a", "answer", T1, "three words")["task_id"] == T1
    assert answered("a2a", "answer", T1, "once more", status=1)["code"] == "task_state"
    assert f"answer to {T1}: ok" in done("a2a", "status")
    assert answered("a2a", "result")["result"]["content"][0]["text"] == "three words"
    # the same again is answered at once
    once_more = ("--kind", "note", "--idempotency-key", "one")
    assert answered("a2a", "send", ME, "another text", *once_more, "--wait")["result"]["status"] == "ok"
    done("a2a", "result")
    task = answered("a2a", "send", ME, "x", "--unsafe")["task_id"]
    assert answered("a2a", "force-error", task, *why, "--message", "gave up")["outcome"]["action"] == "forced_error"
    assert answered("a2a", "result")["result"]["error_message"] == "gave up"
    assert verb("a2a_compacted", "a2a", "compact")["dropped"] >= 3
    assert exit_status(call("a2a", "answer", T1)) == 2


def test_peers(daemon: Daemon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    actions = ("--action", f"a2a.recv.{ME}", "--action", f"a2a.respond.{ME}")
    ada = verb("peer_enrolled", "peers", "enroll", "ada@laptop", *actions)
    key = ada["agent_id"]["pubkey"]
    assert len(ada["granted"]) == 2
    listed = verb("peer_list", "peers", "list", "--live-only")
    assert {one["agent_id"]["display"] for one in listed["peers"]} >= {ME, "ada@laptop"}
    assert answered("peers", "list", "--prefix", key[:8])["peers"][0]["agent_id"]["pubkey"] == key
    assert ada["token_b58"] not in done("peers", "list")
    assert exit_status(call("peers", "list", "--live-only", "--revoked-only")) == 2
    # the beginning of a key stands for it
    assert answered("capabilities", "grant", f"a2a.send.{key[:8]}")["action"] == f"a2a.send.{key}"
    assert exit_status(call("capabilities", "grant", "a2a.send.zzzzzzzz")) == 2
    # a grant of a name says that it is one
    bound = ("--scope", json.dumps({"version": 1, "peer_pubkey_b58": key}))
    told = [call("capabilities", "grant", "a2a.send.ada@laptop", *more).stderr for more in ((), bound)]
    assert [("each peer with the name ada@laptop" in text) for text in told] == [True, False]
    # she takes tasks with her own token
    done("a2a", "send", "ada@laptop", "hello ada", "--id", "for-ada")
    file = tmp_path / "ada.token"
    file.write_text(ada["token_b58"] + "\n")
    file.chmod(0o644)
    monkeypatch.setenv("COVENANT_TOKEN_FILE", str(file))
    assert answered("a2a", "recv", status=1)["code"] == "key_file"
    file.chmod(0o600)
    assert answered("a2a", "recv")["task"]["id"] == "for-ada"
    done("a2a", "answer", "for-ada", "hello operator")
    assert answered("a2a", "send", f"hello@agent:{key}", "x", "--sender", f"{ME}:{key}", status=1)["code"] == (
        "a2a_sender_mismatch"
    )
    assert answered("agents", "reload", status=1)["code"] == "operator_only"
    monkeypatch.delenv("COVENANT_TOKEN_FILE")
    assert answered("a2a", "result")["result"]["content"][0]["text"] == "hello operator"
    prefix = ada["token_b58"][:6]
    assert verb("peer_revoke", "peers", "revoke", prefix)["outcome"]["type"] == "revoked"
    assert answered("peers", "revoke", prefix)["outcome"]["type"] == "already_revoked"
    monkeypatch.setenv("COVENANT_TOKEN_FILE", str(file))
    assert answered("ping", status=1)["code"] == "authentication_failed"


def test_letting_out_whom_one_must_not(daemon: Daemon) -> None:
    token = (daemon.home / "peers/operator.token").read_text().strip()
    assert answered("peers", "revoke", token[:6], status=1)["outcome"]["type"] == "self_revoke_forbidden"
    assert answered("peers", "revoke", "zzzzzz", status=1)["outcome"]["type"] == "not_found"
    assert "your own token" in call("peers", "revoke", token[:6]).stdout
    assert verb("peers_purged", "peers", "purge", "--before-ms", "0")["purged"] == 0
    rotated = verb("peer_token_rotated", "peers", "rotate")["token_b58"]
    assert (daemon.home / "peers/operator.token").read_text().strip() == rotated
    said = done("peers", "rotate")
    now = (daemon.home / "peers/operator.token").read_text().strip()
    assert now != rotated
    assert now not in said
    assert answered("ping")["status"] == "ok"


def test_script_ends_with_status_and_one_document(daemon: Daemon) -> None:
    def script(*arguments: str) -> subprocess.CompletedProcess[str]:
        program = "from covenant.cli.main import entry; entry()"
        command = [sys.executable, "-c", program, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=dict(os.environ))

    for status, words in ((0, ["ping"]), (2, ["a2a", "answer", T1]), (3, ["a2a", "recv"])):
        ended = script(*words, "--json")
        assert ended.returncode == status, ended.stderr
        assert len(ended.stdout.splitlines()) == 1
    refused = script("a2a", "cancel", "nothing", "--json")
    assert (refused.returncode, refused.stderr) == (1, "")
    assert '"code": "no_such_task"' in refused.stdout
    shown = script("a2a", "cancel", "nothing")
    assert shown.stderr.startswith("covenant: there is no task `nothing` of yours [no_such_task]\n  fix: ")
