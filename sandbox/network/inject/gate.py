"""Opens the inject gate of a run: the process that has its authority's key and, for each request, a secret.

    agent ─▶ [ the TLS gate: the gateway's namespace ] ─ two descriptors ─▶ [ the inject gate: an empty namespace ]

The inject gate has no way to anywhere but the connections that the TLS gate makes, which the ruleset holds to granted
destinations; the TLS gate has no secret.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from policy import denials, errors
from sandbox.kernel.proc.spawn import PATIENCE, Patience
from sandbox.network.gate import prefork, uids
from sandbox.network.gate import process as gate_process
from sandbox.network.inject import wire
from sandbox.network.inject.holds import HeldRequestTerms
from sandbox.network.inject.ledger import AskSecret, AskStill, Injected, InjectLedger

LAYER: Final = "inject"
CODES: Final = frozenset({
    "answer_refused", "frame_refused", "handshake_failed", "host_failed", "host_refused", "limit", "path_refused",
    "request_not_granted", "secret_absent", "secret_malformed", "secret_taken", "lease_ended", "not_held",
    denials.NOT_APPROVED,
})  # fmt: skip
# Other uids than those of the gates that the firewall knows.
KIND: Final = prefork.Kind("sandbox.network.inject.process", own_network=True)
CALLS: Final = frozenset({
    "getpeername", "getpid", "getsockname", "getsockopt", "ioctl", "sendmsg", "setsockopt", "shutdown",
})  # fmt: skip
_DESCRIPTORS: Final = 1024


class InjectTerms(Struct, frozen=True):
    """The operator's part of a run's injected secrets.

    ``ask`` looks a secret up, ``still`` asks whether it is there, ``told`` takes the row of each request, and ``trust``
    the certificate of the run's authority, before the agent begins. ``bundles`` are files of the authorities of real
    hosts; the run's own certificates last ``seconds``. ``watches`` are the vault's. ``hold`` asks an operator.
    ``made`` is called with the ledger, whose secrets the caller checks (sandbox.control.withdrawn_secrets).
    """

    ask: AskSecret
    still: AskStill
    told: Callable[[Injected], None]
    bundles: Sequence[str]
    seconds: int
    trust: Callable[[bytes], None] = lambda pem: None
    watches: Mapping[int, Callable[[], errors.RunError | None]] = msgspec.field(default_factory=dict)
    hold: HeldRequestTerms | None = None
    made: Callable[[InjectLedger], None] = lambda ledger: None


class InjectGate(Struct, frozen=True):
    """An open gate. ``watches`` belong into the run's exchange."""

    process: gate_process.GateProcess
    watches: Mapping[int, Callable[[], errors.RunError | None]]
    ledger: InjectLedger
    terms: InjectTerms

    def ready(self) -> None:
        """Wait until it serves, and have the run trust its authority.

        Raises:
            errors.KernelError, errors.RunError: it does not.
        """
        self.process.ready()
        self.terms.trust(self.ledger.certificate())

    def end(self) -> None:
        """End it, and report what it had to say."""
        self.process.end()
        self.process.tell_rest()
        self.ledger.finish()


@contextlib.contextmanager
def open(  # noqa: A001 - the module's verb: gate.open(...)
    plan: Mapping[str, Any],
    terms: InjectTerms,
    connections: int,
    *,
    denied: Callable[[denials.Denial], None],
    join_files: Sequence[str] = (),
    patience: Patience = PATIENCE,
) -> Iterator[InjectGate]:
    """Serve the ``inject`` part of gates.json while the block lasts. ``connections`` is the line from the TLS gate.

    Raises:
        errors.RunError: what ``patience`` watches said so, or the process was not executed in time.
        errors.KernelError: the process cannot be started.
    """
    with contextlib.ExitStack() as stack:
        made = InjectLedger(wire.requests(plan), terms.ask, terms.told, terms.still, terms.hold)
        ledger = stack.enter_context(contextlib.closing(made))
        terms.made(ledger)
        gate = gate_process.Gate(
            module=KIND.module,
            layer=LAYER,
            codes=CODES,
            uid=uids.INJECT,
            plan={**plan, "bundles": list(terms.bundles), "seconds": terms.seconds},
            fds={"line": ledger.gate_end, "connections": connections},
            calls=CALLS,
            descriptors=_DESCRIPTORS,
            join_files=join_files,
            patience=patience,
        )
        process = stack.enter_context(gate_process.start(gate))
        ledger.started()
        watches = {**terms.watches, ledger.fileno(): ledger.serve, **process.watches(denied)}
        yield InjectGate(process, watches, ledger, terms)


def line() -> tuple[socket.socket, socket.socket]:
    """Make the line from the TLS gate to the inject gate, which goes one way."""
    hands, takes = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for one in (hands, takes):
        one.setblocking(False)
    hands.shutdown(socket.SHUT_RD)
    takes.shutdown(socket.SHUT_WR)
    return hands, takes
