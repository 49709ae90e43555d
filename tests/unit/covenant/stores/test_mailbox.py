"""Check every mailbox: a task is leased to one recipient at a time, answered once, and its answer delivered once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.lowlevel
import pytest

from covenant.stores.mailbox.durable import DurableMailbox
from covenant.stores.mailbox.in_memory import InMemoryMailbox
from covenant.stores.mailbox.interface import MAX_RESULT_BYTES, Limits, Mailbox, RetryRules, Skip, State, TaskEntry
from covenant.wire.types import A2ATask, A2ATaskResult, AgentId, Idempotency
from policy import errors

pytestmark = pytest.mark.anyio

ADA = AgentId(display="ada@local", pubkey="A" * 43)
BOB = AgentId(display="bob@local", pubkey="B" * 43)
EVE = AgentId(display="eve@local", pubkey="E" * 43)
NOW = 1_790_000_000_000


class Clock:
    def __init__(self) -> None:
        self.at = NOW

    def __call__(self) -> int:
        return self.at


def task(name: str = "t1", *, safety: str | None = None, key: str = "k", **fields: Any) -> A2ATask:
    declared = None if safety is None else Idempotency(duplicate_safety=safety, key=key)  # type: ignore[arg-type]
    fields = {"sender": ADA, "recipient": BOB, "intent_text": "count to three", **fields}
    return A2ATask(id=name, idempotency=declared, **fields)


def result(name: str = "t1", status: Literal["ok", "error", "partial"] = "ok", text: str = "3") -> A2ATaskResult:
    return A2ATaskResult(task_id=name, status=status, content=({"type": "text", "text": text},))


# One peer may use half of the room for all.
LIMITS = Limits(lease_ms=1000, max_attempts=3, open_per_recipient=10, entries=40, cached=3)


@pytest.fixture
def clock() -> Clock:
    return Clock()


class Kind:
    """One kind of mailbox: opens it, and reopens it without the state in memory."""

    def __init__(self, durable: bool, home: Path, clock: Clock) -> None:
        self.durable, self.home, self.clock = durable, home, clock

    @asynccontextmanager
    async def open(self, limits: Limits = LIMITS) -> AsyncIterator[Mailbox]:
        box: Mailbox = (
            await DurableMailbox.open(self.home, now_ms=self.clock, limits=limits)
            if self.durable
            else InMemoryMailbox(now_ms=self.clock, limits=limits)
        )
        try:
            yield box
        finally:
            await box.close()


@pytest.fixture(params=[False, True], ids=["in_memory", "durable"])
def kind(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Kind:
    tmp_path.chmod(0o700)
    return Kind(request.param, tmp_path, clock)


@pytest.fixture
async def box(kind: Kind) -> AsyncIterator[Mailbox]:
    async with kind.open() as opened:
        yield opened


async def leased(box: Mailbox, **lease: Any) -> TaskEntry:
    entry = await box.lease(BOB.pubkey, **lease)
    assert entry is not None
    assert entry.lease is not None
    return entry


async def test_tasks_of_some_senders_alone_are_given_out_where_asked(box: Mailbox) -> None:
    for name in ("first", "second"):
        await box.send(task(name))
    await box.send(task("third", sender=EVE))
    entry = await leased(box, of=lambda sender: sender == EVE.pubkey)
    assert entry.task.id == "third"
    assert await box.lease(BOB.pubkey, of=lambda sender: sender == EVE.pubkey) is None
    assert [(await leased(box)).task.id for _ in range(2)] == ["first", "second"]


async def test_task_goes_its_way(box: Mailbox, clock: Clock) -> None:
    sent = await box.send(task())
    assert (sent.outcome, sent.entry.state, sent.entry.attempt) == ("queued", State.QUEUED, 0)
    assert await box.lease(ADA.pubkey) is None
    entry = await leased(box)
    assert entry.lease is not None
    assert (entry.state, entry.attempt, entry.lease.to, entry.lease.expires_at_ms) == (
        State.IN_FLIGHT,
        1,
        BOB,
        NOW + 1000,
    )
    assert await box.lease(BOB.pubkey) is None
    assert await box.take_result(ADA.pubkey) is None
    clock.at += 5
    answered = await box.post(result())
    assert (answered.state, answered.ended_at_ms) == (State.RESULT_PENDING, clock.at)
    assert box.unfetched(ADA.pubkey) == [answered]
    assert await box.take_result(BOB.pubkey) is None
    assert await box.take_result(ADA.pubkey) == result()
    assert await box.take_result(ADA.pubkey) is None
    done = box.get("t1")
    assert done is not None
    assert done.state is State.RESOLVED
    assert box.recent(ADA.pubkey, 5) == box.recent(BOB.pubkey, 5) == box.answered(BOB.pubkey, 5) == [done]
    assert box.open_entries() == []


async def test_oldest_goes_first_and_limits_hold(box: Mailbox) -> None:
    for n in range(5):
        await box.send(task(f"t{n}"))
    with pytest.raises(errors.MailboxFullError):
        await box.send(task("t5"))
    assert [(await leased(box)).task.id for _ in range(5)] == [f"t{n}" for n in range(5)]
    assert [entry.task.id for entry in box.recent(BOB.pubkey, 2)] == ["t4", "t3"]
    # another recipient has room
    assert (await box.send(task("to-ada", sender=BOB, recipient=ADA))).outcome == "queued"


async def test_its_bytes_are_bounded(kind: Kind) -> None:
    async with kind.open(Limits(size=2750)) as box:
        for name in ("t1", "t2"):
            await box.send(task(name, intent_text="x" * 500))
        assert 0.5 < box.fullness() < 1
        with pytest.raises(errors.MailboxFullError):
            await box.send(task("t3", intent_text="x" * 500))
        await leased(box)
        with pytest.raises(errors.MailboxFullError):
            await box.post(result("t1", text="y" * 1000))
        # the task still waits for an answer, and is answered once there is room
        await box.cancel("t2", reason="room")
        assert await box.compact() == 1
        assert (await box.post(result("t1", text="y" * 500))).state is State.RESULT_PENDING
        await box.take_result(ADA.pubkey)
        await box.compact()
        assert box.fullness() == 0


async def test_one_sender_does_not_have_all_room(kind: Kind) -> None:
    limits = Limits(of_sender=3, size_of_sender=3000, open_per_pair=2)
    async with kind.open(limits) as box:
        for number in range(2):
            await box.send(task(f"e{number}", sender=EVE))
        with pytest.raises(errors.MailboxFullError, match="of yours wait for"):
            await box.send(task("e2", sender=EVE))
        await box.send(task("e2", sender=EVE, recipient=EVE))
        with pytest.raises(errors.MailboxFullError, match="of yours are kept"):
            await box.send(task("e3", sender=EVE, recipient=EVE))
        # An answer counts for the peer that sends it, so a large answer is no way around the limit.
        await box.lease(EVE.pubkey)
        with pytest.raises(errors.MailboxFullError):
            await box.post(result("e2", text="x" * 3000))
        await box.post(result("e2"))
        for number in range(2):
            await box.send(task(f"t{number}"))
        await box.take_result(EVE.pubkey)
        await box.compact()
        await box.send(task("e3", sender=EVE, recipient=EVE))


async def test_however_many_take_all_they_can_next_gets_in(kind: Kind) -> None:
    limits = Limits(
        entries=64, of_sender=16, open_per_recipient=32, open_per_pair=16, size=40_000, size_of_sender=10_000
    )
    greedy = [AgentId(display=f"g{n}@local", pubkey=n * 43) for n in "1234"]
    taken = dict.fromkeys(greedy, 0)

    async def take(box: Mailbox, sender: AgentId, recipient: AgentId, text: str) -> bool:
        try:
            await box.send(task(f"{taken[sender]}", sender=sender, recipient=recipient, intent_text=text))
        except errors.MailboxFullError:
            return False
        taken[sender] += 1
        return True

    for recipients, text in ((greedy, "x"), ([BOB], "x"), (greedy, "x" * 800)):
        taken = dict.fromkeys(greedy, 0)
        async with kind.open(limits) as box:
            # Each greedy peer in turn sends to each recipient until all are refused everywhere.
            while any([await take(box, one, to, text) for to in recipients for one in greedy]):
                pass
            # A newcomer has as much room as each of them has.
            for number in range(max(2, min(taken.values()) // 2)):
                await box.send(task(f"{number}", intent_text=text))
            for name in [one.task.id for one in box.open_entries()]:
                await box.cancel(name, reason="room")
            await box.compact()


async def test_same_is_answered_again_only_where_there_is_room(kind: Kind) -> None:
    """A small task has a large answer: each repeated task gets that answer, and each is written to disk."""
    async with kind.open(Limits(size_of_sender=8000)) as box:
        for number in range(10):
            await box.send(task(f"t{number}", safety="idempotent"))
        await leased(box)
        await box.post(result("t0", text="x" * 2000))
        entries = [one for number in range(10) if (one := box.get(f"t{number}")) is not None]
        told = [one.result.error_message for one in entries if one.result is not None]
        assert told == [None] * 2 + ["no_room"] * 8
        assert sum(one.size for one in entries) <= 8000
        assert await box.lease(BOB.pubkey) is None
        with pytest.raises(errors.MailboxFullError):
            await box.send(task("more", safety="idempotent"))
        for _ in range(10):
            await box.take_result(ADA.pubkey)
        await box.compact()
        assert (await box.send(task("more", safety="idempotent"))).outcome == "replayed"


@pytest.mark.parametrize("limits", [Limits(cached=3), Limits(cached_size=700)])
async def test_nobody_has_answers_of_others_forgotten(kind: Kind, limits: Limits) -> None:
    """A task whose answer is forgotten would be done again."""
    async with kind.open(limits) as box:
        await box.send(task("mine", safety="idempotent"))
        await leased(box)
        await box.post(result("mine", text="m" * 60))
        for number in range(20):
            await box.send(task(f"e{number}", sender=EVE, recipient=EVE, safety="idempotent", key=f"{number}"))
            await box.lease(EVE.pubkey)
            await box.post(result(f"e{number}", text="e" * 60))
        assert (await box.send(task("again", safety="idempotent"))).outcome == "replayed"
        await box.compact()
    async with kind.open(limits) as box:
        if kind.durable:
            assert (await box.send(task("once more", safety="idempotent"))).outcome == "replayed"


async def test_what_task_is_ended_with_is_bounded_and_short_in_mailbox_full(kind: Kind) -> None:
    async with kind.open(Limits(size=12_000)) as box:
        for name in ("t1", "t2"):
            await box.send(task(name, intent_text="x" * 2500))
        end = partial(box.force_error, "t1", reason="r")
        with pytest.raises(errors.TaskInvalidError):
            await end(message="x" * MAX_RESULT_BYTES)
        with pytest.raises(errors.MailboxFullError):
            await end(message="x" * 2000)
        assert (await end(message="x" * 1000)).state is State.RESULT_PENDING


async def test_same_task_again_is_same(box: Mailbox) -> None:
    await box.send(task())
    assert (await box.send(task())).outcome == "known"
    await leased(box)
    assert (await box.send(task())).entry.state is State.IN_FLIGHT
    with pytest.raises(errors.TaskExistsError):
        await box.send(task(intent_text="count to four"))
    assert await box.lease(BOB.pubkey) is None


async def test_what_one_sender_calls_its_task_is_no_other_s(kind: Kind) -> None:
    """Eve uses Ada's task id: neither learns of it, Bob can tell the tasks apart, and each gets her own answer."""
    async with kind.open() as box:
        for sender in (ADA, EVE):
            assert (await box.send(task(sender=sender, intent_text=sender.display))).outcome == "queued"
            assert (await box.send(task(sender=sender, intent_text=sender.display))).outcome == "known"
        # Eve sends to herself, so that no recipient can reveal that the id is taken.
        alone = await box.send(task(sender=EVE, recipient=EVE, name="t2"))
        assert alone.entry.as_given().id == "t2"
    async with kind.open() as box:
        if not kind.durable:
            for sender in (ADA, EVE):
                await box.send(task(sender=sender, intent_text=sender.display))
        given = [(await leased(box)).as_given() for _ in range(2)]
        assert [one.intent_text for one in given] == [ADA.display, EVE.display]
        assert given[0].id == "t1" != given[1].id
        assert await box.compact() == 0
        for one in given:
            entry = box.given(BOB.pubkey, one.id)
            assert entry is not None
            await box.post(result(entry.task.id, text=one.intent_text))
        for sender in (EVE, ADA):
            answer = await box.take_result(sender.pubkey)
            assert answer is not None
            assert (answer.task_id, answer.content[0]["text"]) == ("t1", sender.display)
            (shown,) = (one.task_of(sender.pubkey) for one in box.recent(sender.pubkey, 5) if one.result)
            assert shown == task(sender=sender, intent_text=sender.display)
        await box.compact()
        assert box.sent(ADA.pubkey, "t1") is box.given(BOB.pubkey, "t1") is None


async def test_id_that_was_taken_elsewhere_is_given_to_recipient_who_has_it_not(box: Mailbox) -> None:
    """Else sender and recipient together could find out the ids of others' tasks."""
    await box.send(task())
    sent = (await box.send(task(sender=EVE, recipient=EVE))).entry
    assert sent.task.id != "t1"
    assert (sent.as_given().id, sent.task_of(EVE.pubkey).id, sent.to_wire(EVE.pubkey).task.id) == ("t1",) * 3
    await box.cancel("t1", reason="gone")
    await box.compact()
    # The name is free again; the recipient that has the id keeps it.
    again = (await box.send(task(sender=ADA, recipient=EVE))).entry
    assert again.task.id == "t1" != again.as_given().id


@pytest.mark.parametrize("bad", [{"name": ""}, {"name": "x" * 257}, {"intent_text": ""}, {"intent_text": "x" * 2**20}])
async def test_task_none_is_refused(box: Mailbox, bad: dict[str, Any]) -> None:
    with pytest.raises(errors.TaskInvalidError):
        await box.send(task(**bad))
    assert box.recent(ADA.pubkey, 5) == []


async def test_lease_over_is_taken_back(box: Mailbox, clock: Clock) -> None:
    await box.send(task())
    first = await leased(box)
    assert box.next_due_ms() == NOW + 1000
    clock.at += 999
    assert await box.lease(BOB.pubkey) is None
    clock.at += 1
    second = await leased(box)
    assert second.attempt == 2
    assert second.lease is not None
    assert first.lease is not None
    assert second.lease.id != first.lease.id
    ended = await box.expire()
    assert [(one.reason, one.lease_id) for one in ended] == [("lease_expired", first.lease.id)]
    # the first recipient names its lease, which has expired
    with pytest.raises(errors.LeaseMismatchError):
        await box.post(result(), lease_id=first.lease.id)
    # version 1's clients name no lease, and their late answer is accepted
    assert (await box.post(result())).result == result()
    with pytest.raises(errors.TaskStateError):
        await box.post(result(), lease_id=second.lease.id)


async def test_late_answer_to_task_that_waits_again_counts(box: Mailbox, clock: Clock) -> None:
    await box.send(task())
    with pytest.raises(errors.TaskStateError, match="given to nobody"):
        await box.post(result())
    await leased(box)
    clock.at += 5000
    await box.expire()
    assert [entry.state for entry in box.open_entries()] == [State.QUEUED]
    await box.post(result())
    assert await box.lease(BOB.pubkey) is None
    assert await box.take_result(ADA.pubkey) == result()


async def test_attempts_come_to_end(box: Mailbox, clock: Clock) -> None:
    await box.send(task())
    for _ in range(3):
        await leased(box)
        clock.at += 1000
    assert await box.lease(BOB.pubkey) is None
    answer = await box.take_result(ADA.pubkey)
    assert answer is not None
    assert (answer.status, answer.error_message) == ("error", "attempts_exhausted")


async def test_what_is_unsafe_to_repeat_waits_for_another(box: Mailbox, clock: Clock) -> None:
    await box.send(task(safety="unsafe"))
    await leased(box)
    clock.at += 10**9
    assert await box.expire() == []
    assert await box.lease(BOB.pubkey) is None
    entry = await box.requeue("t1", duplicate_risk="operator-accepted", reason="stuck")
    assert entry.state is State.QUEUED
    assert (await leased(box)).attempt == 2
    # As in version 1, the caller who repairs may know that it can be repeated.
    assert (await box.requeue("t1", duplicate_risk="idempotent", reason="stuck")).state is State.QUEUED


@pytest.mark.parametrize("lease_first", [False, True])
async def test_deadline_ends_task(box: Mailbox, clock: Clock, lease_first: bool) -> None:
    await box.send(task(deadline_ms=NOW + 100))
    if lease_first:
        await leased(box)
    clock.at = NOW + 100
    assert await box.expire() == []
    clock.at += 1
    assert box.next_due_ms() == clock.at
    assert [one.reason for one in await box.expire()] == ["deadline_exceeded"]
    with pytest.raises(errors.TaskStateError):
        await box.post(result())
    assert await box.lease(BOB.pubkey) is None
    answer = await box.take_result(ADA.pubkey)
    assert answer is not None
    assert (answer.task_id, answer.status, answer.error_message) == ("t1", "error", "deadline_exceeded")
    assert box.next_due_ms() is None


async def test_repairs(box: Mailbox) -> None:
    with pytest.raises(errors.NoTaskError):
        await box.force_error("t1", message="m", reason="r")
    await box.send(task())
    with pytest.raises(errors.TaskStateError):
        await box.requeue("t1", duplicate_risk="operator-accepted", reason="r")
    entry = await leased(box)
    assert entry.lease is not None
    for act in (
        box.requeue("t1", lease_id="x", duplicate_risk=None, reason="r"),
        box.force_error("t1", lease_id="x", message="m", reason="r"),
    ):
        with pytest.raises(errors.LeaseMismatchError):
            await act
    await box.requeue("t1", lease_id=entry.lease.id, duplicate_risk="operator-accepted", reason="r")
    await leased(box)
    ended = await box.force_error("t1", message="it hangs", reason="r")
    assert ended.result is not None
    assert (ended.result.error_message, ended.state) == ("it hangs", State.RESULT_PENDING)


async def test_cancel(box: Mailbox) -> None:
    for name in ("t1", "t2"):
        await box.send(task(name))
    await leased(box)
    for name in ("t1", "t2"):
        assert (await box.cancel(name, reason="changed my mind")).state is State.RESOLVED
    with pytest.raises(errors.TaskStateError):
        await box.cancel("t1", reason="again")
    with pytest.raises(errors.TaskStateError):
        await box.post(result())
    assert await box.lease(BOB.pubkey) is None
    assert await box.take_result(ADA.pubkey) is None


async def test_answered_idempotent_task_is_answered_again_at_once(box: Mailbox) -> None:
    await box.send(task("t1", safety="idempotent"))
    await box.send(task("t2", safety="idempotent"))
    await box.send(task("other", safety="idempotent", key="other"))
    await box.send(task("kind", safety="idempotent", task_kind="counting"))
    assert (await leased(box)).task.id == "t1"
    # of equal tasks one is leased at a time; other tasks do not wait for it
    assert [(await leased(box)).task.id for _ in range(2)] == ["other", "kind"]
    assert await box.lease(BOB.pubkey) is None
    await box.post(result("t1"))
    sent = await box.send(task("t3", safety="idempotent"))
    assert (sent.outcome, sent.entry.result) == ("replayed", result("t3"))
    assert [await box.take_result(ADA.pubkey) for _ in range(4)] == [result("t1"), result("t2"), result("t3"), None]


async def test_only_what_went_well_is_answered_again(box: Mailbox) -> None:
    await box.send(task("t1", safety="idempotent"))
    await box.send(task("t2", safety="idempotent"))
    await leased(box)
    await box.post(result("t1", "partial"))
    assert (await leased(box)).task.id == "t2"


async def test_cache_is_bounded(box: Mailbox, clock: Clock, kind: Kind) -> None:
    for n in range(4):
        await box.send(task(f"t{n}", safety="idempotent", key=f"k{n}"))
        await leased(box)
        await box.post(result(f"t{n}"))
    assert (await box.send(task("again", safety="idempotent", key="k0"))).outcome == "queued"
    assert (await box.send(task("known", safety="idempotent", key="k1"))).outcome == "replayed"
    clock.at += box.limits.cached_ms + 1
    await box.compact()
    assert (await box.send(task("gone", safety="idempotent", key="k2"))).outcome == "queued"


async def test_compaction_forgets_what_is_done(box: Mailbox, clock: Clock) -> None:
    for name in ("resolved", "unfetched", "leased", "waits"):
        await box.send(task(name))
    for _ in range(3):
        await leased(box, lease_ms=10**12)
    for name in ("resolved", "unfetched"):
        await box.post(result(name))
    assert await box.take_result(ADA.pubkey) == result("resolved")
    assert await box.compact() == 1
    assert box.get("resolved") is None
    clock.at += box.limits.unfetched_ms + 1
    assert await box.compact() == 1
    assert [entry.task.id for entry in box.recent(ADA.pubkey, 9)] == ["waits", "leased"]
    assert await box.take_result(ADA.pubkey) is None
    # no recipient took it: its sender gets an error, and then it is forgotten too
    clock.at += box.limits.undelivered_ms
    assert await box.compact() == 0
    assert {entry.result.error_message for entry in box.unfetched(ADA.pubkey) if entry.result} == {"undelivered"}
    clock.at += box.limits.unfetched_ms + 1
    assert await box.compact() == 2
    assert box.recent(ADA.pubkey, 9) == []


async def test_nine_reasons_to_leave_task(kind: Kind, clock: Clock) -> None:
    async with kind.open(replace(LIMITS, lease_ms=10**9, open_per_recipient=50, max_attempts=9)) as box:
        rules = RetryRules(min_lease_age_ms=1000, max_attempts=2, max_requeues=1)
        cases: dict[str, dict[str, Any]] = {
            "late": {"safety": "idempotent", "key": "a", "deadline_ms": NOW + 2000},
            "running": {"safety": "idempotent", "key": "b"},
            "undeclared": {},
            "unsafe": {"safety": "unsafe"},
            "keyless": {"safety": "idempotent", "key": ""},
            "tried": {"safety": "idempotent", "key": "c"},
            "again": {"safety": "idempotent", "key": "d"},
            "young": {"safety": "idempotent", "key": "e"},
            "queued": {"safety": "idempotent", "key": "e"},
        }
        for name, fields in cases.items():
            if name == "young":
                clock.at += 2000
            await box.send(task(name, **fields))
            if name == "queued":
                break
            assert (await leased(box)).task.id == name
            if name == "tried":
                await box.requeue(name, duplicate_risk="idempotent", reason="r")
                await leased(box)
        tried = await box.retry_stale(rules, apply=False, running={"running"})
        assert [entry.task.id for entry in tried.requeued] == ["again"]
        done = await box.retry_stale(rules, apply=True, running={"running"})
        assert [(entry.task.id, entry.state) for entry in done.requeued] == [("again", State.QUEUED)]
        assert (done.considered, sum(done.skipped.values())) == (9, 8)
        # one lease is enough
        assert (await leased(box)).task.id == "again"
        clock.at += 2000
        await box.expire()
        last = await box.retry_stale(replace(rules, max_attempts=5), apply=True, running={"running"})
        assert last.skipped[Skip.REQUEUES] == 1
        assert set(done.skipped) | {Skip.REQUEUES} == set(Skip)
        assert (await box.retry_stale(replace(rules, scan_limit=2), apply=False)).considered == 2


async def test_watchers_hear_of_what_changed(box: Mailbox) -> None:
    heard: list[tuple[str, State]] = []
    end = box.watch(lambda entry: heard.append((entry.task.id, entry.state)))
    await box.send(task())
    await leased(box)
    with pytest.raises(errors.NoTaskError):
        await box.post(result("nobody"))
    await box.post(result())
    end()
    await box.take_result(ADA.pubkey)
    assert heard == [("t1", State.QUEUED), ("t1", State.IN_FLIGHT), ("t1", State.RESULT_PENDING)]


async def test_many_at_once_share_tasks_between_them(kind: Kind) -> None:
    async with kind.open(Limits()) as box:
        had: list[str] = []

        async def work() -> None:
            for _ in range(8):
                while (entry := await box.lease(BOB.pubkey)) is None:
                    await anyio.lowlevel.checkpoint()
                had.append(entry.task.id)
                await box.post(result(entry.task.id), lease_id=entry.lease.id if entry.lease else None)

        async def ask(name: str) -> None:
            for n in range(8):
                await box.send(task(f"{name}-{n}"))

        async with anyio.create_task_group() as group:
            for n in range(8):
                group.start_soon(ask, str(n))
                group.start_soon(work)
        assert sorted(had) == sorted(f"{a}-{b}" for a in range(8) for b in range(8))
        answers = [await box.take_result(ADA.pubkey) for _ in range(65)]
        assert sorted(a.task_id for a in answers if a) == sorted(had)
