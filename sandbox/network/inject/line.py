"""The gate's end of the line to its supervisor: it asks for a secret for each request, and tells how requests ended."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Mapping
from typing import Final

from msgspec import Struct, structs

from policy.manifest.permissions import MAX_ASK_SECONDS
from sandbox.network.gate.call_line import PendingCalls
from sandbox.network.gate.row_sender import RowSender
from sandbox.network.inject import wire

_AT_ONCE: Final = 6
# The supervisor answers before. Without an answer nothing is sent.
_VERDICT_SECONDS: Final = MAX_ASK_SECONDS + 10


class NoLeaseError(Exception):
    """Raised when a request that was held has no lease: another used it, or it ended."""


class HeldQuestion(Struct, frozen=True):
    """A request that an operator is asked about: the digest of all that is sent, and a view of it."""

    host: str
    method: str
    path: str
    digest: str
    arguments: str


class InjectEntry(Struct):
    """One request under way. ``outward`` and ``inward`` count bytes of bodies, to the host and to the agent."""

    number: int
    begun: float
    status: int = 0
    outward: int = 0
    inward: int = 0
    whole: bool = False


class Line:
    """Messages wait where the supervisor is busy: an agent could otherwise do what no row tells."""

    def __init__(self, fd: int) -> None:
        self._line = socket.socket(fileno=fd)
        self._rows = RowSender(self._line)
        self._pending = PendingCalls[bytes | None]()
        self._held = PendingCalls[bool]()
        # Called with a code where the secret of a request under way was taken away, or its lease has ended.
        self._cuts: dict[int, Callable[[str], None]] = {}
        # Answers are as long as a secret may be: so many have room in the socket.
        self._turns = asyncio.Semaphore(_AT_ONCE)

    def certificate(self, pem: bytes) -> None:
        """Tell the certificate of the run's authority: the first message."""
        self._line.setblocking(True)
        self._line.send(pem)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to take answers."""
        self._line.setblocking(False)
        loop.add_reader(self._line.fileno(), self._take)

    async def hold(self, question: HeldQuestion) -> bool:
        """Wait until an operator has answered. Returns whether the request may be sent."""
        with self._held.one() as (number, answer):
            self._rows.send({"kind": "held", "number": number, **structs.asdict(question)})
            try:
                return await asyncio.wait_for(answer, _VERDICT_SECONDS)
            except TimeoutError:
                return False

    async def ask(self, host: str, method: str, path: str, digest: str = "") -> tuple[InjectEntry, bytes | None]:
        """Ask for the secret of a request that is granted, or held under ``digest``. None: there is none.

        Raises:
            NoLeaseError: no lease covers it now.
        """
        async with self._turns:
            return await self._ask({"host": host, "method": method, "path": path, "digest": digest})

    async def _ask(self, request: Mapping[str, str]) -> tuple[InjectEntry, bytes | None]:
        with self._pending.one() as (number, answer):
            self._rows.send({"kind": "asked", "number": number, **request})
            try:
                return InjectEntry(number, time.monotonic()), await answer
            except (asyncio.CancelledError, NoLeaseError):
                self.end(InjectEntry(number, time.monotonic()))
                raise

    def cut_by(self, entry: InjectEntry, cut: Callable[[str], None]) -> None:
        """Have a request cut where its secret is taken away before it has ended, or its lease ends."""
        self._cuts[entry.number] = cut

    def end(self, entry: InjectEntry) -> None:
        """Tell how a request ended."""
        self._cuts.pop(entry.number, None)
        self._rows.send(
            {
                "kind": "ended",
                "number": entry.number,
                "status": entry.status,
                "out_bytes": entry.outward,
                "in_bytes": entry.inward,
                "whole": entry.whole,
                "duration_ms": int((time.monotonic() - entry.begun) * 1000),
            }
        )

    def _take(self) -> None:
        while True:
            try:
                message = self._line.recv(wire.ANSWER.size + wire.VALUE_BYTES)
            except BlockingIOError:
                return
            if len(message) < wire.ANSWER.size:
                raise SystemExit("the supervisor is gone")
            number, status = wire.ANSWER.unpack_from(message)
            if (code := _CUTS.get(status)) is not None:
                if (cut := self._cuts.pop(number, None)) is not None:
                    cut(code)
            elif status in (wire.GRANTED, wire.REFUSED):
                if (held := self._held.waiting(number)) is not None:
                    held.set_result(status == wire.GRANTED)
            elif (waiting := self._pending.waiting(number)) is not None:
                if status == wire.UNAPPROVED:
                    waiting.set_exception(NoLeaseError())
                else:
                    waiting.set_result(message[wire.ANSWER.size :] if status == wire.PRESENT else None)


_CUTS: Final[Mapping[int, str]] = {wire.TAKEN: "secret_taken", wire.OVER: "lease_ended"}
