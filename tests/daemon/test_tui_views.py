"""Each view and act of the screens, driven by keys; the services are doubles that ``test_tui_real.py`` holds to the
real ones."""

from __future__ import annotations

import contextlib
import threading
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from covenant.tui.app import every_view
from policy import errors
from tests import tui_data, tui_kit
from tests.tui_data import AGENTS, APPROVAL, DAEMON, DIFF, HELD, HOSTILE, INTENT, RUNS, SESSION, SUPERVISOR, agent, run
from tests.tui_kit import NO_DAEMON, NO_SUPERVISOR, Service, Silent

pytestmark = pytest.mark.anyio


def services(**other: Any) -> tuple[Service, Service]:
    """The doubles; an answer by name takes the place of the fixed one."""
    daemon = Service(DAEMON | {name: one for name, one in other.items() if name in DAEMON})
    return daemon, Service(SUPERVISOR | {name: one for name, one in other.items() if name in SUPERVISOR})


async def test_runs_are_a_tree_below_their_agents() -> None:
    async with tui_kit.opened(tui_kit.sources(*services())) as pilot:
        shown = await tui_kit.says(pilot, "00000003 researcher")
        lines = shown.splitlines()
        places = {name: next(line.index(name) for line in lines if name in line) for name in ("00000001", "00000003")}
        assert places["00000003"] - places["00000001"] == 4
        assert "daemon: ok   supervisor: ok" in lines[0]
        assert next(line for line in lines if "broken" in line).startswith(" !")
        assert next(line for line in lines if "00000002" in line).startswith(" !")


async def test_run_of_unlisted_agent_is_shown() -> None:
    async with tui_kit.opened(tui_kit.sources(*services())) as pilot:
        assert "not listed" in next(line for line in tui_kit.lines(pilot) if "exec-bash " in line)


async def test_processor_time_is_of_one_core() -> None:
    passed = [1000, 1750]
    daemon, supervisor = services(top=lambda: {"runs": [run(1, cpu_ms=passed[0])]})
    async with tui_kit.opened(tui_kit.sources(daemon, supervisor)) as pilot:
        app = tui_kit.app_of(pilot)
        passed.pop(0)
        app.clock = lambda: tui_kit.NOW_MS + 1000
        await pilot.press("f5")
        await tui_kit.until(pilot, lambda: any(" 75 " in line for line in tui_kit.lines(pilot)))


@pytest.mark.parametrize(
    ("key", "operation", "tree"),
    [("k", "kill", False), ("K", "kill", True), ("z", "suspend", False), ("f", "resume", False)],
)
async def test_operation_asks_then_does(key: str, operation: str, tree: bool) -> None:
    daemon, supervisor = services()
    async with tui_kit.opened(tui_kit.sources(daemon, supervisor)) as pilot:
        tui_kit.app_of(pilot).main.query_one("Table").choose(RUNS[0]["run_id"])  # type: ignore[attr-defined]
        await pilot.press(key)
        shown = await tui_kit.says(pilot, "y yes")
        assert RUNS[0]["run_id"] in shown
        assert supervisor.of("operate") == []
        await pilot.press("y")
        await tui_kit.says(pilot, f"done: {operation}")
        (asked,) = supervisor.of("operate")
        assert (asked["operation"], asked["run"], asked["tree"]) == (operation, RUNS[0]["run_id"], tree)
        await pilot.press("k")
        await tui_kit.says(pilot, "AGENT / RUN")
        assert len(supervisor.of("operate")) == 1


@pytest.mark.parametrize("key", ["escape", "n", "x", "enter"])
async def test_operation_is_not_done_without_yes(key: str) -> None:
    daemon, supervisor = services()
    async with tui_kit.opened(tui_kit.sources(daemon, supervisor)) as pilot:
        await pilot.press("down", "k")
        await tui_kit.says(pilot, "y yes")
        await pilot.press(key)
        await pilot.pause(0.1)
        assert supervisor.of("operate") == []


async def test_refused_operation_shows_the_fix() -> None:
    error = errors.WrongStateError("the run is suspended already", hint="covenant resume RUN")
    async with tui_kit.opened(tui_kit.sources(*services(operate=error))) as pilot:
        await pilot.press("down", "z")
        await tui_kit.says(pilot, "y yes")
        await pilot.press("y")
        shown = await tui_kit.says(pilot, "the run is suspended already")
        assert "fix: covenant resume RUN" in shown


async def test_operation_on_an_agent_asks_nothing() -> None:
    async with tui_kit.opened(tui_kit.sources(*services())) as pilot:
        await pilot.press("k")
        await pilot.pause(0.1)
        assert len(pilot.app.screen_stack) == 1


async def test_daemon_silent_leaves_the_runs() -> None:
    _, supervisor = services()
    async with tui_kit.opened(tui_kit.sources(Silent(NO_DAEMON), supervisor)) as pilot:
        shown = await tui_kit.says(pilot, "00000001 librarian")
        assert "daemon: none   supervisor: ok" in shown
        assert "fix: start it: covenantd" in shown


async def test_supervisor_silent_leaves_the_agents() -> None:
    daemon, _ = services()
    async with tui_kit.opened(tui_kit.sources(daemon, Silent(NO_SUPERVISOR))) as pilot:
        shown = await tui_kit.says(pilot, "librarian 0.1.0")
        assert "fix: start covenant-supervisor" in shown


async def test_unknown_answer_does_not_end_the_screens() -> None:
    daemon, supervisor = services(top={"runs": [{"a": 1}]})
    async with tui_kit.opened(tui_kit.sources(daemon, supervisor)) as pilot:
        await tui_kit.says(pilot, "! the answer cannot be shown: KeyError")
        await tui_kit.show(pilot, "d")
        await tui_kit.says(pilot, "/etc/hosts")


async def test_denial_shows_the_line_to_add() -> None:
    async with tui_kit.opened(tui_kit.sources(*services())) as pilot:
        await tui_kit.show(pilot, "d")
        await tui_kit.says(pilot, "example.org:443")
        await pilot.press("enter")
        shown = await tui_kit.says(pilot, 'read = ["/etc/hosts"]')
        assert "explained for researcher:" in shown
        await pilot.press("escape")
        await tui_kit.says(pilot, "TARGET")


async def test_filter_keeps_the_rows_that_match() -> None:
    async with tui_kit.opened(tui_kit.sources(*services())) as pilot:
        await pilot.press("slash")
        await tui_kit.until(pilot, lambda: pilot.app.focused is not None and pilot.app.focused.id == "filter")
        await pilot.press(*"state:susp", "enter")
        shown = await tui_kit.says(pilot, "rows: 1 of 8, filter: state:susp")
        assert "00000003" in shown
        assert "00000001" not in shown
        await pilot.press("escape")
        await tui_kit.says(pilot, "00000001")


async def test_cursor_stays_on_its_run_as_others_come() -> None:
    runs = [run(5, "z")]
    daemon, supervisor = services(list_agents={"agents": []}, top=lambda: {"runs": list(runs)})
    async with tui_kit.opened(tui_kit.sources(daemon, supervisor)) as pilot:
        await pilot.press("down")
        runs.insert(0, run(1, "a"))
        await pilot.press("f5")
        await tui_kit.says(pilot, "00000001 a")
        assert next(line for line in tui_kit.lines(pilot) if line.startswith(">")).strip("> !").startswith("00000005 z")


async def test_hostile_names_are_drawn_as_text() -> None:
    runs = [run(1, HOSTILE)]
    daemon, supervisor = services(
        list_agents={"agents": [agent("a", error=HOSTILE, routable=False)]}, top={"runs": runs}
    )
    async with tui_kit.opened(tui_kit.sources(daemon, supervisor)) as pilot:
        shown = await tui_kit.says(pilot, "[red]markup[/red]")
        assert not [ch for ch in shown.replace("\n", "") if not ch.isprintable()]
        assert all(len(line) == 80 for line in shown.splitlines() if line.isascii())


async def test_low_terminal_leaves_the_pane_out() -> None:
    async with tui_kit.opened(tui_kit.sources(*services()), size=(60, 12)) as pilot:
        shown = await tui_kit.says(pilot, "00000001")
        assert len(shown.splitlines()) == 12
        assert AGENTS[0]["runtime"] not in shown


# --- intents and approvals ------------------------------------------------------------------------------------------


async def test_intents_show_live_and_ended_ones() -> None:
    async with tui_kit.opened(tui_kit.sources(*services())) as pilot:
        await tui_kit.show(pilot, "I")
        shown = await tui_kit.says(pilot, "count the words")
        assert [word for word in ("abababab", "Running", "failed", "waits") if word not in shown] == []


async def test_intent_shows_its_result() -> None:
    daemon, supervisor = services()
    async with tui_kit.opened(tui_kit.sources(daemon, supervisor)) as pilot:
        await tui_kit.show(pilot, "I")
        await pilot.press("down", "enter")
        shown = await tui_kit.says(pilot, "source: a book")
        assert "| lines" in [line.rstrip() for line in shown.splitlines()]
        assert daemon.of("get_intent_result") == [{"intent_id": INTENT}]


async def test_draft_is_kept_until_it_is_submitted() -> None:
    daemon, supervisor = services()
    async with tui_kit.opened(tui_kit.sources(daemon, supervisor)) as pilot:
        await tui_kit.fill(pilot, "i", "say qaskq", "librarian", "low")
        await tui_kit.says(pilot, "say qaskq")
        assert daemon.of("submit_intent") == []
        await pilot.press("s")
        shown = await tui_kit.says(pilot, "submit this intent?")
        assert "for librarian, priority low:" in shown
        await pilot.press("y")
        await tui_kit.says(pilot, "done so")
        assert daemon.of("submit_intent") == [{"text": "say qaskq", "agent": "librarian", "priority": "low"}]
        assert tui_kit.app_of(pilot).intents.drafts == []


async def test_refused_intent_stays_a_draft() -> None:
    daemon, supervisor = services(submit_intent=errors.UsageError("no", hint="yes"))
    async with tui_kit.opened(tui_kit.sources(daemon, supervisor)) as pilot:
        await tui_kit.fill(pilot, "i", "again", "", "")
        await pilot.press("s")
        await tui_kit.says(pilot, "y yes")
        await pilot.press("y")
        await tui_kit.says(pilot, "fix: yes")
        assert [text for text, _, _ in tui_kit.app_of(pilot).intents.drafts] == ["again"]


async def test_submit_without_draft_names_the_key() -> None:
    async with tui_kit.opened(tui_kit.sources(*services())) as pilot:
        await pilot.press("s")
        await tui_kit.says(pilot, "fix: press i and write one")


async def test_drafts_are_at_most_sixty_four() -> None:
    async with tui_kit.opened(tui_kit.sources(*services())) as pilot:
        intents = tui_kit.app_of(pilot).intents
        for number in range(70):
            intents.form().then([f"n{number}", "", ""])
        assert [intents.drafts[0][0], intents.drafts[-1][0], len(intents.drafts)] == ["n6", "n69", 64]


async def test_waiting_intent_is_resumed() -> None:
    daemon, supervisor = services()
    async with tui_kit.opened(tui_kit.sources(daemon, supervisor)) as pilot:
        await tui_kit.show(pilot, "I")
        await pilot.press("end", "f")
        await tui_kit.says(pilot, "start this intent again?")
        await pilot.press("y")
        await tui_kit.says(pilot, "resumed so")
        assert [asked["intent_id"][:8] for asked in daemon.of("resume_intent")] == ["cccccccc"]


async def test_late_answer_is_told_in_the_head() -> None:
    asked, answered = threading.Event(), threading.Event()

    def slow(**fields: Any) -> dict[str, Any]:
        asked.set()
        assert answered.wait(20)
        return {"runs": [fields["run"]]}

    daemon, supervisor = services(operate=slow)
    async with tui_kit.opened(tui_kit.sources(daemon, supervisor)) as pilot:
        await pilot.press("down", "k")
        await tui_kit.says(pilot, "y yes")
        await pilot.press("y")
        await tui_kit.until(pilot, asked.is_set)
        await pilot.press("escape")
        await tui_kit.says(pilot, "AGENT / RUN")
        answered.set()
        await tui_kit.says(pilot, "done: kill")


async def test_text_of_agent_in_dialog_is_no_line_of_ours() -> None:
    ours = ("! denied", "fix: grant it", "A grant is a lease for nothing.")
    # Broken at their space, so that a piece begins with words like ours.
    command = "\n".join(f"{'x' * 75} {line}" for line in ours)
    approval = APPROVAL | {"command": command, "description": f"do\n{ours[0]}"}
    daemon, supervisor = services(list_approvals={"approvals": [approval]})
    supervisor.answers["approvals"] = {"requests": [], "leases": [], "now_ms": 0}
    async with tui_kit.opened(tui_kit.sources(daemon, supervisor)) as pilot:
        await tui_kit.show(pilot, "o")
        await pilot.press("y")
        await tui_kit.says(pilot, "1 once")
        drawn: set[str] = set()
        for _ in range(6):
            # Between the borders of the dialog.
            drawn.update(line[1:-1].strip() for line in tui_kit.lines(pilot))
            await pilot.press("pagedown")
        assert any(line.startswith("The log has the answer") for line in drawn)
        assert {f"| {line}" for line in ours} <= {line[: 2 + len(one)] for line in drawn for one in ours}
        assert [line for line in drawn if line.startswith(ours)] == []


async def test_approval_is_answered_with_its_choice() -> None:
    daemon, supervisor = services()
    supervisor.answers["approvals"] = {"requests": [], "leases": [], "now_ms": 0}
    async with tui_kit.opened(tui_kit.sources(daemon, supervisor)) as pilot:
        await tui_kit.says(pilot, "! approvals: 1 (o)")
        await tui_kit.show(pilot, "o")
        await pilot.press("y")
        shown = await tui_kit.says(pilot, "3 deny")
        assert str(APPROVAL["command"]) in shown
        await pilot.press("y")
        await pilot.pause(0.05)
        assert daemon.of("resolve_approval") == []
        await pilot.press("3")
        await tui_kit.says(pilot, "answered with deny")
        assert daemon.of("resolve_approval") == [{"approval_id": "approval-1", "choice": "deny"}]


async def test_held_request_is_granted_or_denied() -> None:
    held = HELD[0]

    def approvals(verb: str, **fields: Any) -> dict[str, Any]:
        if verb == "deny":
            return {"denied": held}
        return {"requests": [held], "leases": [], "now_ms": 1_790_000_000_000}

    daemon, supervisor = services()
    daemon.answers["list_approvals"] = {"approvals": []}
    supervisor.answers["approvals"] = approvals
    given, leases = tui_kit.sources(daemon, supervisor), []

    def grant(one: Mapping[str, Any], duration: str) -> str:
        leases.append((one["id"], duration))
        return "granted it"

    given.grant = grant
    async with tui_kit.opened(given) as pilot:
        await tui_kit.says(pilot, "! approvals: 1 (o)")
        await tui_kit.show(pilot, "o")
        await pilot.press("y")
        assert "api.example.com" in await tui_kit.says(pilot, "2 for the run")
        assert "[[permissions.network]]" in tui_kit.text(pilot)
        await pilot.press("2")
        await tui_kit.says(pilot, "granted it")
        await pilot.press("escape", "y")
        await tui_kit.says(pilot, "4 for 10 minutes")
        await pilot.press("4")
        await tui_kit.says(pilot, "granted it")
        assert leases == [("3f" * 8, "run"), ("3f" * 8, "until")]
        await pilot.press("escape", "y")
        await tui_kit.says(pilot, "3 deny")
        await pilot.press("3")
        await tui_kit.says(pilot, "denied api.example.com")
        assert {"verb": "deny", "request": "3f" * 8} in supervisor.of("approvals")


# --- what is kept -----------------------------------------------------------------------------------------------------


async def test_memory_filter_is_searched_by_the_daemon() -> None:
    daemon, supervisor = services()
    async with tui_kit.opened(tui_kit.sources(daemon, supervisor)) as pilot:
        await tui_kit.show(pilot, "m")
        await tui_kit.says(pilot, "five words")
        await tui_kit.filter_by(pilot, "archive tier:long -working")
        await tui_kit.until(pilot, lambda: "five words" not in tui_kit.text(pilot))
        assert daemon.of("search_memory")[-1] == {"query": "archive", "tier": "longterm", "limit": 200}


async def test_audit_shows_whether_the_chain_holds() -> None:
    report = {"events": 7, "anchors": 7, "valid": False, "root_hash_hex": "ab" * 32, "failures": [{}, {}]}
    daemon, supervisor = services()
    async with tui_kit.opened(tui_kit.sources(daemon, supervisor)) as pilot:
        await tui_kit.show(pilot, "a")
        await tui_kit.says(pilot, "chain: holds, 7 rows")
        daemon.answers["verify_audit_integrity"] = {"report": report}
        await pilot.press("V")
        await tui_kit.says(pilot, "y yes")
        await pilot.press("y")
        await tui_kit.says(pilot, "! chain: DOES NOT HOLD, 2 failures")


async def test_audit_row_shows_its_place_in_the_log() -> None:
    async with tui_kit.opened(tui_kit.sources(*services())) as pilot:
        await tui_kit.show(pilot, "a")
        await pilot.press("enter")
        await tui_kit.says(pilot, "in the log: row 6 of 7")


async def test_chain_that_cannot_be_checked_says_so() -> None:
    error = errors.OperatorOnlyError("only the operator verifies", hint="ask as the operator")
    async with tui_kit.opened(tui_kit.sources(*services(verify_audit_integrity=error))) as pilot:
        await tui_kit.show(pilot, "a")
        await tui_kit.says(pilot, "! chain: not checked: only the operator verifies; fix: ask as the operator")


async def test_receipts_are_beside_debits_and_budgets() -> None:
    async with tui_kit.opened(tui_kit.sources(*services())) as pilot:
        await tui_kit.show(pilot, "r")
        kinds = [line.split()[0 if "budget" in line else 2] for line in tui_kit.lines(pilot)[4:7]]
        assert kinds == ["budget", "receipt", "debit"]


# --- people -----------------------------------------------------------------------------------------------------------


async def test_grant_is_shown_before_it_is_made() -> None:
    daemon, supervisor = services()
    async with tui_kit.opened(tui_kit.sources(daemon, supervisor)) as pilot:
        await tui_kit.fill(pilot, "g", "tool.call.echo", "ada@laptop", '{"version": 1}', "")
        shown = await tui_kit.says(pilot, "make this grant?")
        assert "ada@laptop may tool.call.echo" in shown
        assert "ends: never" in shown
        assert daemon.of("grant_capability") == []
        await pilot.press("y")
        await tui_kit.says(pilot, "signature: 8nMt")
        asked = {"action": "tool.call.echo", "scope": {"version": 1}, "expires_at": None, "subject": "ada@laptop"}
        assert daemon.of("grant_capability") == [asked]


@pytest.mark.parametrize(
    ("scope", "ends", "words"), [("{", "", "the scope is no JSON"), ("", "soon", "`soon` is no duration")]
)
async def test_wrong_grant_names_its_fix(scope: str, ends: str, words: str) -> None:
    daemon, supervisor = services()
    async with tui_kit.opened(tui_kit.sources(daemon, supervisor)) as pilot:
        await tui_kit.fill(pilot, "g", "memory.read", "", scope, ends)
        assert "fix: " in await tui_kit.says(pilot, words)
        assert daemon.of("grant_capability") == []


@pytest.mark.parametrize(
    ("view", "kind", "fields"),
    [
        ("c", "revoke_capability", {"signature_b58": "3mJr7AoUXx2Wqd"}),
        ("p", "revoke_peer", {"token_prefix": "7uqkz7"}),
    ],
)
async def test_revocation_asks_first(view: str, kind: str, fields: dict[str, str]) -> None:
    daemon, supervisor = services()
    async with tui_kit.opened(tui_kit.sources(daemon, supervisor)) as pilot:
        await tui_kit.show(pilot, view)
        await pilot.press("x")
        await tui_kit.says(pilot, "y yes")
        assert daemon.of(kind) == []
        await pilot.press("y")
        await tui_kit.says(pilot, "any key closes this")
        assert daemon.of(kind) == [fields]


async def test_own_token_is_named_with_its_fix() -> None:
    outcome = {"outcome": {"type": "self_revoke_forbidden"}}
    async with tui_kit.opened(tui_kit.sources(*services(revoke_peer=outcome))) as pilot:
        await tui_kit.show(pilot, "p")
        await pilot.press("x")
        await tui_kit.says(pilot, "y yes")
        await pilot.press("y")
        assert "fix: covenant peers revoke --force" in await tui_kit.says(pilot, "! that is your own token")


async def test_mailbox_shows_tasks_and_results() -> None:
    async with tui_kit.opened(tui_kit.sources(*services())) as pilot:
        await tui_kit.show(pilot, "A")
        shown = tui_kit.text(pilot)
        assert [word for word in ("in_flight", "queued", "it could not count") if word not in shown] == []


# --- services, workspaces, sessions -----------------------------------------------------------------------------------


async def test_services_sum_the_requests_to_models() -> None:
    async with tui_kit.opened(tui_kit.sources(*services())) as pilot:
        await tui_kit.show(pilot, "v")
        model = next(line for line in tui_kit.lines(pilot) if "local/small" in line)
        assert model.split()[-4:] == ["2", "150", "300", "2"]
        assert "8080 at 127" in tui_kit.text(pilot)


async def test_apply_is_held_to_what_was_shown() -> None:
    daemon, supervisor = services()
    async with tui_kit.opened(tui_kit.sources(daemon, supervisor)) as pilot:
        await tui_kit.show(pilot, "w")
        await pilot.press("u")
        shown = await tui_kit.says(pilot, "y yes")
        assert "~ src/main.py" in shown
        assert "refused: it starts programs on the host" in shown
        assert [one["verb"] for one in supervisor.of("workspace") if one["verb"] == "apply"] == []
        await pilot.press("y")
        await tui_kit.says(pilot, "applied to /home/op/project")
        assert supervisor.of("workspace")[-1] in (
            {"verb": "apply", "run": SESSION["run_id"], "digest": DIFF["digest"]},
            {"verb": "list"},
        )
        applied = [one for one in supervisor.of("workspace") if one["verb"] == "apply"]
        assert applied == [{"verb": "apply", "run": SESSION["run_id"], "digest": DIFF["digest"]}]


async def test_apply_of_nothing_offers_no_yes() -> None:
    def nothing(verb: str, **fields: Any) -> dict[str, Any]:
        answer: dict[str, Any] = SUPERVISOR["workspace"](verb)
        return answer | {"changes": [], "applicable": 0} if verb == "diff" else answer

    async with tui_kit.opened(tui_kit.sources(*services(workspace=nothing))) as pilot:
        await tui_kit.show(pilot, "w")
        await pilot.press("u")
        assert "y yes" not in await tui_kit.says(pilot, "apply this workspace?")


async def test_discard_asks_first() -> None:
    daemon, supervisor = services()
    async with tui_kit.opened(tui_kit.sources(daemon, supervisor)) as pilot:
        await tui_kit.show(pilot, "w")
        await pilot.press("x")
        await tui_kit.says(pilot, "discard this workspace?")
        await pilot.press("y")
        await tui_kit.says(pilot, "the directory is as it was")
        assert {"verb": "discard", "run": SESSION["run_id"]} in supervisor.of("workspace")


async def test_session_is_attached_with_the_screens_away() -> None:
    attached: list[str] = []
    daemon, supervisor = services()

    def attach(run_id: str) -> int:
        attached.append(run_id)
        return 0

    given = tui_kit.sources(daemon, supervisor, attach)
    async with tui_kit.opened(given) as pilot:
        await tui_kit.show(pilot, "S")
        app, away = tui_kit.app_of(pilot), list[str]()

        @contextlib.contextmanager
        def suspended() -> Iterator[None]:
            away.append("left")
            yield
            away.append("came back")

        app.suspend = suspended  # type: ignore[method-assign]
        await pilot.press("j")
        await tui_kit.until(pilot, lambda: away == ["left", "came back"])
        assert attached == [SESSION["run_id"]]


async def test_only_runs_with_a_terminal_are_sessions() -> None:
    async with tui_kit.opened(tui_kit.sources(*services())) as pilot:
        await tui_kit.show(pilot, "S")
        shown = await tui_kit.says(pilot, "exec-claude")
        assert "librarian" not in shown


# --- agents' words ----------------------------------------------------------------------------------------------------


async def test_text_of_agent_cannot_pass_for_a_field() -> None:
    record = tui_data.record(1, "working", "x\nowner: root@local", metadata={"a": "b\nc"})
    async with tui_kit.opened(tui_kit.sources(*services(recent_memory={"records": [record]}))) as pilot:
        await tui_kit.show(pilot, "m")
        await pilot.press("enter")
        shown = await tui_kit.says(pilot, "| owner: root@local")
        assert [line for line in shown.splitlines() if line.startswith("owner:")] == [
            line for line in shown.splitlines() if line.startswith("owner: operator@local")
        ]


async def test_path_of_change_cannot_pass_for_another() -> None:
    change = {"path": "a\n~ b", "action": "add", "refused": "", "conflict": ""}

    def hostile(verb: str, **fields: Any) -> dict[str, Any]:
        answer: dict[str, Any] = SUPERVISOR["workspace"](verb)
        return answer | {"changes": [change]} if verb == "diff" else answer

    async with tui_kit.opened(tui_kit.sources(*services(workspace=hostile))) as pilot:
        await tui_kit.show(pilot, "w")
        await pilot.press("u")
        assert r"+ a\n~ b" in await tui_kit.says(pilot, "y yes")


async def test_key_pressed_twice_asks_once_and_does_nothing() -> None:
    daemon, supervisor = services()
    async with tui_kit.opened(tui_kit.sources(daemon, supervisor)) as pilot:
        await pilot.press("down", "k", "k")
        await tui_kit.says(pilot, "y yes")
        await pilot.press("escape")
        await pilot.pause(0.1)
        assert len(pilot.app.screen_stack) == 1
        await tui_kit.show(pilot, "w")
        await pilot.press("u", "u", "u")
        await pilot.pause(0.1)
        assert "apply" not in [one["verb"] for one in supervisor.of("workspace")]


async def test_no_act_is_confirmed_by_its_own_key() -> None:
    for view in every_view():
        assert "y" not in view.acts or view.name == "approvals"


async def test_keys_do_not_reach_the_view_below_a_text() -> None:
    daemon, supervisor = services()
    async with tui_kit.opened(tui_kit.sources(daemon, supervisor)) as pilot:
        await pilot.press("down", "enter")
        await tui_kit.says(pilot, "stderr of the agent:")
        await pilot.press("k", "d", "g")
        await pilot.pause(0.1)
        assert len(pilot.app.screen_stack) == 2
        assert tui_kit.app_of(pilot).view.name == "runs"


# --- every view -------------------------------------------------------------------------------------------------------


async def test_views_without_services_name_the_fix() -> None:
    async with tui_kit.opened(tui_kit.sources(Silent(NO_DAEMON), Silent(NO_SUPERVISOR))) as pilot:
        for view in every_view():
            await tui_kit.show(pilot, view.key)
            assert f"Covenant  {view.name} " in await tui_kit.says(pilot, "fix: start")


async def test_every_view_is_filtered() -> None:
    async with tui_kit.opened(tui_kit.sources(*services())) as pilot:
        app = tui_kit.app_of(pilot)
        for view in every_view():
            await tui_kit.show(pilot, view.key)
            assert app.rows(), view.name
            await tui_kit.filter_by(pilot, "zq")
            await tui_kit.until(pilot, lambda: app.rows() == ())
            await pilot.press("escape")


async def test_hostile_text_is_drawn_in_every_view() -> None:
    daemon, supervisor = Service(_hostile(DAEMON)), Service(_hostile(SUPERVISOR))
    async with tui_kit.opened(tui_kit.sources(daemon, supervisor)) as pilot:
        for view in every_view():
            await tui_kit.show(pilot, view.key)
            for keys in (["enter"], ["escape", *view.acts]):
                assert _steering(pilot) == [], view.name
                await pilot.press(*keys)
                await pilot.pause(0.05)
            assert _steering(pilot) == [], view.name
            while len(pilot.app.screen_stack) > 1:
                await pilot.press("escape")
        assert pilot.app.is_running


def _steering(pilot: Any) -> list[str]:
    shown = tui_kit.text(pilot)
    return [ch for ch in shown if unicodedata.category(ch) in STEERING and ch != "\n"]


def _hostile(answers: Any) -> Any:
    """Return the answers with hostile text in place of each free text; ids, kinds and keys stay."""
    if callable(answers):
        return lambda *a, **fields: _hostile(answers(*a, **fields))
    if isinstance(answers, dict):
        return {
            name: HOSTILE if isinstance(value, str) and name in FREE else _hostile(value)
            for name, value in answers.items()
        }
    return [_hostile(one) for one in answers] if isinstance(answers, list | tuple) else answers


STEERING = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
# The texts of which an agent or a caller has the words.
FREE = frozenset({
    "action", "agent_display", "agent_id", "command", "conflict", "description", "directory", "display", "error",
    "error_message", "intent_text", "issuer", "line", "message", "model", "name", "path", "reason", "refused", "status",
    "target", "text", "url", "version",
})  # fmt: skip
