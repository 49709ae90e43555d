"""The names that leases open at a run's TLS gate: the line from its supervisor, and the gate's end of it.

supervisor ──▶ gate    `+N NAME` lets connections to a name pass under the lease N, `1N NAME` one connection, and
                       `-N NAME` ends the lease with the connections that it let pass
gate ──▶ supervisor    `NAME`, once the one connection was made
"""

from __future__ import annotations

from typing import Final

from policy import errors
from policy.leases.book import Lease
from sandbox.network.gate.lease_desk import LeaseDesk
from sandbox.network.gate.rows import GateRows, RowTerms
from sandbox.network.tls.leased_names import MESSAGE_BYTES

_AT_ONCE: Final = 64


class LeaseLine(GateRows):
    """The supervisor's end (lease_desk.LeasedGate)."""

    def __init__(self, desk: LeaseDesk) -> None:
        self._desk = desk
        self._numbers: dict[str, int] = {}
        self._last = 0
        super().__init__(RowTerms("tls", "said what no lease has", MESSAGE_BYTES, _AT_ONCE, self._take))
        desk.attach(self)

    def begin(self, lease: Lease) -> None:
        """Let connections to the name of a lease pass.

        Raises:
            errors.KernelError: the gate does not read its line.
        """
        if lease.kind == "network":
            self._last += 1
            self._numbers[lease.id] = self._last
            self._say("1" if lease.duration == "once" else "+", self._last, lease.target)

    def end(self, lease: Lease) -> None:
        """End connections to it. A spent lease has none to come."""
        if lease.kind != "network" or (lease.spent and lease.ends_ms > self._desk.now_ms):
            return
        if (number := self._numbers.pop(lease.id, None)) is not None:
            self._say("-", number, lease.target)

    def _say(self, what: str, number: int, host: str) -> None:
        try:
            self.own.send(f"{what}{number} {host}".encode("ascii"))
        except OSError as e:
            raise errors.KernelError(f"the TLS gate is not told of a lease: {e.strerror}") from e

    def _take(self, message: bytes) -> bool:
        try:
            self._desk.used("network", message.decode("ascii"))
        except UnicodeDecodeError:
            return False
        return True
