"""Runs inside the plain sandbox of the hostile controls: makes every object that a probe searches for.

A probe that finds no other process, no listener and no leaked descriptor proves nothing where there is none. So this
makes them, waits until they answer, and then executes the command of its arguments.
"""

from __future__ import annotations

import os
import pty
import socket
import subprocess
import sys
import threading

# INVARIANT: the same as in agents/hostile/python/network.py.
ABSTRACT_NAME = b"\0covenant-hostile-control"
SOCKET_PATH = "/run/docker.sock"
PORT = 47_001
ADDRESSES = ("169.254.169.254/32", "192.0.2.1/32")
LIFETIME_SECONDS = 120


def listeners() -> list[socket.socket]:
    """One stream listener for each way that a probe tries."""
    found = []
    for family, address in (
        (socket.AF_UNIX, ABSTRACT_NAME),
        (socket.AF_UNIX, SOCKET_PATH),
        (socket.AF_INET, ("0.0.0.0", PORT)),
    ):
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.bind(address)
        listener.listen()
        found.append(listener)
    return found


def answer(listener: socket.socket) -> None:
    """Greet every client."""
    while True:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"reached")


def echo(datagrams: socket.socket) -> None:
    """Send every datagram back."""
    while True:
        data, peer = datagrams.recvfrom(512)
        datagrams.sendto(data, peer)


def serve() -> None:
    """The sibling process: answer until the sandbox ends."""
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.bind(("0.0.0.0", PORT))
    threads = [threading.Thread(target=echo, args=(datagrams,), daemon=True)]
    threads += [threading.Thread(target=answer, args=(one,), daemon=True) for one in listeners()]
    for thread in threads:
        thread.start()
    os.write(1, b"r")
    os.close(1)
    threads[0].join(LIFETIME_SECONDS)


def main() -> None:
    """Set the stage, then exec."""
    if sys.argv[1:] == ["serve"]:
        serve()
        return
    master, terminal = pty.openpty()
    for address in ADDRESSES:
        subprocess.run(["/usr/bin/ip", "address", "add", address, "dev", "lo"], check=True)
    os.makedirs(os.path.dirname(SOCKET_PATH), exist_ok=True)
    # Not this script's stdin: the sibling must not eat the intent line. It keeps the terminal's other end open.
    sibling = subprocess.Popen(
        [sys.executable, __file__, "serve"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, pass_fds=[master]
    )
    assert sibling.stdout is not None
    if sibling.stdout.read(1) != b"r":
        raise SystemExit("the sibling did not start")
    for leaked in (os.open("/", os.O_RDONLY), terminal):
        os.set_inheritable(leaked, True)
    os.execv(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
