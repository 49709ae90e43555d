"""Every store of a home, opened in the order of version 1 (section 3), and closed in the other."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

import anyio
import anyio.to_thread

from covenant.adapters.ipc.run_tools import RunTools
from covenant.handlers import billing, routes
from covenant.handlers.server import Server
from covenant.handlers.state.ignore_rules import IgnoreSet
from covenant.handlers.state.other_hosts import OtherHosts
from covenant.handlers.state.secret_source import InMemorySecrets
from covenant.keys.identity import Identity
from covenant.providers import known_hosts, mcp_servers, secrets_file, tools
from covenant.providers.chain import pick
from covenant.providers.embed import pick as embed_pick
from covenant.runtime import build
from covenant.runtime.agents import Agents
from covenant.settings import Settings
from covenant.stores.audit.durable import DurableAudit
from covenant.stores.budget.durable import DurableBudgetLedger, DurableCheckpoints
from covenant.stores.capabilities.durable import DurableCapabilities
from covenant.stores.clock import SteadyClock
from covenant.stores.mailbox.durable import DurableMailbox
from covenant.stores.mailbox.seen_envelopes import SeenEnvelopes
from covenant.stores.memory.durable import DurableMemory
from covenant.stores.peers.durable import DurablePeers
from covenant.stores.settlement.durable import DurableReceipts
from sandbox.storage import files_read

_LOG: Final = logging.getLogger(__name__)
# A store that cannot be closed must not keep the daemon from ending.
_CLOSE_SECONDS: Final = 30.0


def now_ms() -> int:
    """The daemon's one clock: Unix milliseconds."""
    return time.time_ns() // 1_000_000


class Opened:
    """The server, what runs its agents, and what the opening of its stores set right."""

    def __init__(
        self,
        server: Server,
        runtime: build.Runtime,
        recovered: tuple[str, ...],
        mcp_servers: tuple[mcp_servers.McpServer, ...] = (),
    ) -> None:
        self.server, self.runtime, self.recovered, self.mcp_servers = server, runtime, recovered, mcp_servers


@asynccontextmanager
async def opened(settings: Settings, *, clock: Callable[[], int] = now_ms) -> AsyncIterator[Opened]:
    """A server over the stores of ``settings.home``.

    Raises:
        errors.CovenantError: a store cannot be used; none stays open then.
    """
    home = settings.home
    files_read.note(home, files_read.look(home / name for name in (secrets_file.NAME, known_hosts.NAME)))
    steady = await anyio.to_thread.run_sync(SteadyClock.open, home, clock)
    recovered: list[str] = []
    async with AsyncExitStack() as stack:

        def closing(what: str, store: Any) -> Any:
            stack.push_async_callback(_closed, what, store.close)
            recovered.extend(f"{what}: {each}" for each in getattr(store, "recovered", ()))
            return store

        agents = Agents(home)
        told = await anyio.to_thread.run_sync(secrets_file.told, home)
        anchors = pick.pick(told.chain)
        servers, warnings = await anyio.to_thread.run_sync(mcp_servers.read, home)
        for warning in warnings:
            _LOG.warning("%s: %s", secrets_file.NAME, warning)
        picked = await embed_pick.pick(await anyio.to_thread.run_sync(embed_pick.read_settings, home))
        if picked.warning:
            _LOG.warning("embedder: %s", picked.warning)
        embedder = closing("embedder", picked.embedder)
        memory = closing("memory", await DurableMemory.open(home / "memory.db", space=embedder.name))
        receipts = closing("receipts", await DurableReceipts.open(home / "receipts" / "working.jsonl"))
        identity = await anyio.to_thread.run_sync(Identity.load, home)
        audit = closing("audit", await DurableAudit.open(home, issuer=identity.agent, now_ms=steady))
        runtime = await stack.enter_async_context(
            build.opened(settings, audit=audit, now_ms=steady, operator=identity.agent.pubkey, sessions=len(servers))
        )
        capabilities = closing("capabilities", await DurableCapabilities.open(home / "capabilities", identity))
        ignore = await anyio.to_thread.run_sync(IgnoreSet.open, home)
        mailbox = closing("mailbox", await DurableMailbox.open(home, now_ms=steady))
        known = await anyio.to_thread.run_sync(known_hosts.read, home)
        seen = closing("envelopes", await SeenEnvelopes.open(home)) if known.hosts else None
        peers = closing("peers", await DurablePeers.open(home / "peers", identity.agent, steady))
        budget = closing("budget", await DurableBudgetLedger.open(home / "budget" / "ledger.jsonl", steady))
        runtime.supervised.allow(functools.partial(billing.allowance, budget))
        checkpoints = closing(
            "checkpoints", await DurableCheckpoints.open(home / "budget" / "checkpoints.jsonl", steady)
        )
        server = Server(
            home=home,
            now_ms=steady,
            settings=settings,
            identity=identity,
            audit=audit,
            capabilities=capabilities,
            peers=peers,
            memory=memory,
            embedder=embedder,
            ignore=ignore,
            budget=budget,
            checkpoints=checkpoints,
            receipts=receipts,
            chain=anchors,
            mailbox=mailbox,
            other_hosts=None if seen is None else OtherHosts(known, seen),
            tools=tools.native(steady),
            agents=agents,
            runners=runtime.runners,
            secrets=InMemorySecrets(told.secrets),
            handlers=routes.HANDLERS,
            clock=steady,
        )
        runtime.supervised.serve_tools(RunTools(server))
        stack.push_async_callback(steady.keep)
        audit.listen(lambda event: server.feed.publish("audit", event))
        audit.listen(server.live.heard)
        yield Opened(server, runtime, tuple(recovered), servers)


async def _closed(what: str, close: Callable[[], Awaitable[None]]) -> None:
    with anyio.CancelScope(shield=True), anyio.move_on_after(_CLOSE_SECONDS) as limit:
        try:
            await close()
        except Exception:
            # The others are closed all the same; what was acknowledged is on the disk already.
            _LOG.exception("%s could not be closed", what)
    if limit.cancelled_caught:
        _LOG.error("%s did not close in time", what)
