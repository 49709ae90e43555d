"""A listening socket of a gate that the agent reaches at its gateway."""

from __future__ import annotations

import socket

from sandbox.network import addresses


def listening(port: int, backlog: int) -> socket.socket:
    """Return a listener on the gateway's address, which takes from the agent's link alone. Called in its namespace.

    Raises:
        OSError: the port is taken.
    """
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, addresses.GATEWAY_DEVICE.encode() + b"\0")
        made.bind((addresses.GATEWAY4, port))
        made.listen(backlog)
    except BaseException:
        made.close()
        raise
    return made
