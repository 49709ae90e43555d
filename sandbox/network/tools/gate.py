"""Opens the tool gate of a run: the process between the service gate and the run's tool servers.

service gate -> line -> [ the tool gate: an empty namespace, no files ] -> pipes -> servers, each in its sandbox
                                 |  rows and starts
                             supervisor
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence
from typing import Final

from msgspec import Struct

from policy import errors
from sandbox.kernel.proc.spawn import PATIENCE, Patience
from sandbox.network.gate import prefork, uids
from sandbox.network.gate import process as gate_process
from sandbox.network.tools.ledger import ToolLedger, ToolTerms

LAYER: Final = "tool"
KIND: Final = prefork.Kind("sandbox.network.tools.server", own_network=True)
CALLS: Final = frozenset({"sendmsg"})
_DESCRIPTORS: Final = 512


class ToolGate(Struct, frozen=True):
    """An open tool gate. ``line`` is the service gate's end; ``given`` closes it here."""

    process: gate_process.GateProcess
    ledger: ToolLedger
    line: socket.socket

    def serve(self) -> errors.RunError | None:
        """Serve the ledger. A gate that hung up has written why to its stderr."""
        found = self.ledger.serve()
        return self.process.ended() if self.ledger.hung_up else found

    def given(self) -> None:
        """The service gate has its end."""
        self.line.close()


@contextlib.contextmanager
def open(  # noqa: A001 - the module's verb: gate.open(...)
    terms: ToolTerms, *, join_files: Sequence[str] = (), patience: Patience = PATIENCE
) -> Iterator[ToolGate]:
    """Serve the tools of ``terms`` while the block lasts. Does not wait until the gate is ready.

    Raises:
        errors.KernelError: the process cannot be started.
        errors.RunError: what ``patience`` watches said so.
    """
    with contextlib.ExitStack() as stack:
        ledger = stack.enter_context(contextlib.closing(ToolLedger(terms)))
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        stack.enter_context(far)
        with near:
            process = stack.enter_context(
                gate_process.start(
                    gate_process.Gate(
                        module=KIND.module,
                        layer=LAYER,
                        codes=(),
                        uid=uids.TOOLS,
                        plan=terms.plan(),
                        fds={"line": near.fileno(), **ledger.gate_ends},
                        calls=CALLS,
                        descriptors=_DESCRIPTORS,
                        join_files=join_files,
                        patience=patience,
                    )
                )
            )
        ledger.started()
        yield ToolGate(process, ledger, far)
