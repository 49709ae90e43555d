"""The screens over a real daemon, and the doubles of ``test_tui_views.py`` held to its answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from textual.pilot import Pilot

from covenant.cli.daemon import tui
from covenant.tui.sources import Sources
from tests import cli_daemon_kit, tui_data, tui_kit
from tests.cli_daemon_kit import Daemon
from tests.cli_kit import done
from tests.mailbox_kit import MANIFEST
from tests.tui_data import HOSTILE
from tests.tui_kit import NO_SUPERVISOR, Silent

pytestmark = pytest.mark.anyio
# Answers to acts, which the second test makes, and those of a Hermes API (tests/daemon/test_hermes.py).
NOT_LISTS = {
    "get_intent_result",
    "grant_capability",
    "list_approvals",
    "resolve_approval",
    "resume_intent",
    "revoke_capability",
    "revoke_peer",
    "submit_intent",
}
# The double has kinds of rows that this daemon wrote none of.
OTHER_ROWS = {"recent_audit"}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon that has done an intent, and has a peer, a task, a hostile record, and a denial."""
    home = tmp_path_factory.mktemp("tui") / "h"
    home.mkdir(mode=0o700)
    manifest = MANIFEST.format(id="hello", required="[]") + "[settlement]\nbudget_credits_per_hour = 60\n"
    cli_daemon_kit.package(home, "hello", manifest)
    sealed = MANIFEST.format(id="sealed", required="[]") + '[sandbox]\nbackend = "linux-gvisor"\nrequired = true\n'
    cli_daemon_kit.package(home, "sealed", sealed)
    (home / "agents" / "sealed" / "main.py").write_text("print()\n")
    (home / "agents" / "broken").mkdir(mode=0o700)
    (home / "agents" / "broken" / "agent.toml").write_text("[agent]\n")
    with cli_daemon_kit.granted(home) as one:
        done("intent", "--agent", "hello", "count these words")
        done("peers", "enroll", "ada@laptop", "--action", "memory.read")
        done("a2a", "send", "operator@local", "count to three")
        done("a2a", "recv")
        done("a2a", "send", "operator@local", "count to four")
        done("capabilities", "grant", "tool.call.clock", "--scope", '{"version": 1, "max_uses": 3}')
        done("memory", "put", "--tier", "longterm", HOSTILE.replace("\ud800", ""))
        about: dict[str, Any] = {
            "run_id": "r-1",
            "agent_id": "sealed",
            "operator": None,
            "denial": "D1",
            "grant": "permissions",
        }
        about |= {"layer": "path", "target": "/var/log", "code": "not_granted", "count": 2}
        one.portal.call(one.server.audit.append, "denied", about, one.server.identity.agent)
        yield one


@pytest.fixture
def given(real: Daemon, monkeypatch: pytest.MonkeyPatch) -> Sources:
    monkeypatch.setenv("COVENANT_HOME", str(real.home))
    return Sources(tui.ask_daemon, Silent(NO_SUPERVISOR), tui.explain, lambda run_id: 0)


@pytest.mark.parametrize("kind", sorted(set(tui_data.DAEMON) - NOT_LISTS))
def test_double_answers_as_the_daemon(kind: str, given: Sources) -> None:
    fields: dict[str, Any] = {"search_memory": {"query": "words"}}.get(kind, {})
    if kind in ("recent_audit", "prove_audit_inclusion"):
        newest = given.daemon("recent_audit", limit=500, extended=True)["events"]
        fields = (
            {"event_id": newest[0]["id"], "extended": True}
            if kind == "prove_audit_inclusion"
            else {"limit": 500, "extended": True}
        )
    double = tui_data.DAEMON[kind]
    said = json.loads(json.dumps(double(**fields) if callable(double) else double))
    answer = given.daemon(kind, **fields)
    for grant in said.get("grants", ()):
        del grant["effective"]  # a word, or in earlier versions whether it holds: the view takes both
    if kind in OTHER_ROWS:
        types = {one["kind"]["type"] for one in answer["events"]}
        said["events"] = [one for one in said["events"] if one["kind"]["type"] in types]
    assert tui_kit.differences(said, answer) == []
    for name, value in said.items():
        assert not isinstance(value, list) or not value or name == "results" or answer[name], (
            f"{name}: nothing compared"
        )


async def yes(pilot: Pilot[None], words: str) -> str:
    """Agree to the question that is asked, and wait for words of the answer; then close it."""
    await tui_kit.says(pilot, "y yes")
    await pilot.press("y")
    shown = await tui_kit.says(pilot, words)
    await tui_kit.says(pilot, "any key closes this")
    await pilot.press("enter")
    await tui_kit.says(pilot, "? keys")
    return shown


async def test_acts_are_done_by_the_daemon(real: Daemon, given: Sources) -> None:
    async with tui_kit.opened(given) as pilot:
        assert "daemon: ok   supervisor: none" in await tui_kit.says(pilot, "hello 0.1.0")

        await tui_kit.fill(pilot, "i", "say so again", "hello", "low")
        await pilot.press("s")
        assert "hello" in await yes(pilot, "SAY SO AGAIN")
        # The row of the log, which the draft's row gives way to.
        await tui_kit.until(pilot, lambda: any(" ok " in one and "say so" in one for one in tui_kit.lines(pilot)))
        await pilot.press("home", "enter")
        await tui_kit.says(pilot, "result: ok")
        await pilot.press("escape")

        await tui_kit.show(pilot, "m")
        await tui_kit.says(pilot, "[red]markup[/red]")
        await tui_kit.filter_by(pilot, "again")
        await tui_kit.says(pilot, "SAY SO AGAIN")

        await tui_kit.show(pilot, "a")
        await tui_kit.says(pilot, "chain: holds")
        await pilot.press("enter")
        await tui_kit.says(pilot, "in the log: row ")
        await pilot.press("escape")

        await tui_kit.fill(pilot, "g", "memory.read.working", "", "", "12h")
        await yes(pilot, "operator@local may memory.read.working")
        await tui_kit.show(pilot, "c")
        await tui_kit.filter_by(pilot, "read.working")
        await tui_kit.says(pilot, "holds")
        await pilot.press("x")
        await yes(pilot, "revoked")

        await tui_kit.show(pilot, "p")
        await tui_kit.filter_by(pilot, "ada")
        await pilot.press("x")
        await yes(pilot, "revoked")
        await tui_kit.says(pilot, "revoked ")
        live = given.daemon("list_peers", limit=10, status_filter="live")["peers"]
        assert [one["agent_id"]["display"] for one in live] == ["operator@local"]

        await tui_kit.show(pilot, "d")
        await tui_kit.says(pilot, "/var/log")
        await pilot.press("enter")
        assert '"/var/log"' in await tui_kit.says(pilot, "to grant it, write in agent.toml")
