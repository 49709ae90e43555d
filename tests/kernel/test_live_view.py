"""Views of live runs: for root, for a client of the supervisor, for a scraper, and on stderr."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import prometheus_text
from tests.kernel.serving import Served
from tests.kernel.world import HEAD, TAIL, World

ROOT = Path(__file__).resolve().parents[2]
# Uses some processor and some memory, is refused one program, and then waits.
BUSY = """
import subprocess, time
block = b"x" * (8 << 20)
while time.process_time() < 0.8: pass  # gVisor counts by ticks, and may count too much
try: subprocess.run(["/bin/true"])
except OSError: pass
time.sleep(300)
answer = 1
"""


def until(true: Callable[[], Any], *, seconds: float = 60.0) -> Any:
    """Return the first true value of ``true``; fail after ``seconds``."""
    end = time.monotonic() + seconds
    while not (value := true()):
        assert time.monotonic() < end, "it did not become true in time"
        time.sleep(0.05)
    return value


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, warm: Path) -> Iterator[Served]:
    """A supervisor that serves its numbers, and under which one agent works."""
    world = World(tmp_path_factory.mktemp("live"), warm=warm)
    package = world.sign(world.package({"main.py": HEAD + BUSY + TAIL}, id="busy-one", cpu_ms=300_000))
    with Served(world, journal=True, checkpoint_seconds=1, metrics=f"unix:{world.base}/numbers.sock") as made:
        run = subprocess.Popen(
            [sys.executable, "-m", "covenant", "run", str(package), "a secret intent"],
            env=environment(made),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        until(lambda: any(r["kind"]["type"] == "denied" for r in world.rows()) or run.poll() is not None)
        yield made
        (one,) = json.loads(covenant(made, "top", "--json"))["runs"]
        covenant(made, "kill", one["run_id"])
        _, err = run.communicate(timeout=60)
        assert run.returncode == 1, err


def environment(served: Served) -> dict[str, str]:
    return {
        **os.environ,
        "COVENANT_HOME": str(served.world.home),
        "COVENANT_SOCKET": str(served.path),
        "PYTHONPATH": str(ROOT),
    }


def covenant(served: Served, *words: str, **more: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "covenant", *words],
        env={**environment(served), **more},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def scrape(served: Served, request: bytes = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n") -> tuple[bytes, str]:
    """The head and the body of an answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(60)
        sock.connect(f"{served.world.base}/numbers.sock")
        sock.sendall(request)
        raw = b""
        while data := sock.recv(65536):
            raw += data
    head, _, body = raw.partition(b"\r\n\r\n")
    return head, body.decode()


def test_top_shows_what_run_uses_whoever_answers(served: Served) -> None:
    own = dict.fromkeys(("COVENANT_SOCKET",), "")
    for more in ({}, own):
        (run,) = json.loads(covenant(served, "top", "--json", **more))["runs"]
        assert (run["agent_id"], run["state"]) == ("busy-one", "Running")
        assert run["denied"] >= 1
        assert run["cpu_ms"] > 200
        assert run["memory_bytes"] > 8 << 20
        assert run["processes"] > 2
    (run,) = json.loads(covenant(served, "top", "--json"))["runs"]
    lines = covenant(served, "top").splitlines()
    assert lines[0].startswith("1 runs")
    assert lines[2].split()[0] == run["run_id"][:8]
    assert lines[2].split()[-1] == "busy-one"


def test_scraper_gets_numbers_and_no_words(served: Served) -> None:
    head, body = scrape(served)
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert b"text/plain; version=0.0.4" in head
    numbers = prometheus_text.parse(body)
    assert numbers["covenant_runs"]['state="Running"'] == 1
    assert numbers["covenant_run_starts_total"][""] == 1
    assert numbers["covenant_denials_total"]['layer="exec"'] == 1
    assert numbers["covenant_agent_memory_bytes"]['agent_id="busy-one"'] > 8 << 20
    assert numbers["covenant_agent_cpu_seconds"]['agent_id="busy-one"'] > 0.2
    assert numbers["covenant_clock_behind_seconds"] == {"": 0}
    # The same that root reads from the state.
    assert prometheus_text.parse(covenant(served, "metrics")).keys() == numbers.keys()
    for word in ("secret", str(served.world.base), "/bin/true", "operator@"):
        assert word not in body


def test_whoever_asks_for_something_else_gets_nothing_and_harms_nobody(served: Served) -> None:
    for request, status in (
        (b"GET / HTTP/1.1\r\n\r\n", b"404"),
        (b"GET /metrics/../../etc/passwd HTTP/1.1\r\n\r\n", b"404"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"\x00\xff" * 100 + b"\r\n\r\n", b"400"),
        (b"x" * 20_000, b""),
        (b"GET /metrics HTTP/1.1\r\n", b""),
    ):
        try:
            head, _ = scrape(served, request)
        except ConnectionError:
            head = b""
        assert status in head.split(b"\r\n")[0], request[:40]
    assert scrape(served)[0].startswith(b"HTTP/1.1 200 OK")


def test_process_that_answers_has_no_rights(served: Served) -> None:
    found = [
        entry
        for entry in filter(str.isdigit, os.listdir("/proc"))
        if b"sandbox.serve.metrics_http" in _bytes(f"/proc/{entry}/cmdline") and _below(int(entry), served.pid)
    ]
    assert len(found) == 1
    lines = Path(f"/proc/{found[0]}/status").read_text().splitlines()
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    assert "0" not in status["Uid"].split()
    assert [int(status[name], 16) for name in ("CapPrm", "CapEff", "CapBnd", "CapInh", "CapAmb")] == [0] * 5
    assert (status["Seccomp"].strip(), status["NoNewPrivs"].strip()) == ("2", "1")
    assert os.listdir(f"/proc/{found[0]}/root/") == []
    assert os.stat(f"{served.world.base}/numbers.sock").st_mode & 0o777 == 0o600


def test_supervisor_says_each_step_of_run_with_its_id(served: Served) -> None:
    def events() -> list[dict[str, Any]]:
        lines = [line for line in served.log().splitlines() if line.startswith("{")]
        return [json.loads(line) for line in lines]

    until(lambda: any(event["event"] == "denied" for event in events()))
    said = events()
    ids = {event["run_id"] for event in said if "run_id" in event}
    assert len(ids) == 1
    assert {"run_started", "denied", "run_state"} <= {event["event"] for event in said}
    assert "Running" in [event.get("state") for event in said]
    assert "secret" not in served.log()


def test_page_can_be_followed(served: Served) -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    lines = [
        line
        for block in re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
    ]
    assert len(lines) == 4
    for line in lines:
        program, *words = line.split()
        assert program == "covenant"
        covenant(served, *words)
    # And its table of names is that of the numbers.
    named = set(re.findall(r"covenant_[a-z_]+", page.partition("| name | what |")[2]))
    assert named <= prometheus_text.parse(scrape(served)[1]).keys() | {"covenant_agent_runs"}


def _bytes(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def _below(pid: int, ancestor: int) -> bool:
    while pid > 1:
        if pid == ancestor:
            return True
        pid = int(_bytes(f"/proc/{pid}/stat").rpartition(b")")[2].split()[1])
    return False


def test_supervisor_signs_checkpoints_by_itself(served: Served) -> None:
    state = served.world.state
    rows = (state / "audit" / "events.jsonl").read_bytes().splitlines()
    denied = max(n for n, line in enumerate(rows) if b'"kind":{"type":"denied",' in line)
    file = state / "audit" / "checkpoints.jsonl"

    def covered() -> bool:
        lines = file.read_bytes().splitlines() if file.exists() else []
        return any(json.loads(line)["tree_size"] > denied for line in lines)

    until(covered)
    assert json.loads(covenant(served, "audit", "verify", "--json", COVENANT_STATE=str(state)))["report"]["valid"]
