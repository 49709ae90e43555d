"""Published ports of an agent under gVisor, with `network = "off"`: reached at their places, and nothing else is.

An agent that serves three ports and publishes two is asked from this host. What is refused has its control beside it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from policy import errors
from sandbox.run_result import RunResult
from sandbox.runner import recovery
from tests import loopback_server
from tests.kernel import live_runs, serving
from tests.kernel.conftest import leftovers
from tests.kernel.serving import CALLER, Served, covenant
from tests.kernel.world import ROOT, World

# The agent echoes in capitals, says of itself what it reaches, and ends by the word `end` to its first port.
SERVES = """
import json, os, socket, sys, threading
sys.stdin.readline()
done, found = threading.Event(), {}
for host, port in (("192.0.0.1", 80), ("192.0.0.1", 8080), ("192.0.0.1", 7000), ("198.18.0.1", 443)):
    try:
        with socket.create_connection((host, port), 5):
            found[f"{host}:{port}"] = "open"
    except OSError as e:
        found[f"{host}:{port}"] = type(e).__name__
def serve(one):
    while data := one.recv(65536):
        if data == b"end":
            done.set()
        one.sendall(json.dumps(found).encode() if data == b"found" else data.upper())
    one.close()
def listen(listener):
    while True:
        threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
for port in (8080, 8081, 9999):
    threading.Thread(target=listen, args=(socket.create_server(("0.0.0.0", port)),), daemon=True).start()
# Its own loopback works too (FastAPI's TestClient, Vite).
with socket.create_connection(("127.0.0.1", 9999)) as own:
    own.sendall(b"own")
    found["own loopback"] = own.recv(3).decode()
done.wait(250)
print(json.dumps({"text": json.dumps(found)}), flush=True)
# CPython 3.11 ends daemon threads by pthread_exit, which may abort the process at its very end.
os._exit(0)
"""


def entry(port: int, to: str | Path) -> str:
    return f'[[publish]]\nport = {port}\nto = "{to if isinstance(to, str) else f"unix:{to}"}"\n'


@pytest.fixture
def own() -> Iterator[Path]:
    """A directory of root alone, at a path that a socket can have."""
    with tempfile.TemporaryDirectory(prefix="publish-") as made:
        yield Path(made)


def asked(place: Path | int, words: bytes) -> bytes:
    """Ask at a place until the agent listens there."""

    def answer() -> bytes:
        with socket.socket(socket.AF_INET if isinstance(place, int) else socket.AF_UNIX) as client:
            client.settimeout(30)
            try:
                client.connect(("127.0.0.1", place) if isinstance(place, int) else str(place))
                client.sendall(words)
                return client.recv(1 << 16)
            except OSError:
                return b""

    found: bytes = live_runs.until(answer, seconds=4 * live_runs.WAIT_SECONDS)
    return found


def end(place: Path) -> None:
    """Have the agent end. It may do so before its answer is sent."""
    with socket.socket(socket.AF_UNIX) as client, contextlib.suppress(OSError):
        client.settimeout(30)
        client.connect(str(place))
        client.sendall(b"end")
        client.recv(1)


def rows(world: World, kind: str) -> list[dict[str, Any]]:
    return [row["kind"] for row in world.rows() if row["kind"]["type"] == kind]


def test_published_ports_are_reached_alone(world: World, own: Path) -> None:
    port, path, silent = loopback_server.free_port(), own / "web.sock", own / "silent.sock"
    world.configure(publish_ports=[port], self_test=True, attest_seconds=1)
    more = entry(8080, path) + entry(8081, f"127.0.0.1:{port}") + entry(7000, silent)
    package = world.sign(world.package({"main.py": SERVES}, cpu_ms=300_000, more=more))
    answers: list[RunResult] = []
    thread = threading.Thread(target=lambda: answers.append(world.run(package)))
    thread.start()
    try:
        assert asked(path, b"by path") == b"BY PATH"
        assert (stat.S_IMODE(path.lstat().st_mode), path.lstat().st_uid) == (0o600, 0)
        assert asked(port, b"by port") == b"BY PORT"
        found = json.loads(asked(path, b"found"))
        assert found.pop("own loopback") == "OWN"
        assert set(found.values()) == {"ConnectionRefusedError"}, found
        # A port without a listener is at its place, and ends each client.
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(30)
            client.connect(str(silent))
            assert client.recv(1) == b""
        (run,) = [one for one in (world.state / "runs").iterdir() if one.is_dir()]
        listed = json.loads(_covenant(world, "ps", "--json").stdout)["runs"]
        assert listed[0]["published"] == [
            {"port": 7000, "to": f"unix:{silent}"},
            {"port": 8080, "to": f"unix:{path}"},
            {"port": 8081, "to": f"127.0.0.1:{port}"},
        ]
        assert f"publishes port 8080 at unix:{path}" in _covenant(world, "ps").stdout
        attested = _covenant(world, "attest", run.name)
        assert attested.returncode == 0, attested.stdout + attested.stderr
    finally:
        end(path)
        thread.join()
    assert answers[0].error is None, answers[0].error
    assert list(own.iterdir()) == []
    assert [row["port"] for row in rows(world, "port_published")] == [7000, 8080, 8081]
    ended = {row["port"]: row for row in rows(world, "publish_ended")}
    assert (ended[7000]["connections"], ended[7000]["refused"]) == (0, 1)
    assert (ended[8081]["connections"], ended[8081]["in_bytes"], ended[8081]["out_bytes"]) == (1, 7, 7)
    assert ended[8080]["connections"] >= 3
    assert rows(world, "drift") == []


def _covenant(world: World, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COVENANT_HOME": str(world.home), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "covenant", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)


def test_place_that_cannot_be_had_starts_nothing(world: World, own: Path) -> None:
    port, path = loopback_server.free_port(), own / "web.sock"
    package = world.package({"main.py": "print(1)"}, more=entry(8080, f"127.0.0.1:{port}"))
    with pytest.raises(errors.NotEnforceableError, match=f"publishing at 127.0.0.1:{port}") as refusal:
        world.run(world.sign(package))
    assert f"publish_ports = [{port}]" in refusal.value.hint
    path.write_text("mine")
    own.chmod(0o777)
    package = world.sign(world.package({"main.py": SERVES}, cpu_ms=300_000, more=entry(8080, path)))
    for message, fix in (("others can write there", own.chmod), ("in use", lambda mode: path.unlink())):
        with pytest.raises(errors.PublishError, match=message):
            world.run(package)
        fix(0o700)
    assert [row["status"] for row in rows(world, "run_ended")] == ["failed", "failed"]
    assert rows(world, "publish_ended") == []
    # The fixes hold.
    with _running(world, package):
        assert asked(path, b"a") == b"A"
    assert list(own.iterdir()) == []


@contextlib.contextmanager
def _running(world: World, package: Path) -> Iterator[None]:
    """`covenant run` of the package in a process of its own, killed with all of it at the end of the block."""
    environment = {**os.environ, "COVENANT_HOME": str(world.home), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "covenant", "run", str(package), "hi"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        process.kill()
        process.wait()


def test_killed_run_leaves_no_place(world: World, own: Path) -> None:
    path = own / "web.sock"
    package = world.sign(world.package({"main.py": SERVES}, cpu_ms=300_000, more=entry(8080, path)))
    with _running(world, package):
        assert asked(path, b"a") == b"A"
        (run,) = [one for one in (world.state / "runs").iterdir() if one.is_dir()]
        shim = json.loads(_covenant(world, "ps", "--json").stdout)["runs"][0]["keeper"]
        os.kill(shim, signal.SIGKILL)
        with socket.socket(socket.AF_UNIX) as client:
            live_runs.until(lambda: client.connect_ex(str(path)) != 0)
    assert path.exists()
    assert recovery.recover(world.state / "runs") == [run.name]
    assert list(own.iterdir()) == []
    assert leftovers(world) == []


def test_caller_of_supervisor_publishes_in_its_own(warm: Path) -> None:
    with serving.open_place() as base, Served(World(base, warm=warm)) as served:
        world = served.world
        own, foreign = base / "own", base / "foreign"
        for directory, uid in ((own, CALLER), (foreign, 0)):
            directory.mkdir(mode=0o755)
            os.chown(directory, uid, uid)
        bad = world.sign(
            world.package(
                {"main.py": SERVES}, cpu_ms=300_000, more=entry(8080, foreign / "a.sock"), id="bad", name="bad"
            )
        )
        done = covenant("run", str(bad), "hi", served=served, uid=CALLER)
        assert (done.returncode, "belongs to another user" in done.stderr) == (1, True), done.stderr
        good = world.sign(world.package({"main.py": SERVES}, cpu_ms=300_000, more=entry(8080, own / "a.sock")))
        answers: list[subprocess.CompletedProcess[str]] = []
        thread = threading.Thread(
            target=lambda: answers.append(covenant("run", str(good), "hi", served=served, uid=CALLER))
        )
        thread.start()
        try:
            assert asked(own / "a.sock", b"a") == b"A"
            info = (own / "a.sock").lstat()
            assert (info.st_uid, stat.S_IMODE(info.st_mode)) == (CALLER, 0o600)
        finally:
            end(own / "a.sock")
            thread.join()
        assert answers[0].returncode == 0, answers[0].stderr
        assert [*own.iterdir(), *foreign.iterdir()] == []
