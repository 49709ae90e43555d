"""The supervisor's end of a service gate's line: each request that was passed on becomes one row of the log.

What the gate says is checked: it is the process that reads the agent's bytes. A request that had begun when the gate
ended has its row too, with what is known of it.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping
from typing import Any, Final

from msgspec import Struct

from policy import errors
from policy.grants.services import ServiceSet

MESSAGE_BYTES: Final = 2048
_AT_ONCE: Final = 64
# An honest gate has no more under way (server.AT_ONCE), and numbers that a counter can hold.
_UNDER_WAY: Final = 1024
_MOST: Final = 1 << 48
_BEGUN: Final = {"number": int, "provider": str, "model": str, "path": str, "stream": bool, "input_tokens": int}
_ENDED: Final = {
    "number": int,
    "provider": str,
    "status": int,
    "input_tokens": int,
    "output_tokens": int,
    "counted": bool,
    "whole": bool,
    "duration_ms": int,
}


class Asked(Struct, frozen=True):
    """One request to a model. ``status`` is 0 where no provider answered; ``counted``: by the provider's own numbers;
    ``whole``: all of the answer reached the agent."""

    provider: str
    model: str
    path: str
    stream: bool
    status: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    counted: bool = False
    whole: bool = False
    duration_ms: int = 0


Told = Callable[[Asked], None]


class ModelLedger:
    """Serves one gate. ``plan`` is the ``services`` part of gates.json."""

    def __init__(self, plan: Mapping[str, Any], told: Told) -> None:
        self._granted = ServiceSet.of((one["provider"], one["pattern"]) for one in plan["models"])
        self._providers = frozenset(one["provider"] for one in plan["models"])
        self._told = told
        self._under_way: dict[int, Asked] = {}
        self._own, self._gates = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._own, self._gates):
            end.setblocking(False)

    def close(self) -> None:
        """Release both ends."""
        self._own.close()
        self._gates.close()

    @property
    def gate_end(self) -> int:
        """The descriptor for the gate; ``started`` closes it here."""
        return self._gates.fileno()

    def fileno(self) -> int:
        """Readable when there are rows."""
        return self._own.fileno()

    def started(self) -> None:
        """The gate has its end: from now on, its death is the end of the line."""
        self._gates.close()

    def serve(self) -> errors.RunError | None:
        """Write the rows that are there, a bounded number."""
        for _ in range(_AT_ONCE):
            try:
                message = self._own.recv(MESSAGE_BYTES + 1)
            except BlockingIOError:
                return None
            except OSError:
                message = b""
            if not message:
                return errors.GateError("the model gate hung up")
            if not self._one(message):
                return errors.GateError("the model gate tells what it may not")
        return None

    def finish(self) -> None:
        """Write the rest, once the gate has ended: also the requests that it could not end."""
        while True:
            try:
                message = self._own.recv(MESSAGE_BYTES + 1)
            except OSError:
                break
            if not message or not self._one(message):
                break
        while self._under_way:
            self._told(self._under_way.pop(next(iter(self._under_way))))

    def _one(self, message: bytes) -> bool:
        row = _row(message)
        if row is None:
            return False
        kind = row.pop("kind")
        number = row.pop("number")
        if kind == "begun":
            known = row["provider"] in self._providers and len(self._under_way) < _UNDER_WAY
            listed = row["model"] == "" or self._granted.holds(row["provider"], row["model"])
            if not known or not listed or number in self._under_way:
                return False
            self._under_way[number] = Asked(**row)
            return True
        begun = self._under_way.pop(number, None)
        if begun is None or row["provider"] not in self._providers:
            return False
        self._told(Asked(model=begun.model, path=begun.path, stream=begun.stream, **row))
        return True


def _row(message: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(message)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    shape: dict[str, type] | None = {"begun": _BEGUN, "ended": _ENDED}.get(str(row.get("kind")))
    if shape is None or set(row) != {"kind", *shape}:
        return None
    fine = all(type(row[name]) is kind for name, kind in shape.items())
    return row if fine and all(0 <= row[name] < _MOST for name, kind in shape.items() if kind is int) else None
