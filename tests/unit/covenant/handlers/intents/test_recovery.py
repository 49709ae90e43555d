"""Check recovery from kill -9 at any moment of an intent: the state of the home, and the next start on it.

Each store operation gives one moment before it and one after. At each moment the test copies the home, as a kill would
leave it, and starts a daemon on the copy.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from covenant import daemon_stores
from covenant.handlers import billing
from covenant.handlers.audit import consistency
from covenant.handlers.grants import capabilities
from covenant.handlers.intents import completion, recovery, submit
from covenant.handlers.server import Server
from covenant.handlers.state import pending_writes
from covenant.runtime.packages import Card
from covenant.runtime.runner import Intent, Runners, RunResult, Spent, with_spent
from covenant.settings import Settings
from covenant.stores.audit import event_text
from covenant.stores.audit.interface import AuditEntry, Scan
from covenant.stores.budget.interface import Reservation
from covenant.wire import requests
from covenant.wire.types import BudgetPauseCheckpoint, SettlementReceipt
from policy import errors
from policy.audit_log.chain import ChainRow
from tests import full_disk, runtime_kit, server_kit
from tests.intents_kit import ALICE
from tests.runtime_kit import USED, Acts

pytestmark = pytest.mark.anyio

_ACTS = {
    "audit": ("append", "append_all"),
    "budget": ("set_capacity", "try_debit", "settle", "refund"),
    "capabilities": ("use",),
    "checkpoints": ("save", "claim"),
    "receipts": ("append",),
    "memory": ("put",),
}
_ENDS = ("intent_dispatched", "intent_failed")


class _Moments:
    """Copies of a home, one for each moment before and after a store operation."""

    def __init__(self, home: Path, place: Path) -> None:
        self._home, self._place = home, place
        self.copies: list[tuple[str, Path]] = []
        self.watching = False

    def watch(self, server: Server) -> None:
        for store, names in _ACTS.items():
            for name in names:
                self._around(getattr(server, store), name, f"{store}.{name}")

    def _around(self, store: Any, name: str, what: str) -> None:
        whole: Callable[..., Awaitable[Any]] = getattr(store, name)

        async def act(*given: Any, **more: Any) -> Any:
            self._copy(f"before {what}")
            result = await whole(*given, **more)
            self._copy(f"after {what}")
            return result

        setattr(store, name, act)

    def _copy(self, when: str) -> None:
        if self.watching:
            copy = self._place / f"{len(self.copies):03}"
            shutil.copytree(self._home, copy)
            self.copies.append((when, copy))


async def _used_up(server: Server, card: Card) -> None:
    """Use up the agent's credits, so that its next intent waits."""
    agent = billing.budget_of(card.id)
    await server.budget.set_capacity(agent, 1)
    await server.budget.try_debit(agent, 1, "other")
    await server.budget.settle(agent, "other", 0)


async def _fails(card: Card, asked: Intent) -> RunResult:
    raise with_spent(errors.AgentError("it failed"), Spent(USED, "run-1"))


async def _never_begins(card: Card, asked: Intent) -> RunResult:
    raise errors.NoSupervisorError("nobody is there")


_WAYS: dict[str, tuple[int, Any]] = {
    "echo": (0, None),
    "done": (0, runtime_kit.echoes),
    "done and paid": (9, runtime_kit.echoes),
    "failed": (9, _fails),
    "never began": (9, _never_begins),
    "waits": (1, runtime_kit.echoes),
    "resumed": (1, runtime_kit.echoes),
}


@pytest.mark.parametrize("way", _WAYS)
async def test_kill_at_any_moment_leaves_no_intent_without_its_row(way: str, home: Path, tmp_path: Path) -> None:
    per_hour, act = _WAYS[way]
    clock = server_kit.Clock()
    if act is not None:
        runtime_kit.package(home, "a", budget=per_hour, required='["tool.call.x"]')
    moments = _Moments(home, tmp_path / "copies")
    async with daemon_stores.opened(Settings(home=home), clock=clock) as opened:
        server = opened.server
        server.runners = Runners({"python3": Acts(act)}) if act else server.runners
        await server.agents.reload()
        for action, scope in (("memory.write", {}), ("tool.call.x", {"version": 1, "max_uses": 5})):
            signed = capabilities.from_daemon(server, ALICE.agent, action, scope, None)
            await capabilities.give(server, server.identity.agent, signed)
        if way in {"waits", "resumed"}:
            await _used_up(server, server.agents.find("a"))
        moments.watch(server)
        moments.watching = way != "resumed"
        asked = requests.SubmitIntent(text="words", agent=None if act is None else "a")
        try:
            await submit.submit_intent(server, ALICE, asked)
        except errors.CovenantError:
            assert way in {"failed", "never began", "waits", "resumed"}
        if way == "resumed":
            clock.at_ms += 3_600_000
            moments.watching = True
            (waiting,) = server.checkpoints.active()
            await submit.resume_intent(server, ALICE, requests.ResumeIntent(intent_id=waiting.intent_id))
    assert len(moments.copies) >= 8
    accepted: set[str] = set()
    for when, copy in moments.copies:
        await _is_whole(when, copy, clock, way, accepted)
    assert len(accepted) == (way != "waits")


async def _is_whole(when: str, copy: Path, clock: server_kit.Clock, way: str, accepted: set[str]) -> None:
    """Start a daemon on the copy and check it. Every accepted intent has its row."""
    async with daemon_stores.opened(Settings(home=copy), clock=clock) as opened:
        server = opened.server
        left = {one.paired_receipt: one for one in server.budget.unsettled()}
        assert all(one.submitter == ALICE.agent for one in left.values()), when
        before = await _ends(server)
        await recovery.recover_open_intents(server)
        assert server.budget.unsettled() == (), when
        after = await _ends(server)
        accepted.update(left)
        # Each accepted intent has one row about its end, which its submitter can find.
        assert all(len(after.get(one, ())) == 1 for one in accepted), (when, after)
        assert {one: rows for one, rows in after.items() if one not in left} == {
            one: rows for one, rows in before.items() if one not in left
        }, when
        answer = {one: await server.memory.get(one) for one in left}
        assert all(answer[one] is None or after[one] == ["intent_dispatched"] for one in left), when
        if way == "resumed":
            waits = server.checkpoints.active()
            rows = [row.kind for row in await server.audit.recent(1000)]
            became = [row["intent_id"] for row in rows if row["type"] == "intent_resumed"]
            # It still waits, or the log names the intent that it was resumed as, and that intent's end.
            assert waits or (became and all(after.get(one) for one in became)), when
        await _a_second_start_changes_nothing(server, when)


async def _ends(server: Server) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for row in await server.audit.recent(1000, issuer_pubkey=ALICE.agent.pubkey):
        if row.kind["type"] in _ENDS:
            found.setdefault(row.kind["intent_id"], []).append(row.kind["type"])
    return found


async def _a_second_start_changes_nothing(server: Server, when: str) -> None:
    before = await server.audit.recent(1000)
    await recovery.recover_open_intents(server)
    assert await server.audit.recent(1000) == before, when


async def test_what_was_written_of_intent_before_it_was_asked_again_is_not_its_end(home: Path) -> None:
    """A failed intent that is submitted again under its key has the same id."""
    clock = server_kit.Clock()
    async with daemon_stores.opened(Settings(home=home), clock=clock) as opened:
        server = opened.server
        agent = billing.budget_of("a")
        await server.audit.append_all([recovery._failed(server, Reservation(agent, 0, "k", 1, ALICE.agent))])
        clock.at_ms += 1
        await server.budget.try_debit(agent, 0, "k", submitter=ALICE.agent)
        await recovery.recover_open_intents(server)
        assert await _ends(server) == {"k": ["intent_failed"] * 2}


async def test_end_long_or_stands_behind_many_is_found(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recovery holds a bounded part of the log at once; a dispatched intent must not get the row of a failed one."""
    monkeypatch.setattr(event_text, "MOST_HELD_BYTES", 1)
    names = [f"k{number}" for number in range(3)]
    async with daemon_stores.opened(Settings(home=home), clock=server_kit.Clock()) as opened:
        server = opened.server
        for name in names:
            await server.budget.try_debit(billing.budget_of("a"), 0, name, submitter=ALICE.agent)
            done = {"intent_text": "words", "matched_agent": "a", "result_hash_hex": "0" * 64, "status": "ok"}
            # The rows about one intent are not about the others.
            failed = {"matched_agent": "a", "run_id": None, "stage": "memory", "code": "c", "message": "m"}
            rows = [AuditEntry("intent_failed", {"intent_id": name, **failed}, ALICE.agent)] * 3
            await server.audit.append_all(
                [*rows, AuditEntry("intent_dispatched", {"run_id": None, "intent_id": name, **done}, ALICE.agent)]
            )
        before = await server.audit.scan(lambda row: False, 1)
        await recovery.recover_open_intents(server)
        assert server.budget.unsettled() == ()
        assert (await server.audit.scan(lambda row: False, 1)).scanned == before.scanned


async def test_log_not_looked_through_tells_of_no_intent_that_it_failed(home: Path) -> None:
    async with daemon_stores.opened(Settings(home=home), clock=server_kit.Clock()) as opened:
        server = opened.server
        await server.budget.try_debit(billing.budget_of("a"), 0, "k", submitter=ALICE.agent)

        async def cut(*given: Any, **more: Any) -> Scan:
            return Scan((), 1, cut=True)

        server.audit.scan = cut  # type: ignore[method-assign]
        with pytest.raises(errors.StoreError, match="looked through"):
            await recovery.recover_open_intents(server)
        assert [one.paired_receipt for one in server.budget.unsettled()] == ["k"]
        assert await _ends(server) == {}


@pytest.mark.parametrize("way", ["done", "failed"])
@pytest.mark.parametrize("files", [("working.jsonl",), ("ledger.jsonl",), ("working.jsonl", "events.jsonl")])
async def test_what_run_used_is_neither_given_back_nor_lost_where_disk_is_full(
    home: Path, monkeypatch: pytest.MonkeyPatch, way: str, files: tuple[str, ...]
) -> None:
    runtime_kit.package(home, "a", budget=9)
    acts = Acts(_fails if way == "failed" else runtime_kit.echoes)
    clock = server_kit.Clock()
    async with daemon_stores.opened(Settings(home=home), clock=clock) as opened:
        server = opened.server
        await _ready(server, acts)
        asked = requests.SubmitIntent(text="words", agent="a", idempotency_key="k")
        agent, whole = billing.budget_of("a"), acts.act

        async def fills(card: Card, intent_: Intent) -> RunResult:
            full_disk.refuse(monkeypatch, *files)
            return await whole(card, intent_)

        acts.act = fills
        with pytest.raises(errors.StoreFullError, match="cannot be written now"):
            await submit.submit_intent(server, ALICE, asked)
        # Its credit is taken, and every later intent is refused until its end is written.
        ((intent_id, credits_),) = [(one.paired_receipt, one.credits) for one in server.budget.unsettled()]
        assert (credits_, server.budget.tokens(agent), intent_id) == (1, 8, acts.asked[0].id)
        for again in (asked, requests.SubmitIntent(text="others", agent="a")):
            with pytest.raises(errors.StoreFullError):
                await submit.submit_intent(server, ALICE, again)
        assert len(acts.asked) == 1
        monkeypatch.undo()
        await server.unfinished.write()
        assert (len(server.unfinished), server.budget.unsettled()) == (0, ())
        receipt = await server.receipts.get(intent_id)
        assert receipt is not None
        assert receipt.credits_consumed == billing.cost(USED) == 2
        assert server.budget.tokens(agent) == 9 - 2
        assert (await _ends(server))[intent_id].count("intent_dispatched" if way == "done" else "intent_failed") == 1
        if way == "done":
            assert (await submit.submit_intent(server, ALICE, asked)).text == "a: words"
            assert len(acts.asked) == 1
            assert len(await server.receipts.recent(9)) == 2


@pytest.mark.parametrize("agent", [None, "a"])
@pytest.mark.parametrize("key", [None, "k"])
async def test_record_whose_receipt_found_no_room_gets_it_before_the_intent_ends(
    home: Path, monkeypatch: pytest.MonkeyPatch, agent: str | None, key: str | None
) -> None:
    runtime_kit.package(home, "a", budget=9)
    async with daemon_stores.opened(Settings(home=home), clock=server_kit.Clock()) as opened:
        server = opened.server
        await _ready(server, Acts())
        put = server.memory.put

        async def fills(*given: Any, **more: Any) -> None:
            await put(*given, **more)
            full_disk.refuse(monkeypatch, "working.jsonl")

        monkeypatch.setattr(server.memory, "put", fills)
        with pytest.raises(errors.StoreFullError, match="cannot be written now"):
            await submit.submit_intent(
                server, ALICE, requests.SubmitIntent(text="words", agent=agent, idempotency_key=key)
            )
        (waiting,) = server.budget.unsettled()
        monkeypatch.undo()
        await server.unfinished.write()
        assert await _ends(server) == {waiting.paired_receipt: ["intent_dispatched"]}
        receipts = await server.receipts.recent(9)
        assert [one.memory_record_id for one in receipts].count(waiting.paired_receipt) == 1
        assert (
            await consistency.verify(
                server, server_kit.caller(server.identity.agent, operator=True), requests.Verify(window=10)
            )
        ).drift == ()


async def test_what_no_disk_took_until_daemon_was_killed_is_taken_as_it_was_reserved(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime_kit.package(home, "a", budget=9)
    acts, clock = Acts(), server_kit.Clock()
    copy, agent = tmp_path / "copy", billing.budget_of("a")
    async with daemon_stores.opened(Settings(home=home), clock=clock) as opened:
        await _ready(opened.server, acts)
        full_disk.refuse(monkeypatch, "working.jsonl")
        with pytest.raises(errors.StoreFullError):
            await submit.submit_intent(opened.server, ALICE, requests.SubmitIntent(text="words", agent="a"))
        shutil.copytree(home, copy)
        monkeypatch.undo()
    async with daemon_stores.opened(Settings(home=copy), clock=clock) as opened:
        await recovery.recover_open_intents(opened.server)
        assert (opened.server.budget.unsettled(), opened.server.budget.tokens(agent)) == ((), 8)
        assert await _ends(opened.server) == {acts.asked[0].id: ["intent_failed"]}


@pytest.mark.parametrize(
    "fault", [errors.ReservationError("it is settled"), errors.MemoryStoreError("not a database")], ids=lambda e: e.code
)
async def test_what_no_room_mends_does_not_keep_all_others_from_running(
    home: Path, fault: errors.CovenantError
) -> None:
    left, written = pending_writes.PendingWrites(), list[str]()

    async def broken() -> None:
        raise fault

    async def whole() -> None:
        written.append("whole")

    left.keep("broken", broken)
    left.keep("whole", whole)
    await left.write()
    assert (len(left), written) == (0, ["whole"])


async def _ready(server: Server, acts: Acts) -> None:
    """Prepare an agent that follows the test, and Alice with the grant to call it."""
    server.runners = Runners({"python3": acts})
    await server.agents.reload()
    signed = capabilities.from_daemon(server, ALICE.agent, "memory.write", {}, None)
    await capabilities.give(server, server.identity.agent, signed)


async def test_refused_budget_leaves_what_waits_where_it_is(home: Path) -> None:
    """Others took the credits before the resume: the intent keeps its id and waits on, and its checkpoint stays."""
    clock = server_kit.Clock()
    runtime_kit.package(home, "a", budget=1)
    async with daemon_stores.opened(Settings(home=home), clock=clock) as opened:
        server = opened.server
        server.runners = Runners({"python3": Acts()})
        await server.agents.reload()
        signed = capabilities.from_daemon(server, ALICE.agent, "memory.write", {}, None)
        await capabilities.give(server, server.identity.agent, signed)
        await _used_up(server, server.agents.find("a"))
        with pytest.raises(errors.BudgetExhaustedError):
            await submit.submit_intent(server, ALICE, requests.SubmitIntent(text="words", agent="a"))
        waiting: BudgetPauseCheckpoint
        (waiting,) = server.checkpoints.active()
        # The balance looks sufficient, but another intent takes it before the debit.
        server.budget.tokens = lambda agent: 5  # type: ignore[method-assign]
        with pytest.raises(errors.BudgetExhaustedError, match=f"`{waiting.intent_id}` waits"):
            await submit.resume_intent(server, ALICE, requests.ResumeIntent(intent_id=waiting.intent_id))
        assert server.checkpoints.active() == (waiting,)


@pytest.mark.parametrize("error", [errors.LedgerError("it does not hold together"), errors.StoreError("it broke")])
async def test_end_that_log_does_not_take_is_written_once_it_does(home: Path, error: Exception) -> None:
    runtime_kit.package(home, "a", budget=9)
    acts = Acts()
    async with daemon_stores.opened(Settings(home=home), clock=server_kit.Clock()) as opened:
        server = opened.server
        await _ready(server, acts)
        whole = server.audit.append_all

        async def refuses(entries: Sequence[AuditEntry]) -> list[str]:
            if any(one.kind == "intent_dispatched" for one in entries):
                raise error
            return await whole(entries)

        server.audit.append_all = refuses  # type: ignore[method-assign]
        with pytest.raises(type(error), match="cannot be written now"):
            await submit.submit_intent(server, ALICE, requests.SubmitIntent(text="words", agent="a"))
        assert len(server.unfinished) == 1
        server.audit.append_all = whole  # type: ignore[method-assign]
        await server.unfinished.write()
        assert await _ends(server) == {acts.asked[0].id: ["intent_dispatched"]}
        assert (server.budget.unsettled(), len(await server.receipts.recent(9))) == ((), 2)


@pytest.mark.parametrize("resource", ["compute", "memory"])
async def test_receipt_that_slow_disk_takes_later_is_the_only_one(
    home: Path, monkeypatch: pytest.MonkeyPatch, resource: str
) -> None:
    runtime_kit.package(home, "a", budget=9)
    clock = server_kit.Clock()
    async with daemon_stores.opened(Settings(home=home), clock=clock) as opened:
        server = opened.server
        await _ready(server, Acts())
        whole, late, scopes = server.receipts.append, list[SettlementReceipt](), list[anyio.CancelScope]()

        async def hangs(receipt: SettlementReceipt) -> None:
            if receipt.resource != resource:
                return await whole(receipt)
            late.append(receipt)
            scopes[-1].cancel()
            return await anyio.sleep_forever()

        async def takes_all(receipt: SettlementReceipt) -> None:
            # In their order.
            while late:
                await whole(late.pop(0))
            await whole(receipt)

        def writing() -> anyio.CancelScope:
            scopes.append(anyio.CancelScope(shield=True))
            return scopes[-1]

        monkeypatch.setattr(completion, "writing", writing)
        monkeypatch.setattr(server.receipts, "append", hangs)
        with pytest.raises(errors.StoreError):
            await submit.submit_intent(server, ALICE, requests.SubmitIntent(text="words", agent="a"))
        monkeypatch.setattr(server.receipts, "append", takes_all)
        clock.at_ms += 60_000
        await server.unfinished.write()
        assert (server.budget.unsettled(), len(server.unfinished)) == ((), 0)
        receipts = [one.resource for one in await server.receipts.recent(9)]
        assert sorted(receipts) == ["compute", "memory"]


@pytest.mark.parametrize("way", ["done", "failed"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", ["receipts.append", "memory.put", "audit.append_all", "budget.settle"])
async def test_end_cut_off_in_any_step_is_written_once(
    home: Path, monkeypatch: pytest.MonkeyPatch, way: str, when: str, step: str
) -> None:
    """The store hangs until the deadline of the end has passed; the requested write has happened by then or has not."""
    runtime_kit.package(home, "a", budget=9)
    acts = Acts()
    async with daemon_stores.opened(Settings(home=home), clock=server_kit.Clock()) as opened:
        server = opened.server
        await _ready(server, acts)
        of, _, name = step.partition(".")
        store = getattr(server, of)
        whole = getattr(store, name)

        async def hangs(*given: Any, **more: Any) -> Any:
            if when == "after":
                await whole(*given, **more)
            scopes[-1].cancel()
            await anyio.sleep_forever()

        async def begins(card: Card, asked: Intent) -> RunResult:
            setattr(store, name, hangs)
            return await (_fails if way == "failed" else runtime_kit.echoes)(card, asked)

        scopes: list[anyio.CancelScope] = []

        def writing() -> anyio.CancelScope:
            scopes.append(anyio.CancelScope(shield=True))
            return scopes[-1]

        acts.act = begins
        monkeypatch.setattr(completion, "writing", writing)
        asked = requests.SubmitIntent(text="words", agent="a", idempotency_key="k")
        never = (way, step) == ("failed", "memory.put")
        # The answer says nothing that is not on disk.
        with pytest.raises(errors.AgentError if never else errors.StoreError):
            await submit.submit_intent(server, ALICE, asked)
        setattr(store, name, whole)
        assert len(server.unfinished) == (not never)
        await server.unfinished.write()
        intent_id = acts.asked[0].id
        ended = await _ends(server)
        assert ended == {intent_id: ["intent_dispatched" if way == "done" else "intent_failed"]}
        assert (server.budget.unsettled(), server.budget.tokens(billing.budget_of("a"))) == ((), 7)
        kinds = [row.kind["type"] for row in await server.audit.recent(100)]
        receipts = await server.receipts.recent(9)
        assert kinds.count("receipt_written") == len(receipts) == (2 if way == "done" else 1)
        assert kinds.count("run_usage") == 1
        if way == "done":
            assert (await submit.submit_intent(server, ALICE, asked)).text == "a: words"
            assert len(acts.asked) == 1


async def test_reservation_is_whole_or_not_at_all_whoever_goes_away(home: Path) -> None:
    """A reservation that is cut off halfway would stay open until the next start, and so would its key."""
    runtime_kit.package(home, "a", budget=9)
    acts = Acts()
    async with daemon_stores.opened(Settings(home=home), clock=server_kit.Clock()) as opened:
        server = opened.server
        await _ready(server, acts)
        whole = server.budget.try_debit

        asked = requests.SubmitIntent(text="words", agent="a", idempotency_key="k")
        with anyio.CancelScope() as scope:

            async def leaves(*given: Any, **more: Any) -> Any:
                scope.cancel()
                await anyio.lowlevel.checkpoint()
                return await whole(*given, **more)

            server.budget.try_debit = leaves  # type: ignore[method-assign]
            await submit.submit_intent(server, ALICE, asked)
        assert scope.cancelled_caught
        server.budget.try_debit = whole  # type: ignore[method-assign]
        assert (server.budget.unsettled(), server.budget.tokens(billing.budget_of("a"))) == ((), 9)
        assert (await submit.submit_intent(server, ALICE, asked)).text == "a: words"


async def test_rows_that_hung_disk_takes_late_are_not_written_again(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the deadline the rows are still being written, and no scan finds them: only a later row proves their fate."""
    runtime_kit.package(home, "a", budget=9)
    acts = Acts()
    async with daemon_stores.opened(Settings(home=home), clock=server_kit.Clock()) as opened:
        server = opened.server
        await _ready(server, acts)
        log: Any = server.audit
        whole, hangs, goes_on = log._files.append, threading.Event(), threading.Event()
        scopes: list[anyio.CancelScope] = []

        def append(written: Sequence[ChainRow]) -> None:
            if any(b'"intent_dispatched"' in row.line for row in written):
                hangs.set()
                assert goes_on.wait(60)
            whole(written)

        def writing() -> anyio.CancelScope:
            scopes.append(anyio.CancelScope(shield=True))
            return scopes[-1]

        async def submits() -> None:
            with pytest.raises(errors.StoreError):
                await submit.submit_intent(server, ALICE, requests.SubmitIntent(text="words", agent="a"))

        async def until(look: Callable[[], object]) -> None:
            while not look():  # noqa: ASYNC110 - what a thread did
                await anyio.sleep(0.002)

        log._files.append = append
        monkeypatch.setattr(completion, "writing", writing)
        try:
            with anyio.fail_after(60):
                async with anyio.create_task_group() as group:
                    group.start_soon(submits)
                    await until(hangs.is_set)
                    scopes[-1].cancel()
                    await until(lambda: len(server.unfinished))
                    group.start_soon(server.unfinished.write)
                    await until(lambda: log._turns._queue)
                    goes_on.set()
        finally:
            goes_on.set()
        assert await _ends(server) == {acts.asked[0].id: ["intent_dispatched"]}
        kinds = [row.kind["type"] for row in await server.audit.recent(100)]
        assert (kinds.count("run_usage"), kinds.count("receipt_written")) == (1, 2)
        assert (server.budget.unsettled(), len(server.unfinished)) == ((), 0)
