"""The web console in a real Chromium: login, each page, what an agent's texts can do, and who else may load it.

Pictures of each page are in build/console afterwards. The daemon is real; a double answers for the supervisor.
"""

from __future__ import annotations

import base64
import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from covenant.handlers.caller import Caller
from covenant.handlers.server import Server
from covenant.wire import parts, requests, responses
from policy import errors
from policy.audit_log import note
from tests import browser_kit, console_kit, loopback_server, tui_data
from tests.browser_kit import Page
from tests.console_kit import ASKED, HOSTILE, INTENT, PAGES, PICTURES, RUN, TASK, Console


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    with console_kit.opened(tmp_path_factory.mktemp("console") / "h") as one:
        yield one


def test_login_leaves_no_secret_in_tab(console: Console) -> None:
    page = console.page
    assert page.evaluate("location.href") == f"{console.base}/#/"
    assert page.evaluate("document.cookie") == ""
    assert page.evaluate("localStorage.length") == 0
    assert page.evaluate("Object.keys(sessionStorage).sort().reverse()") == ["covenant-page-half", "covenant-log-key"]
    token = (console.daemon.home / "peers/operator.token").read_text().strip()
    assert token not in page.evaluate("JSON.stringify(sessionStorage) + document.documentElement.outerHTML")
    entries = page.send("Page.getNavigationHistory")["entries"]
    assert [one["url"] for one in entries if "code=" in one["url"]] == []
    # A second tab is of the same session; a link that was used does not end it.
    url = console.ask("open_console")["url"]
    for _ in range(2):
        page.go("about:blank")
        page.go(url)
        page.sees("Live runs")
    _forget_refused(page, "/console/login")


def test_overview_follows_what_happens(console: Console) -> None:
    console.go("#/")
    console.page.sees("00000002")
    before = console.supervisor.answers["top"]
    console.supervisor.answers["top"] = {"runs": [*before["runs"], tui_data.run(0xABC, "newcomer")]}
    console.page.sees("newcomer")
    console.supervisor.answers["top"] = before
    console.page.until("!document.body.innerText.includes('newcomer')")


@pytest.mark.parametrize("name", PAGES)
def test_page_can_be_used_by_all(console: Console, name: str) -> None:
    """No violation of axe-core's rules, light and dark, on a desk and a phone, where nothing is cut off at the side."""
    for size, scheme in (("desk", "light"), ("phone", "dark")):
        console.page.look(size, scheme)
        console.go(PAGES[name])
        console.page.picture(PICTURES / f"{name}-{size}.png")
        assert console.page.violations() == []
        width = console.page.evaluate("document.documentElement.scrollWidth")
        assert width <= browser_kit.SIZES[size][0], (name, size)
    # Nothing of what agents wrote became markup.
    page = console.page
    assert page.evaluate("window.hit === undefined && !document.querySelector('img, main script, iframe, object')")
    hidden = page.evaluate(
        r"document.body.innerText.match(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2066-\u2069]/g)"
    )
    assert hidden is None


def test_run_has_timeline_and_is_steered(console: Console) -> None:
    page = console.page
    page.look("desk", "light")
    console.go(PAGES["run"])
    page.until("document.querySelectorAll('.timeline li.bad').length === 3")
    assert page.evaluate("document.querySelectorAll('svg rect').length") == 4
    before = len(console.supervisor.of("operate"))
    page.click("suspend")
    page.until("document.querySelector('dialog[open]') !== null")
    page.key("Escape")
    page.until("!document.querySelector('dialog[open]')")
    assert len(console.supervisor.of("operate")) == before
    page.click("suspend")
    page.until("document.querySelector('dialog[open]') !== null")
    page.key("Enter")
    page.sees("suspend: 1 runs")
    reason = "asked for in the web console"
    assert console.supervisor.of("operate")[before:] == [
        {"operation": "suspend", "run": RUN, "tree": False, "reason": reason}
    ]


@pytest.mark.parametrize("size", ["phone", "desk"])
def test_delegation_tree_fits_the_window(console: Console, size: str) -> None:
    """Show depth 3 without scrolling, each text within its box; also where the window changes its size."""
    page = console.page
    for name in ("run", "runs"):
        page.look("desk" if size == "phone" else "phone", "light")
        console.go(PAGES[name])
        page.look(size, "light")
        page.until("(({ scrollWidth, clientWidth }) => scrollWidth <= clientWidth)(document.querySelector('.wide'))")
        # An inner picture has each box's texts, and clips them; how much was denied is never clipped.
        script = """[...document.querySelectorAll('svg svg')].filter((one) => {
            const [, text] = one.querySelectorAll('text');
            const room = text.getSubStringLength(0, text.textContent.lastIndexOf('denied') + 6);
            return getComputedStyle(one).overflow !== 'hidden' || room > one.width.baseVal.value;
        }).map((one) => one.textContent)"""
        assert page.evaluate(script) == []
        assert "! 1234 denied" in page.evaluate("document.querySelector('svg').textContent")
        page.picture(PICTURES / f"tree-{name}-{size}.png")


def test_agent_may_beside_what_it_tried(console: Console) -> None:
    page = console.page
    page.look("desk", "light")
    console.go("#/agents/librarian")
    page.sees("/usr/share/doc")
    page.sees("permissions.filesystem")
    assert page.evaluate("document.querySelectorAll('section').length") == 2
    wider = "area.value.replace('/usr/share/doc', '/usr/share')"
    page.evaluate(f"(() => {{ const area = document.querySelector('textarea'); area.value = {wider}; }})()")
    page.click("compare")
    page.sees("! it allows more")
    shown = page.evaluate("[...document.querySelectorAll('form ~ div pre')].map((one) => one.textContent).join()")
    assert "+ read /usr/share" in shown, shown
    page.evaluate("document.querySelector('textarea').value = '[agent]'")
    page.click("compare")
    page.sees("[manifest_invalid]")
    page.picture(PICTURES / "compare-desk.png")
    # The agent of plain trusted-local has nothing to compile, and the page says so.
    console.go("#/agents/hello")
    page.sees("fix: write backend")


def test_intent_is_ended_and_answer_shown(console: Console) -> None:
    page = console.page
    page.look("desk", "light")
    console.go("#/intents")
    page.sees("! waits")
    page.sees("! failed")
    console.go(f"#/intents/{ASKED['intent_id']}")
    before = len(console.supervisor.of("operate"))
    page.click("end it")
    page.until("document.querySelector('dialog[open]') !== null")
    page.key("Enter")
    page.sees("ended: 1 runs")
    [done] = console.supervisor.of("operate")[before:]
    assert (done["operation"], done["run"], done["tree"]) == ("kill", ASKED["run_id"], True)
    # The answer of a resumed one is the test's: no agent runs here.
    resumed: list[str] = []

    async def resume(server: Server, caller: Caller, asked: requests.ResumeIntent) -> responses.IntentResult:
        resumed.append(asked.intent_id)
        return responses.IntentResult(intent_id=asked.intent_id, status="ok", text=HOSTILE, sources=())

    server = console.daemon.server
    before_handlers = server.handlers
    server.handlers = {**before_handlers, "resume_intent": resume}
    try:
        console.go(f"#/intents/{INTENT}")
        page.sees("budget_exhausted")
        page.click("start it again")
        page.until("document.querySelector('dialog[open]') !== null")
        page.key("Enter")
        page.until("[...document.querySelectorAll('[role=status]')].some((one) => one.textContent.startsWith('ok: '))")
    finally:
        server.handlers = before_handlers
    assert resumed == [INTENT]
    assert page.evaluate("window.hit === undefined")


def test_task_is_taken_back(console: Console) -> None:
    page = console.page
    console.go(f"#/mailbox/{TASK}")
    page.sees("queued")
    page.click("take it back")
    page.until("document.querySelector('dialog[open]') !== null")
    page.key("Enter")
    page.sees("Result: error")
    assert [one["task"]["id"] for one in console.ask("a2_a_queue")["tasks"]] == []


def test_session_is_attached_typed_and_detached(console: Console) -> None:
    page, sessions, run = console.page, console.sessions, tui_data.SESSION["run_id"]
    rows = "document.querySelector('.xterm-rows')?.innerText ?? ''"
    page.look("phone", "dark")
    console.go("#/sessions")
    page.evaluate("[...document.querySelectorAll('main td a')].at(0).click()")
    page.until(f"location.hash === '#/sessions/{run}'")
    page.click("attach")
    page.until(f"({rows}).includes('READY')")
    page.picture(PICTURES / "terminal-phone.png")
    assert page.violations() == []
    assert page.evaluate("document.documentElement.scrollWidth") <= browser_kit.SIZES["phone"][0]
    narrow = sessions.sizes[-1]
    page.look("desk", "light")
    until = time.monotonic() + browser_kit.PATIENCE_SECONDS
    while sessions.sizes[-1][1] <= narrow[1]:
        assert time.monotonic() < until, sessions.sizes
        page.evaluate("new Promise((resolve) => setTimeout(resolve, 50))")
    page.type("echo \u00e9 ")
    page.until(f"({rows}).includes('READY echo \u00e9')")
    page.control("c")
    page.control("p")
    page.type("x")
    page.until(f"/\\u00e9\\s+x/.test({rows})")
    page.control("p")
    page.control("q")
    page.sees("detached; the session goes on")
    page.until("document.activeElement.textContent === 'attach'")
    assert (sessions.runs, bytes(sessions.typed)) == ([run], "echo \u00e9 \x03\x10x".encode())
    # What an agent wrote became no markup, title or link, and needs no style that the policy forbids.
    assert page.evaluate("document.title") == f"Session {run[:8]} - Covenant"
    assert page.evaluate(
        "window.hit === undefined && !document.querySelector('main img, main script, main a[href*=evil]')"
    )
    # With what a screen reader is told, in the order of the lines.
    page.evaluate("document.querySelector('input[type=checkbox]').click()")
    page.click("attach")
    page.until("document.querySelector('.xterm-accessibility-tree')?.innerText.includes('READY')")
    page.evaluate("document.querySelector('.xterm-rows span.xterm-underline-5, .xterm-rows span')?.click()")
    page.picture(PICTURES / "terminal-desk.png")
    assert page.violations() == []
    page.type("Q")
    page.sees("the session has ended: failed, exit status 7")
    sessions.refusal = errors.WrongStateError("another terminal is attached to it", hint=HOSTILE)
    page.click("attach")
    page.sees("another terminal is attached to it")
    sessions.refusal = None
    assert page.problems == []


def test_workspace_is_applied_as_shown(console: Console) -> None:
    page = console.page
    run, digest = tui_data.WORKSPACE["run_id"], tui_data.DIFF["digest"]
    console.go(f"#/workspaces/{run}")
    page.sees("it starts programs on the host")
    page.evaluate("document.querySelector('[aria-label=\"show src/main.py\"]').click()")
    page.sees("- two")
    page.picture(PICTURES / "changes-desk.png")
    assert page.evaluate("window.hit === undefined")
    page.click("apply")
    page.until("document.querySelector('dialog[open]') !== null")
    page.key("Enter")
    page.sees("applied 1 changes; 1 are left")
    page.click("throw away")
    page.until("document.querySelector('dialog[open]') !== null")
    page.key("Enter")
    page.sees("the directory is as it was")
    acts = [one for one in console.supervisor.of("workspace") if one["verb"] in ("apply", "discard")]
    assert acts == [{"verb": "apply", "run": run, "digest": digest}, {"verb": "discard", "run": run}]


def test_denial_has_its_line(console: Console) -> None:
    page = console.page
    console.go("#/denials")
    page.sees("/var/log")
    page.evaluate("document.querySelector('[aria-label=\"explain path /var/log\"]').click()")
    page.sees('read = ["/var/log"]')
    page.evaluate("document.querySelector('[aria-label=\"explain exec /usr/bin/curl\"]').click()")
    page.sees("it is no program that is granted")


def test_budgets_are_drawn(console: Console) -> None:
    page = console.page
    page.look("desk", "light")
    console.go("#/budgets")
    page.sees("Credits over time")
    drawn = """(() => {
        const one = document.querySelector('canvas');
        if (!one) return 0;
        const { data } = one.getContext('2d').getImageData(0, 0, one.width, one.height);
        return data.filter((value, at) => at % 4 === 3 && value > 0).length;
    })()"""
    page.until(f"{drawn} > 500")
    # Its colours are those of the scheme, also where that changes while it is shown.
    bright = drawn.replace("at % 4 === 3 && value > 0", "at % 4 === 0 && value > 200")
    page.look("desk", "dark")
    page.until(f"{bright} > 500")


def test_proof_is_computed_in_browser(console: Console) -> None:
    page = console.page
    console.go("#/audit")
    page.sees("the chain holds")
    page.click("check")
    page.sees("the checkpoint of that size has this root")
    page.sees("the row, hashed here, is the leaf")
    vkey = console.daemon.server.audit.verifier.text
    page.sees(f"the checkpoint is signed with the key {'+'.join(vkey.split('+')[:2])}")
    page.picture(PICTURES / "proof-desk.png")
    # A key of the operator's own choice, such as one that was kept elsewhere.
    other = note.Verifier("other.example/log", note.SIGNATURE, Ed25519PrivateKey.generate().public_key()).text
    page.evaluate("document.querySelector('input[size]').select()")
    page.type(other)
    page.click("check")
    page.sees("the checkpoint is not signed with the key other.example/log+")
    # All rows, with any characters in them; then one that is not as the log has it.
    script = """(async () => {
        const { check } = await import('/console/app/audit.js');
        const { daemon } = await import('/console/app/session.js');
        const { events } = await daemon('recent_audit', {limit: 100, extended: true});
        const all = await Promise.all(events.map((one) => check(one)));
        const changed = await check({...events[0], timestamp_ms: events[0].timestamp_ms + 1});
        const signs = (lines) => lines.map(([sign]) => sign).join(' ').trim();
        return {count: events.length, all: [...new Set(all.map(signs))], changed: signs(changed)};
    })()"""
    found = page.evaluate(script)
    assert found == {"count": found["count"], "all": ["ok ok ok ok"], "changed": "! ! ok ok"}
    assert found["count"] >= 8
    _check_signatures(page, console, vkey)


def _check_signatures(page: Page, console: Console, vkey: str) -> None:
    """Other texts, signatures and keys are refused by the browser, as they are by policy.audit_log.note."""
    event = console.ask("recent_audit", limit=1)["events"][0]["id"]
    checkpoint = console.ask("prove_audit_inclusion", event_id=event, extended=True)["proof"]["checkpoint"]
    text, _, lines = checkpoint.partition("\n\n")
    name, key_id, encoded = vkey.split("+", 2)
    stranger = note.Verifier(name, note.SIGNATURE, Ed25519PrivateKey.generate().public_key()).text
    forged = f"\u2014 {name} {base64.b64encode(bytes.fromhex(key_id) + bytes(64)).decode()}\n"
    no_key = "the key is none of a log: name+id+key, as in checkpoint.vkey"
    cases = {
        "good": (checkpoint, vkey, True),
        "size": (f"{text}0\n\n{lines}", vkey, False),
        "extension": (f"{text}\nmore\n\n{lines}", vkey, False),
        "stranger": (checkpoint, stranger, False),
        "forged": (f"{text}\n\n{forged}", vkey, False),
        "both": (checkpoint + forged, vkey, False),
        "unsigned": (f"{text}\n", vkey, False),
        "witness": (checkpoint + forged.replace(name, "w.example"), vkey, True),
        "id": (checkpoint, f"{name}+00000000+{encoded}", "the key's id is that of another key"),
        "type": (
            checkpoint,
            f"{name}+{key_id}+BA{encoded[2:]}",
            "the key is none of a log: name+id+key, as in checkpoint.vkey",
        ),
        "none": (checkpoint, "", no_key),
    }
    script = f"""(async () => {{
        const {{ isSigned }} = await import('/console/app/audit.js');
        const found = {{}};
        for (const [name, [text, key]] of Object.entries({json.dumps(cases)}))
            found[name] = await isSigned(text, key).catch((error) => error.message);
        return found;
    }})()"""
    assert page.evaluate(script) == {name: expected for name, (_, _, expected) in cases.items()}


def test_answer_of_other_shape_spoils_no_menu(console: Console) -> None:
    before = console.supervisor.answers["top"]
    console.go("#/runs")
    console.supervisor.answers["top"] = {"runs": 7}
    console.page.sees("cannot be shown")
    console.supervisor.answers["top"] = before
    console.page.until("import('/console/app/live.js').then((one) => Array.isArray(one.runs.value))")
    console.page.click("try again")
    console.page.sees("Live runs")
    console.page.click("Memory")
    console.page.sees("The newest records")
    console.page.problems.clear()


def test_approval_is_answered(console: Console) -> None:
    """A Hermes API holds the run in tests/daemon/test_hermes.py; here its two answers are the test's."""
    shown = {**tui_data.APPROVAL, "command": HOSTILE[:300], "choices": ("once", "session", "deny")}
    waiting = [parts.Approval.model_validate(shown)]
    answered: list[tuple[str, str]] = []

    async def listed(server: Server, caller: Caller, asked: Any) -> responses.Approvals:
        return responses.Approvals(approvals=tuple(waiting))

    async def resolved(server: Server, caller: Caller, asked: requests.ResolveApproval) -> responses.ApprovalResolved:
        answered.append((caller.agent.display, asked.choice))
        waiting.clear()
        return responses.ApprovalResolved(approval_id=asked.approval_id, choice=asked.choice, resolved=1)

    server, page = console.daemon.server, console.page
    before = server.handlers
    server.handlers = {**before, "list_approvals": listed, "resolve_approval": resolved}
    try:
        for size, scheme in (("phone", "dark"), ("desk", "light")):
            page.look(size, scheme)
            console.go("#/")
            page.sees("! 2")
            console.go("#/approvals")
            page.sees("run a command")
            page.picture(PICTURES / f"approval-{size}.png")
            assert page.violations() == []
        assert page.evaluate("document.documentElement.scrollWidth") <= browser_kit.SIZES["desk"][0]
        page.click("deny")
        page.until("document.querySelector('dialog[open]') !== null")
        page.key("Enter")
        page.sees("Waiting for an answer: none")
    finally:
        server.handlers = before
    assert answered == [("operator@local", "deny")]
    assert page.evaluate("window.hit === undefined")


def test_held_calls_are_shown_and_denied(console: Console) -> None:
    """As the supervisor lists them; a grant is a lease, and a page has no key to sign one."""
    page, supervisor = console.page, console.supervisor
    waiting = [dict(one) for one in tui_data.HELD]
    waiting[1]["arguments"] = HOSTILE[:300]

    def approvals(verb: str, **fields: Any) -> dict[str, Any]:
        if verb == "deny":
            (denied,) = [one for one in waiting if one["id"] == fields["request"]]
            waiting.remove(denied)
            return {"denied": denied}
        return {"requests": list(waiting), "leases": [], "now_ms": 0}

    console.go("#/")
    before = supervisor.answers["approvals"]
    supervisor.answers["approvals"] = approvals
    try:
        page.sees("! 3")
        for size, scheme in (("phone", "dark"), ("desk", "light")):
            page.look(size, scheme)
            console.go("#/approvals")
            page.sees("api.example.com")
            page.evaluate("document.querySelectorAll('main details').forEach((one) => { one.open = true; })")
            page.sees("covenant approvals grant 3f3f3f3f --until 10m")
            page.sees("[[permissions.network]]")
            page.picture(PICTURES / f"held-{size}.png")
            assert page.violations() == []
            assert page.evaluate("document.documentElement.scrollWidth") <= browser_kit.SIZES[size][0]
        page.click("deny 5d5d5d5d")
        page.until("document.querySelector('dialog[open]') !== null")
        page.key("Enter")
        page.until("!document.querySelector('main').innerText.includes('POST https://')")
        page.sees("api.example.com")
        waiting.clear()
        page.sees("Held for an operator: none")  # by the stream, without a press
    finally:
        supervisor.answers["approvals"] = before
    assert [one for one in supervisor.of("approvals") if one["verb"] != "list"] == [
        {"verb": "deny", "request": "5d" * 8}
    ]
    assert page.evaluate("window.hit === undefined")


def test_grant_and_peer_are_revoked(console: Console) -> None:
    page = console.page
    page.look("desk", "light")
    made = console.ask("grant_capability", action="tool.call.echo")
    console.ask("enroll_peer", display="ada@laptop")
    console.go("#/grants")
    for row in ("tool.call.echo", "ada@laptop"):
        page.sees(row)
        of_row = f"[...document.querySelectorAll('tr')].find((one) => one.textContent.includes('{row}'))"
        page.evaluate(f"{of_row}.querySelector('button').click()")
        page.until("document.querySelector('dialog[open]') !== null")
        page.key("Enter")
        page.until(f"!{of_row}?.querySelector('button')")
    uses = console.ask("capability_usage", limit=50)["grants"]
    assert [one["revoked"] for one in uses if one["signature_b58"] == made["signature_b58"]] == [True]
    peers = console.ask("list_peers", limit=50)["peers"]
    assert [one["revoked_at"] is None for one in peers if one["agent_id"]["display"] == "ada@laptop"] == [False]


def test_memory_is_searched(console: Console) -> None:
    page = console.page
    console.go("#/memory")
    page.sees("The newest records")
    page.evaluate("document.querySelector('input[name=query]').value = 'archive'")
    page.click("search")
    page.sees("What fits best")
    page.sees("the disk of the archive is full on Fridays")


def test_keyboard_is_enough(console: Console) -> None:
    page = console.page
    page.look("desk", "light")
    console.go("#/")
    page.go("about:blank")
    console.go("#/")
    page.key("Tab")
    assert page.evaluate("document.activeElement.textContent") == "to the page"
    page.key("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.key("Tab")
    assert page.evaluate("document.activeElement.closest('main') !== null")


def test_policy_of_pages_holds(console: Console) -> None:
    """A script that got into a page could load nothing, and no text becomes markup or a script."""
    page = console.page
    console.go("#/")
    tried = {
        "markup": "document.body.insertAdjacentHTML('beforeend', '<b>x</b>')",
        "inner": "document.querySelector('main').innerHTML = '<b>x</b>'",
        "script": "document.createElement('script').textContent = 'window.hit=1'",
        "source": "document.createElement('script').src = '/console/app/main.js'",
        "policy": "trustedTypes.createPolicy('default', {createHTML: (text) => text})",
    }
    for name, script in tried.items():
        found = page.evaluate(f"(() => {{ try {{ {script}; return 'done'; }} catch (e) {{ return e.name; }} }})()")
        assert found == "TypeError", (name, found)
    with _elsewhere("<p>elsewhere</p>") as (origin, asked):
        fetched = page.evaluate(f"fetch('{origin}/fetched', {{mode: 'no-cors'}}).then(() => 'done', (e) => e.name)")
        assert fetched == "TypeError"
        page.evaluate(f"document.body.append(Object.assign(new Image(), {{src: '{origin}/image'}}))")
        page.evaluate("new Promise((resolve) => setTimeout(resolve, 200))")
        assert asked == []
        page.urls = [url for url in page.urls if not url.startswith(origin)]
        assert page.evaluate("fetch('/console/icon.svg').then((one) => one.status)") == 200
    _forget_refused(page, "Content Security Policy", "TrustedHTML", "TrustedScript", "violates", "Refused")


def test_page_of_other_port_gets_nothing(console: Console) -> None:
    """Another port of 127.0.0.1 is of the same site, and has our cookie: an agent's published port may listen there."""
    page = console.page
    script = (
        f"const base = '{console.base}'; const done = {{}};"
        "const body = JSON.stringify({of: 'supervisor', kind: 'operate', operation: 'kill', run: 'x', reason: 'x'});"
        "const post = (kind, mode) => fetch(base + '/console/ask', {method: 'POST', mode, body,"
        " credentials: 'include', headers: {'Content-Type': kind}}).then(() => 'done', (e) => e.name);"
        "done.json = await post('application/json', 'cors'); done.text = await post('text/plain', 'no-cors');"
        "done.live = await fetch(base + '/console/live', {credentials: 'include'}).then(() => 1, (e) => e.name);"
        "window.done = done;"
    )
    before = len(console.supervisor.of("operate"))
    body = f"<iframe src='{console.base}/'></iframe><form method=post action='{console.base}/console/ask'></form>"
    with _elsewhere(f"<p>elsewhere</p>{body}<script type=module>{script}</script>") as (origin, asked):
        page.go(f"{origin}/console/")
        page.until("window.done")
        done = page.evaluate("window.done")
        assert done == {"json": "TypeError", "text": "TypeError", "live": "TypeError"}
        # The cookie came there; without the half of the page it opens nothing (tests/daemon/test_console.py).
        assert "covenant_console" in asked[-1]
        assert page.evaluate("frames.length") == 1
        assert page.evaluate(
            "(() => { try { return frames[0].document.body.innerText; } catch (e) { return e.name; } })()"
        )
        page.urls = [url for url in page.urls if not url.startswith(origin)]
    assert len(console.supervisor.of("operate")) == before
    _forget_refused(page, "frame-ancestors", "CORS", "403", "ERR_", "favicon")
    console.go("#/")
    page.sees("Live runs")


def _forget_refused(page: Page, *words: str) -> None:
    """Take out the messages of the browser about what a test had it refuse."""
    page.problems = [one for one in page.problems if not any(word in one for word in words)]


@contextlib.contextmanager
def _elsewhere(body: str) -> Iterator[tuple[str, list[str]]]:
    """A page of another port. Yields its origin, and the cookies of what was asked there."""
    asked: list[str] = []

    class Handler(loopback_server.QuietHandler):
        protocol_version = "HTTP/1.0"

        def do_GET(self) -> None:
            if self.path != "/favicon.ico":
                asked.append(self.headers.get("Cookie", ""))
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(body.encode())

    with loopback_server.serving(loopback_server.LoopbackServer(Handler)) as server:
        yield f"http://127.0.0.1:{server.server_port}", asked
