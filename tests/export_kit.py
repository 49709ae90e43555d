"""An export of a log in a test's directory, and a collector on the loopback that fails as it is told."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from covenant.export import cursor, ocsf_file, sinks, worker
from sandbox.audit.follow_process import LocalReaders
from sandbox.audit.log_follow import Follower
from tests.unit.sandbox.audit.test_log import opened, state, write

__all__ = ["state"]


class FakeCollector:
    """An OTLP receiver on the loopback. ``answers`` are given in turn, then 200."""

    def __init__(self) -> None:
        self.answers = list[web.Response]()
        self.bodies = dict[str, list[Any]]()
        self.headers = dict[str, str]()
        self.asked = 0
        self.refused = ""
        self._came = asyncio.Event()

    async def _take(self, request: web.Request) -> web.Response:
        self.asked += 1
        self.headers = dict(request.headers)
        body = await request.json()
        if self.answers:
            answer = self.answers.pop(0)
            if not 200 <= answer.status < 300:
                return answer
        else:
            answer = web.json_response({})
        if self.refused and self.refused in json.dumps(body):
            return web.Response(status=400)
        self.bodies.setdefault(request.match_info["signal"], []).append(body)
        self._came.set()
        return answer

    @property
    def rows(self) -> list[str]:
        """The reasons of all log records in the order of their arrival."""
        records = [
            record
            for body in self.bodies.get("logs", [])
            for record in body["resourceLogs"][0]["scopeLogs"][0]["logRecords"]
        ]
        said = [{one["key"]: one["value"] for one in record["attributes"]} for record in records]
        return [one["covenant.reason"]["stringValue"] for one in said if "covenant.reason" in one]

    async def until(self, count: int) -> None:
        """Wait for so many different rows."""
        while len(set(self.rows)) < count:
            self._came.clear()
            await self._came.wait()

    async def serve(self, port: int = 0) -> tuple[web.AppRunner, int]:
        app = web.Application()
        app.router.add_post("/v1/{signal}", self._take)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        return runner, runner.addresses[0][1]


class Export:
    """One export of a supervisor's log in a test's directory, and what it told."""

    def __init__(self, state: Path, place: Path) -> None:
        place.mkdir(mode=0o700, exist_ok=True)
        self.place = place
        self.told = list[str]()
        self.heard = asyncio.Event()
        self.readers = LocalReaders({"supervisor": Follower("supervisor", state / "audit")})
        self.about = sinks.About("h", "1", self._tell)

    def gives_up_after(self, seconds: float) -> None:
        """Wait so long for a target that takes nothing, as ``--timeout`` does."""
        self.about = dataclasses.replace(self.about, patience_seconds=seconds)

    def _tell(self, text: str) -> None:
        self.told.append(text)
        self.heard.set()

    async def once(
        self, *, otlp: str = "", ocsf: str = "", proofs: str = "", headers: dict[str, str] | None = None
    ) -> None:
        folder = cursor.directory(self.place, os.geteuid())
        lines = ocsf_file.Lines(self.place / ocsf, folder, self.about) if ocsf else None
        proved = ocsf_file.Lines(self.place / proofs, folder, self.about) if proofs else None
        targets = worker.Targets(ocsf=lines, proofs=proved, otlp=otlp, headers=headers or {})
        try:
            with cursor.opened(self.place, folder) as kept:
                await worker.export(targets, ["supervisor"], self.readers, kept, self.about, True)
        finally:
            os.close(folder)


def filled(place: Path, times: range) -> None:
    with opened(place) as log:
        for now_ms in times:
            write(log, f"row {now_ms}", now_ms=now_ms)


def expected(times: range) -> list[str]:
    return [f"row {n}" for n in times]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait shortly: a test has no outage of minutes."""
    monkeypatch.setattr(sinks, "FIRST_WAIT_SECONDS", 0.001)
    monkeypatch.setattr(sinks, "POLL_SECONDS", 0.002)


@pytest.fixture
def export(state: Path, tmp_path: Path) -> Export:
    """An export of a log of the test's own."""
    return Export(state, tmp_path / "export")
