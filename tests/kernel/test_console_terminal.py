"""A session in the web console: a browser's requests, a daemon without rights, a real supervisor, a real terminal."""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import anyio.to_thread
import pytest

from tests import http_kit
from tests.daemon.test_console import Browser
from tests.doubles import async_client
from tests.kernel import serving
from tests.kernel.serving import CALLER, Served
from tests.kernel.test_daemon_runs import Process
from tests.kernel.test_detach import _detached, _package, _rows
from tests.kernel.test_serve import eventually
from tests.kernel.world import World

pytestmark = pytest.mark.anyio
SECONDS = 120.0
LEFT = "its caller has left, and it goes on"


@pytest.fixture
def served(warm: Path) -> Iterator[Served]:
    with serving.open_place() as base, Served(World(base, warm=warm)) as one:
        yield one


@contextlib.asynccontextmanager
async def _logged_in(home: Path) -> AsyncIterator[Browser]:
    async with async_client.connected(home) as client:
        origin, _, code = (await client.ask("open_console"))["url"].partition("/#code=")
    jar = aiohttp.CookieJar(unsafe=True)
    async with aiohttp.ClientSession(origin, cookie_jar=jar) as session:
        browser = Browser(session, origin)
        browser.page = (await browser.post("login", {"code": code}))[1]["page"]
        yield browser


class _Screen:
    """The output of one attachment."""

    def __init__(self, browser: Browser, answer: aiohttp.ClientResponse) -> None:
        self._browser, self.answer = browser, answer
        self._events = http_kit.events(answer)
        self.shown = b""
        self.name = ""

    async def until(self, text: bytes) -> None:
        """Read until the text was shown."""
        with anyio.fail_after(SECONDS):
            while text not in self.shown:
                chunk = (await anext(self._events)).data.get("chunk", {})
                self.name = chunk.get("terminal", self.name)
                self.shown += base64.b64decode(chunk.get("data", ""))

    async def type(self, **fields: Any) -> None:
        """Type, or set the size."""
        status, document, _ = await self._browser.post("type", {"terminal": self.name, **fields})
        assert status == 200, document

    async def end(self) -> dict[str, Any]:
        """Return the record of the session."""
        with anyio.fail_after(SECONDS):
            found = [one.data async for one in self._events]
        record: dict[str, Any] = found[-1]["summary"]["record"]
        return record


async def _attached(browser: Browser, run: str) -> aiohttp.ClientResponse:
    body = {"run": run, "rows": 30, "columns": 90}
    return await browser.session.post(
        "/console/attach", json=body, headers={"Origin": browser.origin, "X-Covenant-Page": browser.page}
    )


async def test_session_of_own_user_alone_is_attached(served: Served) -> None:
    package = _package(served.world)
    run = _detached(served, package, uid=CALLER)
    roots = _detached(served, _package(served.world, name="roots", id="roots"))
    home = served.world.base / "theirs"
    home.mkdir(mode=0o700)
    os.chown(home, CALLER, CALLER)
    with Process(served, home, http="0"):
        async with _logged_in(home) as browser:
            listed = await browser.ask("ps", of="supervisor")
            assert [(one["run_id"], one["contract"]) for one in listed["runs"]] == [(run, "terminal")]
            # Another user's session is none to this daemon's user.
            async with await _attached(browser, roots) as refused:
                document = await refused.json()
            assert (document["kind"], document["code"]) == ("error", "no_such_run"), document
            async with await _attached(browser, run) as answer:
                one = _Screen(browser, answer)
                await one.until(b"columns=90, lines=30")
                await one.type(data="first \u00e9\r")
                await one.until("said first \u00e9".encode())
                await one.type(rows=44, columns=120)
                await one.until(b"columns=120, lines=44")
                async with await _attached(browser, run) as second:
                    assert "attached already" in (await second.json())["message"]
            # In a thread: the loop closes the connection.
            await anyio.to_thread.run_sync(eventually, lambda: LEFT in _reasons(served, run))
            async with await _attached(browser, run) as answer:
                again = _Screen(browser, answer)
                await again.until("said first \u00e9".encode())
                await again.type(data="quit\r")
                record = await again.end()
            assert (record["run_id"], record["exit_status"]) == (run, 7)
    assert sum(f"uid{CALLER}@local" in row for row in _attachments(served, run)) == 2


def _reasons(served: Served, run: str) -> list[str]:
    return [row["reason"] for row in _rows(served, run, "run_state")]


def _attachments(served: Served, run: str) -> list[str]:
    rows = [row for row in served.world.rows() if row["kind"].get("run_id") == run]
    return [row["issuer"]["display"] for row in rows if "attached" in str(row["kind"].get("reason"))]
