"""Ways round the network: sockets without an address, descriptors, other processes' files, listening."""

from __future__ import annotations

import os
import socket

import wire
from harness import Blocked, probe

# INVARIANT: tests/kernel/hostile_world.py has a listener of this name in the control.
ABSTRACT_NAME = b"\0covenant-hostile-control"
SOCKET_PATHS = ("/run/docker.sock", "/run/containerd/containerd.sock", "/run/covenant/supervisor.sock")
AF_ALG, AF_VSOCK, AF_TIPC, AF_BLUETOOTH, AF_XDP, AF_CAN = 38, 40, 30, 31, 44, 29


@probe("door_abstract")
def door_abstract() -> str:
    """An abstract socket has no file: only a network namespace hides it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made:
        made.settimeout(wire.SECONDS)
        made.connect(ABSTRACT_NAME)
        return f"answered {made.recv(64)!r}"


@probe("door_service_socket")
def door_service_socket() -> str:
    failure: OSError = FileNotFoundError(2, "no socket")
    for path in SOCKET_PATHS:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made:
            made.settimeout(wire.SECONDS)
            try:
                made.connect(path)
                return f"{path} answered {made.recv(64)!r}"
            except OSError as error:
                failure = error
    raise failure


@probe("door_vsock")
def door_vsock() -> str:
    socket.socket(AF_VSOCK, socket.SOCK_STREAM).close()
    return "has a socket to the hypervisor"


@probe("door_xdp")
def door_xdp() -> str:
    socket.socket(AF_XDP, socket.SOCK_RAW).close()
    return "has a socket below the network"


@probe("door_can")
def door_can() -> str:
    socket.socket(AF_CAN, socket.SOCK_RAW, 1).close()
    return "has a socket to a bus"


@probe("door_bluetooth")
def door_bluetooth() -> str:
    socket.socket(AF_BLUETOOTH, socket.SOCK_SEQPACKET, 0).close()
    return "has a radio"


@probe("door_inherited")
def door_inherited() -> str:
    """Look for an inherited socket: one left open reaches the peer that it is connected to."""
    found = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                found.append(entry)
        except OSError:
            continue
    if not found:
        raise Blocked("no socket was left open")
    return f"descriptors {found} are sockets"


@probe("door_pass_descriptor")
def door_pass_descriptor() -> str:
    """Look for a named socket.

    SCM_RIGHTS over the agent's own pair passes only its own descriptors, so a peer is needed.
    """
    with open("/proc/net/unix", encoding="ascii") as file:
        others = [line.split()[-1] for line in file.readlines()[1:] if line.split()[-1].startswith(("/", "@"))]
    if not others:
        raise Blocked("no named socket is listed")
    return f"sees {others[:3]}"
