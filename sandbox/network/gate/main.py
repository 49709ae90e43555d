"""Begin a gate's own process: import its modules, and read nothing from the agent before it is sealed.

``sandbox.network.gate.process`` starts it as a fresh interpreter, so that it has none of the supervisor's memory. It
imports nothing heavy: each start of a run with a network pays for it.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from sandbox import unix_wire
from sandbox.kernel import libc
from sandbox.kernel.proc import privdrop
from sandbox.rate_limit import Tokens

READY = b'{"ready":true}'
# What the supervisor says once the agent is dead, to a gate that counts, and the answer after the last report.
END, REPORTED = b"end", b'{"reported":true}'
# A report has a target of at most so many characters, each of up to twelve bytes of JSON.
_TARGET_CHARACTERS = 512
REPORT_BYTES = 8192
# The burst of reports of one gate, and the rate after it.
BURST, PER_SECOND = 100, 50
# More descriptors than any gate gets.
_DESCRIPTORS = 16


class GateInput:
    """Input of a gate's module: its ``plan``, its descriptors by name, and the descriptor for reports.

    INVARIANT: a module calls ``seal`` once, after its imports and before it reads a byte from the agent.
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.plan: Mapping[str, Any] = document["plan"]
        self.fds: Mapping[str, int] = document["fds"]
        self._layer = str(document["layer"])
        self._seal = document["seal"]
        self.reports = int(document["reports"])
        self._tokens = Tokens(PER_SECOND, BURST, time.monotonic())
        self._counts = Tokens(PER_SECOND / 2, BURST, time.monotonic())

    def seal(self) -> None:
        """Drop every right, load the filter, and report that the gate is ready."""
        wanted = self._seal
        limits = [(int(name), int(value)) for name, value in wanted["limits"]]
        privdrop.apply(
            privdrop.Seal(
                wanted["uid"], wanted["parent"], limits, base64.b64decode(wanted["program"]), files=wanted["files"]
            )
        )
        os.write(self.reports, READY)

    def answer(self, read: Callable[[bytes], bytes], *, max_bytes: int) -> NoReturn:
        """Seal this process and answer the frames of the descriptor `line`: the life of a sealed reader."""
        with socket.socket(fileno=self.fds["line"]) as line:
            # Once, for the filter has no ioctl. A wait without a limit does not set the socket's timeout again.
            line.setblocking(True)
            self.seal()
            try:
                while (message := unix_wire.receive(line, max_bytes=max_bytes, until=None)) is not None:
                    line.sendall(unix_wire.framed(read(message)))
            except unix_wire.FrameError as e:
                sys.exit(f"the gate sends no request: {e}")
        sys.exit("the gate is gone")

    def reached(self, target: str, connections: int, carried: int) -> bool:
        """Report a destination with the connections and bytes since the last report. Returns whether it was sent."""
        return self._counts.take(time.monotonic()) and self._sent(_count(target, connections, carried))

    def end(self, counts: Mapping[str, tuple[int, int]]) -> NoReturn:
        """Report the destinations that are left, without a limit of the rate, say that these were all, and end."""
        room = select.poll()
        room.register(self.reports, select.POLLOUT)
        for message in (*(_count(target, *both) for target, both in counts.items()), REPORTED):
            while not self._sent(message):
                room.poll()
        os._exit(0)

    def _sent(self, message: bytes) -> bool:
        try:
            os.write(self.reports, message)
        except BlockingIOError:
            return False
        except OSError:
            os._exit(1)  # the supervisor is gone
        return True

    def denied(self, target: str, code: str) -> None:
        """Report a denial; beyond the rate limit it is dropped. Never blocks, never raises."""
        if not self._tokens.take(time.monotonic()):
            return
        row = {"layer": self._layer, "target": target[:_TARGET_CHARACTERS], "code": code}
        try:
            # INVARIANT: never an empty message, which to the supervisor is the end of the gate, and so of the run.
            os.write(self.reports, json.dumps(row, separators=(",", ":")).encode())
        except BlockingIOError:
            return  # the supervisor is slow: there is a flood, which it has counted already
        except OSError:
            os._exit(1)  # the supervisor is gone


def _count(target: str, connections: int, carried: int) -> bytes:
    row = {"reached": target[:_TARGET_CHARACTERS], "connections": connections, "bytes": carried}
    return json.dumps(row, separators=(",", ":")).encode()


def main(module: str, control: str) -> NoReturn:
    """Import ``module``, wait for the document, and run ``module.serve(gate)``.

    It never returns: a gate whose module returns has failed. The socket ``control`` delivers descriptors in this order:
    the document, the one for reports, those that the document names, and the network namespace if it must enter one.
    """
    served = importlib.import_module(module)
    with socket.socket(fileno=int(control)) as line:
        said, fds, _, _ = socket.recv_fds(line, 1, _DESCRIPTORS)
    if not said:
        sys.exit(0)  # no run needs it any more
    document_fd, reports, *given = fds
    with open(document_fd, "rb") as file:
        document = json.load(file)
    if document["enters"]:
        space = given.pop()
        libc.setns(space, libc.CLONE_NEWNET)
        os.close(space)
    names = document["fds"]
    gate = GateInput({**document, "fds": dict(zip(names, given, strict=True)), "reports": reports})
    # A traceback may be long and its reader busy: cut it rather than block.
    os.set_blocking(2, False)
    served.serve(gate)
    sys.exit("the gate stopped serving")
