"""Data in the buffers of an agent's network stack is the agent's own memory: the stack is in its cgroup."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from policy import errors
from tests.kernel import internet
from tests.kernel.internet import Internet, NetworkedWorld
from tests.kernel.world import HEAD, SLOWNESS, TAIL, refused

MIB, PORT = 1 << 20, 9100
# Each connection is open and its other end does not read, so the sent data stays here.
HOARD = """
import socket
held, sent = [], 0
for _ in range({connections}):
    s = socket.socket()
    s.settimeout(20)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
    s.connect(("93.184.216.34", {port}))
    s.setblocking(False)
    held.append(s)
    try:
        while True:
            sent += s.send(bytes(1 << 18))
    except BlockingIOError:
        pass
answer = sent
"""


def test_buffers_of_connections_that_nobody_reads_are_agents_memory(tmp_path: Path, warm: Path, net: Internet) -> None:
    world = internet.configured(NetworkedWorld(tmp_path, warm=warm), net)
    fields: dict[str, Any] = {"network": "full", "memory_mb": 64, "cpu_ms": 60_000 * SLOWNESS}
    fields["more"] = internet.entries(("93.184.216.34", f"[{PORT}]", "tcp"))
    with contextlib.closing(net.bound("world", "93.184.216.34", PORT)):
        answer = world.run_code(HEAD + HOARD.format(connections=2, port=PORT) + TAIL, **fields)
        # The control: two fit, and each holds far more than the world's end takes.
        assert answer.result is not None, (answer.error, answer.stderr)
        assert int(json.loads(answer.result.text)) > 8 * MIB
        answer = world.run_code(HEAD + HOARD.format(connections=220, port=PORT) + TAIL, **fields)
    refused(errors.OutOfMemoryError, answer.error)
    assert net.leftovers() == []
