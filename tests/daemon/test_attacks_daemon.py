"""Attacks on a daemon by clients that can reach it.

Names in its home that stop its watch, texts that stop its loop, and rows that would tell a peer about others.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import anyio
import pytest

from covenant.handlers import billing
from covenant.handlers.state import ignore_rules
from covenant.runtime import agents as runtime_agents
from policy import errors
from tests import daemon_kit, runtime_kit
from tests.capability_kit import ADA, BOB, EVE
from tests.daemon_kit import peer

pytestmark = pytest.mark.anyio


async def test_name_no_utf8_stops_neither_daemon_nor_its_watch(
    covenant_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with daemon_kit.running(covenant_home) as daemon:
        agents = covenant_home / "agents"
        with anyio.fail_after(60):
            # The watcher reads names as text, and raises what it cannot read. It may not have begun: so until it says.
            number = 0
            while "begins anew" not in caplog.text:
                await anyio.sleep(0.3)
                if agents.is_dir():
                    bad = os.fsencode(agents) + b"/bad\xff%d" % number
                    os.mkdir(bad)
                    Path(os.fsdecode(bad + b"/agent.toml")).write_text("x=")
                    number += 1
            assert (await daemon.ask("ping"))["kind"] == "pong"
            # What comes afterwards is seen without being asked for.
            (agents / "later").mkdir()
            (agents / "later" / "agent.toml").write_text("x=")
            seen: set[str] = set()
            while "later" not in seen:
                await anyio.sleep(0.1)
                seen = {one["directory"] for one in (await daemon.ask("list_agents"))["agents"]}


@pytest.mark.parametrize("also", [(), ("!**/none.env",)])
def test_of_text_full_of_places_no_more_are_counted_than_may_be(also: tuple[str, ...], monkeypatch: Any) -> None:
    monkeypatch.setattr(ignore_rules, "MOST_PLACES", 50)
    looked: list[int] = []
    paths = ignore_rules.Rule._paths

    def counted(*args: Any) -> Any:
        for span in paths(*args):
            looked.append(1)
            yield span

    monkeypatch.setattr(ignore_rules.Rule, "_paths", counted)
    # Where nothing is taken back one place is enough; where something is, as many as may be are.
    rules = ignore_rules.parse("\n".join((*ignore_rules.SEEDED, *also)))
    assert ignore_rules.matched(rules, "x/.env.a " * 10_000) in ("**/.env", "**/.env.*")
    assert len(looked) <= (50 if also else 1)
    assert ignore_rules.matched(rules, "none.txt " * 10_000) is None


async def test_peers_own_feed_does_not_say_whose_tasks_there_are(covenant_home: Path) -> None:
    async with (
        daemon_kit.running(covenant_home) as daemon,
        peer(daemon, ADA, f"a2a.send.{BOB.display}") as ada,
        peer(daemon, BOB, f"a2a.recv.{ADA.display}") as bob,
        peer(daemon, EVE) as eve,
    ):
        agent = {"ada": ADA.model_dump(), "bob": BOB.model_dump()}
        task = {"id": "secret-1", "sender": agent["ada"], "recipient": agent["bob"], "intent_text": "x"}
        await ada.ask("send_a2_a_task", task=task)
        assert (await bob.ask("try_recv_a2_a_task"))["task"]["id"] == "secret-1"
        for task_id in ("secret-1", "secret-2"):
            with pytest.raises(errors.CovenantError):
                await eve.ask("post_a2_a_result", result={"task_id": task_id, "status": "ok"})
        rows = (await eve.ask("recent_audit", extended=True, limit=100))["events"]
        rejected = [row["kind"] for row in rows if row["kind"]["type"] == "a2_a_result_rejected"]
        assert {row["task_id"] for row in rejected} == {"secret-1", "secret-2"}
        assert len({row["reason"] for row in rejected}) == 1


async def test_nobody_is_let_in_by_key_of_agent(covenant_home: Path) -> None:
    covenant_home.mkdir(mode=0o700, parents=True, exist_ok=True)
    runtime_kit.package(covenant_home, "wordcount")
    # Two with one id: neither is routable, and the key is theirs all the same.
    for directory in ("twin", "other"):
        shutil.copytree(covenant_home / "agents" / "wordcount", covenant_home / "agents" / directory)
        manifest = covenant_home / "agents" / directory / "agent.toml"
        manifest.write_text(manifest.read_text().replace("wordcount", "twin"))
    async with daemon_kit.running(covenant_home) as daemon:
        listed = {one["id"]: one["pubkey"] for one in (await daemon.ask("list_agents"))["agents"]}
        assert listed.keys() == {"wordcount", "twin"}
        later = billing.budget_of("later").pubkey
        for display, pubkey in (
            ("eve@local", listed["wordcount"]),
            ("eve@local", listed["twin"]),
            # One that is not there yet, under the name that it will have.
            ("later@agent", later),
            ("later@local", later),
        ):
            with pytest.raises(errors.PeerRefusedError):
                await daemon.ask("enroll_peer", display=display, pubkey=pubkey)
        assert (await daemon.ask("enroll_peer", display="eve@local"))["token_b58"]


async def test_directory_of_agents_that_was_put_away_is_watched_again(
    covenant_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_agents, "_IDLE_MS", 200)
    async with daemon_kit.running(covenant_home) as daemon:
        place = covenant_home / "agents"
        with anyio.fail_after(60):
            listed: set[str] = set()
            runtime_kit.package(covenant_home, "first")
            while listed != {"first"}:
                await anyio.sleep(0.1)
                listed = {one["directory"] for one in (await daemon.ask("list_agents"))["agents"]}
            place.rename(covenant_home / "away")
            place.mkdir(mode=0o700)
            runtime_kit.package(covenant_home, "second")
            while listed != {"second"}:
                await anyio.sleep(0.1)
                listed = {one["directory"] for one in (await daemon.ask("list_agents"))["agents"]}
            # It is watched, and not only looked at once more.
            runtime_kit.package(covenant_home, "third")
            while listed != {"second", "third"}:
                await anyio.sleep(0.1)
                listed = {one["directory"] for one in (await daemon.ask("list_agents"))["agents"]}
