"""The line between a gate and the desk of its shim, over a pair of SOCK_SEQPACKET sockets.

gate -> desk    ``L`` or ``S``, a number; behind ``S`` the request (policy.ssh.sessions.SignRequest)
desk -> gate    the number, a status; then the keys with the names of their secrets, or the signature
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Final

from policy.ssh import wire
from sandbox.network.gate.call_line import PendingCalls

QUESTION: Final = struct.Struct("!cI")
ANSWER: Final = struct.Struct("!IB")
LIST, SIGN = b"L", b"S"
GIVEN, NOT_GRANTED, UNAVAILABLE = 0, 1, 2
# A request has the bytes of a login, two keys and a signature; an answer a few public keys.
MOST_BYTES: Final = 32 << 10


def encoded(found: list[tuple[str, bytes]]) -> bytes:
    """Return the names of secrets with their public keys as the contents of an answer."""
    return b"".join(wire.string(name) + wire.string(blob) for name, blob in found)


def decoded(data: bytes) -> list[tuple[str, bytes]]:
    """Read such contents."""
    fields, found = wire.Reader(data), []
    while fields.left:
        found.append((fields.word(), fields.string()))
    return found


class DeskLine:
    """The gate's end. The gate ends with its shim."""

    def __init__(self, fd: int) -> None:
        self._line = socket.socket(fileno=fd)
        self._line.setblocking(False)
        self._pending = PendingCalls[tuple[int, bytes]]()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to take answers."""
        loop.add_reader(self._line.fileno(), self._take)

    def close(self) -> None:
        """Release the socket."""
        self._line.close()

    async def ask(self, kind: bytes, request: bytes = b"") -> tuple[int, bytes]:
        """Return the status and the contents of the answer."""
        with self._pending.one() as (number, answer):
            try:
                self._line.send(QUESTION.pack(kind, number) + request)
            except BlockingIOError:
                return UNAVAILABLE, b""  # more questions wait than have room: the client may ask again
            except OSError as e:
                raise SystemExit("the shim is gone") from e
            return await answer

    def _take(self) -> None:
        while True:
            try:
                message = self._line.recv(MOST_BYTES)
            except BlockingIOError:
                return
            if len(message) < ANSWER.size:
                raise SystemExit("the shim is gone")
            number, status = ANSWER.unpack_from(message)
            if (waiting := self._pending.waiting(number)) is not None:
                waiting.set_result((status, message[ANSWER.size :]))
