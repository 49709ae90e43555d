"""Check that the supervisor's rows about an intent's runs are in the daemon's log before the answer is sent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio.lowlevel
import pytest

from covenant.handlers import billing
from covenant.handlers.audit import consistency
from covenant.handlers.intents import supervisor_events
from covenant.handlers.intents.pipeline import IntentPipeline
from covenant.handlers.server import Server
from covenant.runtime import supervisor_report
from covenant.runtime.packages import Card
from covenant.runtime.runner import Intent, RunResult, Spent, Usage, with_spent
from covenant.runtime.supervisor_report import SupervisorReport
from policy import errors
from policy.audit_log import chain
from tests import intents_kit, runtime_kit, supervisor_double
from tests.intents_kit import ALICE, BOB, rows
from tests.runtime_kit import USED, Acts
from tests.supervisor_double import ORIGIN

pytestmark = pytest.mark.anyio

LINES = [
    supervisor_double.row("run_state", "run-1", state="Running", reason="größe \u202e"),
    supervisor_double.row("run_state", "below", state="Running", reason=""),
]
# The rows in the log before the run.
BEFORE = ("capability_check", "budget_unseeded", "budget_capacity_set")


def _told(**fields: Any) -> SupervisorReport:
    return supervisor_report.read(supervisor_double.told({}, *LINES, **fields))


def _family(**fields: int) -> dict[str, int]:
    used = {"cpu_ms": 0, "memory_byte_ms": 0, "wall_ms": 0, "credits": 0}
    return {"runs": 1, "unended": 0, "uncounted": 0, **used, **fields}


async def _server(home: Path, act: Any, *, runtime: str = "python3") -> Server:
    more = '[hermes]\ntools_allowed = []\napproval_policy = "auto-deny"\n' if runtime == "hermes" else ""
    runtime_kit.package(home, "a", runtime=runtime, budget=100, more=more)
    server = intents_kit.make(home, acts=Acts(act))
    await server.agents.reload()
    await intents_kit.granted(server, ALICE, "memory.write")
    return server


def _answering(found: SupervisorReport | None) -> Any:
    async def act(card: Card, intent: Intent) -> RunResult:
        await anyio.lowlevel.checkpoint()
        return RunResult(text="done", usage=USED, run_id="run-1", told=found)

    return act


def _failing(error: errors.CovenantError) -> Any:
    async def act(card: Card, intent: Intent) -> RunResult:
        await anyio.lowlevel.checkpoint()
        raise error

    return act


async def test_each_row_is_copied_as_it_stands_with_its_origin_before_row_of_answer(tmp_path: Path) -> None:
    server = await _server(tmp_path, _answering(_told()))
    result = await IntentPipeline(server, ALICE, "x", agent="a").go()
    found = await rows(server)
    assert [row["type"] for row in found if row["type"] not in BEFORE] == [
        "supervisor_row", "supervisor_row", "run_usage", "receipt_written", "memory_written", "receipt_written",
        "intent_dispatched",
    ]  # fmt: skip
    copied = [row for row in found if row["type"] == "supervisor_row"]
    assert [row["line"].encode() for row in copied] == LINES
    for number, row in enumerate(copied, 7):
        line = row["line"].encode()
        assert (row["origin"], row["index"], row["intent_id"]) == (ORIGIN, number, result.intent_id)
        assert row["event_hash_hex"] == chain.event_hash(line)
        assert (row["event_id"], row["row_type"]) == (json.loads(line)["id"], "run_state")
    assert copied[1]["chain_hash_hex"] == chain.chain_hash(copied[0]["chain_hash_hex"], copied[1]["event_hash_hex"])
    mine = await server.audit.recent(100, issuer_pubkey=ALICE.agent.pubkey)
    assert {"supervisor_row"} <= {row.kind["type"] for row in mine}
    theirs = await server.audit.recent(100, issuer_pubkey=BOB.agent.pubkey)
    assert [row for row in theirs if row.kind["type"] == "supervisor_row"] == []


async def test_what_is_left_out_is_said_and_what_family_used_is_billed(tmp_path: Path) -> None:
    family = _family(runs=3, unended=1, cpu_ms=9_000, memory_byte_ms=5, wall_ms=4)
    server = await _server(tmp_path, _answering(_told(left_out=4, family=family)))
    await IntentPipeline(server, ALICE, "x", agent="a").go()
    (missing,) = await rows(server, "supervisor_rows_missing")
    assert (missing["copied"], missing["left_out"], missing["run_id"]) == (2, 4, "run-1")
    (used,) = await rows(server, "family_usage")
    assert (used["runs"], used["unended"], used["cpu_ms"]) == (3, 1, 9_000)
    (usage,) = await rows(server, "run_usage")
    assert usage["cpu_ms"] == USED.cpu_ms
    # Nine seconds of processor time, and the time and memory of the run itself.
    assert usage["credits"] == billing.cost(USED, _told(family=family)) == 10 > billing.cost(USED)
    (receipt,) = [one for one in await server.receipts.recent(10) if one.resource == "compute"]
    assert receipt.credits_consumed == 10
    assert server.budget.tokens(billing.budget_of("a")) == 90


async def test_what_was_not_counted_is_null_in_its_row_and_said_of_its_family(tmp_path: Path) -> None:
    """An uncounted run costs nothing, and its row differs from the row of a run that used nothing."""
    found = _told(family=_family(uncounted=1))
    error = with_spent(errors.AgentFailedError("no"), Spent(Usage(None, None, None), "run-1", told=found))
    server = await _server(tmp_path, _failing(supervisor_report.with_told(error, found)))
    with pytest.raises(errors.CovenantError):
        await IntentPipeline(server, ALICE, "x", agent="a").go()
    (usage,) = await rows(server, "run_usage")
    assert [usage[name] for name in ("cpu_ms", "memory_peak_bytes", "wall_ms", "credits")] == [None, None, None, 1]
    (family,) = await rows(server, "family_usage")
    assert (family["runs"], family["uncounted"]) == (1, 1)


async def test_run_that_failed_has_its_rows_copied_and_its_family_billed(tmp_path: Path) -> None:
    found = _told(family=_family(runs=2, cpu_ms=4_000))
    error = with_spent(errors.AgentFailedError("no"), Spent(USED, "run-1", told=found))
    server = await _server(tmp_path, _failing(supervisor_report.with_told(error, found)))
    with pytest.raises(errors.CovenantError):
        await IntentPipeline(server, ALICE, "x", agent="a").go()
    assert [row["line"].encode() for row in await rows(server, "supervisor_row")] == LINES
    (usage,) = await rows(server, "run_usage")
    assert usage["credits"] == billing.cost(USED, found) == 5
    assert (await rows(server))[-1]["type"] == "intent_failed"


async def test_refusal_has_its_rows_copied_and_costs_nothing(tmp_path: Path) -> None:
    found = _told(family=_family(runs=0))
    server = await _server(tmp_path, _failing(supervisor_report.with_told(errors.UnsignedError("not signed"), found)))
    with pytest.raises(errors.UnsignedError):
        await IntentPipeline(server, ALICE, "x", agent="a").go()
    assert len(await rows(server, "supervisor_row")) == 2
    assert server.budget.tokens(billing.budget_of("a")) == 100


async def test_what_others_did_for_run_that_machine_failed_is_billed(tmp_path: Path) -> None:
    found = _told(family=_family(runs=2, cpu_ms=4_000))
    server = await _server(tmp_path, _failing(supervisor_report.with_told(errors.KernelError("no memory"), found)))
    with pytest.raises(errors.KernelError):
        await IntentPipeline(server, ALICE, "x", agent="a").go()
    (usage,) = await rows(server, "run_usage")
    assert (usage["credits"], usage["cpu_ms"]) == (4, None)
    assert server.budget.tokens(billing.budget_of("a")) == 96


@pytest.mark.parametrize(
    ("error", "runtime", "said"),
    [
        (errors.ServiceError("the supervisor ended the conversation before its answer"), "python3", True),
        (errors.NoSupervisorError("nobody listens"), "python3", False),
        (errors.ServiceError("the API is gone"), "hermes", False),
    ],
)
async def test_run_whose_end_nobody_told_has_row_that_says_what_is_missing(
    tmp_path: Path, error: errors.CovenantError, runtime: str, said: bool
) -> None:
    server = await _server(tmp_path, _failing(error), runtime=runtime)
    with pytest.raises(type(error)):
        await IntentPipeline(server, ALICE, "x", agent="a").go()
    found = await rows(server, "supervisor_rows_missing")
    assert [(row["copied"], row["left_out"], row["reason"]) for row in found] == [(0, None, error.message)] * said


async def test_copies_leave_window_of_verify_to_our_own_rows(tmp_path: Path) -> None:
    server = await _server(tmp_path, _answering(_told()))
    for _ in range(3):
        await IntentPipeline(server, ALICE, "x", agent="a").go()
    window = await consistency.gather(server, ALICE, 12)
    kinds = [event.kind["type"] for event in window.events]
    assert (len(kinds), "supervisor_row" in kinds) == (12, False)
    assert kinds.count("intent_dispatched") == 2


async def test_row_too_long_is_copied_by_its_hash() -> None:
    document = supervisor_double.told({}, *LINES)
    document["rows"][0][1] = None
    first, second = supervisor_events.entries(supervisor_report.read(document), "i", ALICE)
    assert (first.fields["line"], first.fields["row_type"]) == (None, None)
    assert first.fields["event_hash_hex"] == chain.event_hash(LINES[0])
    assert second.fields["line"] == LINES[1].decode()
