"""``covenantd``: the only process that owns a home's state. This module defines the start order and the wiring.

    (1) the home is ours alone, and locked       (4) runs that the last daemon did not see end
    (2) the stores, in version 1's order         (5) the row that says that it runs
    (3) the agents                               (6) tasks: deliveries, retries, budgets, packages, peers, watchdog
                                                 (7) HTTP, then the socket

It stops in reverse order. Requests in progress are answered within ``STOP_SECONDS``; a longer run is ended, and its
rows say so.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.metadata
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import anyio
import anyio.abc

from covenant import daemon_home, daemon_log, daemon_stores
from covenant import settings as covenant_settings
from covenant.adapters.console.pages import Services
from covenant.adapters.http import gateway as http_gateway
from covenant.adapters.http import listen
from covenant.adapters.ipc import gateway as ipc_gateway
from covenant.daemon_stores import Opened
from covenant.handlers import billing, expiry, tool_servers
from covenant.handlers.grants import peers
from covenant.handlers.intents import agents, budget, recovery
from covenant.handlers.mailbox import delivery
from covenant.handlers.server import Server
from covenant.runtime.budget_preemption import BudgetPreemption
from covenant.settings import Settings
from covenant.wire import parts
from covenant.wire.a2a import push_urls
from policy import errors
from policy.data import price_table
from sandbox import core_dumps, heap
from sandbox.serve import systemd

_LOG: Final = logging.getLogger("covenantd")

STOP_SECONDS: Final = 30.0
# The interval at which expired tokens are logged.
_PEERS_SECONDS: Final = 60.0
_USAGE_STATUS: Final = 2


def main(arguments: Sequence[str]) -> int:
    """Serve until a signal. Returns the exit status: 0 ended, 1 refused or failed, 2 wrong usage."""
    parser = argparse.ArgumentParser(
        prog="covenantd", description="Serve COVENANT_HOME to its clients, over its socket and over HTTP on 127.0.0.1."
    )
    parser.add_argument("--version", action="version", version=f"covenantd {version()}")
    parser.add_argument("--allow-root", action="store_true", help="run as root all the same (COVENANT_ALLOW_ROOT=1)")
    given = parser.parse_args(arguments)
    daemon_log.configure()
    try:
        _check_user(allow_root=given.allow_root or os.environ.get("COVENANT_ALLOW_ROOT") == "1")
        os.umask(0o077)
        _limits()
        settings = covenant_settings.read(os.environ)
        for name in settings.unused:
            _LOG.warning("%s is set, and has no effect here", name)
        anyio.run(_until_signal, settings)
    except (errors.CovenantError, BaseExceptionGroup) as e:
        first = _first(e)
        if first is None:
            raise
        for one in errors.each(first):
            sys.stderr.write(daemon_log.visible(f"covenantd: {one} [{one.code}]\n"))
            if one.hint:
                sys.stderr.write(daemon_log.visible(f"  fix: {one.hint}\n"))
        return _USAGE_STATUS if isinstance(first, errors.UsageError) else 1
    return 0


def version() -> str:
    """Return the version of this program."""
    return importlib.metadata.version("covenant-supervisor")


def _first(error: BaseException) -> errors.CovenantError | None:
    """Return the first refusal in the exception groups of the tasks; None if there is none."""
    if isinstance(error, BaseExceptionGroup):
        return next(filter(None, map(_first, error.exceptions)), None)
    return error if isinstance(error, errors.CovenantError) else None


def _check_user(*, allow_root: bool) -> None:
    """Refuse to run as root.

    Raises:
        errors.RootRefusedError: the process is root's, and ``allow_root`` is not set.
    """
    if os.geteuid() == 0 and not allow_root:
        raise errors.RootRefusedError("the daemon does not run as root", hint="run it as the operator, or --allow-root")


def _limits() -> None:
    """Forbid core files, which would contain keys, raise the limit of descriptors, since each connection needs one, and
    keep one heap for all threads: what one thread has freed is then used by the others, and not held for years."""
    core_dumps.forbid()
    heap.share()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _until_signal(settings: Settings) -> None:
    stop = Stop()
    async with anyio.create_task_group() as group:
        group.start_soon(_signals, stop)
        await serve(settings, stop)
        group.cancel_scope.cancel()


async def _signals(stop: Stop) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for number in signals:
            stop(signal.Signals(number).name)


class Stop:
    """The request to stop the daemon, with its reason."""

    def __init__(self) -> None:
        self.reason = ""
        self.event = anyio.Event()

    def __call__(self, reason: str) -> None:
        self.reason = self.reason or reason
        self.event.set()


@dataclass(frozen=True, slots=True)
class Running:
    """A running daemon; ``http_port`` is None without HTTP."""

    opened: Opened
    socket: ipc_gateway.IpcGateway
    http_port: int | None


Ready = Callable[[Running], None]


async def serve(settings: Settings, stop: Stop, *, ready: Ready = lambda running: None) -> None:
    """Serve ``settings.home`` until ``stop``.

    Raises:
        errors.CovenantError: it cannot be served.
    """
    began = time.monotonic()
    with ExitStack() as stack:
        # Objects made before the freeze stay: scanning them for garbage repeatedly took a third of a start.
        gc.collect()
        gc.disable()
        stack.callback(gc.enable)
        # (1)
        directory = stack.enter_context(daemon_home.held(settings.home))
        # (2)
        async with daemon_stores.opened(settings) as opened, anyio.create_task_group() as group:
            await _prepare(opened)
            # (6)
            await _tasks(opened, settings, group, stop)
            # (7)
            async with _http(opened, settings, group) as web:
                sock = stack.enter_context(daemon_home.listening(directory, settings.home))
                gateway = ipc_gateway.IpcGateway(opened.server, group)
                group.start_soon(gateway.listen, sock)
                gc.freeze()
                gc.enable()
                _say_ready(settings, opened, web, time.monotonic() - began)
                # Only now, because only a search waits for it.
                group.start_soon(_warm, opened)
                ready(Running(opened, gateway, web.port if web else None))
                await stop.event.wait()
                await _end(opened, gateway, web, stop.reason)
            group.cancel_scope.cancel()


async def _prepare(opened: Opened) -> None:
    server = opened.server
    # (3)
    await server.agents.reload(lambda change: agents.noted(server, change, "start"))
    # (4)
    await recovery.recover_open_intents(server)
    for each in opened.recovered:
        _LOG.warning("set right: %s", each)
    # (5)
    row = {"version": version(), "agents": len(server.agents.cards()), "recovered": list(opened.recovered)}
    await server.audit.append("daemon_started", row)


async def _tasks(opened: Opened, settings: Settings, group: anyio.abc.TaskGroup, stop: Stop) -> None:
    server = opened.server
    await group.start(delivery.Delivery(server).run)
    if settings.retry.scheduler:
        policy = parts.RetryPolicy(
            enabled=True,
            min_lease_age_ms=settings.retry.min_lease_age_ms,
            max_attempts=settings.retry.max_attempts,
            max_requeues=settings.retry.max_requeues,
            scan_limit=settings.retry.scan_limit,
        )
        group.start_soon(lambda: delivery.retry_on_schedule(server, policy, interval_ms=settings.retry.interval_ms))
    projection = BudgetPreemption(
        server.runners,
        server.budget,
        look=opened.runtime.supervised.used,
        audit=server.audit,
        key_of=lambda agent_id: billing.budget_of(agent_id).pubkey,
        prices=price_table.prices(),
        now_ms=server.now_ms,
        clock_ms=lambda: time.monotonic_ns() // 1_000_000,
        tick=settings.projection,
    )
    group.start_soon(projection.run)
    # `stop` reaches the watcher's thread at once; a cancellation waits for the thread to return.
    noted = functools.partial(agents.noted, server, cause="inotify")
    group.start_soon(lambda: server.agents.watch(noted, stop=stop.event))
    group.start_soon(_peers, opened)
    group.start_soon(budget.upkeep, server)
    group.start_soon(server.unfinished.run)
    group.start_soon(server.refusals.run, server.audit)
    group.start_soon(server.clock.run)
    group.start_soon(expiry.warn, server)
    keep = functools.partial(tool_servers.keep, operator=server.identity.agent.pubkey)
    group.start_soon(keep, opened.mcp_servers, opened.runtime.supervised, server.tools, server.audit)
    group.start_soon(_watchdog)


async def _peers(opened: Opened) -> None:
    while True:
        await anyio.sleep(_PEERS_SECONDS)
        try:
            await peers.note_expired(opened.server)
        except errors.CovenantError as e:
            _LOG.error("the end of a token is not in the log: %s", e)


async def _warm(opened: Opened) -> None:
    try:
        await opened.server.memory.warm()
    except errors.CovenantError as e:
        _LOG.error("memory could not be read ahead: %s", e)


async def _watchdog() -> None:
    """Notify systemd from the loop itself: a blocked loop means a blocked daemon."""
    while True:
        systemd.alive()
        await anyio.sleep(systemd.watchdog_seconds())


@asynccontextmanager
async def _http(
    opened: Opened, settings: Settings, group: anyio.abc.TaskGroup
) -> AsyncIterator[http_gateway.HttpGateway | None]:
    if settings.http_port is None:
        yield None
        return
    allowed, bad = push_urls.rules(settings.a2a_push_urls)
    if bad:
        # An entry that is left out would be a smaller list than the operator thinks; a wider reading is never taken.
        raise errors.SettingError(
            f"`{bad[0][:64]}` is no URL of {covenant_settings.PUSH_URLS}",
            hint="write https://HOST[:PORT][/PATH], with commas between several",
            where=covenant_settings.PUSH_URLS,
        )
    gateway = http_gateway.HttpGateway(
        *(opened.server, group),
        origins=settings.http_origins,
        push_urls=allowed,
        console=Services(
            opened.runtime.supervised.ask,
            opened.runtime.supervised.attached,
            functools.partial(_view_packages, opened.server, settings),
        ),
    )
    with listen.bind(settings.http_bind, settings.http_port) as sock:
        try:
            await gateway.listen(sock)
            yield gateway
        finally:
            # After an orderly end this has no effect.
            with anyio.CancelScope(shield=True):
                await gateway.stop(grace_seconds=0)


def _view_packages(server: Server, settings: Settings, kind: str, fields: Mapping[str, str]) -> Mapping[str, Any]:
    # Only the console asks, and the compilers take long to import.
    from covenant.runtime.agent_view import AgentView

    state = settings.state or settings.home / "supervisor"
    return AgentView(server.agents, home=settings.home, state=state).answer(kind, fields)


def _say_ready(settings: Settings, opened: Opened, web: http_gateway.HttpGateway | None, seconds: float) -> None:
    count = len(opened.server.agents.cards())
    where = f"HTTP {settings.http_bind}:{web.port}" if web else "no HTTP"
    _LOG.info("serves %s with %d agents, %s (started in %.2f s)", settings.home, count, where, seconds)
    systemd.say("READY=1")


async def _end(
    opened: Opened, gateway: ipc_gateway.IpcGateway, web: http_gateway.HttpGateway | None, reason: str
) -> None:
    """Answer the requests in progress, and no more."""
    systemd.say("STOPPING=1")
    _LOG.info("ends: %s", reason)
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: gateway.stop(grace_seconds=STOP_SECONDS))
        if web is not None:
            group.start_soon(lambda: web.stop(grace_seconds=STOP_SECONDS))
    try:
        await opened.server.unfinished.write()
    except errors.CovenantError as e:
        _LOG.error("%d intents are left to the next start: %s", len(opened.server.unfinished), e)
    await opened.server.audit.append("daemon_stopped", {"reason": reason})
