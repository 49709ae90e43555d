"""A web console for tests in a real Chromium: a real daemon with rows that a hostile agent chose, a double of the
supervisor, and one browser that is logged in.
"""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio.from_thread
import anyio.to_thread
import pytest
from anyio.from_thread import BlockingPortal

from covenant.runtime.attached import AttachedTerminal, AttachmentPipes
from covenant.runtime.supervisor_client import Supervised
from policy import errors
from sandbox.run_io import RESIZE
from tests import browser_kit, cli_daemon_kit, daemon_kit, tui_data, tui_kit
from tests.browser_kit import ROOT, Page
from tests.daemon_kit import Daemon
from tests.mailbox_kit import MANIFEST

PICTURES = ROOT / "build/console"
# Markup, an attribute's end, and a link that is a script; then what tests/tui_data.py has for terminals.
MARKUP = (
    '<img src=/console/icon.svg?hit onload="window.hit=1" onerror="window.hit=1"><script>window.hit=1</script>'
    "\"'><svg onload=window.hit=1> javascript:window.hit=1 ${window.hit=1} </td></table></main>"
)
HOSTILE = MARKUP + tui_data.HOSTILE.replace("\ud800", "")
RUN = tui_data.RUNS[1]["run_id"]
# The third below its root, with words that are wide in a picture.
DEEPEST = tui_data.run(8, "W" * 40, parent=tui_data.RUNS[2]["run_id"], depth=3, state="Suspending", denied=1234)
# The run of an intent.
ASKED = tui_data.run(7, "hello", intent_id=tui_data.ANSWERING["intent_id"])
INTENT = tui_data.INTENT
FAILED = "bbbbbbbb-2222-4222-8222-000000000002"
TASK = "task-1"
PAGES = {
    "overview": "#/",
    "runs": "#/runs",
    "run": f"#/runs/{RUN}",
    "sessions": "#/sessions",
    "session": f"#/sessions/{tui_data.SESSION['run_id']}",
    "intents": "#/intents",
    "intent": f"#/intents/{INTENT}",
    "workspaces": "#/workspaces",
    "workspace": f"#/workspaces/{tui_data.WORKSPACE['run_id']}",
    "agents": "#/agents",
    "agent": "#/agents/librarian",
    "denials": "#/denials",
    "approvals": "#/approvals",
    "audit": "#/audit",
    "memory": "#/memory",
    "mailbox": "#/mailbox",
    "task": f"#/mailbox/{TASK}",
    "budgets": "#/budgets",
    "grants": "#/grants",
}


# What an agent writes first: markup, the clipboard, a title, a link, colours that need a style of their own.
SCREEN = (
    f"{MARKUP}\r\n\x1b]52;c;ZXZpbA==\x07\x1b]0;stolen title\x07\x1b]8;;http://evil.example/\x1b\\LINK\x1b]8;;\x1b\\"
    "\x1b[38;2;250;250;250mpale\x1b[0m \x1b[1;31mred\x1b[0m \x9b21t\x1bP+q544e\x1b\\\r\nREADY "
).encode()


class Sessions:
    """Doubles of the shims of sessions: each writes SCREEN and what is typed, and ends at a `Q` with status 7."""

    def __init__(self) -> None:
        self.typed = bytearray()
        self.sizes: list[tuple[int, int]] = []
        self.runs: list[str] = []
        self.open = 0
        self.refusal: errors.CovenantError | None = None

    @contextlib.asynccontextmanager
    async def attached(self, run: str, rows: int, columns: int) -> AsyncIterator[AttachedTerminal]:
        """As ``Supervised.attached``."""
        if self.refusal is not None:
            raise self.refusal
        self.runs.append(run)
        self.sizes.append((rows, columns))
        self.open += 1
        pipes = AttachmentPipes()
        stdin, stdout, sizes = (os.dup(fd) for fd in pipes.theirs)
        agents = [threading.Thread(target=self._agent, args=(stdin, stdout)),
                  threading.Thread(target=self._resized, args=(sizes,))]  # fmt: skip
        for one in agents:
            one.start()

        async def ended() -> Mapping[str, Any]:
            return {"status": "failed", "exit_status": 7, "message": HOSTILE}

        pipes.release()
        try:
            yield AttachedTerminal(run, pipes, ended)
        finally:
            pipes.close()
            for one in agents:
                await anyio.to_thread.run_sync(one.join)
            self.open -= 1

    def _agent(self, stdin: int, stdout: int) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(stdout, SCREEN)
            while (data := os.read(stdin, 4096)) and b"Q" not in data:
                self.typed += data
                os.write(stdout, data)
        os.close(stdin)
        os.close(stdout)

    def _resized(self, sizes: int) -> None:
        while size := os.read(sizes, RESIZE.size):
            self.sizes.append(RESIZE.unpack(size))
        os.close(sizes)


@dataclass
class Console:
    """A browser that is logged in, its daemon, and the double of the supervisor."""

    page: Page
    daemon: Daemon
    portal: BlockingPortal
    supervisor: tui_kit.Service
    sessions: Sessions

    @property
    def base(self) -> str:
        """The origin of the console."""
        return f"http://127.0.0.1:{self.daemon.http_port}"

    def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Ask the daemon as the operator."""
        return self.portal.call(lambda: self.daemon.ask(kind, **fields))

    def go(self, page: str) -> None:
        """Open one page of the console."""
        self.page.go(f"{self.base}/{page}")
        self.page.evaluate("new Promise((resolve) => setTimeout(resolve, 50))")
        self.page.until("document.querySelector('[role=status]')?.textContent === 'live'")
        self.page.until("document.querySelector('main[aria-busy=false] h1') !== null")


def _filled(home: Path) -> None:
    manifest = MANIFEST.format(id="hello", required="[]") + "[settlement]\nbudget_credits_per_hour = 60\n"
    cli_daemon_kit.package(home, "hello", manifest)
    shutil.copytree(ROOT / "agents/librarian", home / "agents/librarian")
    (home / "agents" / "broken").mkdir(mode=0o700)
    (home / "agents" / "broken" / "agent.toml").write_text("[agent]\n")


def _workspace(verb: str, **fields: Any) -> dict[str, Any]:
    """Answer about one workspace, whose names and contents an agent chose."""
    rows = {
        "damaged": [HOSTILE],
        "workspaces": [tui_data.WORKSPACE, tui_data.WORKSPACE | {"run_id": "x", "agent_id": HOSTILE}],
    }
    if verb == "list":
        return {"kind": "workspaces", **rows}
    if verb == "texts":
        old, new = "one\ntwo\n", f"one\n{HOSTILE}\n"
        texts = {name: base64.b64encode(text.encode()).decode() for name, text in (("old", old), ("new", new))}
        return {"kind": "workspace_texts", "texts": [{"path": fields["paths"][0], **texts}]}
    if verb == "apply":
        return {"kind": "workspace_applied", "count": 1, "left": [{}], "more": 0}
    change = {"kind": "file", "size": 7, "target": "", "refused": "", "conflict": ""}
    changes = [
        change | one for one in (*tui_data.DIFF["changes"], {"path": HOSTILE, "action": "delete", "conflict": HOSTILE})
    ]
    return {**tui_data.workspace(verb), **({"changes": changes} if verb == "diff" else {})}


async def _rows(daemon: Daemon) -> None:
    for number, (layer, target) in enumerate((("path", "/var/log"), ("network", HOSTILE), ("exec", "/usr/bin/curl"))):
        about: dict[str, Any] = {
            "run_id": tui_data.RUNS[1]["run_id"],
            "agent_id": "librarian",
            "operator": None,
            "denial": f"D{number}",
            "grant": "permissions",
        }
        about |= {"layer": layer, "target": target, "code": "not_granted", "count": number + 1}
        await daemon.server.audit.append("denied", about, daemon.server.identity.agent)
    for action in ("memory.write", "memory.read", "chain.receipts"):
        await daemon.grant(action)
    await daemon.ask("put_memory", tier="longterm", text=HOSTILE)
    await daemon.ask("put_memory", tier="working", text="the disk of the archive is full on Fridays")
    await _asked_for(daemon)


async def _asked_for(daemon: Daemon) -> None:
    """Intents that waited and failed, and tasks without and with an answer."""
    me = daemon.server.identity.agent
    waits = {"intent_id": INTENT, "intent_text": HOSTILE, "agent_display": f"{MARKUP}@agent", "requested": 1}
    await daemon.server.audit.append("budget_exhausted", waits | {"tokens_remaining": 0, "refill_eta_ms": 0}, me)
    failed = {"intent_id": FAILED, "matched_agent": "hello", "run_id": None, "stage": "run", "code": "killed"}
    await daemon.server.audit.append("intent_failed", failed | {"message": HOSTILE}, me)
    await daemon.grant(f"a2a.send.{me.display}", f"a2a.recv.{me.display}", f"a2a.respond.{me.display}")
    for name in ("task-0", TASK):
        task = {"id": name, "sender": me.model_dump(), "recipient": me.model_dump(), "intent_text": f"{name} {HOSTILE}"}
        await daemon.ask("send_a2_a_task", task=task)
    assert (await daemon.ask("try_recv_a2_a_task"))["task"]["id"] == "task-0"
    result = {"task_id": "task-0", "status": "error", "content": [], "error_message": HOSTILE}
    await daemon.ask("post_a2_a_result", result=result)


@contextlib.contextmanager
def opened(home: Path) -> Iterator[Console]:
    """A console of a new home."""
    home.mkdir(mode=0o700)
    _filled(home)
    answers = {
        **tui_data.SUPERVISOR,
        "top": {"runs": [*tui_data.RUNS, DEEPEST, tui_data.run(6, MARKUP + tui_data.HOSTILE, state=HOSTILE), ASKED]},
        "workspace": _workspace,
    }
    service = tui_kit.Service(answers)

    async def ask(self: Supervised, kind: str, /, **fields: Any) -> dict[str, Any]:
        return service(kind, **fields)

    sessions = Sessions()
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(Supervised, "ask", ask)
        patch.setattr(Supervised, "attached", lambda self, *about: sessions.attached(*about))
        portal = stack.enter_context(anyio.from_thread.start_blocking_portal())
        running = daemon_kit.running(home, http_port=0)
        daemon = stack.enter_context(portal.wrap_async_context_manager(running))
        portal.call(_rows, daemon)
        one = Console(stack.enter_context(browser_kit.browser()), daemon, portal, service, sessions)
        one.page.look("desk", "light")
        one.page.go(one.ask("open_console")["url"])
        one.page.sees("Overview")
        yield one
        # No test may have made a page load something from elsewhere.
        assert [url for url in one.page.urls if not url.startswith((f"{one.base}/", "about:", "data:"))] == []
        assert one.page.problems == []
