"""Runs inside the plain sandbox of the network probes' control: makes the objects that doors.py searches for."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading

# INVARIANT: the same as in agents/hostile/network/doors.py.
NAMES = (b"\0covenant-hostile-control", b"/run/docker.sock")
LIFETIME_SECONDS = 240


def answer(listener: socket.socket) -> None:
    """Greet every client."""
    while True:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"reached")


def serve() -> None:
    """The sibling process: answer until the sandbox ends."""
    os.makedirs("/run", exist_ok=True)
    for name in NAMES:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(name)
        listener.listen()
        threading.Thread(target=answer, args=(listener,), daemon=True).start()
    os.write(1, b"r")
    os.close(1)
    threading.Event().wait(LIFETIME_SECONDS)


def main() -> None:
    """Set the stage, then exec."""
    if sys.argv[1:] == ["serve"]:
        serve()
        return
    sibling = subprocess.Popen([sys.executable, __file__, "serve"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert sibling.stdout is not None
    if sibling.stdout.read(1) != b"r":
        raise SystemExit("the sibling did not start")
    leaked, _ = socket.socketpair()
    os.set_inheritable(leaked.detach(), True)
    os.execv(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
