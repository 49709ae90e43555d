"""A Hermes API that speaks the published contract over real HTTP and does what a test scripts.

Contract: hermes-agent, website/docs/user-guide/features/api-server.md, "Runs API": bearer token, `/capabilities`,
`POST /runs` with an idempotency key, polled status, server-sent events, `/stop`, `/approval`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import anyio
import anyio.abc
from aiohttp import web

KEY: Final = "a-key-of-hermes"
FEATURES: Final = {"run_submission": True, "run_status": True, "run_events_sse": True, "run_stop": True}


@dataclass
class Run:
    """One run: what it says, how it stands, and who asked what of it."""

    id: str
    input: str
    session_id: str
    status: str = "started"
    output: str | None = None
    error: Any = None
    stopped: int = 0
    approvals: list[dict[str, Any]] = field(default_factory=list)
    events: list[bytes] = field(default_factory=list)
    closed: bool = False
    changed: anyio.Event = field(default_factory=anyio.Event)

    def say(self, event: str, **fields: Any) -> None:
        """An event on the stream."""
        document = {"event": event, "run_id": self.id, "timestamp": 1.0, **fields}
        self.raw(f"event: {event}\ndata: {json.dumps(document)}\n\n".encode())

    def raw(self, data: bytes) -> None:
        """Bytes on the stream."""
        self.events.append(data)
        self.wake()

    def wake(self) -> None:
        """Have everybody look again who waits."""
        changed, self.changed = self.changed, anyio.Event()
        changed.set()

    def end(self, status: str, output: str | None = None, error: Any = None) -> None:
        """Its last state, said on the stream as well."""
        self.status, self.output, self.error = status, output, error
        self.say(f"run.{status}", output=output)
        self.close()

    def close(self) -> None:
        """The end of the stream."""
        self.closed = True
        self.raw(b": stream closed\n\n")

    async def until(self, look: Callable[[], bool]) -> None:
        """Wait until `look` is true; it is tried after each request."""
        while not look():
            await self.changed.wait()


Script = Callable[[Run], Coroutine[Any, Any, None]]


async def answers(run: Run) -> None:
    """A run without tools."""
    run.status = "running"
    run.say("message.delta", delta="Hel")
    run.end("completed", f"You said: {run.input}")


@dataclass
class HermesDouble:
    """``script`` is what each run does; ``runs`` are those that were started, by their id."""

    script: Script = answers
    features: dict[str, Any] = field(default_factory=lambda: dict(FEATURES))
    runs: dict[str, Run] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    # What is answered in the place of the contract, by path.
    instead: dict[str, Callable[[web.Request], Awaitable[web.StreamResponse]]] = field(default_factory=dict)
    url: str = ""
    group: anyio.abc.TaskGroup | None = None

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append((request.method, request.path))
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return web.json_response({"error": {"message": "no"}}, status=401)
        path = request.path.removeprefix("/v1")
        if path in self.instead:
            return await self.instead[path](request)
        if path == "/capabilities":
            return web.json_response({"object": "hermes.api_server.capabilities", "features": self.features})
        if (request.method, path) == ("POST", "/runs"):
            return await self._start(request)
        _, _, run_id, *what = path.split("/")
        run = self.runs.get(run_id)
        if run is None:
            return web.json_response({"error": {"message": "run_not_found"}}, status=404)
        return await {
            (): self._status,
            ("events",): self._events,
            ("stop",): self._stop,
            ("approval",): self._approval,
        }[tuple(what)](request, run)

    async def _start(self, request: web.Request) -> web.Response:
        document, key = await request.json(), request.headers["Idempotency-Key"]
        run_id = self.keys.get(key)
        if run_id is None:
            run_id = self.keys[key] = f"run_{len(self.runs) + 1}"
            run = self.runs[run_id] = Run(run_id, document["input"], document["session_id"])
            assert self.group is not None
            self.group.start_soon(self.script, run)
        return web.json_response({"run_id": run_id, "status": "started"}, status=202)

    async def _status(self, request: web.Request, run: Run) -> web.Response:
        document = {"object": "hermes.run", "run_id": run.id, "status": run.status, "session_id": run.session_id}
        return web.json_response({**document, "output": run.output, "error": run.error})

    async def _events(self, request: web.Request, run: Run) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        sent = 0
        while True:
            while sent < len(run.events):
                await response.write(run.events[sent])
                sent += 1
            if run.closed:
                return response
            await run.changed.wait()

    async def _stop(self, request: web.Request, run: Run) -> web.Response:
        run.stopped += 1
        run.wake()
        if not run.closed:
            run.end("cancelled")
        return web.json_response({"run_id": run.id, "status": "stopping"})

    async def _approval(self, request: web.Request, run: Run) -> web.Response:
        document = await request.json()
        run.approvals.append(document)
        run.wake()
        answer = {"object": "hermes.run.approval_response", "run_id": run.id, "choice": document["choice"]}
        run.say("approval.responded", choice=document["choice"], resolved=1)
        return web.json_response({**answer, "resolved": 1})


@asynccontextmanager
async def serving(script: Script = answers, **fields: Any) -> AsyncIterator[HermesDouble]:
    """One on the loopback, until the end of the block."""
    double = HermesDouble(script, **fields)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", double._handle)
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    double.url = f"http://127.0.0.1:{port}/v1"
    try:
        async with anyio.create_task_group() as group:
            double.group = group
            yield double
            group.cancel_scope.cancel()
    finally:
        await runner.cleanup()
