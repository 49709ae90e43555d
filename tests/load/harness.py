"""A separate daemon under load: the requests, the answers, and the content of its files afterwards.

As root the agents are those of a supervisor's double, over its real frames. Another user has no supervisor, and sends
intents that no agent answers. Everything else is the daemon itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import anyio

from policy import errors
from tests import runtime_kit
from tests.doubles import async_client
from tests.doubles.async_client import AsyncClient
from tests.supervisor_double import SupervisorDouble

ROOT: Final = Path(__file__).resolve().parents[2]
START_SECONDS: Final = 60.0
AGENT: Final = "load"


@dataclass
class Asked:
    """An intent sent under one key, and every answer to it."""

    text: str
    answers: list[dict[str, Any]] = field(default_factory=list)


class Daemon:
    """``covenantd`` in its own process."""

    def __init__(self, home: Path, supervisor: Path) -> None:
        self.home, self._supervisor = home, supervisor
        self._log = home.with_suffix(".log").open("ab")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.end(signal.SIGTERM)
        self._log.close()

    def start(self) -> None:
        """Start it, and wait until it serves."""
        environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        environment |= {"COVENANT_HOME": str(self.home), "COVENANT_SOCKET": str(self._supervisor)}
        environment |= {"COVENANT_HTTP_PORT": "off", "COVENANT_ALLOW_ROOT": "1"}
        # What a kill left is not the socket of the one that starts.
        (self.home / "sock").unlink(missing_ok=True)
        self._popen = subprocess.Popen(
            [sys.executable, "-c", "from covenant.start import entry; entry()"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        until = time.monotonic() + START_SECONDS
        while not (self.home / "sock").exists():
            assert self._popen.poll() is None, self.said()
            assert time.monotonic() < until, self.said()
            time.sleep(0.02)

    def end(self, number: int) -> int:
        """Send it a signal, and its exit status."""
        if self._popen.poll() is None:
            self._popen.send_signal(number)
        return self._popen.wait(START_SECONDS)

    def said(self) -> str:
        """The end of its log."""
        return Path(self._log.name).read_text()[-4000:]


@contextlib.contextmanager
def prepared(base: Path) -> Iterator[tuple[Daemon, SupervisorDouble | None]]:
    """Yield a daemon that serves a home with one agent, and the supervisor's double, None without root."""
    home, socket = base / "home", base / "s.sock"
    home.mkdir(mode=0o700)
    with contextlib.ExitStack() as stack:
        double = None
        if os.geteuid() == 0:
            runtime_kit.package(home, AGENT)
            double = stack.enter_context(SupervisorDouble(socket))
        yield stack.enter_context(Daemon(home, socket)), double


@contextlib.asynccontextmanager
async def _client(home: Path) -> AsyncIterator[AsyncClient]:
    """A connection of the operator's."""
    async with async_client.connected(home) as client:
        yield client


async def drive(daemon: Daemon, asked: dict[str, Asked], *, clients: int, kill_after: int | None = None) -> None:
    """Ask everything that has no answer yet, each client its share in turn; ends early when the daemon is killed after
    so many answers."""
    waiting = [key for key, one in asked.items() if not one.answers]
    answered = 0

    async def work(share: list[str]) -> None:
        nonlocal answered
        async with _client(daemon.home) as client:
            for key in share:
                fields = {"text": asked[key].text, "idempotency_key": key}
                answer = await client.ask("submit_intent", **fields)
                asked[key].answers.append(answer)
                answered += 1
                if answered == kill_after:
                    daemon.end(signal.SIGKILL)

    async def until_killed(share: list[str]) -> None:
        if kill_after is None:
            await work(share)
            return
        with contextlib.suppress(
            errors.DaemonSilentError, anyio.ClosedResourceError, anyio.BrokenResourceError, OSError
        ):
            await work(share)

    async with _client(daemon.home) as operator:
        await operator.ask("grant_capability", action="memory.write", scope={})
    async with anyio.create_task_group() as group:
        for number in range(clients):
            group.start_soon(until_killed, waiting[number::clients])


async def check(daemon: Daemon, asked: dict[str, Asked], *, whole: bool) -> None:
    """Check that each answer is once in the log, is in memory as it was sent, and that nothing is doubled.

    With ``whole`` every intent must have an answer. The daemon must be serving, since its own verification is
    requested.
    """
    told = {one.answers[0]["intent_id"]: one for one in asked.values() if one.answers}
    if whole:
        assert len(told) == len(asked)
    for one in told.values():
        assert len({json.dumps(answer, sort_keys=True) for answer in one.answers}) == 1
        assert one.text in one.answers[0]["text"]
    lines = (daemon.home / "audit" / "events.jsonl").read_text().splitlines()
    rows = [event["kind"] for event in map(json.loads, lines) if event["kind"]["type"] == "intent_dispatched"]
    count = Counter(row["intent_id"] for row in rows)
    hashes = {row["intent_id"]: row["result_hash_hex"] for row in rows}
    for intent_id, one in told.items():
        assert count[intent_id] == 1, (intent_id, count[intent_id])
        assert hashes[intent_id] == hashlib.sha256(one.answers[0]["text"].encode()).hexdigest()
    assert max(count.values(), default=0) <= 1
    async with _client(daemon.home) as client:
        assert (await client.ask("verify_audit_integrity"))["report"]["valid"] is True
        for intent_id, one in told.items():
            kept = await client.ask("get_intent_result", intent_id=intent_id)
            assert kept["text"] == one.answers[0]["text"]
    receipts = [json.loads(line) for line in (daemon.home / "receipts" / "working.jsonl").read_text().splitlines()]
    remembered = Counter(one["memory_record_id"] for one in receipts if one.get("resource") == "memory")
    assert set(told) <= set(remembered)
    assert max(remembered.values(), default=0) <= 1


def questions(count: int, *, agent: bool) -> dict[str, Asked]:
    """Make `count` intents, each under its own key; the text names the agent, or none."""
    return {f"key-{n}": Asked(f"{AGENT if agent else 'nobody'} number {n}") for n in range(count)}


async def storm(base: Path, *, intents: int, clients: int) -> float:
    """All of them answered, none lost, none doubled; how many a second."""
    with prepared(base) as (daemon, double):
        asked = questions(intents, agent=double is not None)
        began = time.monotonic()
        await drive(daemon, asked, clients=clients)
        seconds = time.monotonic() - began
        await check(daemon, asked, whole=True)
        if double is not None:
            runs = Counter(one["intent_id"] for one in double.requests)
            assert set(runs.values()) == {1}
            assert len(runs) == intents
    return intents / seconds


async def kill(base: Path, *, intents: int, clients: int) -> int:
    """Killed in the middle: nothing that was acknowledged is missing, and what was not is answered when it is asked
    again under its key, without a second run of what was finished. How many were acknowledged before."""
    with prepared(base) as (daemon, double):
        asked = questions(intents, agent=double is not None)
        await drive(daemon, asked, clients=clients, kill_after=intents // 2)
        before = sum(bool(one.answers) for one in asked.values())
        assert intents // 2 <= before < intents
        daemon.start()
        await check(daemon, asked, whole=False)
        kept = {one.answers[0]["intent_id"] for one in asked.values() if one.answers}
        runs = len(double.requests) if double is not None else 0
        await drive(daemon, asked, clients=clients)
        await check(daemon, asked, whole=True)
        if double is not None:
            again = {one["intent_id"] for one in double.requests[runs:]}
            assert not again & kept
            # An intent in progress at the kill may run twice, no other.
            assert len(double.requests) <= intents + clients
    return before
