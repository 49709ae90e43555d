"""Attacks on bounds: a peer with few rights, or a foreign Hermes API.

Each tries to make the daemon hold or write too much, or do something twice.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from aiohttp import web

from covenant.handlers.intents import pipeline, submit
from covenant.handlers.server import Server
from covenant.runtime import hermes as hermes_module
from covenant.runtime.agents import Agents
from covenant.runtime.hermes import Hermes
from covenant.runtime.hermes_api import HermesApi
from covenant.runtime.runner import Intent, RunResult
from covenant.wire import requests
from policy import errors
from tests import daemon_kit, hermes_double, intents_kit, runtime_kit, server_kit
from tests.doubles import async_client
from tests.doubles.audit import InMemoryAudit
from tests.hermes_double import Run, Script
from tests.intents_kit import ALICE, rows

pytestmark = pytest.mark.anyio

NOW_MS = 1_790_000_000_000
SECONDS = 60.0


# Intents that wait ----------------------------------------------------------------------------------------------


async def _poor(home: Path, clock: server_kit.Clock) -> tuple[Server, runtime_kit.Acts]:
    """A server with one agent whose credits are spent."""
    acts = runtime_kit.Acts()
    runtime_kit.package(home, "a", budget=2)
    server = intents_kit.make(home, acts=acts, now_ms=clock)
    await server.agents.reload()
    await intents_kit.granted(server, ALICE, "memory.write")
    await submit.submit_intent(server, ALICE, requests.SubmitIntent(text="first", agent="a"))
    return server, acts


async def test_intent_with_key_is_done_once_if_it_was_resumed_as_well(tmp_path: Path) -> None:
    clock = server_kit.Clock()
    server, _ = await _poor(tmp_path, clock)
    asked = requests.SubmitIntent(text="second", agent="a", idempotency_key="/k")
    with pytest.raises(errors.BudgetExhaustedError):
        await submit.submit_intent(server, ALICE, asked)
    (waiting,) = server.checkpoints.active()
    clock.at_ms += 3_600_000
    resumed = await submit.resume_intent(server, ALICE, requests.ResumeIntent(intent_id=waiting.intent_id))
    clock.at_ms += 3_600_000
    again = await submit.submit_intent(server, ALICE, asked)
    assert again.intent_id == resumed.intent_id
    assert [row["intent_text"] for row in await rows(server, "intent_dispatched")] == ["first", "second"]


@pytest.mark.parametrize(("most", "most_bytes"), [(3, 1 << 20), (1 << 20, 20)])
async def test_no_more_intents_wait_for_one_submitter_than_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, most_bytes: int
) -> None:
    monkeypatch.setattr(pipeline, "_MOST_WAITING", most)
    monkeypatch.setattr(pipeline, "_MOST_WAITING_BYTES", most_bytes)
    server, _ = await _poor(tmp_path, server_kit.Clock())
    for number in range(3):
        with pytest.raises(errors.BudgetExhaustedError):
            await submit.submit_intent(server, ALICE, requests.SubmitIntent(text=f"éé {number}", agent="a"))
    with pytest.raises(errors.BusyError, match="as many intents"):
        await submit.submit_intent(server, ALICE, requests.SubmitIntent(text="éé 3", agent="a"))
    assert len(server.checkpoints.active()) == 3
    assert [row["code"] for row in await rows(server, "intent_failed")][-1] == errors.BusyError.code


# Rows that anybody may cause ------------------------------------------------------------------------------------


async def test_who_may_nothing_writes_no_long_rows(covenant_home: Path) -> None:
    long = "\x1b" * 100_000
    async with daemon_kit.running(covenant_home) as daemon:
        made = await daemon.ask("enroll_peer", display="eve@local", actions=["memory.write"])
        async with async_client.connected(covenant_home, token=made["token_b58"]) as eve:
            asked: list[tuple[str, dict[str, Any]]] = [
                ("submit_intent", {"text": "x", "agent": long}),
                ("post_a2_a_result", {"result": {"task_id": long, "status": "ok"}}),
                ("cancel_a2_a_task", {"task_id": "t", "reason": long}),
                ("get_secret", {"name": long}),
                ("grant_capability", {"action": long, "subject": long}),
                ("call_tool", {"name": long}),
                ("resume_intent", {"intent_id": long}),
                ("revoke_capability", {"signature_b58": long}),
            ]
            for kind, fields in asked:
                with pytest.raises(errors.CovenantError):
                    await eve.ask(kind, **fields)
        written = (await daemon.server.audit.recent(1000))[: 3 * len(asked)]
        assert {"intent_failed", "a2_a_result_rejected"} <= {row.kind["type"] for row in written}
        assert max(len(json.dumps(row.kind)) for row in written) < 4096


# A foreign Hermes API ---------------------------------------------------------------------------


def _api(url: str) -> HermesApi:
    return HermesApi(url, hermes_double.KEY)


@asynccontextmanager
async def _hermes(home: Path, script: Script, policy: str) -> AsyncIterator[tuple[Any, Hermes, InMemoryAudit, Any]]:
    more = f'[hermes]\ntools_allowed = ["t"]\napproval_policy = "{policy}"\n'
    runtime_kit.package(home, "remote", runtime="hermes", entry="", more=more)
    agents = Agents(home)
    await agents.reload()
    # The real log: what it refuses to write is part of it.
    log = InMemoryAudit(issuer=runtime_kit.ALICE, now_ms=lambda: NOW_MS)
    async with (
        hermes_double.serving(script) as double,
        Hermes(
            HermesApi(double.url, hermes_double.KEY), audit=log, verify=runtime_kit.trusting, now_ms=lambda: NOW_MS
        ) as one,
    ):

        async def run() -> RunResult:
            with anyio.fail_after(SECONDS):
                asked = Intent("intent-1", "hi", NOW_MS)
                return await one.run(agents.find("remote"), asked, caller=runtime_kit.ALICE, deadline=None)

        yield run, one, log, double


async def test_api_that_asks_for_approvals_without_end_is_stopped(tmp_path: Path) -> None:
    async def script(run: Run) -> None:
        run.status = "waiting_for_approval"
        for number in range(200):
            run.say("approval.request", command="x" * 1000, request_id=str(number))

    async with _hermes(tmp_path, script, "operator-prompt") as (run, one, log, double):
        with pytest.raises(errors.HermesError, match="approvals at once"):
            await run()
        assert one.approvals() == ()
        assert len(await log.recent(1000)) == hermes_module._MOST_WAITING + 1
        assert next(iter(double.runs.values())).stopped == 1


async def test_api_that_tells_of_tools_without_end_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hermes_module, "_MOST_ROWS", 20)

    async def script(run: Run) -> None:
        run.status = "running"
        for _ in range(100):
            run.say("tool.completed", tool="t", duration=0.1)

    async with _hermes(tmp_path, script, "auto-deny") as (run, _, log, double):
        with pytest.raises(errors.HermesError, match="more than 20 things"):
            await run()
        assert len(await log.recent(1000)) == 20
        assert next(iter(double.runs.values())).stopped == 1


async def test_counts_that_no_row_holds_are_none(tmp_path: Path) -> None:
    huge = 10**3000

    async def script(run: Run) -> None:
        run.say("approval.request", choices=["once", "deny"])
        await run.until(lambda: bool(run.approvals))
        run.say("approval.responded", choice="deny", resolved=huge)
        await hermes_double.answers(run)

    async def approval(request: web.Request) -> web.StreamResponse:
        for run in double.runs.values():
            run.approvals.append(await request.json())
            run.wake()
        return web.Response(text=f'{{"resolved": {huge}}}', content_type="application/json")

    async with _hermes(tmp_path, script, "auto-deny") as (run, _, log, double):
        double.instead["/runs/run_1/approval"] = approval
        assert (await run()).text == "You said: hi"
        resolved = [row.kind["resolved"] for row in await log.recent(100) if "resolved" in row.kind]
        assert max(resolved) < 2**32
