"""A whole daemon and its agents: packages that come and go, and a run at a Hermes API that waits for the operator."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from covenant import daemon as daemon_module
from covenant.handlers.server import Server
from covenant.keys import signing
from covenant.runtime.packages import Card
from covenant.runtime.runner import Intent, Runners, RunResult
from policy import decide, errors
from sandbox.storage import package_reader as reader
from tests import daemon_kit, hermes_double, runtime_kit
from tests.daemon_kit import Daemon
from tests.doubles import async_client
from tests.hermes_double import KEY, Run

pytestmark = pytest.mark.anyio

SECONDS = 60.0


async def _listed(daemon: Daemon) -> dict[str, dict[str, Any]]:
    return {one["directory"]: one for one in (await daemon.ask("list_agents"))["agents"]}


async def _rows(daemon: Daemon, kind: str) -> list[dict[str, Any]]:
    found = [one.kind for one in await daemon.server.audit.recent(1000)]
    return [one for one in reversed(found) if one["type"] == kind]


async def test_package_that_comes_is_agent_without_restart(covenant_home: Path) -> None:
    covenant_home.mkdir(mode=0o700)
    runtime_kit.package(covenant_home, "first")
    async with daemon_kit.running(covenant_home) as daemon:
        assert {name: one["routable"] for name, one in (await _listed(daemon)).items()} == {"first": True}
        second = runtime_kit.package(covenant_home, "second", budget=7) / "agent.toml"
        second.write_text(second.read_text().replace("version =", 'description = "Says hello"\nversion =', 1))
        (covenant_home / "agents" / "third").mkdir()
        (covenant_home / "agents" / "third" / "agent.toml").write_text("[agent\n")
        await _until(lambda: _has(daemon, "second", "third"))
        listed = await _listed(daemon)
        assert (listed["second"]["routable"], listed["second"]["budget_credits_per_hour"]) == (True, 7)
        assert (listed["second"]["description"], listed["first"].get("description")) == ("Says hello", None)
        assert listed["third"]["routable"] is False
        assert listed["third"]["error"]
        runtime_kit.package(covenant_home, "first", directory="third")
        await _until(lambda: _unroutable(daemon, "first"))
        with pytest.raises(errors.CovenantError) as raised:
            await daemon.ask("submit_intent", text="x", agent="first")
        assert raised.value.code == errors.AgentIdTakenError.code
        rows = await _rows(daemon, "agents_reloaded")
        assert [rows[0]["cause"], rows[0]["added"]] == ["start", ["first"]]
        assert {row["cause"] for row in rows[1:]} == {"inotify"}


async def test_operator_alone_has_daemon_look_again(covenant_home: Path) -> None:
    async with daemon_kit.running(covenant_home) as daemon:
        peer = await daemon.ask("enroll_peer", display="guest@local", actions=["memory.write"])
        async with async_client.connected(covenant_home, token=peer["token_b58"]) as guest:
            assert (await guest.ask("list_agents"))["agents"] == []
            with pytest.raises(errors.CovenantError) as raised:
                await guest.ask("reload_agents")
        assert raised.value.code == errors.OperatorOnlyError.code
        assert (await daemon.ask("reload_agents"))["agents"] == []


async def test_approval_goes_by_way_of_daemon_to_operator_and_back(covenant_home: Path) -> None:
    async def asks(run: Run) -> None:
        run.say("approval.request", command="rm -r x", description="removes x", choices=["once", "deny"])
        run.status = "waiting_for_approval"
        await run.until(lambda: bool(run.approvals))
        await hermes_double.answers(run)

    covenant_home.mkdir(mode=0o700)
    _signed(covenant_home)
    async with (
        hermes_double.serving(asks) as double,
        daemon_kit.running(covenant_home, hermes_base_url=double.url, hermes_api_key=KEY) as daemon,
        async_client.connected(covenant_home) as asking,
    ):
        await daemon.grant("memory.write")
        await asking.send("submit_intent", text="remove it", agent="remote")
        await _until(lambda: _waits(daemon))
        (waiting,) = (await daemon.ask("list_approvals"))["approvals"]
        assert (waiting["agent_id"], waiting["command"]) == ("remote", "rm -r x")
        with pytest.raises(errors.CovenantError) as raised:
            await daemon.ask("resolve_approval", approval_id=waiting["id"], choice="always")
        assert raised.value.code == errors.NoApprovalError.code
        await daemon.ask("resolve_approval", approval_id=waiting["id"], choice="deny")
        with anyio.fail_after(SECONDS):
            result = await asking.receive()
        assert (result["text"], result["run_id"]) == ("You said: remove it", "run_1")
        assert [one.approvals for one in double.runs.values()] == [[{"choice": "deny"}]]
        resolved = await _rows(daemon, "hermes_approval_resolved")
        assert [(row["choice"], row["resolved"]) for row in resolved] == [("deny", 1)]
        assert [row["choice"] for row in await _rows(daemon, "hermes_approval_answered")] == ["deny"]
        (used,) = await _rows(daemon, "run_usage")
        assert (used["backend"], used["run_id"], used["cpu_ms"]) == ("hermes", "run_1", None)


async def test_daemon_that_ends_says_so_of_what_it_was_at(covenant_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client gets its answer within the daemon's patience; this run takes longer."""
    monkeypatch.setattr(daemon_module, "STOP_SECONDS", 0.2)
    began = anyio.Event()

    async def waits(card: Card, intent: Intent) -> RunResult:
        began.set()
        await anyio.sleep_forever()
        raise AssertionError

    def prepare(server: Server) -> None:
        server.runners = Runners({"python3": runtime_kit.Acts(waits)})

    covenant_home.mkdir(mode=0o700)
    runtime_kit.package(covenant_home, "slow", budget=5)
    async with daemon_kit.running(covenant_home, prepare=prepare) as daemon:
        await daemon.grant("memory.write")
        await daemon.client.send("submit_intent", text="x", agent="slow")
        with anyio.fail_after(SECONDS):
            await began.wait()
    lines = (covenant_home / "audit" / "events.jsonl").read_text().splitlines()
    (failed,) = [one["kind"] for one in map(json.loads, lines) if one["kind"]["type"] == "intent_failed"]
    assert (failed["matched_agent"], failed["stage"], failed["code"]) == ("slow", "run", "stopped")
    async with daemon_kit.running(covenant_home) as daemon:
        assert not daemon.server.budget.unsettled()
        assert (await daemon.ask("verify_audit_integrity"))["report"]["valid"] is True


def _signed(home: Path) -> None:
    """A hermes agent that the home's trust root answers for."""
    now_ms = int(time.time() * 1000)
    key = Ed25519PrivateKey.generate()
    (home / "trust").mkdir(mode=0o700)
    root = home / "trust" / "root.json"
    root.write_bytes(signing.new_root("tester", key, now_ms=now_ms))
    root.chmod(0o600)
    package = runtime_kit.package(home, "remote", runtime="hermes", entry="")
    read = reader.read(package)
    terms = signing.Terms(serial=now_ms)
    statement = signing.statement(read, decide.manifest_of(read), terms, now_ms=now_ms)
    signing.write_envelope(package, signing.sign(statement, key))


async def _has(daemon: Daemon, *directories: str) -> bool:
    return set(directories) <= set(await _listed(daemon))


async def _unroutable(daemon: Daemon, agent_id: str) -> bool:
    return not any(one["routable"] for one in (await _listed(daemon)).values() if one["id"] == agent_id)


async def _waits(daemon: Daemon) -> bool:
    return bool((await daemon.ask("list_approvals"))["approvals"])


async def _until(look: Callable[[], Awaitable[bool]]) -> None:
    with anyio.fail_after(SECONDS):
        while not await look():  # noqa: ASYNC110 - what is waited for happens in other tasks
            await anyio.sleep(0.02)
