"""A whole daemon in the process of the test, and a client on its socket."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

from covenant import daemon
from covenant.handlers.server import Server
from covenant.settings import Settings
from tests.doubles import async_client
from tests.doubles.async_client import AsyncClient

START_SECONDS = 60.0


@dataclass
class Daemon:
    """One that runs, and its operator's connection."""

    home: Path
    running: daemon.Running
    client: AsyncClient

    @property
    def server(self) -> Server:
        """Its stores."""
        return self.running.opened.server

    @property
    def http_port(self) -> int:
        """Where its HTTP listens."""
        assert self.running.http_port is not None
        return self.running.http_port

    async def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        """One request of the operator's; what is refused is raised. Rows of the log are those of all kinds."""
        if kind == "recent_audit":
            fields = {"extended": True} | fields
        return await self.client.ask(kind, **fields)

    async def grant(self, *actions: str, scope: Any = None) -> None:
        """Have the operator hold these actions, as ``bootstrap`` does."""
        for action in actions:
            await self.ask("grant_capability", action=action, scope=scope or {})


@contextlib.asynccontextmanager
async def running(
    home: Path, *, prepare: Callable[[Server], None] = lambda server: None, **settings: Any
) -> AsyncIterator[Daemon]:
    """A daemon of ``home``, without HTTP unless ``http_port`` says otherwise; it is stopped at the end of the block.

    ``prepare`` may put doubles in the place of what a server holds (its ``runners``, say) once it runs.
    """
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    stop, started = daemon.Stop(), anyio.Event()
    found: list[daemon.Running] = []

    def ready(one: daemon.Running) -> None:
        prepare(one.opened.server)
        found.append(one)
        started.set()

    async with anyio.create_task_group() as group:
        group.start_soon(lambda: daemon.serve(Settings(home=home, **{"http_port": None} | settings), stop, ready=ready))
        with anyio.fail_after(START_SECONDS):
            await started.wait()
        try:
            async with async_client.connected(home) as client:
                yield Daemon(home, found[0], client)
        finally:
            stop("test")


@contextlib.asynccontextmanager
async def peer(one: Daemon, agent: Any, *actions: str) -> AsyncIterator[AsyncClient]:
    """Enroll a peer and yield its connected client."""
    made = await one.ask("enroll_peer", display=agent.display, pubkey=agent.pubkey, actions=list(actions))
    async with async_client.connected(one.home, token=made["token_b58"]) as client:
        yield client
