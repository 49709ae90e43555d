"""A gate for tests: it reports its own state from the kernel, and tries what a gate must not be able to do."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
from collections.abc import Callable
from typing import NoReturn

from sandbox.network.gate import main


def serve(gate: main.GateInput) -> NoReturn:
    """Answer each datagram on ``agent``: ``die`` ends it, ``report`` reports, anything else is a name of a probe."""
    status = os.open("/proc/self/status", os.O_RDONLY)
    gate.seal()
    while True:
        asked = os.read(gate.fds["agent"], 4096).decode()
        if asked == "die":
            raise SystemExit("told to")
        if asked in _LAST:
            _end(gate, _LAST[asked])
        if asked == "report":
            gate.denied("name.example", "refused")
        os.write(gate.fds["agent"], _probe(asked, status, gate).encode())


def _end(gate: main.GateInput, how: str) -> NoReturn:
    """Wait until the supervisor asks for what is left."""
    if how == "shouts":
        os.close(gate.reports)
        while True:
            with contextlib.suppress(BlockingIOError):
                os.write(2, b"x" * 65536)
    if how == "lies":
        os.write(gate.reports, main.REPORTED)
    wait = select.poll()
    wait.register(gate.reports, select.POLLIN)
    wait.poll()
    if how == "sleeps":
        select.poll().poll()
    if how == "dies":
        gate.reached("first.example:443/tls", 1, 10)
        os._exit(0)
    if how == "lies":
        os.write(gate.reports, b"[")
        select.poll().poll()
    gate.end({f"n{number}.example:443/tls": (1, number) for number in range(gate.plan["counted"])})


def _probe(asked: str, status: int, gate: main.GateInput) -> str:
    if asked == "status":
        return os.read(status, 4096).decode()
    if asked in ("flood", "nonsense"):
        # As a gate in an agent's hands would: past gate_main, straight into the line.
        message = b'{"layer":"dns","target":"x","code":"refused"}' if asked == "flood" else b"["
        with contextlib.suppress(BlockingIOError):
            for _ in range(100):
                os.write(gate.reports, message)
        return "done"
    if asked in _MOVES:
        try:
            return str(os.lseek(gate.fds["meter"], *_MOVES[asked]))
        except OSError as e:
            return f"errno {e.errno}"
    if asked == "plan":
        return str(gate.plan["word"])
    try:
        if asked in _FORBIDDEN:
            _FORBIDDEN[asked]()
    except OSError as e:
        return f"errno {e.errno}"
    return "done"


def _send(flags: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # no receiver: the call was let through
        _PAIR[0].send(b"x", flags)


def _fork() -> None:
    if os.fork() == 0:
        os._exit(0)


_LAST = {f"last {how}": how for how in ("reports", "dies", "sleeps", "lies", "shouts")}
# Made before the seal.
_PAIR = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
_FORBIDDEN: dict[str, Callable[[], object]] = {
    "open": lambda: os.close(os.open("/etc/passwd", os.O_RDONLY)),
    "socket": lambda: socket.socket().close(),
    "fork": _fork,
    "exec": lambda: os.execv("/bin/true", ["true"]),
    "kill": lambda: os.kill(os.getppid(), 0),
    "memfd": lambda: os.close(os.memfd_create("x")),
    "own": lambda: fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid()),
    "duplicate": lambda: os.close(fcntl.fcntl(0, fcntl.F_DUPFD, 50)),
    "fastopen": lambda: _send(socket.MSG_FASTOPEN),
    "fastopen by sendmsg": lambda: _PAIR[0].sendmsg([b"x"], [], socket.MSG_FASTOPEN),
    "more": lambda: _send(socket.MSG_MORE),
    # The controls: as a gate does it.
    "flags": lambda: fcntl.fcntl(0, fcntl.F_GETFL),
    "send": lambda: _send(socket.MSG_DONTWAIT),
    "sendmsg": lambda: _PAIR[0].sendmsg([b"x"], [], socket.MSG_DONTWAIT),
}
# The position of the counter of credits: it is read and goes forwards.
_MOVES = {
    "add": (5, os.SEEK_CUR),
    "read": (0, os.SEEK_CUR),
    "take away": (-5, os.SEEK_CUR),
    "take all": (-(2**63), os.SEEK_CUR),
    "begin again": (0, os.SEEK_SET),
    "end": (0, os.SEEK_END),
}
