"""`covenant top` shows the bytes that a live run sends and receives, each in the right column."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.kernel import internet
from tests.kernel.internet import Internet, NetworkedWorld
from tests.kernel.live_runs import until
from tests.kernel.world import HEAD, TAIL

ROOT = Path(__file__).resolve().parents[2]
SENT = 256 * 1024
# What it says comes back in part (``Servers._echo``): of each piece the first kilobyte.
SENDS = f"""
import socket, time
held = socket.create_connection(("93.184.216.34", 80), 10)
held.sendall(b"x" * {SENT})
time.sleep(300)
answer = 1
"""


def test_top_says_what_live_run_sent_and_received(tmp_path: Path, warm: Path, net: Internet) -> None:
    world = internet.configured(NetworkedWorld(tmp_path, warm=warm), net)
    grants = internet.entries(("93.184.216.34", "[80]", "tcp"))
    package = world.sign(world.package({"main.py": HEAD + SENDS + TAIL}, cpu_ms=250_000, network="full", more=grants))
    environment = {**os.environ, "COVENANT_HOME": str(world.home), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "covenant", "run", str(package), "hi"]
    entered = ["nsenter", f"--net=/proc/{os.getpid()}/fd/{net.spaces['host']}", *command]

    def shown() -> list[dict[str, Any]]:
        done = subprocess.run(
            [sys.executable, "-m", "covenant", "top", "--json"], env=environment, capture_output=True, check=True
        )
        found: list[dict[str, Any]] = json.loads(done.stdout)["runs"]
        return found

    run = subprocess.Popen(entered, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:

        def exchanged() -> Any:
            """Or nothing more to wait for."""
            enough = [one for one in shown() if (one["sent_bytes"] or 0) >= SENT and one["received_bytes"] >= 1024]
            return enough or run.poll() is not None

        found = until(exchanged)
        assert run.poll() is None, run.communicate()
        (one,) = found
        assert one["agent_id"] == "probe"
        assert one["received_bytes"] < SENT
    finally:
        run.terminate()
        run.communicate(timeout=60)
    assert net.leftovers() == []
