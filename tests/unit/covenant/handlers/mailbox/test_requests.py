"""Check the mailbox over the wire: the owner of a task, the rights of other peers, and the rows of both answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from covenant.wire import parts, requests
from covenant.wire.types import A2ATask, AgentId, Idempotency
from tests.mailbox_kit import ADA, BOB, EVE, World

pytestmark = pytest.mark.anyio


@pytest.fixture
def world(tmp_path: Path) -> World:
    tmp_path.chmod(0o700)
    return World(tmp_path)


async def friends(world: World) -> None:
    """Grant Ada to send to Bob, and Bob to receive and to answer."""
    await world.grant(ADA, f"a2a.send.{BOB.pubkey}", "a2a.repair.requeue", "a2a.repair.force_error", "a2a.compact")
    await world.grant(BOB, f"a2a.recv.{ADA.pubkey}", f"a2a.respond.{ADA.display}", "a2a.repair.requeue")


def code(answer: Any) -> str | None:
    assert answer.kind == "error", answer
    found: str | None = answer.code
    return found


async def test_task_goes_its_way(world: World) -> None:
    await friends(world)
    assert (await world.send(ADA, BOB)).kind == "a2_a_task_queued"
    given = await world.ask(BOB, requests.TryRecvA2ATask())
    assert given.task.intent_text == "count to three"
    assert given.lease_expires_at_ms > world.clock()
    assert (await world.ask(BOB, requests.TryRecvA2ATask())).task is None
    assert (await world.post(BOB)).kind == "a2_a_result_posted"
    assert (await world.ask(BOB, requests.TryRecvA2AResult())).result is None
    assert (await world.ask(ADA, requests.TryRecvA2AResult())).result.content[0]["text"] == "3"
    assert (await world.ask(ADA, requests.TryRecvA2AResult())).result is None
    for peer in (ADA, BOB):
        assert [one.id for one in (await world.ask(peer, requests.RecentA2ATasks())).tasks] == ["t1"]
        assert [one.task_id for one in (await world.ask(peer, requests.RecentA2AResults())).results] == ["t1"]
    assert (await world.ask(EVE, requests.RecentA2ATasks())).tasks == ()
    named = requests.RecentA2AResults(task_id="t1")
    assert [len((await world.ask(one, named)).results) for one in (ADA, BOB, EVE)] == [1, 1, 0]
    assert (await world.ask(ADA, requests.RecentA2AResults(task_id="t2"))).results == ()
    kinds = ["a2_a_task_sent", "a2_a_task_leased", "a2_a_result_posted", "a2_a_result_taken"]
    assert [row["type"] for row in await world.rows(*kinds)] == kinds
    checks = await world.rows("capability_check")
    assert [(row["required_actions"], row["passed"]) for row in checks] == [
        ([f"a2a.send.{BOB.pubkey}"], True),
        ([f"a2a.respond.{ADA.display}"], True),
    ]


async def test_whether_id_is_taken_by_another_is_nobody_s_to_know(world: World) -> None:
    """Eve sends under the id of Ada's task, to Bob and to herself: the answers are as if the id were free."""
    await friends(world)
    await world.grant(EVE, f"a2a.send.{BOB.pubkey}", f"a2a.send.{EVE.pubkey}", "a2a.repair.force_error")
    await world.grant(BOB, f"a2a.recv.{EVE.pubkey}", f"a2a.respond.{EVE.pubkey}", "a2a.repair.force_error")
    await world.send(ADA, BOB, intent_text="ada's")
    heard = [await world.send(EVE, BOB, name, intent_text="eve's") for name in ("t1", "free")]
    assert [one.model_dump() for one in heard] == [{"kind": "a2_a_task_queued", "task_id": n} for n in ("t1", "free")]
    assert code(await world.send(EVE, BOB, "t1", intent_text="another")) == "task_exists"
    given = [(await world.ask(BOB, requests.TryRecvA2ATask())).task for _ in range(3)]
    assert [one.intent_text for one in given] == ["ada's", "eve's", "eve's"]
    assert len({one.id for one in given}) == 3
    # Bob's repair changes only the task with the id that he was given.
    command = parts.ForceError(message="no")
    order = parts.A2ARepairOrder(task_id=given[1].id, command=command, reason="r")
    assert (await world.ask(BOB, requests.RepairA2ATask(request=order))).outcome.task_id == given[1].id
    refused = await world.ask(EVE, requests.RepairA2ATask(request=order.model_copy(update={"task_id": "t1"})))
    assert (code(refused), given[1].id in refused.message) == ("task_state", False)
    assert (await world.post(BOB, given[0].id)).kind == "a2_a_result_posted"
    for sender, status in ((ADA, "ok"), (EVE, "error")):
        assert [one.id for one in (await world.ask(sender, requests.RecentA2ATasks())).tasks][-1] == "t1"
        answers = (await world.ask(sender, requests.RecentA2AResults(task_id="t1"))).results
        assert [(one.task_id, one.status) for one in answers] == [("t1", status)]
        result = (await world.ask(sender, requests.TryRecvA2AResult())).result
        assert (result.task_id, result.status) == ("t1", status)
    feed = await world.server.audit.recent(1000, issuer_pubkey=EVE.pubkey)
    assert given[1].id not in "".join(row.model_dump_json() for row in feed)


async def test_who_sends_to_itself_does_so_under_its_own_name(world: World) -> None:
    await world.grant(EVE, f"a2a.send.{EVE.pubkey}")
    assert (await world.send(EVE, EVE, "own")).kind == "a2_a_task_queued"
    assert code(await world.send(EVE, AgentId(display=BOB.display, pubkey=EVE.pubkey))) == "a2a_recipient_rejected"
    assert [row["recipient_display"] for row in await world.rows("a2_a_task_sent")] == [EVE.display]


async def test_nobody_sends_in_anothers_name(world: World) -> None:
    await friends(world)
    task = requests.SendA2ATask(task=A2ATask(id="t1", sender=ADA, recipient=BOB, intent_text="x"))
    assert code(await world.ask(EVE, task)) == "a2a_sender_mismatch"
    other_name = AgentId(display="root@local", pubkey=ADA.pubkey)
    renamed = task.model_copy(update={"task": task.task.model_copy(update={"sender": other_name})})
    assert code(await world.ask(ADA, renamed)) == "a2a_sender_mismatch"
    assert await world.rows("a2_a_sender_mismatch") == [
        {"type": "a2_a_sender_mismatch", "peer_display": "eve@local", "claimed_sender_display": "ada@local"},
        {"type": "a2_a_sender_mismatch", "peer_display": "ada@local", "claimed_sender_display": "root@local"},
    ]
    assert (await world.ask(BOB, requests.TryRecvA2ATask())).task is None


async def test_both_ends_must_want_it(world: World) -> None:
    assert code(await world.send(ADA, BOB)) == "capability_not_held"
    await world.grant(ADA, f"a2a.send.{BOB.display}")
    assert code(await world.send(ADA, BOB)) == "a2a_recipient_rejected"
    row = {"sender_display": ADA.display, "recipient_display": BOB.display, "action": f"a2a.recv.{ADA.display}"}
    assert await world.rows("a2_a_recipient_rejected") == [{"type": "a2_a_recipient_rejected", **row}]
    await world.grant(BOB, f"a2a.recv.{ADA.display}")
    assert (await world.send(ADA, BOB)).kind == "a2_a_task_queued"
    # the key decides, and the display name must be the key's own
    lookalike = AgentId(display="carol@local", pubkey=BOB.pubkey)
    await world.grant(ADA, f"a2a.send.{lookalike.display}")
    assert code(await world.send(ADA, lookalike, "t2")) == "a2a_recipient_rejected"
    # a peer that sends to itself needs only its own grant
    await world.grant(ADA, f"a2a.send.{ADA.pubkey}")
    assert (await world.send(ADA, ADA, "t3")).kind == "a2_a_task_queued"


@pytest.mark.parametrize(
    ("whose", "action", "scope"),
    [
        (ADA, f"a2a.send.{BOB.display}", {"task_id": "another"}),
        (ADA, f"a2a.send.{BOB.display}", {"peer_pubkey_b58": EVE.pubkey}),
        (BOB, f"a2a.recv.{ADA.display}", {"peer_pubkey_b58": EVE.pubkey}),
        (BOB, f"a2a.recv.{ADA.display}", {"task_id": "another"}),
    ],
)
async def test_scopes_bound_both_ends(world: World, whose: AgentId, action: str, scope: dict[str, str]) -> None:
    for agent, wanted in ((ADA, f"a2a.send.{BOB.display}"), (BOB, f"a2a.recv.{ADA.display}")):
        if (agent, wanted) != (whose, action):
            await world.grant(agent, wanted)
    await world.grant(whose, action, **scope)
    assert code(await world.send(ADA, BOB)) == ("capability_scope" if whose == ADA else "a2a_recipient_rejected")
    # the control: without the bound the request passes
    await world.grant(whose, action)
    assert (await world.send(ADA, BOB)).kind == "a2_a_task_queued"


async def test_answer_to_nothing_is_refused_before_anybody_is_asked(world: World) -> None:
    await friends(world)
    await world.send(ADA, BOB)
    asked = len(await world.rows("capability_check"))
    assert code(await world.post(BOB, "t9")) == "no_such_task"
    # another peer's task is reported as unknown, with the same words
    unknown, others = await world.post(EVE, "t9"), await world.post(EVE)
    assert (code(unknown), code(others)) == ("no_such_task", "no_such_task")
    assert len(await world.rows("capability_check")) == asked
    assert [row["reason"] for row in await world.rows("a2_a_result_rejected")] == [
        "unknown task",
        "unknown task",
        # The caller's own feed does not tell the two apart either.
        "unknown task",
    ]
    # Bob has not received the task yet, so he may not answer it
    assert code(await world.post(BOB)) == "task_state"
    await world.ask(BOB, requests.TryRecvA2ATask())
    assert (await world.post(BOB)).kind == "a2_a_result_posted"
    assert code(await world.post(BOB)) == "task_state"
    assert (await world.rows("a2_a_result_rejected"))[-1]["reason"] == "answered already"


async def test_answering_needs_leave(world: World) -> None:
    await world.grant(ADA, f"a2a.send.{BOB.pubkey}")
    await world.grant(BOB, f"a2a.recv.{ADA.pubkey}")
    await world.send(ADA, BOB)
    await world.ask(BOB, requests.TryRecvA2ATask())
    assert code(await world.post(BOB)) == "capability_not_held"


async def test_queue_shows_each_its_own(world: World) -> None:
    await friends(world)
    hello = await world.package("hello")
    await world.grant(ADA, f"a2a.send.{hello.display}")
    await world.grant(world.identity.agent, f"a2a.recv.{ADA.display}")
    await world.send(ADA, BOB, "t1", deadline_ms=world.clock() + 500)
    await world.send(ADA, BOB, "t2")
    await world.send(ADA, hello, "t3")
    await world.ask(BOB, requests.TryRecvA2ATask())
    world.clock.at_ms += 100

    async def seen(agent: AgentId, **filters: Any) -> list[tuple[str, str]]:
        queue = await world.ask(agent, requests.A2AQueue(**filters))
        return [(one.task.id, one.state) for one in queue.tasks]

    assert await seen(ADA) == [("t1", "in_flight"), ("t2", "queued"), ("t3", "queued")]
    assert await seen(BOB) == [("t1", "in_flight"), ("t2", "queued")]
    assert await seen(EVE) == []
    assert await seen(world.identity.agent) == [("t3", "queued")]
    assert await seen(ADA, state_filter="queued") == [("t2", "queued"), ("t3", "queued")]
    assert await seen(ADA, min_lease_age_ms=100) == [("t1", "in_flight")]
    assert await seen(ADA, min_lease_age_ms=101) == []
    assert await seen(ADA, deadline_within_ms=400) == [("t1", "in_flight")]
    assert await seen(ADA, deadline_within_ms=399) == []
    assert await seen(ADA, limit=1) == [("t1", "in_flight")]
    await world.post(BOB)
    assert [one.task_id for one in (await world.ask(ADA, requests.A2AQueue())).results] == ["t1"]


def repair(command: Any, name: str = "t1", reason: str = "it hangs") -> requests.RepairA2ATask:
    return requests.RepairA2ATask(request=parts.A2ARepairOrder(task_id=name, command=command, reason=reason))


async def test_repairs(world: World) -> None:
    await friends(world)
    await world.send(ADA, BOB)
    given = await world.ask(BOB, requests.TryRecvA2ATask())
    again = parts.Requeue(lease_id=given.lease_id, duplicate_risk="operator_accepted")
    assert code(await world.ask(EVE, repair(again))) == "no_such_task"
    assert code(await world.ask(ADA, repair(again, reason="  "))) == "task_invalid"
    assert code(await world.ask(ADA, repair(parts.Requeue(lease_id="x", duplicate_risk="operator-accepted")))) == (
        "lease_mismatch"
    )
    done = await world.ask(BOB, repair(again))
    assert done.outcome.model_dump(exclude_none=True) == {
        "task_id": "t1",
        "action": "requeued",
        "state": "queued",
        "lease_id": given.lease_id,
        "duplicate_risk": "operator-accepted",
        "attempt": 1,
    }
    # Bob has one of the two grants
    assert code(await world.ask(BOB, repair(parts.ForceError(message="no")))) == "capability_not_held"
    assert (await world.ask(ADA, repair(parts.ForceError(message="no")))).outcome.action == "forced_error"
    assert (await world.ask(ADA, requests.TryRecvA2AResult())).result.error_message == "no"
    assert [(row["action"], row["reason"]) for row in await world.rows("a2_a_repair_applied")] == [
        ("requeue", "it hangs"),
        ("force_error", "it hangs"),
    ]


async def test_repair_within_its_scope(world: World) -> None:
    await world.grant(ADA, f"a2a.send.{BOB.pubkey}")
    await world.grant(BOB, f"a2a.recv.{ADA.pubkey}")
    await world.grant(ADA, "a2a.repair.requeue", duplicate_risk="idempotent", peer_pubkey_b58=BOB.pubkey)
    await world.send(ADA, BOB, idempotency=Idempotency(duplicate_safety="idempotent", key="k"))
    await world.ask(BOB, requests.TryRecvA2ATask())
    risky = repair(parts.Requeue(duplicate_risk="operator-accepted"))
    assert code(await world.ask(ADA, risky)) == "capability_scope"
    safe = repair(parts.Requeue(duplicate_risk="idempotent"))
    assert (await world.ask(ADA, safe)).kind == "a2_a_repaired"


async def test_cancel_is_senders(world: World) -> None:
    await friends(world)
    await world.send(ADA, BOB)
    cancel = requests.CancelA2ATask(task_id="t1", reason="no need")
    assert code(await world.ask(EVE, cancel)) == "no_such_task"
    assert code(await world.ask(BOB, cancel)) == "not_the_sender"
    assert (await world.ask(ADA, cancel)).cancelled is True
    assert (await world.ask(ADA, cancel)).cancelled is False
    assert await world.rows("a2_a_task_cancelled") == [
        {"type": "a2_a_task_cancelled", "task_id": "t1", "reason": "no need"}
    ]


async def test_stale_tasks_are_operators_to_retry(world: World) -> None:
    await friends(world)
    await world.send(ADA, BOB, idempotency=Idempotency(duplicate_safety="idempotent", key="k"))
    await world.ask(BOB, requests.TryRecvA2ATask())
    world.clock.at_ms += 300_000
    enabled = requests.RetryA2AStale(policy=parts.RetryPolicy(enabled=True))
    me = world.identity.agent
    assert code(await world.ask(ADA, enabled)) == "operator_only"
    tried = (await world.ask(me, requests.RetryA2AStale())).report
    assert (tried.policy.enabled, tried.considered, len(tried.requeued), tried.skipped_by_reason) == (
        False,
        1,
        0,
        {"disabled": 1},
    )
    assert code(await world.ask(me, enabled)) == "capability_not_held"
    await world.grant(me, "a2a.repair.requeue")
    report = (await world.ask(me, enabled)).report
    assert (len(report.requeued), report.skipped) == (1, ())
    row = (await world.rows("a2_a_repair_applied"))[-1]
    assert (row["action"], row["attempt"], row["duplicate_risk"]) == ("auto_requeue", 1, "idempotent")


async def test_compaction_needs_leave(world: World) -> None:
    await friends(world)
    await world.send(ADA, BOB)
    await world.ask(ADA, requests.CancelA2ATask(task_id="t1"))
    assert code(await world.ask(BOB, requests.CompactA2A())) == "capability_not_held"
    assert (await world.ask(ADA, requests.CompactA2A())).dropped == 1
    assert await world.rows("a2_a_compacted") == [{"type": "a2_a_compacted", "dropped": 1}]
