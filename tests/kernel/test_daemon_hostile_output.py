"""Agents with forbidden answers, in real sandboxes behind a real supervisor and a separate daemon.

Over every transport the client gets an error that names the fault, or an answer within its bounds. No other client
waits for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import anyio
import pytest

from covenant.wire import client
from policy import contract, errors
from tests.doubles import async_client
from tests.kernel import serving
from tests.kernel.serving import CALLER, Served
from tests.kernel.test_daemon_runs import Process
from tests.kernel.test_serve import eventually
from tests.kernel.world import HEAD, SLOWNESS, World

pytestmark = pytest.mark.anyio

MALFORMED, TOO_LARGE = errors.MalformedOutputError.code, errors.OutputTooLargeError.code
MOST = contract.RESULT_BYTES
# What a terminal, a browser or a log could be steered by.
STEERING = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202eevil\u2066\x00\r\x08\u2028\x7f"
_RAW = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
# Beyond what it takes to hold one answer a few times: an idle daemon has about 100 MiB.
MOST_MEMORY = 768 << 20
_WRITE = "w = sys.stdout.buffer.write\n"


class Case(NamedTuple):
    """The agent's code, and the code of its error, or None for an answer that ``text`` and ``count`` describe."""

    code: str
    error: str | None = None
    text: str = "x"
    sources: int = 0


def _exactly(text: str, size: int) -> str:
    """Code that prints one line of `size` bytes: the text's repetitions, the rest `.`."""
    return (
        f'unit = {text!r}\nroom = {size} - len(b\'{{"text":""}}\')\ncount = room // len(unit.encode())\n'
        "body = unit * count + '.' * (room - count * len(unit.encode()))\n"
        "w(('{\"text\":\"' + body + '\"}').encode())\n"
    )


def _filled(unit: str, decoded: str, size: int) -> str:
    """The text of ``_exactly``."""
    count, rest = divmod(size - len('{"text":""}'), len(unit.encode()))
    return decoded * count + "." * rest


def _list(key: str, item: str, most: int = MOST) -> str:
    """Code that prints a list of as many items as a result takes, and no more than ``most``."""
    count = min((MOST - 64) // (len(item) + 1), most)
    return f'w(b\'{{"text":"x","{key}":[\' + b",".join([{item!r}.encode()] * {count}) + b"]}}")\n'


def _nested(depth: int) -> str:
    """Code that prints a result of this depth."""
    return f"w(b'{{\"text\":\"x\",\"files\":' + b'[' * {depth - 1} + b']' * {depth - 1} + b'}}')"


CASES = {
    "nothing": Case("", MALFORMED),
    "bytes16": Case(f"w(b'x' * {contract.STDOUT_BYTES + 1})", TOO_LARGE),
    "lines16": Case(f"w(b'x\\n' * {contract.STDOUT_BYTES // 2 + 1})", TOO_LARGE),
    "blank16": Case(f"w(b'\\n' * {contract.STDOUT_BYTES - 64} + b'{{\"text\":\"x\"}}\\n')"),
    "limit": Case(_exactly("a", MOST), text=_filled("a", "a", MOST)),
    "beyond": Case(_exactly("a", MOST + 1), TOO_LARGE),
    "controls": Case(_exactly("\\u0001", MOST), text=_filled("\\u0001", "\x01", MOST)),
    "raw-controls": Case('w(b\'{"text":"\\x01"}\')', MALFORMED),
    "deletes": Case(_exactly("\x7f", MOST), text=_filled("\x7f", "\x7f", MOST)),
    "accents": Case(_exactly("\xe9", MOST), text=_filled("\xe9", "\xe9", MOST)),
    "separators": Case(_exactly("\u2028", MOST), text=_filled("\u2028", "\u2028", MOST)),
    "steering": Case(
        f"print(json.dumps({{'text': {STEERING!r}, 'sources': [{STEERING!r}]}}))", text=STEERING, sources=1
    ),
    "utf8": Case('w(b\'{"text":"\\xff"}\\n\')', MALFORMED),
    "surrogate": Case('w(b\'{"text":"\\\\ud800"}\\n\')', MALFORMED),
    "second": Case('w(b\'{"text":"x"}\\n{"text":"y"}\\n\')', MALFORMED),
    "deep": Case("w(b'{\"text\":\"x\",\"files\":' + b'[' * 1000000 + b']' * 1000000 + b'}')", MALFORMED),
    "nested": Case(_nested(contract.RESULT_DEPTH)),
    "too-nested": Case(_nested(contract.RESULT_DEPTH + 1), MALFORMED),
    "nan": Case('w(b\'{"text":"x","files":[NaN]}\')', MALFORMED),
    "number": Case("w(b'{\"text\":\"x\",\"files\":[' + b'9' * 5000 + b']}')", MALFORMED),
    "no-text": Case('w(b\'{"text":["x"]}\')', MALFORMED),
    "sources": Case(_list("sources", '"s"'), sources=(MOST - 64) // 4),
    "events": Case(_list("runtime_events", '{"a":{}}', contract.RESULT_CONTAINERS // 2 - 1)),
    "files": Case(_list("files", "[]", contract.RESULT_CONTAINERS - 2)),
    "too-many": Case(_list("files", "[]"), TOO_LARGE),
    "stderr": Case(f"for _ in range(400): sys.stderr.write({STEERING!r} * 5000)\nprint(json.dumps({{'text': 'x'}}))"),
    "fails": Case(f"sys.stderr.write({STEERING!r} * 1000)\nsys.exit(3)", errors.AgentFailedError.code),
}
# What goes over HTTP too, once plain and once as a stream.
BY_HTTP = (
    "limit",
    "controls",
    "separators",
    "accents",
    "steering",
    "sources",
    "second",
    "bytes16",
    "nested",
    "too-many",
)


@pytest.fixture(scope="module")
def daemon(warm: Path) -> Iterator[Process]:
    """A daemon without rights whose agents are the cases."""
    with serving.open_place() as base, Served(World(base, warm=warm)) as served:
        home = base / "theirs"
        (home / "agents").mkdir(parents=True)
        for name, case in CASES.items():
            files = {"main.py": HEAD + _WRITE + case.code + "\n"}
            package = served.world.sign(served.world.package(files, name=name, id=name, memory_mb=256))
            shutil.copytree(package, home / "agents" / name)
        for path in (home, *home.rglob("*")):
            os.chown(path, CALLER, CALLER)
        home.chmod(0o700)
        with Process(served, home, http="0") as process:
            eventually(lambda: "serves " in process.log)
            with client.connected(home) as one:
                one.ask("grant_capability", action="memory.write", scope={})
            yield process
        served.quiet()


@pytest.fixture(autouse=True)
def _memory(daemon: Process) -> Iterator[None]:
    """Limit the daemon's peak memory during one case."""
    Path(f"/proc/{daemon.pid}/clear_refs").write_text("5")
    yield
    peak = int(serving.status(daemon.pid)["VmHWM"].split()[0]) * 1024
    assert peak <= MOST_MEMORY, f"{peak >> 20} MiB"


@contextlib.asynccontextmanager
async def _others(daemon: Process) -> AsyncIterator[None]:
    """Let another client ask all the while; it is answered before the block ends."""
    async with async_client.connected(daemon.home) as other, anyio.create_task_group() as group:
        answered, over = 0, False

        async def ask() -> None:
            nonlocal answered
            while not over:
                assert (await other.ask("ping"))["kind"] == "pong"
                answered += 1

        group.start_soon(ask)
        try:
            yield
            assert answered > 0
        finally:
            over = True


def _agrees(name: str, answer: dict[str, Any]) -> None:
    """Assert that the answer is the one of its case."""
    case = CASES[name]
    if case.error is not None:
        assert (answer["kind"], answer["code"]) == ("error", case.error)
        assert f"agent `{name}` failed" in answer["message"]
        assert len(answer["message"]) < 2000
        return
    assert (answer["kind"], answer["status"]) == ("intent_result", "ok"), str(answer)[:500]
    assert answer["text"] == case.text
    assert len(answer["sources"]) == case.sources


def _ends(daemon: Process) -> list[dict[str, Any]]:
    """Return the rows of how intents ended; none is long, however much an agent printed."""
    lines = (daemon.home / "audit" / "events.jsonl").read_bytes().splitlines()
    assert max(map(len, lines)) < 16_384
    kinds = [json.loads(line)["kind"] for line in lines]
    return [one for one in kinds if one["type"] in ("intent_dispatched", "intent_failed")]


@pytest.mark.parametrize("name", CASES)
async def test_over_ipc(name: str, daemon: Process) -> None:
    before = len(_ends(daemon))
    async with async_client.connected(daemon.home) as one, _others(daemon):
        with anyio.fail_after(120 * SLOWNESS):
            try:
                answer = await one.ask("submit_intent", text="go", agent=name)
            except errors.CovenantError as e:
                answer = {"kind": "error", "code": e.code, "message": str(e)}
        _agrees(name, answer)
        # The same connection goes on.
        assert (await one.ask("ping"))["kind"] == "pong"
    (end,) = _ends(daemon)[before:]
    assert end["matched_agent"] == name
    assert (end["type"], end.get("code")) == (
        ("intent_failed", CASES[name].error) if CASES[name].error else ("intent_dispatched", None)
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", BY_HTTP)
async def test_over_http(name: str, stream: bool, daemon: Process) -> None:
    port = re.findall(r"HTTP 127\.0\.0\.1:(\d+)", daemon.log)[-1]
    token = client.operator_token(daemon.home)
    headers = {"Authorization": f"Bearer {token}", **({"Accept": "text/event-stream"} if stream else {})}
    async with (
        aiohttp.ClientSession(f"http://127.0.0.1:{port}", read_bufsize=1 << 24) as session,
        _others(daemon),
        session.post("/intent", json={"text": "go", "agent": name}, headers=headers) as response,
    ):
        assert response.status == 200
        with anyio.fail_after(120 * SLOWNESS):
            body = await response.read()
    _agrees(name, _streamed(body, CASES[name]) if stream else json.loads(body))


def _streamed(body: bytes, case: Case) -> dict[str, Any]:
    """Return the result of a stream's events. Lines end at the standard's line ends only."""
    found = []
    for block in re.split(rb"\r\n\r\n|\n\n", body.strip()):
        data = [line.removeprefix(b"data:").strip() for line in re.split(rb"\r\n|\n|\r", block) if line[:5] == b"data:"]
        if data:
            found.append(json.loads(b"\n".join(data)))
    if found[-1]["kind"] == "stream_error":
        # Errors of version 1 have no code.
        return {"kind": "error", "message": found[-1]["message"], "code": case.error}
    begin, *chunks, end = found
    assert (begin["response_kind"], len(chunks), end["kind"]) == ("intent_result", 1, "stream_end")
    return {"kind": "intent_result", **chunks[0]["chunk"], **end["summary"]}


@pytest.mark.parametrize("name", ["steering", "fails"])
@pytest.mark.parametrize("more", [(), ("--json",), ("--stream",)])
def test_command_line_shows_nothing_that_steers_terminal(name: str, more: tuple[str, ...], daemon: Process) -> None:
    done = subprocess.run(
        serving.covenant_command("intent", "--agent", name, *more, "go"),
        env={"PATH": "/usr/bin:/bin", "COVENANT_HOME": str(daemon.home)},
        capture_output=True, timeout=120 * SLOWNESS, **serving.identity(CALLER),
    )  # fmt: skip
    assert done.returncode == (0 if name == "steering" else 1), done.stderr
    shown = done.stdout.decode() + done.stderr.decode()
    assert _RAW.findall(shown) == [], shown
    assert name != "steering" or "owned" in shown
