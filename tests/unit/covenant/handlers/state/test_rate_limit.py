"""Check the rate limit of requests that cost nothing: each allowed one has all its rows, and the rate is bounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from covenant.handlers.caller import Caller
from covenant.handlers.intents import submit
from covenant.handlers.memory import records
from covenant.handlers.server import Server
from covenant.handlers.state import rate_limit
from covenant.handlers.state.rate_limit import FREE, Rates
from covenant.providers.tools import native
from covenant.settings import PeerRate
from covenant.stores.audit.interface import Scan
from covenant.stores.memory.interface import Room
from covenant.wire import requests, responses
from covenant.wire.types import Priority
from policy import errors
from tests import intents_kit, mailbox_kit, runtime_kit, server_kit
from tests.intents_kit import ALICE, BOB, rows
from tests.runtime_kit import Acts

pytestmark = pytest.mark.anyio

RATE = PeerRate(requests_per_second=2, burst=5)


class Seconds:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def seconds() -> Seconds:
    return Seconds()


async def _made(home: Path, seconds: Seconds, acts: Acts | None = None, **given: Any) -> Server:
    clock = server_kit.Clock()
    server = intents_kit.make(home, acts=acts, now_ms=clock, tools=native(clock), **given)
    server.rates = Rates(RATE, seconds)
    await server.agents.reload()
    for who in (ALICE, BOB):
        await intents_kit.granted(server, who, "memory.write", "tool.call.echo")
    return server


def _echo() -> requests.CallTool:
    return requests.CallTool(name="echo", arguments={"text": "hi"})


def _code(answer: responses.Response) -> str | None:
    return answer.code if isinstance(answer, responses.Error) else None


async def test_calls_of_tools_are_all_written_and_so_many_in_time(tmp_path: Path, seconds: Seconds) -> None:
    server = await _made(tmp_path, seconds)
    said = [_code(await server.respond(ALICE, _echo())) for _ in range(20)]
    assert said == [None] * 5 + ["too_many_requests"] * 15
    assert len(await rows(server, "tool_call_completed")) == len(await rows(server, "capability_check")) == 5
    # Each peer has its own bucket, and time refills it up to its size.
    assert _code(await server.respond(BOB, _echo())) is None
    seconds.now += 1.0
    assert [_code(await server.respond(ALICE, _echo())) for _ in range(3)] == [None, None, "too_many_requests"]
    seconds.now += 1000.0
    assert [_code(await server.respond(ALICE, _echo())) for _ in range(6)].count(None) == 5
    await server.refusals.sum_up(server.audit, all_=True)
    (row,) = await rows(server, "refusals_summed")
    assert (row["count"], row["codes"]) == (17, {"too_many_requests": 17})


async def test_intent_takes_of_it_only_where_it_costs_nothing(tmp_path: Path, seconds: Seconds) -> None:
    acts = Acts()
    runtime_kit.package(tmp_path, "paid", budget=99)
    runtime_kit.package(tmp_path, "free")
    server = await _made(tmp_path, seconds, acts)

    async def ask(agent: str | None, caller: Caller = ALICE, **fields: Any) -> str | None:
        asked = requests.SubmitIntent(text="x", agent=agent, **fields)
        try:
            await submit.submit_intent(server, caller, asked)
        except errors.CovenantError as e:
            return e.code
        return None

    assert [await ask("paid") for _ in range(10)] == [None] * 10
    assert [await ask("free") for _ in range(3)] == [None] * 3
    assert await ask(None, idempotency_key="k") is None
    assert [await ask(agent) for agent in (None, None, "free")] == [None, "too_many_requests", "too_many_requests"]
    before = await rows(server)
    # A replay of a key's answer does no work and is allowed; so is an intent that costs credits.
    assert await ask(None, idempotency_key="k") is None
    assert await ask("free") == "too_many_requests"
    assert await rows(server) == before
    assert await ask("paid", priority=Priority.LOW) is None
    assert len(acts.asked) == 14


async def test_to_look_through_log_for_key_is_bounded_as_well(
    tmp_path: Path, seconds: Seconds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MAX_OWN", Room(records=0, bytes=0))
    server = await _made(tmp_path, seconds)
    asked, looks = requests.SubmitIntent(text="x", idempotency_key="k"), list[int]()
    whole = server.audit.scan

    async def scan(*given: Any, **more: Any) -> Scan:
        looks.append(1)
        return await whole(*given, **more)

    server.audit.scan = scan  # type: ignore[method-assign]
    said = [_code(await server.respond(ALICE, asked)) for _ in range(20)]
    assert said == [None] * 5 + ["too_many_requests"] * 15
    assert len(looks) <= 2 * 4


async def test_answer_kept_is_looked_after_once(
    tmp_path: Path, seconds: Seconds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit, "MOST_WHOLE", 2)
    server = await _made(tmp_path, seconds)
    looks, whole = list[int](), server.audit.scan

    async def scan(*given: Any, **more: Any) -> Scan:
        looks.append(1)
        return await whole(*given, **more)

    async def ask(key: str) -> str | None:
        return _code(await server.respond(ALICE, requests.SubmitIntent(text="x", idempotency_key=key)))

    server.audit.scan = scan  # type: ignore[method-assign]
    assert [await ask("k") for _ in range(50)] == [None] * 50
    assert looks == []
    # For a key that is no longer in memory the log is scanned, as after a start, and the rate of scans is bounded.
    assert [await ask(key) for key in ("l", "m")] == [None] * 2
    server.whole.clear()
    seconds.now += 3600.0
    assert [await ask("k") for _ in range(50)] == [None] * 50
    assert len(looks) == 1
    said = []
    for _ in range(20):
        server.whole.clear()
        said.append(await ask("k"))
    assert said == [None] * 4 + ["too_many_requests"] * 16
    assert (len(looks), len(server.whole)) == (5, 0)


async def test_operator_is_not_bounded(tmp_path: Path, seconds: Seconds) -> None:
    server = await _made(tmp_path, seconds)
    operator = Caller(agent=server.identity.agent, operator=True, token_prefix="oooooo", transport="ipc")
    await intents_kit.granted(server, operator, "tool.call.echo", "memory.write")
    for _ in range(20):
        assert _code(await server.respond(operator, _echo())) is None
        assert _code(await server.respond(operator, requests.SubmitIntent(text="x"))) is None


async def test_empty_bucket_hides_no_other_refusal(tmp_path: Path, seconds: Seconds) -> None:
    server = await _made(tmp_path, seconds)
    for _ in range(10):
        await server.respond(ALICE, _echo())
    seconds.now += 1.0
    assert _code(await server.respond(ALICE, requests.RecentMemory())) == "capability_not_held"
    (row,) = [one for one in await rows(server, "capability_check") if not one["passed"]]
    assert row["required_actions"] == ["memory.read"]


async def test_what_is_free_leaves_no_row(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    world = mailbox_kit.World(tmp_path)
    world.server.tools = native(world.clock)
    intents = {"submit_intent", "resume_intent", "authenticate"}
    asked: list[Any] = [
        requests.Ping(),
        requests.ProtocolInfo(),
        requests.GetIntentResult(intent_id="00000000-0000-4000-8000-000000000000"),
        requests.ListAgents(),
        requests.ListTools(),
        requests.RecentAudit(),
        requests.RecentDebits(),
        requests.RecentDenials(),
        requests.ListApprovals(),
    ]
    assert {one.kind for one in asked} == FREE - intents
    before = await world.rows()
    for one in asked:
        await world.ask(mailbox_kit.EVE, one)
    assert await world.rows() == before


async def test_full_buckets_are_let_go_of(tmp_path: Path, seconds: Seconds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limit, "MOST_IDLE", 2)
    server = await _made(tmp_path, seconds)
    for caller in (ALICE, BOB):
        server.rates.admit(caller, server.refusals, server.now_ms())
    seconds.now += 10.0
    for _ in range(5):
        server.rates.admit(server_kit.caller(mailbox_kit.EVE), server.refusals, server.now_ms())
    assert list(server.rates._buckets) == [mailbox_kit.EVE.pubkey]
    with pytest.raises(errors.BusyError, match="2 requests a second"):
        server.rates.admit(server_kit.caller(mailbox_kit.EVE), server.refusals, server.now_ms())
