"""The supervisor's end of a line on which a gate sends messages: read a bounded number at a time, and what is left.

A message that is a row is one JSON object with exactly the fields of its kind (``read_row``).
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping
from typing import Any, Final

from msgspec import Struct

from policy import errors

# Numbers that a counter can hold.
_MOST: Final = 1 << 48

# The kinds of rows, each with the names and types of its fields besides ``kind``.
RowShapes = Mapping[str, Mapping[str, type]]


class RowTerms(Struct, frozen=True):
    """``take`` is called with each message; it returns False for one that an honest gate does not send."""

    gate: str
    refused: str
    most_bytes: int
    at_once: int
    take: Callable[[bytes], bool]


class GateRows:
    """A pair of SOCK_SEQPACKET sockets, of which the gate gets one end."""

    def __init__(self, terms: RowTerms) -> None:
        self._terms: Final = terms
        self.own, self._gates = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self.own, self._gates):
            end.setblocking(False)

    def close(self) -> None:
        """Release both ends."""
        self.own.close()
        self._gates.close()

    @property
    def gate_end(self) -> int:
        """The descriptor for the gate; ``started`` closes it here."""
        return self._gates.fileno()

    def fileno(self) -> int:
        """Readable when there are messages."""
        return self.own.fileno()

    def started(self) -> None:
        """Close the gate's end here: from now on, the gate's death is the end of the line."""
        self._gates.close()

    def serve(self) -> errors.RunError | None:
        """Take the messages that are there, a bounded number."""
        for _ in range(self._terms.at_once):
            try:
                message = self.own.recv(self._terms.most_bytes + 1)
            except BlockingIOError:
                return None
            except OSError:
                message = b""
            if not message:
                return errors.GateError(f"the {self._terms.gate} gate hung up")
            if not self._terms.take(message):
                return errors.GateError(f"the {self._terms.gate} gate {self._terms.refused}")
        return None

    def rest(self) -> None:
        """Take what the gate sent before it ended."""
        while True:
            try:
                message = self.own.recv(self._terms.most_bytes + 1)
            except OSError:
                return
            if not message or not self._terms.take(message):
                return


def read_row(message: bytes, shapes: RowShapes) -> dict[str, Any] | None:
    """Return a row of one of these shapes, with its ``kind``. None for any other message."""
    try:
        row = json.loads(message)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    shape = shapes.get(str(row.get("kind")))
    if shape is None or set(row) != {"kind", *shape}:
        return None
    if any(type(row[name]) is not kind for name, kind in shape.items()):
        return None
    return row if all(0 <= row[name] < _MOST for name, kind in shape.items() if kind is int) else None
