"""Check that agents' denials are in the daemon's log for any result of the intent; each caller sees its own."""

from __future__ import annotations

import pathlib

import pytest

from covenant.handlers.caller import Caller
from covenant.handlers.intents import denials, submit
from covenant.handlers.server import Server
from covenant.runtime.packages import Card
from covenant.runtime.runner import Intent, RunResult, Spent, with_spent
from covenant.wire import parts, requests
from policy import errors
from policy.denials import Denial, Row
from tests import intents_kit, runtime_kit, server_kit
from tests.intents_kit import ALICE, BOB

pytestmark = pytest.mark.anyio

DENIED = (Row(Denial("dns", "evil.example", "name_not_granted"), 3), Row(Denial("exec", "/bin/sh", "not_granted"), 1))
OPERATOR = server_kit.caller(runtime_kit.ALICE, operator=True)


async def succeeds(card: Card, asked: Intent) -> RunResult:
    return RunResult(text="done", usage=runtime_kit.USED, run_id="good", denials=DENIED)


async def fails(card: Card, asked: Intent) -> RunResult:
    raise with_spent(errors.DeadlineError("too late"), Spent(runtime_kit.USED, "bad", None, DENIED[:1]))


async def made(home: pathlib.Path) -> Server:
    home.mkdir()
    runtime_kit.package(home, "tester", name="tester")
    server = intents_kit.make(home)
    await server.agents.reload()
    for caller in (ALICE, BOB):
        await intents_kit.granted(server, caller, "memory.write")
    return server


async def asked(server: Server, caller: Caller, act: runtime_kit.Acts) -> None:
    server.runners._runners["python3"] = act
    await submit.submit_intent(server, caller, requests.SubmitIntent(text="go", agent="tester"))


async def shown(server: Server, caller: Caller, **fields: object) -> list[parts.Denial]:
    wanted = requests.RecentDenials.model_validate({"limit": 10, **fields})
    return list((await denials.recent_denials(server, caller, wanted)).denials)


async def test_denials_are_shown_to_whoever_asked_for_run(covenant_home: pathlib.Path) -> None:
    server = await made(covenant_home)
    await asked(server, ALICE, runtime_kit.Acts(succeeds))
    with pytest.raises(errors.DeadlineError):
        await asked(server, BOB, runtime_kit.Acts(fails))
    mine = await shown(server, ALICE)
    assert {(one.layer, one.target, one.code, one.count, one.run_id) for one in mine} == {
        ("dns", "evil.example", "name_not_granted", 3, "good"),
        ("exec", "/bin/sh", "not_granted", 1, "good"),
    }
    assert [(one.run_id, one.agent_id) for one in await shown(server, BOB)] == [("bad", "tester")]
    assert len(await shown(server, OPERATOR)) == 3
    assert [one.run_id for one in await shown(server, OPERATOR, run_id="bad")] == ["bad"]
    assert len(await shown(server, OPERATOR, limit=1)) == 1
