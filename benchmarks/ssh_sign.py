#!/usr/bin/env python3
"""A login's signature by the gate of the ssh-agent service, beside OpenSSH's own ssh-agent.

    .venv/bin/python benchmarks/ssh_sign.py [signatures]

    agent   client -> a unix socket -> ssh-agent, which has the key
    gate    client -> TCP -> the gate's process, sealed -> a line -> the desk, which reads the key and signs

One Ed25519 key, the same bound session and login. In turn, with a pause: the gate signs about 10 times a second. No
vault is opened, and no row written. As root. Medians.
"""

from __future__ import annotations

import select
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from cryptography.hazmat.primitives import serialization

from sandbox.kernel.net import netns
from sandbox.network import addresses, namespaces
from sandbox.network.gate.process import OpenGate
from sandbox.network.ssh import gate
from tests import ssh_kit

PAUSE_SECONDS, PORT, SIGNED = 0.15, 81, 14


def main() -> None:
    """Print both medians and what the gate adds."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    form = serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    pem = ssh_kit.OWN.private_bytes(*form)
    with tempfile.TemporaryDirectory() as folder, namespaces.made() as made:
        path, key = f"{folder}/agent", Path(folder, "key")
        key.write_bytes(pem)
        key.chmod(0o600)
        agent = subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.DEVNULL)
        try:
            _wait(lambda: Path(path).exists())
            environment = {"SSH_AUTH_SOCK": path, "PATH": "/usr/bin:/bin"}
            subprocess.run(["ssh-add", "-q", key], env=environment, check=True, capture_output=True)
            namespaces.connect(made)
            namespaces.open_link(made)
            plan = {"listen": PORT, "keys": [{"secret": s, "host": h, "key": k} for s, h, k in ssh_kit.ROWS]}
            terms = gate.SshAgentTerms(lambda name, then: then(1, memoryview(pem)), lambda row: None)
            with gate.open(plan, terms, inside=made.inside, denied=print) as opened:
                opened.process.ready(120)
                threading.Thread(target=_serve, args=(opened,), daemon=True).start()
                near = socket.socket(socket.AF_UNIX)
                near.connect(path)
                far = netns.within(made.agent, lambda: socket.create_connection((addresses.GATEWAY4, PORT)))
                _print(count, near, far)
        finally:
            agent.kill()
            agent.wait()


def _print(count: int, near: socket.socket, far: socket.socket) -> None:
    times: dict[str, list[float]] = {"agent": [], "gate": []}
    for line in (near, far):
        _ask(line, ssh_kit.extension(ssh_kit.binding()))
    for _ in range(count):
        for name, line in (("agent", near), ("gate", far)):
            began = time.perf_counter()
            answer = _ask(line, ssh_kit.signing(ssh_kit.login()))
            times[name].append(time.perf_counter() - began)
            if answer[0] != SIGNED:
                raise SystemExit(f"{name} gave no signature: {answer[:40]!r}")
        time.sleep(PAUSE_SECONDS)
    agent, through = (statistics.median(times[name]) * 1000 for name in ("agent", "gate"))
    print(f"agent {agent:.2f} ms, gate {through:.2f} ms: {through - agent:.2f} ms more, over {count} signatures")


def _ask(line: socket.socket, message: bytes) -> bytes:
    line.sendall(len(message).to_bytes(4, "big") + message)
    with_length = _read(line, 4)
    return _read(line, int.from_bytes(with_length, "big"))


def _read(line: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        if not (piece := line.recv(size - len(found))):
            raise SystemExit("the connection ended")
        found += piece
    return found


def _serve(opened: OpenGate) -> None:
    poll = select.poll()
    for fd in opened.watches:
        poll.register(fd, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if opened.watches[fd]() is not None:
                return


def _wait(done: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not done() and time.monotonic() < until:
        time.sleep(0.01)


if __name__ == "__main__":
    main()
