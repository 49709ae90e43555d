"""The names that leases open at a run's TLS gate: the line from its supervisor, and the gate's end of it.

supervisor ──▶ gate    `+NAME` lets connections to a name pass, `1NAME` one connection, `-NAME` none, and ends those
                       that a lease let pass
gate ──▶ supervisor    `NAME`, once the one connection was made
"""

from __future__ import annotations

from typing import Final

from policy import errors
from policy.leases.book import Lease
from sandbox.network.gate.lease_desk import LeaseDesk
from sandbox.network.gate.rows import GateRows, RowTerms

MESSAGE_BYTES: Final = 256
_AT_ONCE: Final = 64


class LeaseLine(GateRows):
    """The supervisor's end (lease_desk.LeasedGate)."""

    def __init__(self, desk: LeaseDesk) -> None:
        self._desk = desk
        super().__init__(RowTerms("tls", "said what no lease has", MESSAGE_BYTES, _AT_ONCE, self._take))
        desk.attach(self)

    def begin(self, lease: Lease) -> None:
        """Let connections to the name of a lease pass.

        Raises:
            errors.KernelError: the gate does not read its line.
        """
        if lease.kind == "network":
            self._say("1" if lease.duration == "once" else "+", lease.target)

    def end(self, lease: Lease) -> None:
        """End connections to it. A spent lease has none to come."""
        if lease.kind == "network" and (not lease.spent or lease.ends_ms <= self._desk.now_ms):
            self._say("-", lease.target)

    def _say(self, what: str, host: str) -> None:
        try:
            self.own.send(f"{what}{host}".encode("ascii"))
        except OSError as e:
            raise errors.KernelError(f"the TLS gate is not told of a lease: {e.strerror}") from e

    def _take(self, message: bytes) -> bool:
        try:
            self._desk.used("network", message.decode("ascii"))
        except UnicodeDecodeError:
            return False
        return True
