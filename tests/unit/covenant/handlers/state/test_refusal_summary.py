"""Check that refusals of one peer add a bounded number of rows, which count all of the refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from covenant.handlers import billing
from covenant.handlers.access import authorization
from covenant.handlers.caller import Caller
from covenant.handlers.intents import submit
from covenant.handlers.intents.pipeline import MOST_OF_IGNORED
from covenant.handlers.memory import records
from covenant.handlers.server import Server
from covenant.handlers.state import refusal_summary
from covenant.handlers.state.refusal_summary import RefusalSummary
from covenant.runtime.packages import Card
from covenant.runtime.runner import Intent, RunResult
from covenant.stores.memory.interface import Room
from covenant.wire import requests, responses
from policy import errors
from tests import intents_kit, mailbox_kit, runtime_kit
from tests.intents_kit import ALICE, BOB, rows
from tests.runtime_kit import Acts

pytestmark = pytest.mark.anyio
MOST = 5


class Seconds:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> Seconds:
    monkeypatch.setattr(refusal_summary, "MOST", MOST)
    return Seconds()


async def _made(home: Path, seconds: Seconds, acts: Acts | None = None, **given: Any) -> Server:
    server = intents_kit.make(home, acts=acts, **given)
    server.refusals = RefusalSummary(seconds)
    await server.agents.reload()
    for who in (ALICE, BOB):
        await intents_kit.granted(server, who, "memory.write")
    return server


async def _refused(server: Server, caller: Caller = ALICE, **asked: Any) -> str:
    try:
        await submit.submit_intent(server, caller, requests.SubmitIntent(**{"text": "x", "agent": "a", **asked}))
    except errors.CovenantError as e:
        return e.code
    raise AssertionError("it was done")


async def _size(server: Server) -> int:
    return (await server.audit.scan(lambda row: False, 1)).scanned


def _spend(server: Server) -> Any:
    return server.budget.try_debit(billing.budget_of("a"), 1, "other")


@pytest.mark.parametrize("why", ["credits", "grant", "agent"])
async def test_intents_refused_fill_no_log(tmp_path: Path, seconds: Seconds, why: str) -> None:
    acts = Acts()
    runtime_kit.package(tmp_path, "a", budget=1, required='["tool.call.x"]' if why == "grant" else "[]")
    server = await _made(tmp_path, seconds, acts)
    await server.budget.set_capacity(billing.budget_of("a"), 1)
    await _spend(server)
    asked: dict[str, Any] = {"agent": "none"} if why == "agent" else {}
    code = {"credits": "budget_exhausted", "grant": "capability_not_held", "agent": "no_such_agent"}[why]
    for _ in range(MOST):
        assert await _refused(server, **asked) == code
    full = await _size(server)
    assert len(await rows(server, "intent_failed")) <= MOST
    for _ in range(50):
        assert await _refused(server, **asked) == code
    assert await _size(server) <= full + 3
    assert len(server.checkpoints.active()) == (MOST if why == "credits" else 0)
    # The limit affects no other peer, and allowed requests still pass and have their rows.
    assert await _refused(server, BOB, **asked) == code
    assert await rows(server, "refusals_summed") == []
    written = len(await rows(server, "intent_failed"))
    seconds.now += refusal_summary.SECONDS
    await server.refusals.sum_up(server.audit)
    (row,) = await rows(server, "refusals_summed")
    assert (row["peer_pubkey_b58"], row["peer_display"], row["code"]) == (ALICE.agent.pubkey, ALICE.agent.display, code)
    # Each refusal has its own row or is in this count; Bob's has its own row.
    assert row["count"] + written - 1 == MOST + 50
    assert await _refused(server, **asked) == code
    assert len(await rows(server, "intent_failed")) == written + 1
    assert acts.asked == []


async def test_who_is_refused_often_may_do_what_it_may(tmp_path: Path, seconds: Seconds) -> None:
    runtime_kit.package(tmp_path, "a")
    server = await _made(tmp_path, seconds)
    for _ in range(2 * MOST):
        assert await _refused(server, agent="none") == "no_such_agent"
    assert server.refusals.full(ALICE)
    done = await submit.submit_intent(server, ALICE, requests.SubmitIntent(text="x", agent="a"))
    assert done.text == "a: x"
    assert [row["intent_id"] for row in await rows(server, "intent_dispatched")] == [done.intent_id]


async def test_every_check_that_refuses_is_bounded_and_operator_s_are_not(tmp_path: Path, seconds: Seconds) -> None:
    server = await _made(tmp_path, seconds)
    operator = Caller(agent=server.identity.agent, operator=True, token_prefix="oooooo", transport="ipc")
    for caller, found in ((ALICE, MOST), (operator, MOST + 20)):
        for _ in range(20):
            answer = await server.respond(caller, requests.RecentMemory())
            assert isinstance(answer, responses.Error)
            assert answer.code == "capability_not_held"
        assert len(await rows(server, "capability_check")) == found


async def test_names_that_refusal_repeats_are_bounded_as_well(
    tmp_path: Path, seconds: Seconds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusal_summary, "MOST_BYTES", 1000)
    server = await _made(tmp_path, seconds)
    for _ in range(4):
        with pytest.raises(errors.CapabilityMissingError):
            await authorization.require(server, ALICE, "tool.call." + "x" * 600, agent_id="tools")
    assert len(await rows(server, "capability_check")) == 2


async def test_words_of_who_is_refused_are_bounded_as_well(
    tmp_path: Path, seconds: Seconds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusal_summary, "MOST_BYTES", 1000)
    server = await _made(tmp_path, seconds)
    for _ in range(MOST):
        asked = requests.SubmitIntent(text="/home/me/secrets.toml " + "x" * 600)
        assert (await submit.submit_intent(server, ALICE, asked)).status == "ignored"
    assert len(await rows(server, "intent_ignored")) == 2
    await server.refusals.sum_up(server.audit, all_=True)
    assert [(row["count"], row["code"]) for row in await rows(server, "refusals_summed")] == [
        (MOST - 2, "text_ignored")
    ]


async def test_of_answer_that_cost_nothing_and_has_no_room_log_has_beginning_of_its_question(
    tmp_path: Path, seconds: Seconds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MAX_OWN", Room(records=1, bytes=10**6))
    server = await _made(tmp_path, seconds)
    text = "nobody knows " + "y" * (2 * MOST_OF_IGNORED)
    for _ in range(2):
        await submit.submit_intent(server, ALICE, requests.SubmitIntent(text=text))
    assert [row["intent_text"] for row in await rows(server, "intent_dispatched")] == [text, text[:MOST_OF_IGNORED]]


async def test_refusals_of_mailbox_are_in_it(tmp_path: Path, seconds: Seconds) -> None:
    tmp_path.chmod(0o700)
    world = mailbox_kit.World(tmp_path)
    world.server.refusals = RefusalSummary(seconds)
    for number in range(3 * MOST):
        await world.post(mailbox_kit.EVE, f"t{number}")
    assert len(await world.rows("a2_a_result_rejected")) == MOST
    await world.server.refusals.sum_up(world.server.audit, all_=True)
    assert [row["count"] for row in await world.rows("refusals_summed")] == [2 * MOST]


async def test_number_that_no_disk_takes_is_not_lost(tmp_path: Path, seconds: Seconds) -> None:
    server = await _made(tmp_path, seconds)
    server.refusals.suppress(ALICE, 1, "c", "m")
    whole = server.audit.append

    async def full(*given: Any, **more: Any) -> str:
        raise errors.StoreFullError("no room")

    server.audit.append = full  # type: ignore[method-assign]
    with pytest.raises(errors.StoreFullError):
        await server.refusals.sum_up(server.audit, all_=True)
    seconds.now += 2 * refusal_summary.SECONDS
    # Its interval is over, but it is still one flood: later refusals are added to its count.
    assert server.refusals.full(ALICE)
    server.refusals.suppress(ALICE, 2, "d", "n")
    server.audit.append = whole  # type: ignore[method-assign]
    async with anyio.create_task_group() as group:
        group.start_soon(server.refusals.run, server.audit)
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    (row,) = await rows(server, "refusals_summed")
    assert (row["count"], row["since_ms"], row["code"], row["message"]) == (2, 1, "d", "n")
    assert not server.refusals.full(ALICE)


async def test_package_that_cannot_start_fills_no_log(tmp_path: Path, seconds: Seconds) -> None:
    async def refuses(card: Card, asked: Intent) -> RunResult:
        if card.id == "b":
            return await runtime_kit.echoes(card, asked)
        raise errors.UnsignedError("no operator signed it", where="/agents/a")

    acts = Acts(refuses)
    for name in ("a", "b"):
        runtime_kit.package(tmp_path, name, budget=99)
    server = await _made(tmp_path, seconds, acts)
    for _ in range(MOST):
        assert await _refused(server) == "unsigned"
    full = await _size(server)
    for _ in range(50):
        assert await _refused(server) == "unsigned"
    assert (await _size(server), len(acts.asked)) == (full, MOST)
    # Meanwhile other packages start, and other callers' intents are tried.
    assert (await submit.submit_intent(server, ALICE, requests.SubmitIntent(text="x", agent="b"))).text == "b: x"
    assert await _refused(server, BOB) == "unsigned"
    assert len(acts.asked) == MOST + 2
    assert server.budget.tokens(billing.budget_of("a")) == 99
    seconds.now += refusal_summary.SECONDS
    await server.refusals.sum_up(server.audit)
    (row,) = await rows(server, "refusals_summed")
    assert (row["count"], row["codes"]) == (50, {"unsigned": 50})
    # The package may be fixed by now, so its start is tried again.
    acts.act = runtime_kit.echoes
    assert (await submit.submit_intent(server, ALICE, requests.SubmitIntent(text="x", agent="a"))).text == "a: x"


async def test_flood_without_credits_says_when_there_are_enough(tmp_path: Path, seconds: Seconds) -> None:
    runtime_kit.package(tmp_path, "a", budget=1)
    server = await _made(tmp_path, seconds)
    await server.budget.set_capacity(billing.budget_of("a"), 1)
    await server.budget.try_debit(billing.budget_of("a"), 1, "another")
    for _ in range(MOST):
        assert await _refused(server) == "budget_exhausted"
    with pytest.raises(errors.BudgetExhaustedError, match="this one does not wait") as refused:
        await submit.submit_intent(server, ALICE, requests.SubmitIntent(text="x", agent="a"))
    assert refused.value.hint == "there are enough in 60 min"


async def test_changed_manifest_is_tried_also_in_flood(tmp_path: Path, seconds: Seconds) -> None:
    async def refuses(card: Card, asked: Intent) -> RunResult:
        raise errors.UnsignedError("no operator signed it")

    acts = Acts(refuses)
    runtime_kit.package(tmp_path, "a")
    server = await _made(tmp_path, seconds, acts)
    for _ in range(2 * MOST):
        await _refused(server)
    assert len(acts.asked) == MOST
    runtime_kit.package(tmp_path, "a", name="Mended")
    await server.agents.reload()
    acts.act = runtime_kit.echoes
    assert (await submit.submit_intent(server, ALICE, requests.SubmitIntent(text="x", agent="a"))).text == "a: x"


async def test_row_of_flood_names_each_kind_with_its_number(tmp_path: Path, seconds: Seconds) -> None:
    server = await _made(tmp_path, seconds)
    for number in range(refusal_summary.MOST_CODES + 2):
        for _ in range(20 - number):
            server.refusals.suppress(ALICE, 1, f"c{number:02}", "m")
    # The number of codes in memory is bounded.
    for number in range(1000):
        server.refusals.suppress(ALICE, 1, f"x{number}", "m")
    await server.refusals.sum_up(server.audit, all_=True)
    (row,) = await rows(server, "refusals_summed")
    named = {f"c{number:02}": 20 - number for number in range(refusal_summary.MOST_CODES)}
    assert row["codes"] == {**named, refusal_summary.OTHERS: row["count"] - sum(named.values())}


async def test_what_is_counted_while_number_is_written_is_in_next(tmp_path: Path, seconds: Seconds) -> None:
    server = await _made(tmp_path, seconds)
    server.refusals.suppress(ALICE, 1, "first", "m")
    whole = server.audit.append

    async def counts(*given: Any, **more: Any) -> str:
        server.refusals.suppress(ALICE, 1, "second", "m")
        server.audit.append = whole  # type: ignore[method-assign]
        return await whole(*given, **more)

    server.audit.append = counts  # type: ignore[method-assign]
    for _ in range(2):
        await server.refusals.sum_up(server.audit, all_=True)
    assert [row["codes"] for row in await rows(server, "refusals_summed")] == [{"first": 1}, {"second": 1}]


async def test_number_written_while_daemon_ends_is_told_once(tmp_path: Path, seconds: Seconds) -> None:
    server = await _made(tmp_path, seconds)
    server.refusals.suppress(ALICE, 1, "c", "m")
    whole, taken, goes_on = server.audit.append, anyio.Event(), anyio.Event()

    async def slow(*given: Any, **more: Any) -> str:
        written = await whole(*given, **more)
        taken.set()
        await goes_on.wait()
        return written

    server.audit.append = slow  # type: ignore[method-assign]
    async with anyio.create_task_group() as group:

        async def sums_up() -> None:
            try:
                await server.refusals.sum_up(server.audit, all_=True)
                await anyio.lowlevel.checkpoint()
            finally:
                with anyio.CancelScope(shield=True):
                    await server.refusals.sum_up(server.audit, all_=True)

        group.start_soon(sums_up)
        await taken.wait()
        group.cancel_scope.cancel()
        goes_on.set()
    assert [row["count"] for row in await rows(server, "refusals_summed")] == [1]
