"""Check a run whose end could not be written by a process that lives on: the next reader writes it, exactly once.

This happens to an instance that its holder outlives (sandbox.standby).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from policy import clocks, errors
from policy.lifecycle import State
from policy.manifest import parse
from sandbox.audit import open_runs, run_events
from sandbox.audit.log import Ledger
from sandbox.audit.run_events import RunEvents

RUN = "11111111-1111-4111-8111-111111111111"
ISSUER = {"display": "operator@local", "pubkey": "4" * 44}
MANIFEST = parse.parse(
    b"""\
[agent]
id = "probe"
name = "Probe"
version = "1.0.0"
runtime = "python3"
entry = "main.py"
[resources]
network = "off"
[sandbox]
required = true
backend = "linux-gvisor"
""",
    file="agent.toml",
)


def _opened(state: Path) -> Ledger:
    return Ledger.open(state / "audit", head=state / "audit-head" / "head.json")


def _begun(log: Ledger) -> RunEvents:
    """Return the rows of a run whose start is written."""
    pen = RunEvents(log, RUN, ISSUER)
    pen.agent_id, pen.operator = "probe", "tester"
    for state in (State.PROVISIONED, State.VALIDATED, State.ISOLATED):
        pen.transition(state, "", waits=True)
    pen.run_started(
        MANIFEST,
        clocks.Deadline(1000, "ttl"),
        intent_id="i",
        package="p",
        policy_digest=None,
        payload_digest=None,
        not_enforced=(),
    )
    return pen


def _ends(log: Ledger) -> list[str | None]:
    kinds: list[dict[str, Any]] = [json.loads(line)["kind"] for _, line in log.lines()]
    return [kind["code"] for kind in kinds if kind["type"] == "run_ended"]


def _looks(state: Path) -> list[str | None]:
    """Open the log as the next process, write the owed ends, and return the ends in it."""
    with _opened(state) as other:
        run_events.cut_off(other)
        return _ends(other)


def test_end_that_could_not_be_written_is_for_whoever_looks_once_it_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _opened(tmp_path) as log:
        pen = _begun(log)
        with monkeypatch.context() as full:

            def refuses(*given: object, **named: object) -> list[str]:
                raise errors.LedgerError("No space left on device")

            full.setattr(Ledger, "append_all", refuses)
            with pytest.raises(errors.LedgerError):
                pen.failure(errors.KilledError("it is to end"), package_digest="p")
        # Its process lives and may still write the end, so no other process does.
        assert open_runs.is_open(tmp_path, RUN)
        assert _looks(tmp_path) == []
        pen.leave()
        assert not open_runs.is_open(tmp_path, RUN)
        assert _looks(tmp_path) == ["cut_off"]
        # Only once.
        pen.leave()
        assert _looks(tmp_path) == ["cut_off"]


def test_who_wrote_its_end_or_began_nothing_leaves_nothing_to_write(tmp_path: Path) -> None:
    with _opened(tmp_path) as log:
        RunEvents(log, RUN, ISSUER).leave()
        assert _looks(tmp_path) == []
        pen = _begun(log)
        pen.failure(errors.KilledError("it is to end"), package_digest="p")
        assert not open_runs.is_open(tmp_path, RUN)
        pen.leave()
        assert _looks(tmp_path) == ["stopped"]
