"""Tasks in the mailbox, done in real sandboxes: answered, ended with their task, and done again after a kill."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from covenant.handlers import billing
from tests import a2a_kit, daemon_kit
from tests.doubles import async_client
from tests.doubles.async_client import AsyncClient
from tests.kernel import serving
from tests.kernel.serving import CALLER, Served
from tests.kernel.test_daemon_runs import Process
from tests.kernel.world import HEAD, SLOWNESS, TAIL, World

pytestmark = pytest.mark.anyio

# Long enough for a kill to hit it on any machine.
SLOW = HEAD + f"import time\ntime.sleep({5 * SLOWNESS})\nanswer = 'at last: ' + intent['text']\n" + TAIL
QUICK = HEAD + "answer = intent['text'].upper()\n" + TAIL
BURNS = HEAD + "while True: pass\n"
PATIENCE = 120 * SLOWNESS


@pytest.fixture(scope="module")
def served(warm: Path) -> Iterator[Served]:
    with serving.open_place() as base, Served(World(base, warm=warm)) as made:
        yield made
        made.quiet()


@pytest.fixture
def home(served: Served) -> Path:
    """A home of a user who is not root, with an agent that takes its time and one that never ends."""
    home = served.world.base / f"mail-{os.urandom(4).hex()}"
    (home / "agents").mkdir(parents=True)
    for name, program in (("quick", QUICK), ("slow", SLOW), ("burns", BURNS)):
        package = served.world.base / "packages" / name
        if not package.exists():
            package = served.world.package({"main.py": program}, name=name, id=name, cpu_ms=120_000 * SLOWNESS)
            served.world.sign(package)
        shutil.copytree(package, home / "agents" / name)
    for path in (home, *home.rglob("*")):
        os.chown(path, CALLER, CALLER)
    home.chmod(0o700)
    return home


async def _send(client: AsyncClient, agent: str, name: str, **fields: Any) -> None:
    me = (await client.ask("list_peers", limit=1))["peers"][0]["agent_id"]
    to = billing.budget_of(agent).model_dump()
    task = {"id": name, "sender": me, "recipient": to, "intent_text": "one two", **fields}
    for action in ("memory.write", f"a2a.send.{agent}@agent"):
        await client.ask("grant_capability", action=action, scope={})
    await client.ask("send_a2_a_task", task=task)


async def _running(served: Served, agent: str, count: int = 1) -> None:
    """Wait until the supervisor has started so many runs of the agent."""
    await _until(lambda: len(_started(served, agent)) >= count)


async def _until(met: Callable[[], bool]) -> None:
    with anyio.fail_after(PATIENCE):
        while not met():  # noqa: ASYNC110 - a row of another process
            await anyio.sleep(0.05)


def _started(served: Served, agent: str) -> list[dict[str, Any]]:
    rows = [row["kind"] for row in served.world.rows()]
    return [row for row in rows if row["type"] == "run_started" and row["agent_id"] == agent]


def _ended(served: Served) -> set[str]:
    return {row["kind"]["run_id"] for row in served.world.rows() if row["kind"]["type"] == "run_ended"}


async def _answer(client: AsyncClient) -> dict[str, Any]:
    with anyio.fail_after(PATIENCE):
        while (result := (await client.ask("try_recv_a2_a_result"))["result"]) is None:  # noqa: ASYNC110
            await anyio.sleep(0.05)
    return dict(result)


async def test_killed_daemons_task_is_done_by_next(served: Served, home: Path) -> None:
    before = len(_started(served, "slow"))
    with Process(served, home) as first:
        async with async_client.connected(home) as client:
            await _send(client, "slow", "once")
            await _send(client, "slow", "unsafe", idempotency={"duplicate_safety": "unsafe", "key": ""})
            await _running(served, "slow", before + 2)
            first.end(signal.SIGKILL)
    # By this one knows that the next one listens; it would take the stale one away itself.
    (home / "sock").unlink()
    with Process(served, home):
        async with async_client.connected(home) as client:
            results = {one["task_id"]: one for one in [await _answer(client), await _answer(client)]}
            assert (await client.ask("try_recv_a2_a_result"))["result"] is None
            assert (await client.ask("verify_audit_integrity"))["report"]["valid"] is True
    assert "at last: one two" in results["once"]["content"][0]["text"]
    assert (results["unsafe"]["status"], results["unsafe"]["error_message"]) == ("error", "interrupted")
    # the unsafe one was not started a second time
    assert len(_started(served, "slow")) == before + 3


async def test_who_takes_task_back_ends_its_sandbox(served: Served, home: Path) -> None:
    for path in (home, *home.rglob("*")):
        os.chown(path, 0, 0)
    before = len(_started(served, "burns"))
    async with daemon_kit.running(home, socket=served.path) as daemon:
        await _send(daemon.client, "burns", "endless")
        await _running(served, "burns", before + 1)
        assert (await daemon.ask("cancel_a2_a_task", task_id="endless"))["cancelled"] is True
        run_id = _started(served, "burns")[-1]["run_id"]
        await _until(lambda: run_id in _ended(served))
        # and a deadline ends one as well
        clock = daemon.server.now_ms()
        await _send(daemon.client, "burns", "late", deadline_ms=clock + 3000)
        assert (await _answer(daemon.client))["error_message"] == "deadline_exceeded"


@pytest.mark.parametrize("version", ["1.0", "0.3"])
async def test_sdk_of_a2a_asks_confined_agent(served: Served, home: Path, version: str) -> None:
    for path in (home, *home.rglob("*")):
        os.chown(path, 0, 0)
    before = len(_started(served, "quick"))
    async with daemon_kit.running(home, socket=served.path, http_port=0) as daemon:
        await daemon.grant("memory.write", "a2a.send.quick@agent")
        token = (home / "peers" / "operator.token").read_text().strip()
        url = f"http://127.0.0.1:{daemon.http_port}/a2a/agents/quick"
        async with a2a_kit.client(url, token, version=version, streaming=True) as client:
            with anyio.fail_after(PATIENCE):
                found = [one async for one in client.send_message(a2a_kit.asks("one two", "first"))]
        assert found[0].WhichOneof("payload") == "task"
        assert found[-2].artifact_update.artifact.parts[0].text == '"ONE TWO"'
        assert found[-1].status_update.status.state == a2a_kit.types.TASK_STATE_COMPLETED
        # The run of the supervisor is the one that the task names.
        assert len(_started(served, "quick")) == before + 1
        task = await a2a_kit.rpc(url, token, "tasks/get", {"id": found[0].task.id})
        assert task["result"]["metadata"]["covenant/run_id"] in _ended(served)
        assert (await daemon.ask("verify_audit_integrity"))["report"]["valid"] is True
