"""Granted ports of this host by the name host.covenant, with `network = "off"`: they are reached, and nothing else is.

What is refused has its control beside it: the same probe of a granted port, and a listener that answers this host.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from policy import errors
from sandbox.run_result import RunResult
from tests import loopback_server
from tests.kernel import live_runs
from tests.kernel.conftest import leftovers
from tests.kernel.session_kit import Home
from tests.kernel.world import ROOT, World

# The agent asks each target for an echo, and says what came back. It ends when the first target says `end`.
ASKS = """
import json, socket, sys
targets = json.loads(json.loads(sys.stdin.readline())["text"])
found, held = {}, None
for host, port in targets:
    name = f"{host}:{port}"
    try:
        one = socket.create_connection((host, port), 20)
        one.settimeout(20)
        one.sendall(b"hello")
        found[name] = one.recv(5).decode() or "closed"
        held = held or one
    except OSError as e:
        found[name] = type(e).__name__
if held is not None:
    held.sendall(b"x" * 300_000)
    held.recv(1)
print(json.dumps({"text": json.dumps(found)}))
"""


REFUSED = {"gaierror", "OSError", "ConnectionRefusedError", "PermissionError"}


class Echo:
    """A server on this host's loopback: five bytes back in capitals, then ``more`` counts, until it is closed."""

    def __init__(self, family: int = socket.AF_INET, address: str = "127.0.0.1") -> None:
        self._listener = socket.create_server((address, 0), family=family)
        self.port: int = self._listener.getsockname()[1]
        self.more = 0
        self.peers: list[str] = []
        self.ends = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._answer, args=self._listener.accept(), daemon=True).start()

    def _answer(self, one: socket.socket, peer: Any) -> None:
        self.peers.append(peer[0])
        with one:
            one.sendall(one.recv(5).upper())
            while self.more < 300_000 and (data := one.recv(65536)):
                self.more += len(data)
            self.ends.wait(120)

    def close(self) -> None:
        self.ends.set()
        self._listener.close()


@pytest.fixture
def echoes() -> Iterator[tuple[Echo, Echo]]:
    """A server whose port is granted, and one whose port is not."""
    with contextlib.closing(Echo()) as granted, contextlib.closing(Echo()) as other:
        for one in (granted, other):  # both answer this host
            with socket.create_connection(("127.0.0.1", one.port)) as client:
                client.sendall(b"hello")
                assert client.recv(5) == b"HELLO"
        yield granted, other


def entry(*ports: int) -> str:
    return f'[[permissions.network]]\nhost = "host.covenant"\nports = {list(ports)}\nprotocol = "tcp"\n'


def rows(world: World, kind: str) -> list[dict[str, Any]]:
    return [row["kind"] for row in world.rows() if row["kind"]["type"] == kind]


def _text(answer: RunResult) -> str:
    assert answer.result is not None, answer.error
    return answer.result.text


def _covenant(world: World, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COVENANT_HOME": str(world.home), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "covenant", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)


def test_granted_port_is_reached_alone(world: World, echoes: tuple[Echo, Echo]) -> None:
    granted, other = echoes
    silent = loopback_server.free_port()
    more = [3001, 3002, 3003, 3004, 3005, 3006]  # as many as a manifest may grant
    package = world.sign(
        world.package({"main.py": ASKS}, cpu_ms=300_000, network="off", more=entry(granted.port, silent, *more))
    )
    with pytest.raises(errors.NotEnforceableError, match=r"port \d+ of host.covenant") as refusal:
        world.run(package)
    assert "host_ports = [3001]" in refusal.value.hint
    # The fix holds. The port that is not granted is allowed by the operator: the manifest alone keeps it closed.
    world.configure(host_ports=[granted.port, silent, other.port, *more], self_test=True, attest_seconds=1)
    open_to_run = (("host.covenant", granted.port), ("192.0.0.1", granted.port))
    closed_to_run = (
        *(("host.covenant", one) for one in (other.port, 80, 53, 8443)),
        *((host, granted.port) for host in ("127.0.0.1", "198.19.0.1", "192.0.0.2", "models.covenant")),
    )
    asks = json.dumps([*open_to_run, ("host.covenant", silent), *closed_to_run])
    answers: list[RunResult] = []
    thread = threading.Thread(target=lambda: answers.append(world.run(package, asks)))
    thread.start()
    try:
        live_runs.until(lambda: answers or granted.more >= 300_000)
        (run,) = [one for one in (world.state / "runs").iterdir() if one.is_dir()]
        attested = _covenant(world, "attest", run.name)
        assert attested.returncode == 0, attested.stdout + attested.stderr
    finally:
        granted.ends.set()
        thread.join()
    assert answers[0].error is None, answers[0].error
    found = json.loads(_text(answers[0]))
    assert {found.pop(f"{host}:{port}") for host, port in open_to_run} == {"HELLO"}
    # A granted port without a listener ends the connection, as a published port does.
    assert found.pop(f"host.covenant:{silent}") in ("closed", "ConnectionResetError")
    assert set(found.values()) <= {"ConnectionRefusedError", "gaierror"}, found
    assert set(granted.peers) == {"127.0.0.1"}
    assert len(other.peers) == 1  # the control of this test
    assert [row["port"] for row in rows(world, "host_port_opened")] == sorted((granted.port, silent, *more))
    ended = {row["port"]: row for row in rows(world, "host_port_ended")}
    assert (ended[silent]["connections"], ended[silent]["refused"]) == (0, 1)
    counts = ended[granted.port]
    assert (counts["connections"], counts["in_bytes"], counts["out_bytes"]) == (2, 300_010, 10)
    assert rows(world, "drift") == []
    assert leftovers(world) == []


def test_run_without_the_grant_is_refused(world: World, echoes: tuple[Echo, Echo]) -> None:
    granted, _ = echoes
    world.configure(host_ports=[granted.port])
    package = world.sign(world.package({"main.py": ASKS}, cpu_ms=300_000, network="off"))
    answer = world.run(package, json.dumps([("host.covenant", granted.port), ("192.0.0.1", granted.port)]))
    assert set(json.loads(_text(answer)).values()) <= REFUSED
    assert len(granted.peers) == 1


def test_verbs_name_the_port(world: World, tmp_path: Path) -> None:
    package = world.package({"main.py": ASKS}, network="off", more=entry(11434))
    world.configure(host_ports=[11434])
    explained = _covenant(world, "policy", "explain", str(package)).stdout
    assert "port 11434 of this host" in explained
    yes = _covenant(world, "policy", "why", str(package), "--connect", "host.covenant:11434")
    assert (yes.returncode, "this host's loopback" in yes.stdout) == (0, True), yes.stdout + yes.stderr
    no = _covenant(world, "policy", "why", str(package), "--connect", "host.covenant:5432")
    assert (no.returncode, "ports = [5432]" in no.stdout) == (3, True), no.stdout + no.stderr
    never = _covenant(world, "policy", "why", str(package), "--connect", "host.covenant:22")
    assert (never.returncode, "from 1024" in never.stdout) == (3, True), never.stdout + never.stderr
    proved = _covenant(world, "policy", "prove", str(package))
    assert proved.returncode == 0, proved.stdout + proved.stderr


def test_session_reaches_the_port(tmp_path: Path, echoes: tuple[Echo, Echo]) -> None:
    granted, other = echoes
    home = Home(tmp_path, "debian-minimal")
    home.world.configure(host_ports=[granted.port])
    ask = "exec 3<>/dev/tcp/host.covenant/$port && printf hello >&3 && head -c 5 <&3"
    code = f'for port in "$@"; do {{ {ask}; }} || echo no; done'
    words = ["--", "bash", "-c", code, "bash", str(other.port), str(granted.port)]
    done = home.exec("--net", f"host.covenant:{granted.port}", *words)
    assert (done.returncode, done.stdout) == (0, b"no\nHELLO"), done.stderr
    assert f"  port {granted.port} of this host\n".encode() in done.stderr
    message, fix = home.refused("--net", f"host.covenant:{other.port}", *words)
    assert (f"port {other.port} of host.covenant" in message, "host_ports" in fix) == (True, True)
    assert leftovers(home.world) == []
