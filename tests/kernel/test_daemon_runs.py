"""An intent over the daemon's socket to a real sandbox and back: the daemon asks, the supervisor runs."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from covenant.handlers import billing
from covenant.settings import Projection
from policy import errors
from sandbox.rundir import registry
from tests import daemon_kit
from tests.daemon_kit import Daemon
from tests.doubles import async_client
from tests.kernel import serving
from tests.kernel.serving import CALLER, Served
from tests.kernel.test_serve import eventually
from tests.kernel.world import AGENTS, HEAD, SLOWNESS, TAIL, World

pytestmark = pytest.mark.anyio

SAMPLES = [
    ("hello", "python3", "Hello! You said: one two"),
    ("wordcount", "node", "1 line, 2 words, 7 characters; most often: one (1), two (1)"),
    ("checksum", "rust-bin", "crc32 cd07892f, fnv1a 108ab07fb9e724e1, 7 bytes: one two"),
]
BURNS = HEAD + "print('here', file=sys.stderr, flush=True)\nwhile True: pass\n"


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    """As tests/kernel/test_sample_agents.py."""
    subprocess.run([str(AGENTS.parent / "scripts" / "build_agents")], check=True, timeout=120, capture_output=True)


@pytest.fixture(scope="module")
def served(warm: Path) -> Iterator[Served]:
    with serving.open_place() as base, Served(World(base, warm=warm)) as made:
        yield made
        made.quiet()


@pytest.fixture(scope="module")
def home(served: Served) -> Path:
    """A daemon's home with the sample agents, an unsigned one, and one that never ends."""
    home = served.world.base / "daemon"
    (home / "agents").mkdir(parents=True, mode=0o700)
    home.chmod(0o700)
    world = served.world
    packages = [world.copy(name) for name, _, _ in SAMPLES]
    packages.append(
        world.package({"main.py": BURNS}, name="burns", id="burns", cpu_ms=120_000 * SLOWNESS, more=_budget(3))
    )
    packages.append(world.package({"main.py": HEAD + "sys.exit(3)\n"}, name="fails", id="fails", more=_budget(9)))
    for package in packages:
        world.sign(package)
    packages.append(
        world.package({"main.py": HEAD + "answer = 1\n" + TAIL}, name="unsigned", id="unsigned", more=_budget(9))
    )
    for package in packages:
        shutil.copytree(package, home / "agents" / package.name)
    return home


def _budget(credits_per_hour: int) -> str:
    return f"[settlement]\nbudget_credits_per_hour = {credits_per_hour}\n"


@contextlib.asynccontextmanager
async def _running(served: Served, home: Path, **settings: Any) -> AsyncIterator[Daemon]:
    async with daemon_kit.running(home, socket=served.path, **settings) as daemon:
        await daemon.grant("memory.write")
        yield daemon


async def _rows(daemon: Daemon, intent_id: str) -> list[dict[str, Any]]:
    """The daemon's own rows of an intent; of those that it copies there is more in test_told_runs.py."""
    events = (await daemon.ask("recent_audit", limit=200))["events"]
    rows = [one["kind"] for one in reversed(events) if one["kind"].get("intent_id") == intent_id]
    return [one for one in rows if one["type"] != "supervisor_row"]


async def test_every_runtime_answers_through_daemon(served: Served, home: Path) -> None:
    async with _running(served, home) as daemon:
        for agent_id, runtime, text in SAMPLES:
            result = await daemon.ask("submit_intent", text="one two", agent=agent_id)
            assert (result["status"], result["text"], result["agent_id"]) == ("ok", text, agent_id)
            intent_id = result["intent_id"]
            # The supervisor's own log has the intent under the daemon's name for it.
            theirs = [row["kind"] for row in served.world.rows() if row["kind"].get("intent_id") == intent_id]
            assert {row["type"] for row in theirs} == {"run_started", "intent_dispatched"}
            assert {row["run_id"] for row in theirs} == {result["run_id"]}
            assert theirs[0]["policy_digest"] == result["policy_digest"]
            ours = await _rows(daemon, intent_id)
            assert [row["type"] for row in ours] == [
                "run_usage",
                "receipt_written",
                "receipt_written",
                "intent_dispatched",
            ]
            assert ours[-1]["matched_agent"] == agent_id
            assert ours[-1]["result_hash_hex"] == theirs[-1]["result_hash_hex"]
            used = ours[0]
            assert used["cpu_ms"] > 0
            assert used["wall_ms"] > 0
            assert used["memory_peak_bytes"] > 1 << 20
            record = await daemon.server.memory.get(intent_id)
            assert record is not None
            assert (record.text, record.metadata["run_id"]) == (text, result["run_id"])
            assert record.embedding
            receipts = await daemon.server.receipts.recent(2)
            assert {one.resource for one in receipts} == {"compute", "memory"}
            assert used["credits"] == result["settlement"]["credits_consumed"] >= 1
            listed = {one["id"]: one for one in (await daemon.ask("list_agents"))["agents"]}
            assert (listed[agent_id]["runtime"], listed[agent_id]["routable"]) == (runtime, True)
        assert (await daemon.ask("verify_audit_integrity"))["report"]["valid"] is True


async def test_router_finds_agent_by_its_words(served: Served, home: Path) -> None:
    async with _running(served, home) as daemon:
        result = await daemon.ask("submit_intent", text="checksum of this")
        assert result["agent_id"] == "checksum"
        assert result["text"].endswith("16 bytes: checksum of this")
        nobody = await daemon.ask("submit_intent", text="zzz")
        assert (nobody.get("agent_id"), nobody["text"]) == (None, "phase 0 echo (no agent matched): zzz")


async def test_what_no_operator_signed_is_not_run_and_costs_nothing(served: Served, home: Path) -> None:
    async with _running(served, home) as daemon:
        with pytest.raises(errors.CovenantError) as raised:
            await daemon.ask("submit_intent", text="x", agent="unsigned")
        assert raised.value.code == errors.UnsignedError.code
        assert daemon.server.budget.tokens(billing.budget_of("unsigned")) == 9


async def test_run_that_fails_pays_for_what_it_used(served: Served, home: Path) -> None:
    async with _running(served, home) as daemon:
        with pytest.raises(errors.CovenantError, match="agent `fails` failed") as raised:
            await daemon.ask("submit_intent", text="x", agent="fails")
        assert raised.value.code == errors.AgentFailedError.code
        assert (daemon.server.budget.tokens(billing.budget_of("fails")) or 0) <= 8
        assert not daemon.server.budget.unsettled()
        events = [one["kind"] for one in (await daemon.ask("recent_audit", limit=3))["events"]]
        assert [one["type"] for one in events] == ["intent_failed", "receipt_written", "run_usage"]
        assert events[0]["run_id"] == events[2]["run_id"]


async def test_without_its_supervisor_daemon_runs_nothing(served: Served, home: Path) -> None:
    async with daemon_kit.running(home, socket=served.world.base / "nobody.sock") as daemon:
        await daemon.grant("memory.write")
        with pytest.raises(errors.CovenantError) as raised:
            await daemon.ask("submit_intent", text="x", agent="hello")
        assert raised.value.code == errors.NoSupervisorError.code


async def test_run_past_its_budget_is_ended_and_its_intent_waits(served: Served, home: Path) -> None:
    """The policy `none` would leave it be: three credits are less than what it burns within seconds."""
    linear = Projection(tick_ms=100, policy="linear", min_window_ms=300, min_samples=3, preempt_grace_ms=500)
    async with _running(served, home, projection=linear) as daemon:
        with anyio.fail_after(60 * SLOWNESS), pytest.raises(errors.CovenantError) as raised:
            await daemon.ask("submit_intent", text="x", agent="burns")
        assert raised.value.code == errors.PreemptedError.code
        (waiting,) = daemon.server.checkpoints.active()
        assert waiting.reason == "projected_overshoot"
        assert waiting.intent_id in str(raised.value)
        with anyio.fail_after(30 * SLOWNESS):
            while not (found := await _of_kind(daemon, "budget_preempted")):  # noqa: ASYNC110 - a row of another task
                await anyio.sleep(0.05)
        assert (found[0]["intent_id"], found[0]["signal_sent"]) == (waiting.intent_id, "SIGTERM")
    assert [row["kind"]["code"] for row in served.world.rows() if row["kind"]["type"] == "run_ended"][-1] == "stopped"


async def _of_kind(daemon: Daemon, kind: str) -> list[dict[str, Any]]:
    events = await daemon.server.audit.recent(50)
    return [one.kind for one in events if one.kind["type"] == kind]


# --- a daemon of its own, without rights ------------------------------------------------------------------------------


class Process:
    """``covenantd`` as a user who is not root and whom the supervisor knows as one of its callers."""

    def __init__(self, served: Served, home: Path, *, http: str = "off") -> None:
        code = "import sys; sys.path[:0] = sys.argv.pop(1).split(':'); from covenant.start import entry; entry()"
        paths = serving.covenant_command()[3]
        environment = {"COVENANT_HOME": str(home), "COVENANT_HTTP_PORT": http, "COVENANT_SOCKET": str(served.path)}
        self.home, self._log = home, (served.world.base / "covenantd.log").open("ab")
        self._popen = subprocess.Popen(
            ["/usr/bin/python3", "-c", code, paths],
            env={"PATH": "/usr/bin:/bin", **environment},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            **serving.identity(CALLER),
        )

    def __enter__(self) -> Process:
        eventually(lambda: self._popen.poll() is not None or (self.home / "sock").exists())
        assert self._popen.poll() is None, Path(self._log.name).read_text()
        return self

    def __exit__(self, *exc: object) -> None:
        self.end(signal.SIGTERM)
        self._log.close()

    @property
    def pid(self) -> int:
        """The process id of the daemon."""
        return self._popen.pid

    @property
    def log(self) -> str:
        """The output of this daemon and of those before it."""
        return Path(self._log.name).read_text()

    def end(self, number: int) -> int:
        """Send it a signal, and its exit status."""
        if self._popen.poll() is None:
            self._popen.send_signal(number)
        return self._popen.wait(120)


@pytest.fixture
def theirs(served: Served, home: Path) -> Path:
    """The same home, of a user who is not root."""
    copied = served.world.base / f"theirs-{time.monotonic_ns()}"
    (copied / "agents").mkdir(parents=True)
    for name in ("hello", "burns"):
        shutil.copytree(home / "agents" / name, copied / "agents" / name)
    for path in (copied, *copied.rglob("*")):
        os.chown(path, CALLER, CALLER)
    copied.chmod(0o700)
    return copied


async def test_daemon_without_rights_has_its_agents_run_in_sandboxes(served: Served, theirs: Path) -> None:
    with Process(served, theirs):
        async with async_client.connected(theirs) as client:
            await client.ask("grant_capability", action="memory.write", scope={})
            result = await client.ask("submit_intent", text="one two", agent="hello")
    assert result["text"] == SAMPLES[0][2]
    started = [row for row in served.world.rows() if row["kind"].get("run_id") == result["run_id"]]
    assert {row["issuer"]["display"] for row in started} == {f"uid{CALLER}@local"}


async def test_daemon_killed_takes_its_runs_along_and_says_so_when_it_is_back(served: Served, theirs: Path) -> None:
    with Process(served, theirs) as daemon:
        async with async_client.connected(theirs) as client:
            await client.ask("grant_capability", action="memory.write", scope={})
            answered = await client.ask("submit_intent", text="kept", agent="hello")
            await client.send("submit_intent", text="x", agent="burns")
            await _until(lambda: bool(_live(served, "burns")))
            daemon.end(signal.SIGKILL)
    await _until(lambda: not _live(served, "burns"))
    (theirs / "sock").unlink(missing_ok=True)
    with Process(served, theirs):
        async with async_client.connected(theirs) as client:
            result = await client.ask("get_intent_result", intent_id=answered["intent_id"])
            report = (await client.ask("verify_audit_integrity"))["report"]
            events = [json.loads(line)["kind"] for line in (theirs / "audit" / "events.jsonl").read_text().splitlines()]
    assert result["text"] == answered["text"] == "Hello! You said: kept"
    assert report["valid"] is True
    (cut,) = [row for row in events if row["type"] == "intent_failed"]
    assert (cut["matched_agent"], cut["code"]) == ("burns", errors.CutOffError.code)
    assert [row["matched_agent"] for row in events if row["type"] == "intent_dispatched"] == ["hello"]


def _live(served: Served, agent_id: str) -> list[registry.Entry]:
    return [one for one in registry.live(served.world.state / "runs") if one.agent_id == agent_id]


async def _until(look: Callable[[], bool]) -> None:
    with anyio.fail_after(60 * SLOWNESS):
        while not look():  # noqa: ASYNC110 - what is waited for happens in other processes
            await anyio.sleep(0.02)
