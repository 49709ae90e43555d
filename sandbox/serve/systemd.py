"""Speak with systemd: notify it (sd_notify(3)) and take its sockets (sd_listen_fds(3)).

Without systemd these do nothing. Lines for the operator go to stderr.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time

_FIRST_FD = 3
# Longest sleep of the main loop without a watchdog.
_IDLE_SECONDS = 30.0
_last = 0.0


def say(line: str) -> None:
    """Send one message, such as ``READY=1``. It is lost without a listener."""
    place = os.environ.get("NOTIFY_SOCKET", "")
    if not place.startswith(("/", "@")):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        address = b"\0" + place[1:].encode() if place[0] == "@" else place.encode()
        # The listener may have stopped: the send does not wait for it.
        sock.sendto(line.encode(), socket.MSG_DONTWAIT, address)


def tell(words: str) -> None:
    """Write one line for the operator to stderr. It is lost where stderr is full, closed or not read."""
    poll = select.poll()
    poll.register(2, select.POLLOUT)
    with contextlib.suppress(OSError):
        if any(ready & select.POLLOUT for _, ready in poll.poll(0)):
            os.write(2, f"covenant-supervisor: {words}\n".encode()[: select.PIPE_BUF])


def watchdog_seconds() -> float:
    """Return the seconds between watchdog messages: half of its timeout, so a single message may be late."""
    given, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not given.isdigit() or (pid and pid != str(os.getpid())):
        return _IDLE_SECONDS
    return max(0.1, min(_IDLE_SECONDS, int(given) / 2e6))


def alive() -> None:
    """Tell the watchdog that the loop turns, at most ten times a second."""
    global _last  # noqa: PLW0603 - one process, one watchdog
    now = time.monotonic()
    if now - _last >= 0.1 and os.environ.get("WATCHDOG_USEC"):
        _last = now
        say("WATCHDOG=1")


def listener() -> socket.socket | None:
    """Return the listening socket that systemd passed, None where it passed none.

    Raises:
        ValueError: Raised when it is not one listening stream socket.
    """
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return None
    if os.environ.get("LISTEN_FDS") != "1":
        raise ValueError("systemd gave more than one socket")
    os.set_inheritable(_FIRST_FD, False)
    sock = socket.socket(fileno=_FIRST_FD)
    listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_STREAM or not listens:
        raise ValueError("what systemd gave is no stream socket that listens")
    return sock
