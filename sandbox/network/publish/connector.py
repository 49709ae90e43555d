"""Begin the connections of a publish gate to its agent: a process beside the gate, in the gateway's namespace.

The gate has sockets of this host. With connect(2) it could undo one and connect it anywhere on this host, so it has no
such call. This process has the call and no socket of this host, and the ruleset lets its user reach the published ports
of the agent alone.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import Any, Final, NoReturn

from sandbox.network.tls.connection import send_at_once

# gate -> connector: a port. connector -> gate: whether a socket comes with it, which is connected or connecting.
REQUEST: Final = struct.Struct("!H")
BEGUN, FAILED = b"b", b"f"


def begin(agent: str, port: int) -> socket.socket | None:
    """Return a socket that connects to a port of the agent, None if it cannot begin. Never waits."""
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        send_at_once(made)
        with contextlib.suppress(BlockingIOError):
            made.connect((agent, port))
    except OSError:
        made.close()
        return None
    return made


def serve(gate: Any) -> NoReturn:
    """Serve the gate's requests."""
    agent, line = gate.plan["agent"], socket.socket(fileno=gate.fds["line"])
    gate.seal()
    while request := line.recv(REQUEST.size + 1):
        (port,) = REQUEST.unpack(request)
        made = begin(agent, port)
        if made is None:
            line.send(FAILED)
        else:
            with made:
                socket.send_fds(line, [BEGUN], [made.fileno()])
    raise SystemExit("the publish gate is gone")


def asked(line: socket.socket, port: int) -> socket.socket | None:
    """Ask the connector for a socket to a port of the agent. The answer comes at once.

    Raises:
        OSError: Raised when the connector is gone.
    """
    line.send(REQUEST.pack(port))
    said, fds, _, _ = socket.recv_fds(line, 1, 1)
    if not said:
        raise BrokenPipeError("the connector is gone")
    return socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=fds[0]) if fds else None
