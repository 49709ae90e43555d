"""The worker of ``covenant export``: every log to every sink, until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import ssl
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from covenant.export.collector import METRICS_SECONDS, Collector, OtlpSink
from covenant.export.cursor import Cursors
from covenant.export.ocsf_file import Lines, OcsfSink
from covenant.export.proofs import ProofPump
from covenant.export.sinks import About, Pump, Sink
from policy import errors
from sandbox.audit.follow_process import Readers


@dataclass(frozen=True)
class Targets:
    """Where rows go; None for a sink that is not wanted. ``otlp`` is the address of a collector."""

    ocsf: Lines | None = None
    proofs: Lines | None = None
    otlp: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    tls: ssl.SSLContext | None = None


def run(targets: Targets, logs: Sequence[str], readers: Readers, cursors: Cursors, about: About, *, once: bool) -> None:
    """Export until SIGTERM or SIGINT; with ``once`` until all rows that are there are delivered.

    Raises:
        errors.CovenantError: a log or a sink cannot be used any more.
    """
    asyncio.run(_until_stopped(export(targets, logs, readers, cursors, about, once)))


async def _until_stopped(work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def export(
    targets: Targets, logs: Sequence[str], readers: Readers, cursors: Cursors, about: About, once: bool
) -> None:
    """Feed every sink from every log; with ``once`` until all rows that are there are delivered.

    Raises:
        errors.CovenantError: a log or a sink cannot be used any more.
    """
    async with contextlib.AsyncExitStack() as stack:
        fed, sums = list[tuple[str, Sink]](), list[OtlpSink]()
        if targets.otlp:
            collector = Collector(targets.otlp, about, headers=targets.headers, tls=targets.tls)
            await stack.enter_async_context(collector)
            sums = [OtlpSink(collector, about) for _ in logs]
            fed += zip(logs, sums, strict=True)
        if targets.ocsf is not None:
            fed += [(log, OcsfSink(targets.ocsf, about)) for log in logs]
        work = [Pump(log, sink, readers, cursors, about, once).run() for log, sink in fed]
        if targets.proofs is not None:
            work += [ProofPump(log, targets.proofs, readers, cursors, about, once).run() for log in logs]
        try:
            async with asyncio.TaskGroup() as group:
                counting = group.create_task(_count(sums))
                pumps = [group.create_task(one) for one in work]
                await asyncio.gather(*pumps)
                counting.cancel()
            for sink in sums:
                await sink.post_sums()
        except BaseExceptionGroup as group_of:
            raise _first(group_of) from None


async def _count(sinks: Sequence[OtlpSink]) -> None:
    while True:
        await asyncio.sleep(METRICS_SECONDS)
        for sink in sinks:
            await sink.post_sums()


def _first(group: BaseExceptionGroup) -> BaseException:
    """The error that ended the work, a refusal of ours where there is one."""
    found = list[BaseException]()
    pending = list[BaseException]([group])
    while pending:
        one = pending.pop()
        if isinstance(one, BaseExceptionGroup):
            pending += one.exceptions
        else:
            found.append(one)
    return next((one for one in found if isinstance(one, errors.CovenantError)), found[0])
