"""Begin the connections of a publish gate to its agent: a process beside the gate, in the gateway's namespace.

The gate has sockets of this host. With connect(2) it could undo one and connect it anywhere on this host, so it has no
such call. This process has the call and no socket of this host, and the ruleset lets its user reach the published ports
of the agent alone. ``sandbox.network.publish.host_gate`` has one in the supervisor's namespace.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import Any, Final, NoReturn

from sandbox.kernel.fs import landlock
from sandbox.network.tls.connection import send_at_once

# gate -> connector: a port. connector -> gate: whether a socket comes with it, which is connected or connecting.
REQUEST: Final = struct.Struct("!H")
BEGUN, FAILED = b"b", b"f"


def begin(where: str, port: int) -> socket.socket | None:
    """Return a socket that connects to a port of this address, None if it cannot begin. Never waits."""
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        send_at_once(made)
        with contextlib.suppress(BlockingIOError):
            made.connect((where, port))
    except OSError:
        made.close()
        return None
    return made


def serve(gate: Any) -> NoReturn:
    """Serve the gate's requests, for the ports of its plan alone."""
    where, ports = gate.plan["where"], frozenset(gate.plan["ports"])
    line = socket.socket(fileno=gate.fds["line"])
    landlock.hold_to_ports(ports)
    gate.seal()
    while request := line.recv(REQUEST.size + 1):
        (port,) = REQUEST.unpack(request)
        if port not in ports:
            break
        made = begin(where, port)
        if made is None:
            line.send(FAILED)
        else:
            with made:
                socket.send_fds(line, [BEGUN], [made.fileno()])
    raise SystemExit("the gate is gone, or asked for another port")


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
