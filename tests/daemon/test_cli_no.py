"""Verbs that sometimes answer no, each with its own home.

An intent that waited, stores that disagree, a token prefix that two peers share.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from covenant.handlers import billing
from covenant.stores.peers.interface import Enrolled
from covenant.wire.types import MemoryRecord, Tier
from tests import cli_daemon_kit
from tests.cli_daemon_kit import Daemon, answered, exit_status
from tests.cli_kit import call, done
from tests.mailbox_kit import MANIFEST, peer

POOR = MANIFEST.format(id="poor", required="[]") + "[settlement]\nbudget_credits_per_hour = 1\n"


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    cli_daemon_kit.package(home, "poor", POOR)
    monkeypatch.setenv("COVENANT_HOME", str(home))
    monkeypatch.delenv("COVENANT_TOKEN_FILE", raising=False)
    with cli_daemon_kit.running(home) as one:
        done("bootstrap")
        yield one


def test_intent_that_waited_is_resumed_once(daemon: Daemon) -> None:
    bucket, ledger = billing.budget_of("poor"), daemon.server.budget
    daemon.portal.call(ledger.set_capacity, bucket, 1)
    # Another run has the only credit until it returns it.
    daemon.portal.call(ledger.try_debit, bucket, 1, "another")
    refused = answered("intent", "--agent", "poor", "do it later", status=1)
    assert (refused["code"], "budget exhausted" in refused["message"]) == ("budget_exhausted", True)
    (waiting,) = [one.intent_id for one in daemon.server.checkpoints.active()]
    still = answered("intents", "resume", waiting, status=1)["error"]
    assert (still["code"], still["daemon_code"]) == ("daemon_error", "budget_exhausted")
    assert re.fullmatch(f"there are enough in [0-9]+ min: covenant intents resume {waiting}", still["hint"])
    daemon.portal.call(ledger.refund, bucket, "another")
    answer = answered("intents", "resume", "latest")
    assert (answer["kind"], answer["ok"], answer["mode"]) == ("intents_resume", True, "latest")
    assert (answer["text"], answer["agent_id"], answer["status"]) == ("DO IT LATER", "poor", "ok")
    assert answer["intent_id"] != waiting
    again = answered("intents", "resume", waiting, status=1)
    assert (again["mode"], again["error"]["daemon_code"]) == ("explicit", "no_checkpoint")
    assert answered("intents", "resume", "latest", status=1)["error"]["code"] == "no_budget_exhausted_row"
    assert answered("budget", "debits")["debits"][0]["credits"] == 1


def test_stores_that_disagree_are_status_3_and_each_is_named(daemon: Daemon) -> None:
    assert exit_status(call("verify")) == 0
    stray = MemoryRecord(
        id="6f0c3c2e-5f4b-4d0a-9a54-1c1f6e0f7a11", tier=Tier.WORKING, owner=peer("ada"), text="x", created_at=1
    )
    daemon.portal.call(daemon.server.memory.put, stray)
    report = answered("verify", status=3)
    assert {one["kind"] for one in report["drift"]} >= {"memory_without_audit", "memory_without_receipt"}
    assert {one["id"] for one in report["drift"]} == {stray.id}
    assert not all(one["passed"] for one in report["checks"])
    shown = call("verify")
    assert exit_status(shown) == 3
    assert f"memory_without_audit {stray.id}: " in shown.stdout


def test_beginning_that_two_tokens_have_shows_nobody_out(daemon: Daemon) -> None:
    def enrolled(number: int) -> Enrolled:
        return daemon.portal.call(daemon.server.peers.enroll, peer(f"peer{number}"), None)

    first: dict[str, Enrolled] = {}
    # Of so many two begin alike: base58 has 58 characters.
    made = enrolled(0)
    for number in itertools.count(1):
        first[made.token[0]] = made
        made = enrolled(number)
        if made.token[0] in first:
            break
    outcome = answered("peers", "revoke", made.token[0], status=1)["outcome"]
    assert outcome["type"] == "ambiguous"
    prefixes = {one["token_prefix"] for one in outcome["matches"]}
    assert prefixes >= {made.token[:6], first[made.token[0]].token[:6]}
    few = answered("peers", "revoke", made.token[0], "--limit-matches", "1", status=1)["outcome"]
    assert (len(few["matches"]), few["truncated"]) == (1, True)
    assert daemon.portal.call(daemon.server.peers.authenticate, made.token) is not None
