"""Check the revocation of a grant that a live run uses: this run ends with its children, and no other run does."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from covenant.handlers import billing
from covenant.handlers.caller import Caller
from covenant.handlers.grants import capabilities
from covenant.handlers.intents import submit
from covenant.handlers.server import Server
from covenant.runtime.packages import Card
from covenant.runtime.runner import Intent, RunResult, Spent, with_spent
from covenant.wire import requests
from covenant.wire.types import AgentId
from policy import errors
from tests import intents_kit, runtime_kit, server_kit
from tests.intents_kit import ALICE, BOB, rows
from tests.runtime_kit import USED, Acts

pytestmark = pytest.mark.anyio

WRITE = "memory.write"


class Works(Acts):
    """An agent that works until its run is ended or the test says it is done. ``found``: a run can be ended."""

    def __init__(self, *, found: bool = True, answers: bool = False, fails: bool = False) -> None:
        super().__init__()
        self.found, self.answers, self.fails = found, answers, fails
        self.wholes: list[tuple[str, bool]] = []
        self.done: dict[str, anyio.Event] = {}
        self.cancelled: list[str] = []

    async def run(self, card: Card, intent: Intent, *, caller: AgentId, deadline: int | None) -> RunResult:
        over = self.done.setdefault(intent.text, anyio.Event())
        self.asked.append(intent)
        try:
            await over.wait()
        except BaseException:
            self.cancelled.append(intent.text)
            raise
        if self.wholes and not self.answers and self.wholes[-1][0] == intent.id:
            raise with_spent(errors.KilledError("it was ended"), Spent(USED, "run"))
        return RunResult(text=f"did {intent.text}", usage=USED, run_id="run")

    async def end(self, intent_id: str, *, reason: str, whole: bool = False) -> bool:
        self.wholes.append((intent_id, whole))
        self.ended.append((intent_id, reason))
        await anyio.lowlevel.checkpoint()
        if self.fails:
            raise errors.ServiceError("the supervisor ended the conversation")
        if self.found:
            next(self.done[one.text] for one in self.asked if one.id == intent_id).set()
        return self.found


class Said:
    """The result or error code of each intent, by its text."""

    def __init__(self, server: Server, group: anyio.abc.TaskGroup, works: Works) -> None:
        self._server, self._group, self._works = server, group, works
        self.came: dict[str, str] = {}

    async def ask(self, text: str, caller: Caller) -> None:
        """Submit an intent and wait until an agent works on it."""
        self._group.start_soon(self._ask, text, caller)
        while text not in self._works.done:
            await anyio.lowlevel.checkpoint()

    async def _ask(self, text: str, caller: Caller) -> None:
        asked = requests.SubmitIntent(text=text, agent="worker")
        try:
            self.came[text] = (await submit.submit_intent(self._server, caller, asked)).text
        except errors.CovenantError as e:
            self.came[text] = e.code


@contextlib.asynccontextmanager
async def _at_work(home: Path, works: Works, *asked: tuple[str, Caller]) -> AsyncIterator[tuple[Server, Said]]:
    """Have agents work on these intents; each caller holds a grant to write and one to search."""
    runtime_kit.package(home, "worker", budget=100, required='["tool.web_search"]')
    server = intents_kit.make(home, acts=works)
    await server.agents.reload()
    for caller in {one.agent.pubkey: one for _, one in asked}.values():
        await intents_kit.granted(server, caller, WRITE, "tool.web_search")
    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            said = Said(server, group, works)
            for text, caller in asked:
                await said.ask(text, caller)
            yield server, said
            for event in works.done.values():
                event.set()


def _held(server: Server, caller: Caller, action: str) -> str:
    signature: str = server.capabilities.candidates(caller.agent.pubkey, action, server.now_ms())[0].signature
    return signature


async def _revoke(server: Server, signature: str) -> None:
    asked = requests.RevokeCapability(signature_b58=signature)
    operator = server_kit.caller(server.identity.agent, operator=True)
    assert (await capabilities.revoke_capability(server, operator, asked)).removed


async def _until(said: Said, text: str) -> str:
    while text not in said.came:
        await anyio.lowlevel.checkpoint()
    return said.came[text]


@pytest.mark.parametrize("action", [WRITE, "tool.web_search"])
async def test_who_loses_grant_loses_what_runs_under_it_and_no_other_does(tmp_path: Path, action: str) -> None:
    works = Works()
    async with _at_work(tmp_path, works, ("hers", ALICE), ("his", BOB)) as (server, said):
        await _revoke(server, _held(server, ALICE, action))
        # Her run ended with its children; his run did not.
        assert works.wholes == [(works.asked[0].id, True)]
        assert works.ended[0][1] == f"revoked: the grant of `{action}`"
        assert await _until(said, "hers") == "revoked"
        assert "his" not in said.came
        (failed,) = await rows(server, "intent_failed")
        assert (failed["code"], failed["stage"], failed["run_id"]) == ("revoked", "run", "run")
        assert f"the grant of `{action}`" in failed["message"]
        assert len(await rows(server, "capability_revoked")) == 1
        # She pays for the use until then: 1 for her dispatch and its cost, 1 reserved for his.
        assert await server.memory.get(works.asked[0].id) is None
        assert [one.payer for one in await server.receipts.recent(9)] == [ALICE.agent]
    assert said.came["his"] == "did his"
    assert server.budget.unsettled() == ()
    assert (server.budget.tokens(billing.budget_of("worker")) or 0) < 100


async def test_grant_above_ends_what_runs_under_those_below(tmp_path: Path) -> None:
    works = Works()
    async with _at_work(tmp_path, works, ("his", BOB)) as (server, said):
        above = _held(server, BOB, WRITE)
        await intents_kit.granted(server, ALICE, "tool.web_search")
        given = requests.GrantCapability(action=WRITE, scope=None, subject=ALICE.agent.pubkey, parent_b58=above)
        await capabilities.grant_capability(server, BOB, given)
        await said.ask("hers", ALICE)
        await _revoke(server, above)
        assert (await _until(said, "hers"), await _until(said, "his")) == ("revoked", "revoked")


async def test_whoever_holds_another_or_had_lost_theirs_before_goes_on(tmp_path: Path) -> None:
    works = Works()
    async with _at_work(tmp_path, works, ("hers", ALICE), ("his", BOB)) as (server, said):
        first = _held(server, ALICE, WRITE)
        await intents_kit.granted(server, ALICE, WRITE, scope={"version": 1, "tiers": ["working"]})
        # His grant had expired while he was served, which is no revocation.
        await server.capabilities.revoke(_held(server, BOB, WRITE), server.now_ms())
        await _revoke(server, first)
        assert works.ended == []
        assert said.came == {}
        # The control: revoke the other grant as well.
        await _revoke(server, _held(server, ALICE, WRITE))
        assert await _until(said, "hers") == "revoked"
        assert [intent_id for intent_id, _ in works.wholes] == [works.asked[0].id]
    assert said.came["his"] == "did his"


@pytest.mark.parametrize("how", ["not there yet", "cannot be asked for"])
async def test_run_that_cannot_be_ended_ends_with_its_request(tmp_path: Path, how: str) -> None:
    works = Works(found=False, fails=how == "cannot be asked for")
    async with _at_work(tmp_path, works, ("hers", ALICE)) as (server, said):
        await _revoke(server, _held(server, ALICE, WRITE))
        assert await _until(said, "hers") == "revoked"
        assert works.cancelled == ["hers"]
        assert [row["code"] for row in await rows(server, "intent_failed")] == ["revoked"]
    assert server.budget.unsettled() == ()


async def test_answer_that_comes_with_end_is_nobodys(tmp_path: Path) -> None:
    works = Works(answers=True)
    async with _at_work(tmp_path, works, ("hers", ALICE)) as (server, said):
        await _revoke(server, _held(server, ALICE, WRITE))
        assert await _until(said, "hers") == "revoked"
        assert await server.memory.get(works.asked[0].id) is None


async def test_it_is_ended_though_whoever_takes_it_back_goes_away(tmp_path: Path) -> None:
    works = Works()
    async with _at_work(tmp_path, works, ("hers", ALICE)) as (server, said):
        signature = _held(server, ALICE, WRITE)
        whole: Any = works.end
        async with anyio.create_task_group() as group:

            async def leaves(*given: Any, **named: Any) -> Any:
                group.cancel_scope.cancel()
                return await whole(*given, **named)

            works.end = leaves  # type: ignore[method-assign]
            group.start_soon(_revoke, server, signature)
        assert await _until(said, "hers") == "revoked"
        assert works.cancelled == []
        assert [row["signature_b58"] for row in await rows(server, "capability_revoked")] == [signature]


async def test_that_it_was_taken_back_is_written_while_run_still_ends(tmp_path: Path) -> None:
    works = Works()
    async with _at_work(tmp_path, works, ("hers", ALICE)) as (server, said):
        whole: Any = works.end

        async def slowly(*given: Any, **named: Any) -> Any:
            while not await rows(server, "capability_revoked"):
                await anyio.lowlevel.checkpoint()
            return await whole(*given, **named)

        works.end = slowly  # type: ignore[method-assign]
        await _revoke(server, _held(server, ALICE, WRITE))
        assert await _until(said, "hers") == "revoked"


async def test_it_is_ended_though_log_takes_nothing_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    works = Works()
    async with _at_work(tmp_path, works, ("hers", ALICE)) as (server, said):
        whole = server.audit.append_all

        async def full(entries: Any) -> Any:
            if any(one.kind == "capability_revoked" for one in entries):
                raise errors.StoreError("no space left on the device")
            return await whole(entries)

        with monkeypatch.context() as patch:
            patch.setattr(server.audit, "append_all", full)
            with pytest.raises(errors.StoreError, match="no space"):
                await _revoke(server, _held(server, ALICE, WRITE))
        assert [intent_id for intent_id, _ in works.wholes] == [works.asked[0].id]
        assert await _until(said, "hers") == "revoked"
