"""Check that each started run has exactly one end in the log, for any killed process and any later reader."""

from __future__ import annotations

import json
import os
import signal
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from policy import errors
from sandbox.audit import open_runs, run_events
from sandbox.audit.log import Ledger
from sandbox.storage import json_cache

ISSUER = {"display": "operator@local", "pubkey": "4" * 44}


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger.open(tmp_path / "audit", head=tmp_path / "audit-head" / "head.json")


def run(name: object) -> str:
    """Return a run id that contains a name."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, str(name)))


def start(ledger: Ledger, run_id: str, size: int = 1, *, issuer: Mapping[str, str] = ISSUER) -> None:
    ledger.append(
        "run_started",
        {
            "run_id": run_id,
            "agent_id": "a",
            "operator": "tester",
            "intent_id": "i",
            "package": "/p" * size,
            "parent": None,
            "behalf_display": None,
            "behalf_pubkey": None,
            "policy_digest": None,
            "payload_digest": None,
            "backend": "linux-gvisor",
            "signers": [],
            "not_enforced": [],
            "deadline_ms": 1,
            "deadline_clock": "ttl",
        },
        issuer=issuer,
        now_ms=1,
    )


def ends(ledger: Ledger) -> list[tuple[str, str]]:
    events: list[dict[str, Any]] = [json.loads(line)["kind"] for _, line in ledger.lines()]
    return [(one["run_id"], one["code"]) for one in events if one["type"] == "run_ended"]


def place(ledger: Ledger) -> Path:
    return ledger.place.parent / "unended"


def dead(ledger: Ledger, run_id: str, *, started: bool) -> None:
    """Have a process mark the run, write its start if ``started``, and be killed."""
    pid = os.fork()
    if pid == 0:
        try:
            with Ledger.open(ledger.place, head=ledger.place.parent / "audit-head" / "head.json") as own:
                open_runs.OpenRunMarker(own, run_id)
                if started:
                    start(own, run_id)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)


def test_start_whose_process_is_gone_gets_one_end(ledger: Ledger) -> None:
    dead(ledger, run("gone"), started=True)
    dead(ledger, run("before-its-start"), started=False)
    run_events.cut_off(ledger)
    run_events.cut_off(ledger)
    assert ends(ledger) == [(run("gone"), "cut_off")]
    assert [name for name in os.listdir(place(ledger)) if not name.startswith(".")] == []


def test_start_whose_process_lives_gets_none(ledger: Ledger) -> None:
    mark = open_runs.OpenRunMarker(ledger, run("alive"))
    start(ledger, run("alive"))
    with Ledger.open(ledger.place, head=ledger.place.parent / "audit-head" / "head.json") as other:
        run_events.cut_off(other)
    assert ends(ledger) == []
    mark.clear()
    # Its mark is gone, as after a reboot, so its end is written now.
    run_events.cut_off(ledger)
    assert ends(ledger) == [(run("alive"), "cut_off")]


def test_what_is_settled_is_not_read_again_and_no_note_of_it_hides_start(ledger: Ledger) -> None:
    for number in range(3):
        start(ledger, run(number), 20_000)
    run_events.cut_off(ledger)
    assert len(ends(ledger)) == 3
    run_events.cut_off(ledger)
    settled = open_runs.settled(ledger.place.parent)
    assert settled > 64 * 1024
    start(ledger, run("late"))
    for note in (settled, settled - 7, 2**40, -1, "x"):
        json_cache.write(place(ledger) / ".settled", {"events_bytes": note})
        run_events.cut_off(ledger)
        assert ends(ledger)[-1] == (run("late"), "cut_off")
        assert len(ends(ledger)) == 4


def test_whoever_writes_ends_and_does_not_go_on_keeps_no_run_from_being_refused(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_runs, "TURN_SECONDS", 0.01)
    with open_runs.settling(ledger):
        with pytest.raises(errors.KeeperError, match=f"process {os.getpid()}") as refused:
            open_runs.OpenRunMarker(ledger, run("late"))
        with pytest.raises(errors.KeeperError):
            run_events.cut_off(ledger)
    assert refused.value.where == str(place(ledger))
    assert os.listdir(place(ledger)) == []
