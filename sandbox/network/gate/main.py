"""The first lines of a gate's own process: import what it needs, and hold the door shut until it is sealed.

Started by ``sandbox.network.gate.process`` as a fresh interpreter, so that nothing of the supervisor's memory is in it.
Imports nothing heavy: what stands here is paid at each start of a run with a network.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any, NoReturn

from sandbox.kernel import libc
from sandbox.kernel.proc import privdrop
from sandbox.rate_limit import Tokens

READY = b'{"ready":true}'
REPORT_BYTES = 1024
# Reports of one gate: as many as this at once, and then this many a second.
BURST, PER_SECOND = 100, 50
# More than any gate is given.
_DESCRIPTORS = 16


class Gate:
    """What a gate's module is given: its ``plan``, its descriptors by name, and where it reports.

    INVARIANT: a module calls ``seal`` once, after its imports and before it reads a byte from the agent.
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.plan: Mapping[str, Any] = document["plan"]
        self.fds: Mapping[str, int] = document["fds"]
        self._layer = str(document["layer"])
        self._seal = document["seal"]
        self.reports = int(document["reports"])
        self._tokens = Tokens(PER_SECOND, BURST, time.monotonic())

    def seal(self) -> None:
        """Give up every right, load the filter, and say that the gate is ready."""
        wanted = self._seal
        limits = [(int(name), int(value)) for name, value in wanted["limits"]]
        privdrop.apply(privdrop.Seal(wanted["uid"], wanted["parent"], limits, base64.b64decode(wanted["program"])))
        os.write(self.reports, READY)

    def denied(self, target: str, code: str) -> None:
        """Report a refusal; beyond the bound of a gate it is left out. Never waits, never raises."""
        if not self._tokens.take(time.monotonic()):
            return
        row = {"layer": self._layer, "target": target[:512], "code": code}
        message = json.dumps(row, separators=(",", ":")).encode()
        try:
            os.write(self.reports, message if len(message) <= REPORT_BYTES else b"")
        except BlockingIOError:
            return  # the supervisor is behind: a flood is its reason, and it has counted that already
        except OSError:
            os._exit(1)  # nobody is there to serve any more


def main(module: str, control: str) -> NoReturn:
    """Import ``module``, wait for what it is to do, and run ``module.serve(gate)``; returns never, and a gate whose
    module returns has failed.

    What comes over the socket ``control`` are descriptors: the document, the one to report on, those that the document
    names, in its order, and the network namespace to enter where it says so.
    """
    served = importlib.import_module(module)
    with socket.socket(fileno=int(control)) as line:
        said, fds, _, _ = socket.recv_fds(line, 1, _DESCRIPTORS)
    if not said:
        sys.exit(0)  # nobody needs it
    document_fd, reports, *given = fds
    with open(document_fd, "rb") as file:
        document = json.load(file)
    if document["enters"]:
        space = given.pop()
        libc.setns(space, libc.CLONE_NEWNET)
        os.close(space)
    names = document["fds"]
    gate = Gate({**document, "fds": dict(zip(names, given, strict=True)), "reports": reports})
    # A traceback may be long and its reader may be busy: it is cut, and nothing waits.
    os.set_blocking(2, False)
    served.serve(gate)
    sys.exit("the gate stopped serving")
