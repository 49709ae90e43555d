"""Check the pipeline of an intent: the rows of each step, and the state that a failure there leaves."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from covenant.handlers import billing
from covenant.handlers.caller import Caller
from covenant.handlers.intents import recovery, submit
from covenant.handlers.intents.pipeline import IntentPipeline
from covenant.handlers.memory import records
from covenant.handlers.server import Server
from covenant.runtime.packages import Card
from covenant.runtime.runner import Intent, RunResult, Spent, with_spent
from covenant.stores.memory.interface import Room
from covenant.wire import requests, responses
from covenant.wire.types import Priority
from policy import contract, errors
from tests import intents_kit, runtime_kit, server_kit
from tests.intents_kit import ALICE, BOB, rows
from tests.runtime_kit import USED, Acts

pytestmark = pytest.mark.anyio


async def _made(
    home: Path, *, acts: Acts | None = None, grants: tuple[str, ...] = ("memory.write",), **given: Any
) -> Server:
    server = intents_kit.make(home, acts=acts, **given)
    await server.agents.reload()
    await intents_kit.granted(server, ALICE, *grants)
    return server


async def _submit(server: Server, text: str, caller: Caller = ALICE, **fields: Any) -> responses.IntentResult:
    return await submit.submit_intent(server, caller, requests.SubmitIntent(text=text, **fields))


async def test_answer_is_in_memory_in_receipts_and_in_log_before_it_is_given(tmp_path: Path) -> None:
    runtime_kit.package(tmp_path, "wordcount", name="Count words")
    server = await _made(tmp_path)
    result = await _submit(server, "count my words")
    assert (result.status, result.text, result.agent_id) == ("ok", "wordcount: count my words", "wordcount")
    uuid.UUID(result.intent_id)
    record = await server.memory.get(result.intent_id)
    assert record is not None
    assert (record.text, record.tier, record.owner) == (result.text, "working", ALICE.agent)
    assert len(record.embedding) == server.embedder.dimensions
    assert record.metadata["intent_text"] == "count my words"
    compute, memory = reversed(await server.receipts.recent(10))
    assert result.settlement == compute
    assert (compute.resource, compute.id, compute.payer) == ("compute", result.intent_id, ALICE.agent)
    assert compute.credits_consumed == billing.cost(USED) == 2
    assert (memory.resource, memory.memory_record_id, memory.credits_consumed) == ("memory", result.intent_id, 1)
    written = await rows(server)
    assert [row["type"] for row in written] == [
        "capability_check", "capability_check", "run_usage", "receipt_written", "memory_written", "receipt_written",
        "intent_dispatched",
    ]  # fmt: skip
    assert written[-1]["matched_agent"] == "wordcount"
    assert written[-1]["status"] == "ok"
    assert written[2]["credits"] == 2


@pytest.mark.parametrize("what", ["memory.write", "tool.web_search", "package"])
async def test_what_ended_while_credits_were_reserved_is_not_served_by_what_was_decided_before(
    tmp_path: Path, what: str
) -> None:
    acts = Acts()
    place = runtime_kit.package(tmp_path, "finder", budget=9, required='["tool.web_search"]')
    server = await _made(tmp_path, acts=acts, grants=("memory.write", "tool.web_search"))
    whole = server.budget.try_debit

    async def slow(*given: Any, **more: Any) -> Any:
        done = await whole(*given, **more)
        if what == "package":
            (place / "agent.toml").write_text(runtime_kit.manifest("finder", budget=9, name="Another"))
            await server.agents.reload()
        else:
            (held,) = server.capabilities.candidates(ALICE.agent.pubkey, what, server.now_ms())
            await server.capabilities.revoke(held.signature, server.now_ms())
        return done

    server.budget.try_debit = slow  # type: ignore[method-assign]
    with pytest.raises(errors.StaleAgentError if what == "package" else errors.CapabilityMissingError):
        await _submit(server, "find", agent="finder")
    assert acts.asked == []
    assert server.budget.tokens(billing.budget_of("finder")) == 9
    assert server.budget.unsettled() == ()
    assert [row["stage"] for row in await rows(server, "intent_failed")] == ["capability"]
    if what != "package":
        assert [row["passed"] for row in await rows(server, "capability_check")][-1] is False


async def test_grant_taken_back_while_another_is_found_again_lets_nothing_begin(tmp_path: Path) -> None:
    """While the last check's row is written, one of two grants is granted again and the other is revoked."""
    acts = Acts()
    runtime_kit.package(tmp_path, "finder", budget=9, required='["tool.web_search"]')
    server = await _made(tmp_path, acts=acts, grants=("memory.write", "tool.web_search"))
    debit, append = server.budget.try_debit, server.audit.append_all
    looks: list[str] = []

    async def take(action: str) -> None:
        (held,) = server.capabilities.candidates(ALICE.agent.pubkey, action, server.now_ms())
        await server.capabilities.revoke(held.signature, server.now_ms())

    async def slow(*given: Any, **more: Any) -> Any:
        done = await debit(*given, **more)
        await take("tool.web_search")
        looks.append("began")
        return done

    async def written(entries: Any) -> Any:
        done = await append(entries)
        if looks == ["began"]:
            looks.append("again")
            await intents_kit.granted(server, ALICE, "tool.web_search")
            await take("memory.write")
        return done

    server.budget.try_debit = slow  # type: ignore[method-assign]
    server.audit.append_all = written  # type: ignore[method-assign]
    with pytest.raises(errors.CapabilityMissingError, match=r"`memory\.write`"):
        await _submit(server, "find", agent="finder")
    assert looks == ["began", "again"]
    assert acts.asked == []


async def test_without_agent_answer_is_version_1_s_echo(tmp_path: Path) -> None:
    server = await _made(tmp_path)
    result = await _submit(server, "nobody knows this")
    assert result.text == "phase 0 echo (no agent matched): nobody knows this"
    assert (result.agent_id, result.settlement and result.settlement.resource) == (None, "memory")
    record = await server.memory.get(result.intent_id)
    assert record is not None
    assert record.metadata["agent_id"] is None
    assert [row["matched_agent"] for row in await rows(server, "intent_dispatched")] == [None]


async def test_what_ignore_set_matches_goes_no_further(tmp_path: Path) -> None:
    acts = Acts()
    server = await _made(tmp_path, acts=acts)
    result = await _submit(server, "read /home/me/secrets.toml")
    assert (result.status, result.text, result.settlement) == ("ignored", "", None)
    assert [row["type"] for row in await rows(server)] == ["intent_ignored"]
    assert acts.asked == []
    assert await server.memory.recent(None, 10) == []


async def test_answer_that_names_secret_is_given_and_not_kept(tmp_path: Path) -> None:
    async def tells(card: Card, asked: Intent) -> RunResult:
        return RunResult(text="it is in /etc/secrets.toml", usage=USED)

    runtime_kit.package(tmp_path, "teller")
    server = await _made(tmp_path, acts=Acts(tells))
    result = await _submit(server, "tell", agent="teller")
    assert (result.status, result.text) == ("ok", "it is in /etc/secrets.toml")
    assert await server.memory.recent(None, 10) == []
    assert [one.resource for one in await server.receipts.recent(10)] == ["compute"]
    kinds = [row["type"] for row in await rows(server)]
    assert kinds[-2:] == ["memory_write_ignored", "intent_dispatched"]
    assert (await rows(server, "intent_dispatched"))[0]["status"] == "not_stored"


async def test_answer_that_memory_could_never_show_is_given_and_not_kept(tmp_path: Path) -> None:
    async def tells(card: Card, asked: Intent) -> RunResult:
        return RunResult(text="x" * (2 * contract.INTENT_BYTES), usage=USED)

    runtime_kit.package(tmp_path, "teller")
    server = await _made(tmp_path, acts=Acts(tells))
    # The answer contains the question, and each of its characters takes six bytes on the wire.
    result = await _submit(server, "\x01" * contract.INTENT_BYTES, agent="teller")
    assert (result.status, len(result.text)) == ("ok", 2 * contract.INTENT_BYTES)
    assert await server.memory.recent(None, 10) == []
    assert [row["status"] for row in await rows(server, "intent_dispatched")] == ["not_stored"]
    assert [row["code"] for row in await rows(server, "intent_failed")] == ["memory_invalid"]


async def test_check_is_written_either_way_and_without_grant_nothing_runs(tmp_path: Path) -> None:
    acts = Acts()
    runtime_kit.package(tmp_path, "finder", required='["memory.write", "tool.web_search"]')
    server = await _made(tmp_path, acts=acts)
    with pytest.raises(errors.CapabilityMissingError, match=r"tool\.web_search"):
        await _submit(server, "finder, find")
    checks = await rows(server, "capability_check")
    assert [(row["agent_id"], row["passed"]) for row in checks] == [("memory:write", True), ("finder", False)]
    (failed,) = await rows(server, "intent_failed")
    assert (failed["stage"], failed["code"], failed["matched_agent"]) == ("capability", "capability_not_held", "finder")
    assert acts.asked == []
    await intents_kit.granted(server, ALICE, "tool.web_search")
    assert (await _submit(server, "finder, find")).agent_id == "finder"
    with pytest.raises(errors.CapabilityMissingError, match=r"memory\.write"):
        await _submit(server, "finder, find", BOB)


async def test_scope_not_for_working_memory_is_no_grant(tmp_path: Path) -> None:
    server = await _made(tmp_path, grants=())
    scope = {"version": 1, "tiers": ["episodic"], "apply": True}
    await intents_kit.granted(server, ALICE, "memory.write", scope=scope)
    with pytest.raises(errors.CapabilityScopeError):
        await _submit(server, "anything")
    assert len(await rows(server, "capability_scope_rejected")) == 1


async def test_agent_can_be_named_and_one_not_there_is_error(tmp_path: Path) -> None:
    for agent_id in ("a", "b"):
        runtime_kit.package(tmp_path, agent_id, name="Same words")
    server = await _made(tmp_path)
    assert (await _submit(server, "same words")).agent_id == "a"
    assert (await _submit(server, "same words", agent="b")).agent_id == "b"
    with pytest.raises(errors.NoAgentError):
        await _submit(server, "same words", agent="c")
    assert (await rows(server, "intent_failed"))[0]["stage"] == "router"


@pytest.mark.parametrize(
    ("asked", "manifest", "given"),
    [
        (None, "low", "low"),
        ("high", "low", "low"),
        ("low", "high", "low"),
        ("high", "high", "high"),
        (None, "high", "high"),
    ],
)
async def test_priority_is_manifest_s_or_lower_one(
    tmp_path: Path, asked: str | None, manifest: str, given: str
) -> None:
    acts = Acts()
    runtime_kit.package(tmp_path, "a", priority=manifest)
    server = await _made(tmp_path, acts=acts)
    await _submit(server, "x", agent="a", priority=None if asked is None else Priority(asked))
    assert acts.asked[0].priority == given


async def test_intent_that_no_agent_could_be_given_costs_no_row(tmp_path: Path) -> None:
    server = await _made(tmp_path)
    with pytest.raises(errors.UsageError):
        await _submit(server, "x" * (1 << 20) + "x")
    assert await rows(server) == []


# --- runs that fail -------------------------------------------------------------------------------------------------


async def test_run_that_fails_is_settled_and_written_down(tmp_path: Path) -> None:
    async def fails(card: Card, asked: Intent) -> RunResult:
        raise with_spent(errors.AgentFailedError("the agent exited with status 3"), Spent(USED, "run-1"))

    runtime_kit.package(tmp_path, "a", budget=10)
    server = await _made(tmp_path, acts=Acts(fails))
    with pytest.raises(errors.AgentFailedError, match=r"agent `a` failed: the agent exited with status 3"):
        await _submit(server, "x", agent="a")
    (receipt,) = await server.receipts.recent(10)
    assert (receipt.resource, receipt.credits_consumed) == ("compute", 2)
    assert server.budget.tokens(billing.budget_of("a")) == 8
    assert [row["type"] for row in await rows(server)][-3:] == ["run_usage", "receipt_written", "intent_failed"]
    assert (await rows(server, "intent_failed"))[0]["run_id"] == "run-1"
    assert await server.memory.recent(None, 10) == []
    assert not server.budget.unsettled()


async def test_failed_run_names_its_rows_to_operator(tmp_path: Path) -> None:
    async def fails(card: Card, asked: Intent) -> RunResult:
        raise with_spent(errors.AgentFailedError("the agent exited with status 3"), Spent(USED, "run-1"))

    runtime_kit.package(tmp_path, "a", budget=10)
    server = await _made(tmp_path, acts=Acts(fails))
    hints = []
    for asks in (ALICE, server_kit.caller(runtime_kit.ALICE, operator=True)):
        with pytest.raises(errors.AgentFailedError) as caught:
            await IntentPipeline(server, asks, "x", agent="a").go()
        hints.append(caught.value.hint)
    assert hints == ["", "covenant audit show run-1"]


async def test_run_that_never_began_gives_its_credit_back(tmp_path: Path) -> None:
    async def refuses(card: Card, asked: Intent) -> RunResult:
        raise errors.UnsignedError("the package is not signed")

    runtime_kit.package(tmp_path, "a", budget=10)
    server = await _made(tmp_path, acts=Acts(refuses))
    with pytest.raises(errors.UnsignedError):
        await _submit(server, "x", agent="a")
    assert server.budget.tokens(billing.budget_of("a")) == 10
    assert [row["credits"] for row in await rows(server, "budget_refunded")] == [1]
    assert await server.receipts.recent(10) == ()


@pytest.mark.parametrize("error", [errors.ServiceError, errors.PreemptedError])
async def test_run_whose_end_nobody_saw_keeps_what_was_reserved(
    tmp_path: Path, error: type[errors.CovenantError]
) -> None:
    """So does a run that its budget ended, if its usage until then is unknown."""

    async def breaks(card: Card, asked: Intent) -> RunResult:
        raise error("the supervisor ended the conversation before its answer")

    runtime_kit.package(tmp_path, "a", budget=10)
    server = await _made(tmp_path, acts=Acts(breaks))
    with pytest.raises(error):
        await _submit(server, "x", agent="a")
    assert server.budget.tokens(billing.budget_of("a")) == 9
    assert not server.budget.unsettled()


@pytest.mark.parametrize("how", ["cancelled", "fault"])
async def test_whoever_goes_away_and_fault_of_ours_leave_row_that_says_so(tmp_path: Path, how: str) -> None:
    began = anyio.Event()

    async def waits(card: Card, asked: Intent) -> RunResult:
        began.set()
        if how == "fault":
            raise ZeroDivisionError
        await anyio.sleep_forever()
        raise AssertionError

    runtime_kit.package(tmp_path, "a", budget=10)
    server = await _made(tmp_path, acts=Acts(waits))

    async def asks() -> None:
        if how == "fault":
            with pytest.raises(ZeroDivisionError):
                await _submit(server, "x", agent="a")
        else:
            await _submit(server, "x", agent="a")

    async with anyio.create_task_group() as group:
        group.start_soon(asks)
        await began.wait()
        group.cancel_scope.cancel() if how == "cancelled" else None
    (row,) = await rows(server, "intent_failed")
    assert (row["stage"], row["code"]) == ("run", "stopped" if how == "cancelled" else "internal")
    assert server.runners.live == {}
    assert not server.budget.unsettled()
    assert server.budget.tokens(billing.budget_of("a")) == 9


async def test_after_daemon_died_its_runs_are_settled_and_written_down(tmp_path: Path) -> None:
    server = await _made(tmp_path)
    agent = billing.budget_of("a")
    await server.budget.set_capacity(agent, 10)
    await server.budget.try_debit(agent, 1, "an-intent")
    await recovery.recover_open_intents(server)
    assert not server.budget.unsettled()
    assert server.budget.tokens(agent) == 9
    (row,) = await rows(server, "intent_failed")
    assert (row["intent_id"], row["matched_agent"], row["code"]) == ("an-intent", "a", "cut_off")


async def test_memory_that_takes_nothing_does_not_throw_answer_away(tmp_path: Path) -> None:
    class Full:
        async def put(self, record: Any, *, room: Any = None) -> None:
            raise errors.MemoryStoreError("the disk is full")

    server = await _made(tmp_path, memory=Full())
    result = await _submit(server, "anything")
    assert result.text.endswith("anything")
    assert [(row["type"], row.get("stage"), row.get("status")) for row in (await rows(server))[-2:]] == [
        ("intent_failed", "memory", None),
        ("intent_dispatched", None, "not_stored"),
    ]


async def test_log_that_takes_nothing_gives_no_answer(tmp_path: Path) -> None:
    server = await _made(tmp_path)
    whole = server.audit.append_all

    async def full(entries: Any) -> Any:
        if entries[-1].kind == "intent_dispatched":
            raise errors.StoreError("the disk is full")
        return await whole(entries)

    server.audit.append_all = full  # type: ignore[method-assign]
    with pytest.raises(errors.StoreError):
        await _submit(server, "anything")


# --- budget ---------------------------------------------------------------------------------------------------------


async def test_without_credits_intent_waits_for_whoever_submitted_it(tmp_path: Path) -> None:
    clock = server_kit.Clock()
    runtime_kit.package(tmp_path, "a", budget=2, required='["tool.web_search"]')
    server = await _made(tmp_path, now_ms=clock, grants=("memory.write", "tool.web_search"))
    await intents_kit.granted(server, BOB, "memory.write", "tool.web_search")
    await _submit(server, "first", agent="a")  # costs two
    with pytest.raises(errors.BudgetExhaustedError, match=r"intent `[-0-9a-f]{36}` waits"):
        await _submit(server, "second", agent="a")
    (waiting,) = server.checkpoints.active()
    assert waiting.reason == "budget_exhausted"
    (row,) = await rows(server, "budget_exhausted")
    assert (row["intent_id"], row["requested"], row["tokens_remaining"]) == (waiting.intent_id, 1, 0)
    asked = requests.ResumeIntent(intent_id=waiting.intent_id)
    with pytest.raises(errors.BudgetExhaustedError, match="still waits") as still:
        await submit.resume_intent(server, ALICE, asked)
    assert still.value.hint == f"there are enough in 30 min: covenant intents resume {waiting.intent_id}"
    clock.at_ms += 3_600_000
    with pytest.raises(errors.NoCheckpointError):
        await submit.resume_intent(server, BOB, asked)
    result = await submit.resume_intent(server, ALICE, asked)
    assert result.text == "a: second"
    assert result.intent_id != waiting.intent_id
    assert [row["resumed_from"] for row in await rows(server, "intent_resumed")] == [waiting.intent_id]
    with pytest.raises(errors.NoCheckpointError):
        await submit.resume_intent(server, ALICE, asked)


async def _metered(server: Server, action: str, most: int) -> Callable[[], int]:
    await intents_kit.granted(server, ALICE, action, scope={"version": 1, "max_uses": most})
    (grant,) = server.capabilities.candidates(ALICE.agent.pubkey, action, server.now_ms())
    return lambda: grant.used


async def test_intent_that_waits_for_credits_has_used_no_grant(tmp_path: Path) -> None:
    clock = server_kit.Clock()
    runtime_kit.package(tmp_path, "a", budget=2, required='["tool.call.x", "tool.call.y"]')
    server = await _made(tmp_path, now_ms=clock)
    used = [await _metered(server, action, 2) for action in ("tool.call.x", "tool.call.y")]
    await _submit(server, "first", agent="a")  # costs two
    for _ in range(3):
        with pytest.raises(errors.BudgetExhaustedError):
            await _submit(server, "second", agent="a")
    assert [each() for each in used] == [1, 1]
    clock.at_ms += 3_600_000
    waiting = server.checkpoints.active()[0]
    await submit.resume_intent(server, ALICE, requests.ResumeIntent(intent_id=waiting.intent_id))
    assert [each() for each in used] == [2, 2]
    clock.at_ms += 3_600_000
    debits = len(await server.budget.recent(100))
    with pytest.raises(errors.CapabilityExhaustedError):
        await _submit(server, "third", agent="a")
    assert len(await server.budget.recent(100)) == debits


async def test_however_many_ask_together_no_two_share_use_and_no_credit_is_lost(tmp_path: Path) -> None:
    acts = Acts()
    runtime_kit.package(tmp_path, "a", budget=100, required='["tool.call.x", "tool.call.y"]')
    server = await _made(tmp_path, acts=acts)
    used = [await _metered(server, action, most) for action, most in (("tool.call.x", 9), ("tool.call.y", 3))]
    outcomes: list[str] = []

    async def ask(number: int) -> None:
        try:
            await _submit(server, f"ask {number}", agent="a")
            outcomes.append("ok")
        except errors.CapabilityExhaustedError as e:
            outcomes.append(e.code)

    async with anyio.create_task_group() as group:
        for number in range(20):
            group.start_soon(ask, number)
    assert (outcomes.count("ok"), len(acts.asked)) == (3, 3)
    # Intents that the exhausted grant refused took no use of the other grant.
    assert [each() for each in used] == [3, 3]
    assert server.budget.unsettled() == ()
    assert server.budget.tokens(billing.budget_of("a")) == 100 - 3 * billing.cost(USED)


async def test_one_asked_again_under_its_key_waits_no_longer(tmp_path: Path) -> None:
    clock = server_kit.Clock()
    runtime_kit.package(tmp_path, "a", budget=2)
    server = await _made(tmp_path, now_ms=clock)
    await _submit(server, "first", agent="a")
    for _ in range(2):
        with pytest.raises(errors.BudgetExhaustedError):
            await _submit(server, "second", agent="a", idempotency_key="k")
    (waiting,) = server.checkpoints.active()
    clock.at_ms += 3_600_000
    assert (await _submit(server, "second", agent="a", idempotency_key="k")).intent_id == waiting.intent_id
    assert server.checkpoints.active() == ()


async def test_budget_of_nothing_is_no_gate_and_changed_one_holds_at_once(tmp_path: Path) -> None:
    runtime_kit.package(tmp_path, "a", budget=0)
    server = await _made(tmp_path)
    await _submit(server, "x", agent="a")
    assert server.budget.tokens(billing.budget_of("a")) is None
    runtime_kit.package(tmp_path, "a", budget=5)
    await server.agents.reload()
    again = await _submit(server, "x", agent="a")
    assert server.budget.tokens(billing.budget_of("a")) == 3
    # Version 1 wrote this row for an intent whose agent had no bucket yet; here no intent runs without one.
    (unseeded,) = await rows(server, "budget_unseeded")
    assert unseeded == {
        "type": "budget_unseeded", "agent_display": "a@agent", "intent_id": again.intent_id, "requested": 1,
    }  # fmt: skip
    (capacity,) = await rows(server, "budget_capacity_set")
    assert capacity["credits_per_hour"] == 5
    runtime_kit.package(tmp_path, "a", budget=7)
    await server.agents.reload()
    await _submit(server, "x", agent="a")
    assert len(await rows(server, "budget_unseeded")) == 1
    assert len(await rows(server, "budget_capacity_set")) == 2


async def test_one_that_its_budget_ended_waits_as_well(tmp_path: Path) -> None:
    async def ended(card: Card, asked: Intent) -> RunResult:
        server.runners.live[asked.id].preempted = "used 9 credits, 3 were there for it"
        raise with_spent(errors.KilledError("ended by uid1@local: budget"), Spent(USED, "run-1"))

    runtime_kit.package(tmp_path, "a", budget=5)
    server = await _made(tmp_path, acts=Acts(ended))
    with pytest.raises(errors.PreemptedError, match="waits"):
        await _submit(server, "x", agent="a")
    (waiting,) = server.checkpoints.active()
    assert waiting.reason == "projected_overshoot"
    assert (await rows(server, "intent_failed"))[0]["code"] == "budget_preempted"


# --- the same intent twice ------------------------------------------------------------------------------------------


async def test_with_key_intent_runs_once_however_often_it_is_asked(tmp_path: Path) -> None:
    acts = Acts()
    runtime_kit.package(tmp_path, "a")
    server = await _made(tmp_path, acts=acts)
    await intents_kit.granted(server, BOB, "memory.write")
    results: list[responses.IntentResult] = []

    async def asks() -> None:
        results.append(await _submit(server, "x", agent="a", idempotency_key="k"))

    async with anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(asks)
    assert len(acts.asked) == 1
    assert {one.intent_id for one in results} == {acts.asked[0].id}
    assert len({one.model_dump_json() for one in results}) == 1
    assert len(await rows(server, "intent_dispatched")) == 1
    with pytest.raises(errors.MemoryConflictError):
        await _submit(server, "y", agent="a", idempotency_key="k")
    with pytest.raises(errors.MemoryConflictError):
        # The answer of one agent is not replayed for another agent.
        await _submit(server, "x", agent="b", idempotency_key="k")
    assert (await _submit(server, "x", agent="a", idempotency_key="other")).intent_id != acts.asked[0].id
    assert (await _submit(server, "x", BOB, agent="a", idempotency_key="k")).intent_id != acts.asked[0].id
    assert len(acts.asked) == 3


async def test_with_key_intent_that_failed_may_be_tried_again(tmp_path: Path) -> None:
    async def fails_first(card: Card, asked: Intent) -> RunResult:
        if len(acts.asked) == 1:
            raise with_spent(errors.AgentFailedError("no"), Spent(USED, "run-1"))
        return await runtime_kit.echoes(card, asked)

    acts = Acts(fails_first)
    runtime_kit.package(tmp_path, "a")
    server = await _made(tmp_path, acts=acts)
    with pytest.raises(errors.AgentFailedError):
        await _submit(server, "x", agent="a", idempotency_key="k")
    result = await _submit(server, "x", agent="a", idempotency_key="k")
    assert result.text == "a: x"
    assert (await _submit(server, "x", agent="a", idempotency_key="k")).intent_id == result.intent_id
    assert len(acts.asked) == 2


@pytest.mark.parametrize("why", ["full", "ignored", "deleted", "log gone"])
async def test_with_key_intent_whose_answer_is_not_kept_is_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    async def tells(card: Card, asked: Intent) -> RunResult:
        if len(acts.asked) == 1:
            raise with_spent(errors.AgentFailedError("no"), Spent(USED, "run-1"))
        return RunResult(text="in /etc/secrets.toml" if why == "ignored" else "words", usage=USED)

    acts = Acts(tells)
    runtime_kit.package(tmp_path, "a")
    server = await _made(tmp_path, acts=acts)
    if why in {"full", "log gone"}:
        monkeypatch.setattr(records, "MAX_OWN", Room(records=0, bytes=0))
    with pytest.raises(errors.AgentFailedError):
        await _submit(server, "x", agent="a", idempotency_key="k")
    result = await _submit(server, "x", agent="a", idempotency_key="k")
    if why == "deleted":
        assert await server.memory.purge(None, server.now_ms() + 1) == 1
    if why == "log gone":
        assert (await server.audit.purge(server.now_ms() + 1)).purged
    for _ in range(2):
        with pytest.raises(errors.MemoryConflictError, match="its answer is not kept"):
            await _submit(server, "x", agent="a", idempotency_key="k")
    assert [one.id for one in acts.asked][1:] == [result.intent_id]
    assert (await _submit(server, "x", agent="a", idempotency_key="other")).text == result.text


async def test_answer_whose_row_death_took_is_written_down_before_it_is_given_again(tmp_path: Path) -> None:
    """The log fails between the record and the row, as after a kill; no client has the answer then."""
    server = await _made(tmp_path)
    whole = server.audit.append_all

    async def dies(entries: Any) -> Any:
        if entries[-1].kind == "intent_dispatched":
            raise errors.StoreError("dead")
        return await whole(entries)

    server.audit.append_all = dies  # type: ignore[method-assign]
    with pytest.raises(errors.StoreError):
        await _submit(server, "anything", idempotency_key="k")
    server.audit.append_all = whole  # type: ignore[method-assign]
    assert await rows(server, "intent_dispatched") == []
    first = await _submit(server, "anything", idempotency_key="k")
    assert [row["intent_id"] for row in await rows(server, "intent_dispatched")] == [first.intent_id]
    assert await _submit(server, "anything", idempotency_key="k") == first
    assert len(await rows(server, "intent_dispatched")) == 1
    # Receipts of the intent, which cost nothing, and of its record.
    assert [one.credits_consumed for one in await server.receipts.recent(10) if one.resource == "compute"] == [0]
    assert len(await server.receipts.recent(10)) == 2


@pytest.mark.parametrize("why", ["kept", "full", "deleted"])
async def test_with_key_echo_leaves_its_rows_once_however_often_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    server = await _made(tmp_path)
    if why == "full":
        monkeypatch.setattr(records, "MAX_OWN", Room(records=0, bytes=0))
    first = await _submit(server, "anything", idempotency_key="k")
    if why == "deleted":
        assert await server.memory.purge(None, server.now_ms() + 1) == 1
    before = await rows(server)
    for _ in range(3):
        assert await _submit(server, "anything", idempotency_key="k") == first
    assert await rows(server) == before
    others: list[dict[str, Any]] = [{"text": "another"}, {"text": "anything", "agent": "a"}]
    for asked in others:
        with pytest.raises(errors.MemoryConflictError, match="another intent"):
            await _submit(server, **asked, idempotency_key="k")
    # Another caller's equal key is a different key.
    await intents_kit.granted(server, BOB, "memory.write")
    assert (await _submit(server, "anything", caller=BOB, idempotency_key="k")).intent_id != first.intent_id


# --- who watches ----------------------------------------------------------------------------------------------------


async def test_whoever_watches_hears_each_step_and_end(tmp_path: Path) -> None:
    runtime_kit.package(tmp_path, "a", name="Count words")
    server = await _made(tmp_path)
    with server.feed.subscribe("intent") as heard:
        result = await _submit(server, "count")
        events = [await heard.receive() for _ in range(4)]
    assert [one.value.type for one in events if one] == ["submitted", "routed", "running", "ended"]
    assert {one.value.intent_id for one in events if one} == {result.intent_id}
    assert server.live.so_far(result.intent_id) == ()
