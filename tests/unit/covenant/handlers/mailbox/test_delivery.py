"""Tasks for agents of this host are done by them: with their sender's grants, as many at once as may be, each once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from covenant.handlers.mailbox import delivery
from covenant.handlers.mailbox.delivery import Delivery, retry_on_schedule
from covenant.runtime.runner import RunResult
from covenant.stores.mailbox.durable import DurableMailbox
from covenant.stores.mailbox.interface import Limits, State
from covenant.stores.peers.interface import Enrolled
from covenant.wire import parts, requests
from covenant.wire.types import A2ATaskResult, AgentId, Idempotency
from policy import errors
from tests.mailbox_kit import ADA, EVE, World

pytestmark = pytest.mark.anyio
PATIENCE = 60


@pytest.fixture
def world(home: Path) -> World:
    return World(home)


@asynccontextmanager
async def delivering(world: World, most: int = 4) -> AsyncIterator[None]:
    async with anyio.create_task_group() as group:
        await group.start(Delivery(world.server, most=most).run)
        yield
        group.cancel_scope.cancel()


async def answer(world: World, sender: AgentId) -> A2ATaskResult:
    with anyio.fail_after(PATIENCE):
        while True:
            result = (await world.ask(sender, requests.TryRecvA2AResult())).result
            if result is not None:
                assert isinstance(result, A2ATaskResult)
                return result
            await anyio.sleep(0.005)


async def until(met: Any) -> None:
    with anyio.fail_after(PATIENCE):
        while not met():  # noqa: ASYNC110  # what is waited for has no event of its own
            await anyio.sleep(0.005)


async def ready(world: World, name: str = "hello", **package: Any) -> tuple[AgentId, AgentId]:
    """The operator, who may send to an agent, and the agent."""
    me, hello = world.identity.agent, await world.package(name, **package)
    await world.grant(me, f"a2a.send.{hello.display}", "memory.write")
    return me, hello


async def test_agent_does_its_task(world: World) -> None:
    me, hello = await ready(world)
    async with delivering(world):
        assert (await world.send(me, hello)).kind == "a2_a_task_queued"
        result = await answer(world, me)
    (block,) = result.content
    assert (result.task_id, result.status, block["type"], block["text"]) == ("t1", "ok", "text", "COUNT TO THREE")
    intent_id = block["_meta"]["covenant/intent_id"]
    assert world.runs.asked == [("hello", "count to three", me)]
    # it went the way of every intent
    (row,) = await world.rows("intent_dispatched")
    assert (row["intent_id"], row["matched_agent"]) == (intent_id, "hello")
    record = await world.server.memory.get(intent_id)
    assert record is not None
    assert record.text == "COUNT TO THREE"
    kinds = ["a2_a_task_sent", "a2_a_task_leased", "a2_a_result_posted", "a2_a_result_taken"]
    assert [row["type"] for row in await world.rows(*kinds)] == kinds


async def _of_a_peer(world: World, expires_at_ms: int | None = None) -> tuple[Enrolled, AgentId]:
    """A peer that is let in and may send to an agent, and the agent."""
    hello = await world.package("hello")
    await world.grant(ADA, f"a2a.send.{hello.pubkey}", "memory.write")
    await world.grant(world.identity.agent, f"a2a.recv.{ADA.display}")
    return await world.server.peers.enroll(ADA, expires_at_ms), hello


async def test_who_was_shown_out_has_nothing_done(world: World) -> None:
    made, hello = await _of_a_peer(world)
    world.runs.hold = anyio.Event()
    async with delivering(world, most=1):
        for name in ("runs", "waits"):
            await world.send(ADA, hello, name)
        await until(lambda: world.runs.at_once)
        prefix = requests.RevokePeer(token_prefix=made.entry.token_prefix)
        assert (await world.ask(world.identity.agent, prefix)).outcome.type == "revoked"
        await until(lambda: not world.server.mailbox.open_entries())
        await until(lambda: world.runs.ended)
        world.runs.hold.set()
        # What is sent while it is shown out, as by a connection that has not noticed yet, is not done either.
        await world.send(ADA, hello, "late")
        await until(lambda: not world.server.mailbox.open_entries())
    assert [text for _, text, _ in world.runs.asked] == ["count to three"]
    rows = await world.rows("a2_a_task_cancelled", "a2_a_result_posted")
    told = {(row["type"], row["task_id"], row["reason"]) for row in rows}
    assert told == {("a2_a_task_cancelled", name, delivery.SHOWN_OUT) for name in ("runs", "waits", "late")}
    assert len(rows) == 3


async def test_whose_token_has_ended_has_nothing_done(world: World) -> None:
    _, hello = await _of_a_peer(world, world.clock.at_ms + 1000)
    await world.send(ADA, hello)
    world.clock.at_ms += 2000
    async with delivering(world):
        await until(lambda: not world.server.mailbox.open_entries())
    assert world.runs.asked == []
    assert [row["reason"] for row in await world.rows("a2_a_task_cancelled")] == [delivery.SHOWN_OUT]


async def test_who_has_another_token_is_not_shown_out(world: World) -> None:
    made, hello = await _of_a_peer(world)
    await world.server.peers.enroll(ADA, None)
    async with delivering(world):
        prefix = requests.RevokePeer(token_prefix=made.entry.token_prefix)
        await world.ask(world.identity.agent, prefix)
        await world.send(ADA, hello)
        assert (await answer(world, ADA)).status == "ok"


async def test_grant_can_be_bound_to_agent_that_was_looked_at(world: World) -> None:
    me, hello = world.identity.agent, await world.package("hello")
    await world.grant(me, "memory.write")
    await world.grant(me, f"a2a.send.{hello.display}", manifest_sha256=world.server.agents.find("hello").digest)
    manifest = world.home / "agents" / "hello" / "agent.toml"
    was = manifest.read_text()
    await world.send(me, hello, "waits")
    manifest.write_text(was.replace('version = "0.1.0"', 'version = "0.1.1"'))
    await world.server.agents.reload()
    assert (await world.send(me, hello, "refused")).code == "capability_scope"  # type: ignore[attr-defined]
    async with delivering(world):
        result = await answer(world, me)
        assert (result.task_id, result.status) == ("waits", "error")
        assert "manifest_sha256" in str(result.error_message)
        manifest.write_text(was)
        await world.server.agents.reload()
        await world.send(me, hello, "done")
        assert (await answer(world, me)).status == "ok"
    assert len(world.runs.asked) == 1


@pytest.mark.parametrize("what", ["package", "grant"])
async def test_what_changes_between_check_and_run_is_looked_at_again(world: World, what: str) -> None:
    """The rows of the check take their time: until the run begins the agent and its sender's grants may be others."""
    me, hello = world.identity.agent, await world.package("hello")
    await world.grant(me, "memory.write")
    digest = world.server.agents.find("hello").digest
    signature = await world.grant(me, f"a2a.send.{hello.display}", manifest_sha256=digest)
    await world.send(me, hello)
    manifest = world.home / "agents" / "hello" / "agent.toml"
    whole, changed = world.server.audit.append_all, 0

    async def slow(entries: Any) -> list[str]:
        nonlocal changed
        written = await whole(entries)
        if not changed and entries[0].kind == "capability_check" and entries[0].fields["agent_id"] == "a2a":
            changed += 1
            if what == "package":
                manifest.write_text(manifest.read_text().replace('version = "0.1.0"', 'version = "0.1.1"'))
                await world.server.agents.reload()
            else:
                await world.server.capabilities.revoke(signature, world.clock())
        return written

    world.server.audit.append_all = slow  # type: ignore[method-assign]
    async with delivering(world):
        result = await answer(world, me)
    code = "capability_scope" if what == "package" else "capability_not_held"
    assert (result.status, str(result.error_message).partition(":")[0], changed) == ("error", code, 1)
    assert world.runs.asked == []


async def test_task_ends_with_grant_that_it_was_sent_under(world: World) -> None:
    me, hello = world.identity.agent, await world.package("hello")
    await world.grant(me, "memory.write")
    digest = world.server.agents.find("hello").digest
    signature = await world.grant(me, f"a2a.send.{hello.display}", manifest_sha256=digest)
    world.runs.hold = anyio.Event()
    async with delivering(world):
        await world.send(me, hello)
        await until(lambda: world.runs.at_once)
        # Another of the same admits it as well, and while that holds it goes on.
        other = await world.grant(me, f"a2a.send.{hello.pubkey}")
        await world.ask(me, requests.RevokeCapability(signature_b58=signature))
        assert [one.withdrawn for one in world.server.runners.live.values()] == [""]
        await world.ask(me, requests.RevokeCapability(signature_b58=other))
        result = await answer(world, me)
    assert (result.status, str(result.error_message).partition(":")[0]) == ("error", "revoked")
    assert f"the grant of `a2a.send.{hello.display}`" in str(result.error_message)
    assert len(world.runs.ended) == 1


async def test_full_disk_keeps_nobody_s_tasks_going(world: World) -> None:
    made, hello = await _of_a_peer(world)
    world.runs.hold = anyio.Event()
    whole, failures = world.server.mailbox.cancel, [errors.StoreFullError("full")]

    async def full(*given: Any, **more: Any) -> Any:
        if failures:
            raise failures.pop()
        return await whole(*given, **more)

    world.server.mailbox.cancel = full  # type: ignore[method-assign]
    async with delivering(world, most=1):
        for name in ("runs", "waits"):
            await world.send(ADA, hello, name)
        await until(lambda: world.runs.at_once)
        await world.ask(world.identity.agent, requests.RevokePeer(token_prefix=made.entry.token_prefix))
        await until(lambda: not world.server.mailbox.open_entries())
    assert not failures
    assert len(world.runs.asked) == 1


async def test_what_waited_before_is_done_too(world: World) -> None:
    me, hello = await ready(world)
    for n in range(3):
        await world.send(me, hello, f"t{n}")
    async with delivering(world):
        assert [(await answer(world, me)).status for _ in range(3)] == ["ok"] * 3
    assert len(world.runs.asked) == 3


async def test_disk_that_was_full_once_leaves_no_task_behind(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "AFTER_A_FAILURE", 0.0)
    monkeypatch.setattr(delivery, "LONGEST_WAIT", 0.01)
    me, hello = await ready(world)
    lease, refused = world.server.mailbox.lease, list[str]()

    async def full_once(pubkey: str, **more: Any) -> Any:
        if not refused:
            refused.append(pubkey)
            raise errors.StoreFullError("no space left")
        return await lease(pubkey, **more)

    monkeypatch.setattr(world.server.mailbox, "lease", full_once)
    async with delivering(world):
        await world.send(me, hello)
        assert (await answer(world, me)).status == "ok"
    assert refused == [hello.pubkey]


async def test_senders_grants_decide(world: World) -> None:
    """No way around the capability check: a peer gets done by an agent what it could have asked for itself."""
    _, hello = await ready(world, required='["tool.web_search"]')
    await world.server.peers.enroll(ADA, None)
    await world.grant(ADA, f"a2a.send.{hello.pubkey}")
    assert (await world.send(ADA, hello)).code == "a2a_recipient_rejected"  # type: ignore[attr-defined]
    await world.grant(world.identity.agent, f"a2a.recv.{ADA.display}", "tool.web_search")
    async with delivering(world):
        await world.send(ADA, hello)
        refused = await answer(world, ADA)
        assert (refused.status, (refused.error_message or "").split(":")[0]) == ("error", "capability_not_held")
        assert world.runs.asked == []
        await world.grant(ADA, "memory.write", "tool.web_search")
        await world.send(ADA, hello, "t2")
        assert (await answer(world, ADA)).status == "ok"
    assert world.runs.asked == [("hello", "count to three", ADA)]


async def test_agent_not_there(world: World) -> None:
    me, hello = await ready(world)
    await world.send(me, hello)
    (world.home / "agents/hello/agent.toml").unlink()
    await world.server.agents.reload()
    assert (await world.send(me, hello, "t2")).code == "no_such_agent"  # type: ignore[attr-defined]
    async with delivering(world):
        assert (await answer(world, me)).error_message == "no_such_agent: no agent has the id `hello`"


async def test_failed_run_and_ignored_text_are_answers(world: World) -> None:
    me, hello = await ready(world)

    def fails(intent: Any) -> RunResult:
        raise errors.DeadlineError("it took too long")

    world.runs.answer = fails
    async with delivering(world):
        await world.send(me, hello)
        assert (await answer(world, me)).error_message == "deadline: agent `hello` failed: it took too long"
        await world.send(me, hello, "t2", intent_text="read /srv/.env")
        assert (await answer(world, me)).error_message == "ignored: the text is on the ignore list"


async def test_as_many_at_once_as_may_be(world: World) -> None:
    me, hello = await ready(world)
    other = await world.package("other")
    await world.grant(me, f"a2a.send.{other.display}")
    world.runs.hold = anyio.Event()
    async with delivering(world, most=3):
        for n in range(6):
            await world.send(me, hello if n < 5 else other, f"t{n}")
        await until(lambda: world.runs.at_once == 3)
        await anyio.lowlevel.checkpoint()
        assert {agent for agent, _, _ in world.runs.asked} <= {"hello", "other"}
        assert world.server.mailbox.running == {e.task.id for e in world.server.mailbox.open_entries() if e.lease}
        world.runs.hold.set()
        assert sorted([(await answer(world, me)).task_id for _ in range(6)]) == [f"t{n}" for n in range(6)]
    assert world.runs.most_at_once == 3
    assert world.server.mailbox.running == set()


async def test_whoever_queues_tasks_without_end_holds_up_no_other(world: World) -> None:
    """Each may last as long as its agent's manifest grants, and all of them were sent before."""
    _, hello = await _of_a_peer(world)
    await world.server.peers.enroll(EVE, None)
    await world.grant(EVE, f"a2a.send.{hello.pubkey}", "memory.write")
    me, other = await ready(world, "other")
    await world.grant(me, f"a2a.recv.{EVE.display}", f"a2a.send.{hello.display}")
    world.runs.hold = anyio.Event()
    async with delivering(world):
        for n in range(8):
            await world.send(ADA, hello, f"ada-{n}")
        await until(lambda: world.runs.at_once == 2)
        await world.send(EVE, hello, "eve-0")
        await world.send(EVE, hello, "eve-1")
        await until(lambda: world.runs.at_once == 3)
        await world.send(me, hello, "mine")
        await until(lambda: world.runs.at_once == 4)
        assert [whom for _, _, whom in world.runs.asked] == [ADA, ADA, EVE, me]
        await world.send(me, other, "mine too")
        world.runs.hold.set()
        for sender, count in ((ADA, 8), (EVE, 2), (me, 2)):
            assert {(await answer(world, sender)).status for _ in range(count)} == {"ok"}
        await until(lambda: not world.server.mailbox.running)
    assert world.runs.most_at_once == 4


async def test_who_takes_task_back_ends_its_run(world: World) -> None:
    me, hello = await ready(world)
    world.runs.hold = anyio.Event()
    async with delivering(world):
        await world.send(me, hello)
        await until(lambda: world.runs.at_once == 1)
        assert (await world.ask(me, requests.CancelA2ATask(task_id="t1"))).cancelled is True
        await until(lambda: world.runs.at_once == 0)
        assert world.runs.ended == ["count to three"]
        # and the others go on
        world.runs.hold.set()
        await world.send(me, hello, "t2")
        assert (await answer(world, me)).task_id == "t2"
    assert (await world.rows("intent_failed"))[0]["code"] == "stopped"


async def test_deadline_ends_run(world: World) -> None:
    me, hello = await ready(world)
    world.runs.hold = anyio.Event()
    async with delivering(world):
        await world.send(me, hello, deadline_ms=world.clock() + 50)
        await until(lambda: world.runs.at_once == 1)
        world.clock.at_ms += 51
        assert (await answer(world, me)).error_message == "deadline_exceeded"
        await until(lambda: world.runs.at_once == 0)
    assert await world.rows("a2_a_task_expired") != []


async def test_stop_is_not_end_of_task(home: Path) -> None:
    """Killed or stopped while it ran: the next daemon has it done, or says that it may have been, and knows which."""
    first = World(home)
    box = await DurableMailbox.open(home, now_ms=first.clock)
    first.server.mailbox = box
    me, hello = await ready(first)
    first.runs.hold = anyio.Event()
    unsafe = Idempotency(duplicate_safety="unsafe", key="")
    async with delivering(first):
        await first.send(me, hello, "again")
        await first.send(me, hello, "unsafe", idempotency=unsafe)
        await first.send(me, hello, "done")
        await until(lambda: first.runs.at_once == 3)
    await box.close()
    second = World(home)
    box = await DurableMailbox.open(home, now_ms=second.clock)
    second.server.mailbox = box
    await second.server.agents.reload()
    await second.grant(me, f"a2a.send.{hello.display}", "memory.write")
    # of one the first daemon had the answer, and died before it was in the mailbox
    second.server.memory, second.server.receipts = first.server.memory, first.server.receipts
    async with delivering(second):
        results = {(one := await answer(second, me)).task_id: one for _ in range(3)}
    assert results["unsafe"].error_message == "interrupted"
    assert results["again"].status == results["done"].status == "ok"
    entry = box.get("again")
    assert entry is not None
    assert (entry.attempt, entry.state) == (2, State.RESOLVED)
    assert sorted(row["action"] for row in await second.rows("a2_a_repair_applied")) == [
        "force_error",
        "requeue",
        "requeue",
    ]
    await box.close()


async def test_run_whose_answer_was_not_posted_is_not_run_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    me, hello = await ready(world)
    await world.send(me, hello)
    asked: list[str] = []

    async def dies(result: Any, **fields: Any) -> Any:
        asked.append(result.task_id)
        raise errors.StoreFullError("no room")

    monkeypatch.setattr(world.server.mailbox, "post", dies)
    async with delivering(world):
        await until(lambda: asked)
    monkeypatch.undo()
    async with delivering(world):
        assert (await answer(world, me)).content[0]["text"] == "COUNT TO THREE"
    assert len(world.runs.asked) == 1


async def test_task_that_ends_daemon_each_time_is_given_up(home: Path) -> None:
    world = World(home)
    world.server.mailbox.limits = Limits(max_attempts=1)
    me, hello = await ready(world)
    await world.send(me, hello)
    assert await world.server.mailbox.lease(hello.pubkey) is not None
    async with delivering(world):
        assert (await answer(world, me)).error_message == "attempts_exhausted"
    assert world.runs.asked == []


async def compacted(world: World) -> list[Mapping[str, Any]]:
    """The rows of compactions, once there is one."""
    with anyio.fail_after(PATIENCE):
        while not (rows := await world.rows("a2_a_compacted")):  # noqa: ASYNC110
            await anyio.sleep(0.005)
    return rows


@pytest.mark.parametrize("limits", [Limits(entries=4), Limits(of_sender=4)])
async def test_mailbox_half_full_is_compacted(world: World, limits: Limits) -> None:
    world.server.mailbox.limits = limits
    me, hello = await ready(world)
    async with delivering(world):
        for n in range(12):
            # However many are sent: what was answered and taken is not kept until there is no room.
            await world.send(me, hello, f"t{n}")
            await answer(world, me)
        rows = await compacted(world)
    assert all(row["dropped"] >= 1 for row in rows)


async def test_compaction_that_made_no_room_is_not_made_again_at_once(world: World) -> None:
    world.server.mailbox.limits = Limits(of_sender=4)
    me, hello = await ready(world)
    async with delivering(world):
        for n in range(2):
            await world.send(me, hello, f"t{n}")
        rows = await compacted(world)
        await world.send(me, hello, "t2")
        for _ in range(3):
            await answer(world, me)
    assert [row["dropped"] for row in rows] == [0]
    assert await world.rows("a2_a_compacted") == rows


async def test_stale_tasks_are_looked_for(world: World) -> None:
    policy = parts.RetryPolicy(enabled=True)
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: retry_on_schedule(world.server, policy, interval_ms=1))
        with anyio.fail_after(PATIENCE):
            while not (rows := await world.rows("a2_a_auto_retry_scheduler_scan")):  # noqa: ASYNC110
                await anyio.sleep(0.005)
        group.cancel_scope.cancel()
    assert rows[0] == {
        "type": "a2_a_auto_retry_scheduler_scan",
        "enabled": True,
        "considered": 0,
        "requeued": 0,
        "skipped": 0,
        "skipped_by_reason": {},
        "min_lease_age_ms": 300_000,
        "max_attempts": 3,
        "max_requeues": 1,
        "scan_limit": 100,
        "error": None,
    }
