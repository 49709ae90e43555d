"""The web console as an attacker sees it: codes, halves of a session, other origins, paths, and the log."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest

from covenant.adapters.console import asks, files, pages, terminals
from covenant.handlers.state import console_logins
from covenant.runtime.agent_view import AgentView
from covenant.runtime.supervisor_client import Supervised
from covenant.wire import requests
from policy import errors
from tests import console_kit, daemon_kit, http_kit, tui_data, tui_kit
from tests.daemon_kit import Daemon

pytestmark = pytest.mark.anyio
PAGE = pages.PAGE_HEADER
ROOT = Path(__file__).parents[2]


@dataclass
class Browser:
    """The state of a browser of ours: a jar of cookies, the half of its page, the origin of its pages."""

    session: aiohttp.ClientSession
    origin: str
    page: str = ""

    async def post(self, path: str, body: Any, **headers: str | None) -> tuple[int, dict[str, Any], Any]:
        """Post as a page of the console does; a header of None is left out. Returns status, document, headers."""
        given: dict[str, str | None] = {"Origin": self.origin, "Sec-Fetch-Site": "same-origin", PAGE: self.page}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        sent = {name: value for name, value in given.items() if value is not None}
        async with self.session.post(f"/console/{path}", json=body, headers=sent) as answer:
            return answer.status, await answer.json(), answer.headers

    async def ask(self, kind: str, *, of: str = "daemon", **fields: Any) -> dict[str, Any]:
        """Ask one request of the console, which is not refused."""
        status, document, _ = await self.post("ask", {"of": of, "kind": kind, **fields})
        assert status == 200, document
        return document


@asynccontextmanager
async def visiting(daemon: Daemon) -> AsyncIterator[Browser]:
    """A browser that is not logged in."""
    base = f"http://127.0.0.1:{daemon.http_port}"
    jar = aiohttp.CookieJar(unsafe=True)
    async with aiohttp.ClientSession(base, cookie_jar=jar, timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield Browser(session, base)


@asynccontextmanager
async def logged_in(daemon: Daemon) -> AsyncIterator[Browser]:
    """A browser that came by a link."""
    async with visiting(daemon) as browser:
        status, document, _ = await browser.post("login", {"code": await code(daemon)})
        assert status == 200, document
        browser.page = document["page"]
        yield browser


async def code(daemon: Daemon) -> str:
    url: str = (await daemon.ask("open_console"))["url"]
    origin, _, found = url.partition("/#code=")
    assert origin == f"http://127.0.0.1:{daemon.http_port}"
    return found


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch) -> tui_kit.Service:
    """The supervisor, which lists runs; it records what it was asked."""
    service = tui_kit.Service(tui_data.SUPERVISOR)

    async def ask(self: Supervised, kind: str, /, **fields: Any) -> dict[str, Any]:
        return service(kind, **fields)

    monkeypatch.setattr(Supervised, "ask", ask)
    return service


async def test_link_logs_one_browser_in_once(covenant_home: Path, supervisor: tui_kit.Service) -> None:
    async with daemon_kit.running(covenant_home, http_port=0) as daemon, visiting(daemon) as browser:
        one = await code(daemon)
        status, document, headers = await browser.post("login", {"code": one})
        cookie = headers["Set-Cookie"]
        assert (status, document["display"]) == (200, "operator@local")
        assert all(word in cookie for word in ("HttpOnly", "SameSite=Strict", "Path=/console/", "Max-Age=43200"))
        browser.page = document["page"]
        assert (await browser.ask("list_agents"))["kind"] == "agents"
        assert len((await browser.ask("top", of="supervisor"))["runs"]) == len(tui_data.RUNS)
        async with visiting(daemon) as other:
            for word in (one, "", "A" * 43, None, 7):
                assert (await other.post("login", {"code": word}))[0] == 401
            assert (await other.post("login", {"code": "A" * 600}))[0] == 413
        rows = [row["kind"]["type"] for row in (await daemon.ask("recent_audit", limit=20))["events"]]
        assert (rows.count("console_link_made"), rows.count("console_entered")) == (1, 1)
        assert rows.count("authentication_failed") == 5
        # Nothing that opens anything is in the home: codes, cookies and halves are in memory.
        secrets = (one, document["page"], cookie.partition("=")[2].partition(";")[0])
        kept = b"".join(path.read_bytes() for path in covenant_home.rglob("*") if path.is_file())
        assert [word for word in secrets if word.encode() in kept] == []


async def test_half_of_a_session_opens_nothing(covenant_home: Path, supervisor: tui_kit.Service) -> None:
    async with daemon_kit.running(covenant_home, http_port=0) as daemon, logged_in(daemon) as browser:
        asked = {"of": "daemon", "kind": "list_agents"}
        for half in ("A" * 43, "", None):
            status, document, _ = await browser.post("ask", asked, **{PAGE: half})
            assert (status, document["code"]) == (401, "authentication_failed"), document
        async with logged_in(daemon) as other, visiting(daemon) as stranger:
            stranger.page = browser.page
            assert (await stranger.post("ask", asked))[0] == 401
            # Nor do the halves of two browsers fit; a second tab of one is of its session.
            assert (await other.post("ask", asked, **{PAGE: browser.page}))[0] == 401
            assert (await other.post("ask", asked))[0] == 200
            status, document, _ = await other.post("login", {"code": await code(daemon)})
            assert (await other.post("ask", asked))[0] == 200
            assert (await other.post("ask", asked, **{PAGE: document["page"]}))[0] == 200
        async with browser.session.get("/console/live") as answer:
            assert answer.status == 401
        # The session is none of the other routes.
        async with browser.session.get("/agents", headers={PAGE: browser.page}) as answer:
            assert answer.status == 401


async def test_session_ends(covenant_home: Path, supervisor: tui_kit.Service) -> None:
    async with daemon_kit.running(covenant_home, http_port=0) as daemon:
        asked = {"of": "daemon", "kind": "list_agents"}
        async with logged_in(daemon) as browser:
            assert (await browser.post("logout", {}))[0] == 200
            assert (await browser.post("ask", asked))[0] == 401
        async with logged_in(daemon) as browser, visiting(daemon) as late:
            link = await code(daemon)
            now = daemon.server.now_ms
            daemon.server.console._now_ms = lambda: now() + console_logins.CODE_MS
            assert (await late.post("login", {"code": link}))[0] == 401
            assert (await browser.post("ask", asked))[0] == 200
            daemon.server.console._now_ms = lambda: now() + console_logins.SESSION_MS
            assert (await browser.post("ask", asked))[0] == 401
            daemon.server.console._now_ms = now
        async with logged_in(daemon) as browser:
            stream = await browser.session.get("/console/live", headers={PAGE: browser.page})
            link = await code(daemon)
            await daemon.ask("rotate_operator_token")
            assert (await browser.post("ask", asked))[0] == 401
            assert (await browser.post("login", {"code": link}))[0] == 401
            assert [one.event async for one in http_kit.events(stream)][-1] == "stream_error"


async def test_other_pages_and_names_are_refused(covenant_home: Path, supervisor: tui_kit.Service) -> None:
    """Cookies go to every port of this host: a page of another port is of the same site."""
    other = "http://127.0.0.1:3000"
    async with (
        daemon_kit.running(covenant_home, http_port=0, http_origins=(other,)) as daemon,
        logged_in(daemon) as browser,
    ):
        kill = {"of": "supervisor", "kind": "operate", "operation": "kill", "run": "x", "reason": "x", "tree": False}
        forged: list[dict[str, str | None]] = [
            {"Origin": other},
            {"Origin": other, "Sec-Fetch-Site": "same-site"},
            {"Origin": "null"},
            {"Origin": f"http://localhost:{daemon.http_port}"},
            {"Origin": f"https://127.0.0.1:{daemon.http_port}"},
            {"Origin": None},
            {"Origin": None, "Sec-Fetch-Site": None},
            {"Sec-Fetch-Site": "same-site"},
            {"Sec-Fetch-Site": "cross-site"},
            {"Sec-Fetch-Site": "none"},
        ]
        for headers in forged:
            for path in ("ask", "login", "logout", "%61sk", "attach", "type"):
                status, document, answered = await browser.post(path, kill, **headers)
                assert status == 403, (headers, path, document)
                assert path == "%61sk" or "Access-Control-Allow-Origin" not in answered or headers["Origin"] == other
        rebound = f"evil.example:{daemon.http_port}"
        status, _, _ = await browser.post("ask", kill, Host=rebound, Origin=f"http://{rebound}")
        assert status == 421
        for path in ("/", "/console/app/main.js", "/console/live"):
            async with browser.session.get(path, headers={"Host": rebound, PAGE: browser.page}) as answer:
                assert answer.status == 421
        async with browser.session.get("/console/live", headers={PAGE: browser.page, "Origin": other}) as answer:
            assert answer.status == 403
        async with browser.session.options("/console/ask", headers={"Origin": "http://evil.example"}) as answer:
            assert answer.status == 403
        # A form of another page cannot send JSON.
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            status, _, _ = await browser.post("ask", kill, **{"Content-Type": kind})
            assert status == 415
        assert supervisor.of("operate") == []
        assert (await browser.post("ask", kill))[0] == 200
        assert len(supervisor.of("operate")) == 1


async def test_files_are_those_of_the_table(covenant_home: Path) -> None:
    async with daemon_kit.running(covenant_home, http_port=0) as daemon, visiting(daemon) as browser:
        for name in (*files.load(), ""):
            async with browser.session.get(f"/console/{name}" if name else "/") as answer:
                assert (answer.status, await answer.read()) == (200, files.load()[name or files.INDEX].body)
                assert answer.headers["Content-Security-Policy"] == files.POLICY
                assert (answer.headers["X-Frame-Options"], answer.headers["Cache-Control"]) == ("DENY", "no-store")
        for path in (
            *("../pages.py", "..%2fpages.py", "%2e%2e/pages.py", "app/../../pages.py", "app//main.js", "/etc/passwd"),
            *("app/", "vendor", "app/main.js%00", "app%2fmain.js/", "app/main.js/", "..\\pages.py", "~", "app/Main.js"),
        ):
            line = f"GET /console/{path} HTTP/1.1\r\nHost: 127.0.0.1:{daemon.http_port}\r\nConnection: close\r\n\r\n"
            raw = await _raw(daemon, line.encode())
            assert raw.startswith((b"HTTP/1.1 404", b"HTTP/1.1 400")), (path, raw)


async def _raw(daemon: Daemon, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", daemon.http_port)
    writer.write(data)
    found = await reader.read()
    writer.close()
    return found


async def test_pages_send_no_request_of_authority(covenant_home: Path, supervisor: tui_kit.Service) -> None:
    assert requests.KINDS.keys() >= asks.DAEMON
    async with daemon_kit.running(covenant_home, http_port=0) as daemon, logged_in(daemon) as browser:
        wrong = [("daemon", kind) for kind in requests.KINDS if kind not in asks.DAEMON]
        wrong += [("supervisor", kind) for kind in ("run", "session", "attach", "check_package")]
        wrong += [("", "top"), ("daemon", "top"), (None, "list_agents"), ("supervisor", None)]  # type: ignore[list-item]
        for of, kind in wrong:
            status, document, _ = await browser.post("ask", {"of": of, "kind": kind})
            assert (status, document["kind"]) == (400, "error"), (of, kind, document)
        # Of workspaces: an apply is held to what a page showed, and none takes an approval, a branch or a fork.
        run = {"run": "00000009"}
        refused: tuple[dict[str, Any], ...] = (
            *({}, {"verb": []}, {"verb": "list", **run}, {"verb": "fork", **run}, {"verb": "apply", **run}),
            *({"verb": "branch", "name": "x", **run}, {"verb": "apply", "digest": "ef" * 32, "approval": "x", **run}),
        )
        for fields in refused:
            status, document, _ = await browser.post("ask", {"of": "supervisor", "kind": "workspace", **fields})
            assert (status, document["kind"]) == (400, "error"), (fields, document)
        # Nor does a page give a lease: an operator's key signs it elsewhere.
        held = {"request": "3f" * 8}
        unsigned: tuple[dict[str, Any], ...] = (
            *({}, {"verb": "grant", **held}, {"verb": "grant", "lease": "{}", **held}, {"verb": "list", **held}),
            *({"verb": "deny"}, {"verb": "deny", "by": "ann", **held}),
        )
        for fields in unsigned:
            status, document, _ = await browser.post("ask", {"of": "supervisor", "kind": "approvals", **fields})
            assert (status, document["kind"]) == (400, "error"), (fields, document)
        # No field becomes a parameter of the client, such as descriptors to pass on.
        injected: tuple[dict[str, Any], ...] = ({"fds": [0]}, {"beside": []}, {"run": "x"}, {"kind": ["ps"]})
        for fields in injected:
            assert (await browser.post("ask", {"of": "supervisor", "kind": "ps", **fields}))[0] == 400
        misfits: tuple[dict[str, Any], ...] = ({}, {"agent_id": 7}, {"agent_id": "x", "more": "x"})
        for fields in misfits:
            assert (await browser.post("ask", {"of": "packages", "kind": "agent_rules", **fields}))[0] == 400
        for agent_id in ("absent", "../../etc", "/etc", "", "\x00"):
            found = await browser.ask("agent_rules", of="packages", agent_id=agent_id)
            assert (found["kind"], found["code"]) == ("error", "no_such_agent"), found
        large = {"agent_id": "absent", "manifest": "#" * 300_000}
        assert (await browser.ask("compare_manifest", of="packages", **large))["kind"] == "error"
        bodies: list[Any] = [[], "x", None]
        for body in bodies:
            assert (await browser.post("ask", body))[0] == 400
    assert supervisor.asked == []


async def test_terminal_is_of_the_page_that_attached(covenant_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = console_kit.Sessions()
    monkeypatch.setattr(Supervised, "attached", lambda self, *about: sessions.attached(*about))
    run, asked = "6f1f64c0", {"run": "6f1f64c0", "rows": 24, "columns": 80}
    async with daemon_kit.running(covenant_home, http_port=0) as daemon, logged_in(daemon) as browser:
        for wrong in (
            *(
                {},
                {"run": run},
                asked | {"run": "../x"},
                asked | {"run": 7},
                asked | {"run": "a" * 37},
                asked | {"x": 1},
            ),
            *(asked | {"rows": one} for one in (0, -1, 1001, True, "24", 1.5, None)),
        ):
            assert (await browser.post("attach", wrong))[0] == 400, wrong
        assert (await browser.post("attach", asked, **{PAGE: None}))[0] == 401
        assert sessions.runs == []
        shown = [await _attach(browser, asked) for _ in range(terminals.MOST)]
        status, document, _ = await browser.post("attach", asked)
        assert (status, document["code"]) == (200, "too_many_requests")
        events = http_kit.events(shown[0])
        await anext(events)
        name = (await anext(events)).data["chunk"]["terminal"]
        # What is shown is filtered as `covenant attach` does: the clipboard is out of reach.
        data = base64.b64decode((await anext(events)).data["chunk"]["data"])
        assert (b"READY" in data, b"]52;" in data) == (True, False)
        typed = {"terminal": name, "data": "x"}
        async with logged_in(daemon) as other:
            status, document, _ = await other.post("type", typed)
            assert (status, document["code"]) == (200, "no_such_run")
        for bad in (typed | {"data": 7}, typed | {"data": "x" * 65_537}, {"terminal": name, "rows": 0, "columns": 1}):
            assert (await browser.post("type", bad))[0] == 400
        names: tuple[Any, ...] = ("", "x", None, [], {})
        for unknown in names:
            assert (await browser.post("type", typed | {"terminal": unknown}))[1]["code"] == "no_such_run"
        assert sessions.typed == b""
        assert (await browser.post("type", typed | {"data": "y\ud800"}))[1] == {"taken": 2}
        assert (await browser.post("type", {"terminal": name, "rows": 30, "columns": 90}))[0] == 200
        rows = [row["kind"] for row in (await daemon.ask("recent_audit", limit=20, extended=True))["events"]]
        assert [row["run_id"] for row in rows if row["type"] == "console_attached"] == [run] * terminals.MOST
        # The end of the login ends its terminals, and nothing is typed after it.
        assert (await browser.post("logout", {}))[0] == 200
        assert [one.event async for one in events][-1] == "stream_error"
        assert (await browser.post("type", typed))[0] == 401
        for one in shown:
            one.close()
        with anyio.fail_after(60):
            while True:
                await anyio.sleep(0.05)
                if not sessions.open:
                    break
    assert (bytes(sessions.typed), sessions.sizes[-1]) == (b"y?", (30, 90))


async def _attach(browser: Browser, asked: dict[str, Any]) -> aiohttp.ClientResponse:
    headers = {"Origin": browser.origin, PAGE: browser.page}
    answer = await browser.session.post("/console/attach", json=asked, headers=headers)
    assert answer.content_type == "text/event-stream"
    return answer


async def test_packages_are_shown_as_compiled(covenant_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (covenant_home, covenant_home / "agents"):
        place.mkdir(mode=0o700, exist_ok=True)
    shutil.copytree(ROOT / "agents/librarian", covenant_home / "agents/librarian")
    async with daemon_kit.running(covenant_home, http_port=0) as daemon, logged_in(daemon) as browser:
        rules = await browser.ask("agent_rules", of="packages", agent_id="librarian")
        granted = [one for one in rules["rules"] if one["key"].startswith("permissions.filesystem.read")]
        assert [one["rule"] for one in granted] == ["/usr/share/doc"]
        assert granted[0]["where"].startswith("agent.toml:")
        wider = rules["manifest"].replace("/usr/share/doc", "/usr/share")
        both = await browser.ask("compare_manifest", of="packages", agent_id="librarian", manifest=wider)
        assert (both["widens"], both["rows"][0]["added"]) == (True, ["read /usr/share"])
        same = await browser.ask("compare_manifest", of="packages", agent_id="librarian", manifest=rules["manifest"])
        assert (same["widens"], same["rows"]) == (False, [])
        for target, add in (("/var/log", ["[permissions.filesystem]", 'read = ["/var/log"]']), ("/absent", [])):
            denial = {"agent_id": "librarian", "layer": "path", "target": target, "code": "not_granted"}
            found = await browser.ask("explain_denial", of="packages", **denial)
            assert (found["meaning"], found["add"]) == ("the path is not in the agent's root", add)
        unknown = {"agent_id": "gone", "layer": "path", "target": "/x", "code": "not_granted"}
        found = await browser.ask("explain_denial", of="packages", **unknown)
        assert found["meaning"] == "the path is not in the agent's root"
        # A file system that hangs keeps one request waiting, and no further one.
        monkeypatch.setattr(asks, "_VIEW_SECONDS", 0.1)
        monkeypatch.setattr(AgentView, "rules", lambda self, agent_id: time.sleep(1))
        found = await browser.ask("agent_rules", of="packages", agent_id="librarian")
        assert (found["kind"], found["message"]) == ("error", "the package was not compiled in time")


async def test_crowd_of_streams_is_bounded(covenant_home: Path, supervisor: tui_kit.Service) -> None:
    async with daemon_kit.running(covenant_home, http_port=0) as daemon, logged_in(daemon) as browser:
        connector = aiohttp.TCPConnector(limit=0)
        cookies = browser.session.cookie_jar
        base = f"http://127.0.0.1:{daemon.http_port}"
        async with aiohttp.ClientSession(base, cookie_jar=cookies, connector=connector) as crowd:
            begun = anyio.current_time()
            opened = list[aiohttp.ClientResponse]()
            for _ in range(33):
                opened.append(await crowd.get("/console/live", headers={PAGE: browser.page}))
                await anyio.sleep(0.03)  # each at another part of its second
            assert [one.status for one in opened] == [200] * 32 + [429]
            await anyio.sleep(2.5)
            # All streams share one look a second.
            assert len(supervisor.of("top")) <= anyio.current_time() - begun + 2
            assert (await browser.ask("list_agents"))["kind"] == "agents"
            for one in opened:
                one.close()
        statuses = [429]
        while statuses[-1] == 429 and len(statuses) < 400:
            await anyio.sleep(0.1)
            async with browser.session.get("/console/live", headers={PAGE: browser.page}) as again:
                statuses.append(again.status)
        assert statuses[-1] == 200


async def test_links_and_sessions_are_bounded(covenant_home: Path) -> None:
    async with daemon_kit.running(covenant_home, http_port=0) as daemon, logged_in(daemon) as first:
        links = [await code(daemon) for _ in range(console_logins.MOST_CODES + 1)]
        async with visiting(daemon) as browser:
            assert (await browser.post("login", {"code": links[0]}))[0] == 401
            assert (await browser.post("login", {"code": links[1]}))[0] == 200
        for _ in range(console_logins.MOST_SESSIONS):
            async with logged_in(daemon):
                pass
        assert (await first.post("ask", {"of": "daemon", "kind": "list_agents"}))[0] == 401


async def test_silent_supervisor_is_named(covenant_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(self: Supervised, kind: str, /, **fields: Any) -> dict[str, Any]:
        raise errors.NoSupervisorError("no supervisor listens", hint="start covenant-supervisor")

    monkeypatch.setattr(Supervised, "ask", ask)
    async with daemon_kit.running(covenant_home, http_port=0) as daemon, logged_in(daemon) as browser:
        found = await browser.ask("top", of="supervisor")
        assert (found["kind"], found["hint"]) == ("error", "start covenant-supervisor")
        async with browser.session.get("/console/live", headers={PAGE: browser.page}) as stream:
            events = http_kit.events(stream)
            await anext(events)
            assert (await anext(events)).data["chunk"]["runs"]["code"] == "no_supervisor"


async def test_link_is_for_the_operator_with_http(covenant_home: Path) -> None:
    async with daemon_kit.running(covenant_home) as daemon:
        with pytest.raises(errors.SettingError) as e:
            await daemon.ask("open_console")
        assert "COVENANT_HTTP_PORT" in e.value.hint
    async with (
        daemon_kit.running(covenant_home, http_port=0) as daemon,
        daemon_kit.peer(daemon, http_kit.OTHER) as peer,
    ):
        with pytest.raises(errors.OperatorOnlyError):
            await peer.ask("open_console")
        assert (await daemon.ask("open_console"))["kind"] == "console_opened"


async def test_no_secret_is_in_the_log(
    covenant_home: Path, supervisor: tui_kit.Service, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with daemon_kit.running(covenant_home, http_port=0) as daemon, visiting(daemon) as browser:
        secret = "s3cret-" + "A" * 36
        cookie = {f"{pages.COOKIE}_{daemon.http_port}": secret}
        async with browser.session.get(f"/console/live?code={secret}", headers={PAGE: secret}, cookies=cookie) as one:
            assert one.status == 401
        assert (await browser.post("login", {"code": secret}))[0] == 401
        await _raw(daemon, f"GET /console/{secret} HTTP/9\r\nCookie: {secret}\r\n\r\n".encode())
        rows = json.dumps(await daemon.ask("recent_audit", limit=20))
        assert "authentication_failed" in rows
        assert secret not in rows
    assert secret not in caplog.text
