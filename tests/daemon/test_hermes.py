"""Runs at a Hermes API, over real HTTP against a double that speaks the published contract."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from covenant.keys import signing
from covenant.runtime import package_signatures
from covenant.runtime.agents import Agents
from covenant.runtime.hermes import Hermes
from covenant.runtime.hermes_api import HermesApi
from covenant.runtime.packages import Card
from covenant.runtime.runner import Intent, RunResult, spent
from covenant.wire.types import AgentId
from policy import decide, errors
from sandbox.storage import package_reader as reader
from tests import hermes_double, runtime_kit
from tests.hermes_double import KEY, HermesDouble, Run, Script

pytestmark = pytest.mark.anyio

NOW_MS = 1_790_000_000_000
SECONDS = 60.0


@dataclass
class Log:
    """The rows that were written, and when each was with respect to what was posted."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    fails: str = ""

    async def append(self, kind: str, fields: Any, issuer: AgentId | None = None) -> str:
        if kind == self.fails:
            raise errors.StoreError("the disk is full")
        self.rows.append({"type": kind, "issuer": issuer, **fields})
        return str(len(self.rows))

    def kinds(self) -> list[str]:
        return [row["type"] for row in self.rows]


@dataclass
class Bench:
    """One runner, one agent, one API."""

    double: HermesDouble
    hermes: Hermes
    log: Log
    card: Card

    async def run(self, text: str = "hi", *, intent_id: str = "intent-1", deadline: int | None = None) -> RunResult:
        intent = Intent(intent_id, text, NOW_MS)
        with anyio.fail_after(SECONDS):
            return await self.hermes.run(self.card, intent, caller=runtime_kit.ALICE, deadline=deadline)

    @property
    def only(self) -> Run:
        (run,) = self.double.runs.values()
        return run


async def _card(home: Path, *, tools: str = "[]", policy: str = "operator-prompt", cpu_ms: int = 30_000) -> Card:
    more = f'[hermes]\ntools_allowed = {tools}\napproval_policy = "{policy}"\n'
    path = runtime_kit.package(home, "remote", runtime="hermes", entry="", more=more)
    manifest = path / "agent.toml"
    manifest.write_text(manifest.read_text().replace("[resources]\n", f"[resources]\ncpu_ms_per_task = {cpu_ms}\n"))
    agents = Agents(home)
    await agents.reload()
    return agents.find("remote")


@contextlib.asynccontextmanager
async def _bench(
    home: Path, script: Script = hermes_double.answers, *, key: str = KEY, **manifest: Any
) -> AsyncIterator[Bench]:
    async with hermes_double.serving(script) as double:
        log = Log()
        api = HermesApi(double.url, key)
        async with Hermes(api, audit=log, verify=runtime_kit.trusting, now_ms=lambda: NOW_MS) as hermes:
            yield Bench(double, hermes, log, await _card(home, **manifest))


def _tool(name: str, then: Script = hermes_double.answers) -> Script:
    async def script(run: Run) -> None:
        run.say("tool.started", tool=name, preview="ls -l")
        run.say("tool.completed", tool=name, duration=0.25, error=False)
        await then(run)

    return script


def _asks(*choices: str, request_id: str | None = None) -> Script:
    async def script(run: Run) -> None:
        about = {} if request_id is None else {"request_id": request_id}
        run.say("approval.request", command="rm -rf x", description="removes x", choices=list(choices), **about)
        run.status = "waiting_for_approval"
        await run.until(lambda: bool(run.approvals))
        await hermes_double.answers(run)

    return script


async def test_run_is_started_watched_and_answered(tmp_path: Path) -> None:
    async with _bench(tmp_path) as bench:
        result = await bench.run("größe")
        assert (result.text, result.run_id) == ("You said: größe", "run_1")
        assert bench.only.session_id == "covenant-intent-1"
        assert bench.double.keys == {"intent-1": "run_1"}
        assert bench.double.requests[0] == ("GET", "/v1/capabilities")
        assert bench.only.stopped == 0
        await bench.run(intent_id="intent-2")
        assert [path for _, path in bench.double.requests].count("/v1/capabilities") == 1


@pytest.mark.parametrize(
    ("output", "fits"),
    [("\x01" * 690_000, True), ("\x01" * 700_000, False), ("ü" * 2_097_000, True), ("ü" * 2_098_000, False)],
)
async def test_output_counts_as_it_is_written_in_answer(tmp_path: Path, output: str, fits: bool) -> None:
    async def script(run: Run) -> None:
        run.status, run.output = "completed", output
        run.say("run.completed")
        run.close()

    async with _bench(tmp_path, script) as bench:
        if fits:
            assert (await bench.run()).text == output
        else:
            with pytest.raises(errors.OutputTooLargeError, match="4194304"):
                await bench.run()


async def test_what_run_does_is_in_log(tmp_path: Path) -> None:
    async def script(run: Run) -> None:
        run.say("file.written", path="out.txt", bytes=12)
        await hermes_double.answers(run)

    async with _bench(tmp_path, _tool("terminal", script), tools='["terminal"]') as bench:
        result = await bench.run()
        assert bench.log.kinds() == ["hermes_tool_invoked", "hermes_tool_completed", "hermes_file_written"]
        invoked, completed, written = bench.log.rows
        assert (invoked["intent_id"], invoked["run_id"], invoked["tool"]) == ("intent-1", "run_1", "terminal")
        assert len(invoked["preview_hash_hex"]) == 64
        assert "ls -l" not in str(bench.log.rows)
        assert (completed["duration_ms"], completed["error"]) == (250, False)
        assert (written["path"], written["bytes"]) == ("out.txt", 12)
        assert result.files == ({"path": "out.txt", "bytes": 12},)
        assert len(result.runtime_events) == 2


@pytest.mark.parametrize("tools", ["[]", '["read_file"]'])
async def test_tool_not_allowed_stops_run(tmp_path: Path, tools: str) -> None:
    async def goes_on(run: Run) -> None:
        await run.until(lambda: run.stopped > 0)

    async with _bench(tmp_path, _tool("terminal", goes_on), tools=tools) as bench:
        with pytest.raises(errors.ToolRefusedError, match="`terminal`") as raised:
            await bench.run()
        assert bench.only.stopped == 1
        assert bench.log.kinds()[0] == "hermes_tool_invoked"
        took = spent(raised.value)
        assert took is not None
        assert took.run_id == "run_1"


async def test_run_that_ends_before_its_tools_were_judged_fails_all_same(tmp_path: Path) -> None:
    """The status says completed at the first poll, and the stream is read behind it."""
    async with _bench(tmp_path, _tool("terminal"), tools="[]") as bench:
        with pytest.raises(errors.ToolRefusedError):
            await bench.run()


@pytest.mark.parametrize(("policy", "choice"), [("auto-deny", "deny"), ("auto-once", "once")])
async def test_policy_answers_and_nobody_is_asked(tmp_path: Path, policy: str, choice: str) -> None:
    async with _bench(tmp_path, _asks("once", "session", "always", "deny", request_id="r1"), policy=policy) as bench:
        await bench.run()
        assert bench.only.approvals == [{"choice": choice, "request_id": "r1"}]
        assert [(row["type"], row.get("choice"), row.get("resolved")) for row in bench.log.rows] == [
            ("hermes_approval_requested", None, None),
            ("hermes_approval_answered", choice, None),
            ("hermes_approval_resolved", choice, 1),
        ]


async def test_approval_that_cannot_be_written_down_is_not_given(tmp_path: Path) -> None:
    async with _bench(tmp_path, _asks("once", "deny"), policy="auto-once") as bench:
        bench.log.fails = "hermes_approval_answered"
        with pytest.raises(errors.StoreError):
            await bench.run()
        assert bench.only.approvals == []
        assert bench.only.stopped == 1


@pytest.mark.parametrize("choice", ["once", "deny"])
async def test_operator_is_asked_and_answers_once(tmp_path: Path, choice: str) -> None:
    async with _bench(tmp_path, _asks("once", "deny")) as bench, anyio.create_task_group() as group:
        group.start_soon(bench.run)
        await _until(lambda: bool(bench.hermes.approvals()))
        (waiting,) = bench.hermes.approvals()
        assert (waiting.intent_id, waiting.agent_id, waiting.command) == ("intent-1", "remote", "rm -rf x")
        assert waiting.choices == ("once", "deny")
        with pytest.raises(errors.NoApprovalError, match="offers"):
            await bench.hermes.resolve(waiting.id, "always", by=runtime_kit.BOB)
        assert await bench.hermes.resolve(waiting.id, choice, by=runtime_kit.BOB) == 1
        with pytest.raises(errors.NoApprovalError):
            await bench.hermes.resolve(waiting.id, choice, by=runtime_kit.BOB)
        await _until(lambda: bench.only.closed)
        assert bench.only.approvals == [{"choice": choice}]
        (answered, resolved) = [row for row in bench.log.rows if "choice" in row]
        assert (answered["type"], resolved["type"]) == ("hermes_approval_answered", "hermes_approval_resolved")
        assert (answered["choice"], resolved["choice"], resolved["resolved"]) == (choice, choice, 1)
        assert answered["issuer"] == resolved["issuer"] == runtime_kit.BOB
        assert bench.hermes.approvals() == ()


async def test_answer_that_another_process_gave_ends_run_whose_policy_was_to_answer(tmp_path: Path) -> None:
    async def script(run: Run) -> None:
        run.say("approval.responded", choice="always", resolved=1)
        await run.until(lambda: run.stopped > 0)

    async with _bench(tmp_path, script, policy="auto-deny") as bench:
        with pytest.raises(errors.ToolRefusedError, match="somebody else"):
            await bench.run()


async def test_run_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    async def waits(run: Run) -> None:
        await anyio.sleep_forever()

    async with _bench(tmp_path, waits, cpu_ms=400) as bench:
        with pytest.raises(errors.DeadlineError, match="cpu_ms_per_task"):
            await bench.run()
        assert bench.only.stopped == 1
    async with _bench(tmp_path, waits) as bench:
        with pytest.raises(errors.DeadlineError, match="timeout"):
            await bench.run(deadline=NOW_MS + 300)
        assert bench.only.stopped == 1


@pytest.mark.parametrize("how", ["cancelled", "ended"])
async def test_run_that_nobody_wants_any_more_is_stopped(tmp_path: Path, how: str) -> None:
    async def waits(run: Run) -> None:
        await anyio.sleep_forever()

    async with _bench(tmp_path, waits) as bench:
        async with anyio.create_task_group() as group:

            async def runs() -> None:
                if how == "cancelled":
                    await bench.run()
                else:
                    with pytest.raises(errors.KilledError, match="budget"):
                        await bench.run()

            group.start_soon(runs)
            await _until(lambda: bool(bench.double.runs))
            if how == "cancelled":
                group.cancel_scope.cancel()
            else:
                await _until(lambda: ("GET", "/v1/runs/run_1") in bench.double.requests)
                assert await bench.hermes.end("another", reason="budget") is False
                assert await bench.hermes.end("intent-1", reason="budget") is True
        assert bench.only.stopped == 1
        assert bench.hermes.approvals() == ()


async def test_cancelled_while_it_starts_is_stopped(tmp_path: Path) -> None:
    async with _bench(tmp_path) as bench:
        begun, answered = anyio.Event(), anyio.Event()

        async def slow(request: web.Request) -> web.StreamResponse:
            answer = await bench.double._start(request)
            begun.set()
            await answered.wait()
            return answer

        bench.double.instead["/runs"] = slow
        async with anyio.create_task_group() as group:
            group.start_soon(bench.run)
            with anyio.fail_after(SECONDS):
                await begun.wait()
            group.cancel_scope.cancel()
            answered.set()
        assert bench.only.stopped == 1


@pytest.mark.parametrize(
    ("status", "error", "message"),
    [("failed", "the model is gone", "failed: the model is gone"), ("cancelled", None, "cancelled: no reason given")],
)
async def test_run_that_fails_there_fails_here(tmp_path: Path, status: str, error: Any, message: str) -> None:
    async def script(run: Run) -> None:
        run.end(status, error=error)

    async with _bench(tmp_path, script) as bench:
        with pytest.raises(errors.RemoteRunError, match=message):
            await bench.run()


async def test_stream_that_ends_before_its_run_ends_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covenant.runtime.hermes._LAST_SECONDS", 0.5)

    async def script(run: Run) -> None:
        run.close()
        await anyio.sleep_forever()

    async with _bench(tmp_path, script) as bench:
        with pytest.raises(errors.HermesError, match="cannot be watched"):
            await bench.run()
        assert bench.only.stopped == 1


@pytest.mark.parametrize(
    "raw", [b"data: {nonsense\n\n", b"data: []\n\n", b"data: " + b"x" * (2 << 20), b'data: {"a": "\\ud800"}\n\n']
)
async def test_stream_of_nonsense_ends_run(tmp_path: Path, raw: bytes) -> None:
    async def script(run: Run) -> None:
        run.raw(raw)
        await run.until(lambda: run.stopped > 0)

    async with _bench(tmp_path, script) as bench:
        with pytest.raises(errors.HermesError):
            await bench.run()
        assert bench.only.stopped == 1


async def _body(body: bytes, status: int = 200, **headers: str) -> web.Response:
    return web.Response(body=body, status=status, headers={"Content-Type": "application/json", **headers})


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/runs", b"[]", 202),
        ("/runs", b"{}", 202),
        ("/runs", b'{"run_id": "../../x"}', 202),
        ("/runs", b'{"run_id": ".."}', 202),
        ("/runs", b"no json", 202),
        ("/runs", b'{"run_id": "a"}' + b" " * (26 << 20), 202),
        ("/runs", b"{}", 500),
        ("/capabilities", b"{}", 200),
        ("/capabilities", b'{"features": {"run_submission": true}}', 200),
    ],
    ids=["list", "no id", "path", "dots", "no json", "too long", "status", "no features", "lacks"],
)
async def test_api_that_answers_otherwise_is_error(tmp_path: Path, path: str, body: bytes, status: int) -> None:
    async with _bench(tmp_path) as bench:
        bench.double.instead[path] = lambda request: _body(body, status)
        with pytest.raises(errors.HermesError):
            await bench.run()


async def test_no_redirect_is_followed_and_key_goes_nowhere_else(tmp_path: Path) -> None:
    async with hermes_double.serving() as other, _bench(tmp_path) as bench:
        bench.double.instead["/runs"] = lambda request: _body(b"", 307, Location=f"{other.url}/runs")
        with pytest.raises(errors.HermesError, match="status 307"):
            await bench.run()
        assert other.requests == []


async def test_lost_answer_starts_no_second_run(tmp_path: Path) -> None:
    async with _bench(tmp_path) as bench:
        lost = 0

        async def loses(request: web.Request) -> web.StreamResponse:
            nonlocal lost
            answer = await bench.double._start(request)
            if not lost:
                lost += 1
                assert request.transport is not None
                request.transport.close()
            return answer

        bench.double.instead["/runs"] = loses
        assert (await bench.run()).text == "You said: hi"
        assert len(bench.double.runs) == 1


async def test_wrong_key_is_error_that_does_not_show_it(tmp_path: Path) -> None:
    async with _bench(tmp_path, key="another-secret-key") as bench:
        with pytest.raises(errors.HermesError, match="status 401") as raised:
            await bench.run()
        assert "another-secret-key" not in str(raised.value.to_json())


@pytest.mark.parametrize(
    "url", ["ftp://x/v1", "http://u:p@x/v1", "http://x/v1?a=b", "http://x/v1#f", "x", "http://", "http://x:bad/"]
)
def test_address_that_runs_may_not_be_sent_to(url: str) -> None:
    with pytest.raises(errors.SettingError):
        HermesApi(url, None)


async def test_without_address_hermes_agent_is_refused(tmp_path: Path) -> None:
    async with Hermes(None, audit=Log(), verify=runtime_kit.trusting, now_ms=lambda: NOW_MS) as hermes:
        with pytest.raises(errors.HermesUnconfiguredError):
            await hermes.run(await _card(tmp_path), Intent("i", "x", NOW_MS), caller=runtime_kit.ALICE, deadline=None)


async def test_agent_that_no_operator_signed_is_not_sent_anywhere(tmp_path: Path) -> None:
    """The same card runs once it is signed: what changed is the signature alone."""
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    (home / "trust").mkdir(mode=0o700)
    key, stranger = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    (home / "trust" / "root.json").write_bytes(signing.new_root("tester", key, now_ms=NOW_MS))
    (home / "trust" / "root.json").chmod(0o600)

    async def verify(card: Card) -> None:
        package_signatures.verify(card, home=home, state=home / "supervisor", host="box", now_ms=lambda: NOW_MS)

    def sign(card: Card, by: Ed25519PrivateKey) -> None:
        read = reader.read(card.directory)
        terms = signing.Terms(serial=NOW_MS)
        statement = signing.statement(read, decide.manifest_of(read), terms, now_ms=NOW_MS)
        signing.write_envelope(card.directory, signing.sign(statement, by))

    async with hermes_double.serving() as double:
        card = await _card(home)
        async with Hermes(HermesApi(double.url, KEY), audit=Log(), verify=verify, now_ms=lambda: NOW_MS) as hermes:
            bench = Bench(double, hermes, Log(), card)
            with pytest.raises(errors.UnsignedError):
                await bench.run()
            sign(card, stranger)
            with pytest.raises(errors.SignatureError):
                await bench.run()
            assert double.runs == {}
            sign(card, key)
            assert (await bench.run()).text == "You said: hi"
            (card.directory / "main.py").write_text("print(2)\n")
            with pytest.raises(errors.DigestMismatchError):
                await bench.run()


async def _until(look: Callable[[], bool]) -> None:
    with anyio.fail_after(SECONDS):
        while not look():  # noqa: ASYNC110 - what is waited for happens at the other end
            await anyio.sleep(0.01)
