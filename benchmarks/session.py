#!/usr/bin/env python3
"""Measure a session beside plain runsc of the same layer: a terminal's echo, and bytes through ``cat``; in turns, root.

    .venv/bin/python benchmarks/session.py [rounds] [MiB]

terminal    one key at a time to a shell that waits, until the terminal of the sandbox has echoed it, in milliseconds;
            ours through the caller's terminal, plain runsc through the master that its console socket sends
stdio       MiB a second through ``cat``, from the first byte back to the last; pipes on both sides
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from policy.layers import parse_ref
from sandbox.layers.images import RootImages
from tests.kernel import plain_runsc, skeleton_runsc

KEYS = 300
GAP_SECONDS = 0.02
WAIT_SECONDS = 120
CHUNK = 1 << 16


def covenant(home: Path, *words: str) -> tuple[list[str], dict[str, str]]:
    """A command of this tree, and its environment."""
    return [sys.executable, "-m", "covenant", *words], {
        **os.environ,
        "COVENANT_HOME": str(home),
        "PYTHONPATH": str(ROOT),
        "TERM": "xterm",
    }


@contextlib.contextmanager
def plain(root: Path, command: list[str], *options: str, terminal: bool, **streams: Any) -> Iterator[Any]:
    """Start a command in plain runsc."""
    with tempfile.TemporaryDirectory(prefix="session-") as folder:
        document = skeleton_runsc.bundle_config(root, command, uid=20_000, scratch=["mode=1777"])
        document["process"]["terminal"] = terminal
        Path(folder, "config.json").write_text(json.dumps(document))
        runsc = [plain_runsc.find_runsc(), f"--root={folder}/state", "--network=none", "--ignore-cgroups"]
        name = f"session-{os.getpid()}-{time.monotonic_ns()}"
        started = [*runsc, "--overlay2=none", "run", *options, f"--bundle={folder}", name]
        with subprocess.Popen(started, **streams) as process:
            try:
                yield process
            finally:
                process.terminate()


def echo(master: int) -> list[float]:
    """Type keys, and return the milliseconds until each is shown."""
    shown = b""
    while b"READY" not in shown:
        assert select.select([master], [], [], WAIT_SECONDS)[0], shown
        shown += os.read(master, CHUNK)
    found = []
    for _ in range(KEYS):
        time.sleep(GAP_SECONDS)
        begin = time.perf_counter()
        os.write(master, b"a")
        assert select.select([master], [], [], WAIT_SECONDS)[0]
        os.read(master, CHUNK)
        found.append((time.perf_counter() - begin) * 1e3)
    os.write(master, b"\r")
    return found


WAITS = ["/bin/sh", "-c", "echo READY; read line"]


def our_terminal(home: Path, root: Path) -> list[float]:
    """A session of ours in a terminal of this program."""
    master, slave = pty.openpty()
    command, environment = covenant(home, "exec", "--quiet", "--tty", "--", *WAITS)
    with subprocess.Popen(
        command, env=environment, stdin=slave, stdout=slave, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        os.close(slave)
        found = echo(master)
        process.wait(WAIT_SECONDS)
        os.close(master)
    return found


def plain_terminal(home: Path, root: Path) -> list[float]:
    """The same in plain runsc, on the master that it sends."""
    with tempfile.TemporaryDirectory(prefix="console-") as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/s")
        listener.listen(1)
        with plain(root, WAITS, f"--console-socket={folder}/s", terminal=True, stdin=subprocess.DEVNULL):
            connection, _ = listener.accept()
            _, (master,), _, _ = socket.recv_fds(connection, 4096, 1)
            connection.close()
            found = echo(master)
            os.close(master)
    return found


def through(process: Any, total: int) -> float:
    """Send bytes through a process that gives them back; MiB a second."""
    process.stdin.write(b"x")
    process.stdin.flush()
    assert process.stdout.read(1) == b"x"
    begin = time.perf_counter()

    def send() -> None:
        piece = b"y" * CHUNK
        for _ in range(total // CHUNK):
            process.stdin.write(piece)
        process.stdin.close()

    sender = threading.Thread(target=send)
    sender.start()
    left = total
    while left:
        piece = process.stdout.read1(CHUNK)
        assert piece
        left -= len(piece)
    took = time.perf_counter() - begin
    sender.join()
    return total / took / (1 << 20)


PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}


def our_pipes(home: Path, root: Path, total: int) -> float:
    """A session of ours without a terminal."""
    command, environment = covenant(home, "exec", "--quiet", "--no-tty", "--", "/bin/cat")
    with subprocess.Popen(command, env=environment, **PIPES) as process:  # type: ignore[call-overload]
        return through(process, total)


def plain_pipes(home: Path, root: Path, total: int) -> float:
    """The same in plain runsc."""
    with plain(root, ["/bin/cat"], terminal=False, **PIPES) as process:
        return through(process, total)


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    total = (int(sys.argv[2]) if len(sys.argv) > 2 else 256) << 20
    echoes: dict[str, list[float]] = {"ours": [], "plain": []}
    rates: dict[str, list[float]] = {"ours": [], "plain": []}
    with tempfile.TemporaryDirectory(prefix="covenant-benchmark-") as directory:
        home = Path(directory)
        command, environment = covenant(home, "layer", "build", "debian-minimal")
        ref = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout.decode().strip()
        images = RootImages(home / "supervisor")
        points = skeleton_runsc.MOUNT_POINTS
        with images.hold([], [parse_ref(ref)], executable=["root"], points=points) as held:
            for _ in range(rounds):
                echoes["plain"] += plain_terminal(home, held.root)
                echoes["ours"] += our_terminal(home, held.root)
                rates["plain"].append(plain_pipes(home, held.root, total))
                rates["ours"].append(our_pipes(home, held.root, total))
    for name, found in echoes.items():
        cuts = statistics.quantiles(found, n=100)
        print(f"terminal {name:6} median {cuts[49]:.2f} ms, p99 {cuts[98]:.2f} ms ({len(found)} keys)")
    ours, raw = (statistics.median(rates[name]) for name in ("ours", "plain"))
    print(f"stdio    ours {ours:.0f} MiB/s, plain {raw:.0f} MiB/s, ratio {ours / raw:.2f}")


if __name__ == "__main__":
    main()
