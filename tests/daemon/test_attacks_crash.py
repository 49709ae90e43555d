"""A daemon that is killed while authority and stores change.

After the restart no acknowledged change is missing, doubled or undone, and no right is wider than before.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from covenant.wire import client
from policy import errors
from tests.capability_kit import ADA

START_SECONDS = 60.0
ROUNDS = 4
OPERATOR_NEEDS = (
    *("memory.read", "memory.write", "memory.purge", "memory.compact.apply", "chain.flush", "chain.receipts"),
    *("audit.purge", "peers.purge", "capabilities.purge"),
)


@contextmanager
def _daemon(home: Path) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "COVENANT_HOME": str(home), "COVENANT_ALLOW_ROOT": "1", "COVENANT_HTTP_PORT": "off"}
    command = [sys.executable, "-c", "from covenant.start import entry; raise SystemExit(entry())"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        until = time.monotonic() + START_SECONDS
        while True:
            with suppress(errors.CovenantError, OSError), client.connected(home) as asking:
                asking.ask("ping")
                break
            assert process.stderr is not None
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < until
            time.sleep(0.02)
        yield process
    finally:
        process.kill()
        process.communicate()


@dataclass
class Known:
    """Acknowledged changes. The last request had no answer, so its change may exist or not."""

    tokens: dict[str, str] = field(default_factory=dict)
    shown_out: dict[str, str] = field(default_factory=dict)
    live: set[str] = field(default_factory=set)
    revoked: set[str] = field(default_factory=set)
    records: dict[str, str] = field(default_factory=dict)
    purged: set[str] = field(default_factory=set)
    operator_tokens: list[str] = field(default_factory=list)
    batches: set[str] = field(default_factory=set)
    answers: int = 0


def _enrol(asking: client.Client, known: Known, dice: random.Random) -> None:
    name = f"p{dice.getrandbits(60):x}@local"
    known.tokens[name] = asking.ask("enroll_peer", display=name, actions=["memory.read"])["token_b58"]


def _show_out(asking: client.Client, known: Known, dice: random.Random) -> None:
    if known.tokens:
        name = dice.choice(sorted(known.tokens))
        token = known.tokens.pop(name)
        asking.ask("revoke_peer", token_prefix=token)
        known.shown_out[name] = token


def _grant(asking: client.Client, known: Known, dice: random.Random) -> None:
    action = f"tool.call.t{dice.getrandbits(60):x}"
    known.live.add(asking.ask("grant_capability", action=action, subject=ADA.pubkey)["signature_b58"])


def _revoke(asking: client.Client, known: Known, dice: random.Random) -> None:
    if known.live:
        signature = dice.choice(sorted(known.live))
        known.live.discard(signature)
        asking.ask("revoke_capability", signature_b58=signature)
        known.revoked.add(signature)


def _write(asking: client.Client, known: Known, dice: random.Random) -> None:
    record = asking.ask("put_memory", tier="working", text=f"text {dice.getrandbits(60):x}")["record"]
    known.records[record["id"]] = "working"


def _promote(asking: client.Client, known: Known, dice: random.Random) -> None:
    mine = sorted(one for one, tier in known.records.items() if tier == "working")
    if mine:
        one = dice.choice(mine)
        known.records[one] = "either"
        known.records[one] = asking.ask("promote_memory", id=one, tier="longterm")["record"]["tier"]


def _purge(asking: client.Client, known: Known, dice: random.Random) -> None:
    going = {one for one, tier in known.records.items() if tier == "working"}
    known.records = {one: tier for one, tier in known.records.items() if tier == "longterm"}
    asking.ask("purge_memory", tier="working", before_ms=2**53)
    known.purged |= going


def _rotate(asking: client.Client, known: Known, dice: random.Random) -> None:
    known.operator_tokens.append(asking.ask("rotate_operator_token")["token_b58"])


def _flush(asking: client.Client, known: Known, dice: random.Random) -> None:
    with suppress(errors.NothingToSettleError):
        known.batches.add(asking.ask("flush_receipts", limit=5)["batch"]["batch_id"])


def _forget(asking: client.Client, known: Known, dice: random.Random) -> None:
    kind = dice.choice(["purge_capabilities", "purge_peers", "purge_audit"])
    asking.ask(kind, before_ms=0 if kind == "purge_audit" else 2**53)


ACTS = (_enrol, _show_out, _grant, _grant, _revoke, _write, _write, _promote, _purge, _rotate, _flush, _forget)


def _work(home: Path, known: Known, dice: random.Random) -> None:
    with suppress(errors.DaemonSilentError, OSError), client.connected(home) as asking:
        while True:
            dice.choice(ACTS)(asking, known, dice)
            known.answers += 1


def _lets_in(home: Path, token: str) -> bool:
    try:
        with client.connected(home, token=token):
            return True
    except errors.AuthenticationError:
        return False


def _check(home: Path, known: Known) -> None:
    with client.connected(home) as asking:
        for name, token in known.tokens.items():
            assert _lets_in(home, token), name
        for name, token in known.shown_out.items():
            assert not _lets_in(home, token), name
        # The token in the file lets the operator in (we are in by it), and no earlier one does.
        now = client.operator_token(home)
        assert not any(_lets_in(home, token) for token in known.operator_tokens[-5:-1] if token != now)
        grants = _effective(asking, home)
        assert known.live <= grants
        assert not known.revoked & grants
        _check_memory(asking, known)
        batches = [one["batch_id"] for one in asking.ask("receipt_batches", limit=1000)["batches"]]
        assert known.batches <= set(batches)
        assert len(batches) == len(set(batches))
        receipts = [one["id"] for one in asking.ask("recent_receipts", limit=10_000)["receipts"]]
        assert len(receipts) == len(set(receipts))
        report = asking.ask("verify_audit_integrity")["report"]
        assert report["valid"], report["failures"]


def _check_memory(asking: client.Client, known: Known) -> None:
    records = {one["id"]: one["tier"] for one in asking.ask("recent_memory", limit=1000)["records"]}
    for one, tier in known.records.items():
        assert records.get(one) in ({"working", "longterm"} if tier == "either" else {tier}), one
    assert not known.purged & records.keys()


def _effective(asking: client.Client, home: Path) -> set[str]:
    """Return ADA's effective grants, as the daemon reports them to ADA."""
    made = asking.ask("enroll_peer", display=ADA.display, pubkey=ADA.pubkey)
    with client.connected(home, token=made["token_b58"]) as ada:
        grants: list[dict[str, Any]] = ada.ask("capability_usage", limit=1000)["grants"]
    asking.ask("revoke_peer", token_prefix=made["token_b58"])
    return {one["signature_b58"] for one in grants if one["effective"] == "live"}


def _after(known: Known, more: int) -> None:
    """Until so many more were answered, however long that takes this machine."""
    enough, end = known.answers + more, time.monotonic() + 60
    while known.answers < enough:
        assert time.monotonic() < end, "nothing is answered"
        time.sleep(0.005)


@pytest.mark.parametrize("seed", [6, 2026])
def test_kills_amid_changes_lose_double_and_widen_nothing(tmp_path: Path, seed: int) -> None:
    home, known, dice = tmp_path / "home", Known(), random.Random(seed)
    home.mkdir(mode=0o700)
    with _daemon(home), client.connected(home) as asking:
        for action in (*OPERATOR_NEEDS, "chain.batches"):
            asking.ask("grant_capability", action=action, scope={})
    for _ in range(ROUNDS):
        with _daemon(home) as process:
            _check(home, known)
            worker = threading.Thread(target=_work, args=(home, known, dice))
            worker.start()
            _after(known, dice.randint(2, 12))
            time.sleep(dice.uniform(0, 0.05))
            os.kill(process.pid, signal.SIGKILL)
            worker.join(30)
            assert not worker.is_alive()
    with _daemon(home):
        _check(home, known)
    assert known.answers > ROUNDS, json.dumps({"answers": known.answers})
