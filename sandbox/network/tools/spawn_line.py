"""The supervisor's end of a tool gate's line for children: frames of a number and JSON, requests in and outcomes out.

The tool gate reads what the agent wrote, so what it says is bounded and read strictly. Whether a child is started is
decided by the run's own broker (sandbox.broker.children), as for a request of the agent itself.
"""

from __future__ import annotations

import functools
import json
import socket
from collections.abc import Callable, Mapping
from typing import Any, Final

from policy import errors
from sandbox.network.tools import wire

# Children that are asked for and have no outcome yet, and bytes of outcomes that wait for the gate.
UNDER_WAY: Final = 256
_WAITING: Final = 64 << 20
_CHUNK: Final = 1 << 18

# Starts a child by the fields of a request, and gives its outcome to the second argument, once. What it returns stops
# the child, if it still runs.
Spawn = Callable[[Mapping[str, Any], Callable[[Mapping[str, Any]], None]], Callable[[], None]]


class SpawnLine:
    """Serves the requests of one tool gate. ``writes`` is called with whether outcomes wait for the gate."""

    def __init__(self, spawn: Spawn, writes: Callable[[bool], None]) -> None:
        self._spawn, self._writes = spawn, writes
        self._end, self.gates_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._end.setblocking(False)
        self._in, self._out = bytearray(), bytearray()
        # The requests without an outcome, each with what stops its child.
        self._under_way: dict[int, Callable[[], None]] = {}
        self.hung_up = False

    def fileno(self) -> int:
        """Return the descriptor to watch."""
        return self._end.fileno()

    def close(self) -> None:
        """Release both ends. Outcomes that come later are dropped."""
        self._writes = lambda waiting: None
        self._end.close()
        self.gates_end.close()

    def serve(self) -> errors.RunError | None:
        """Take requests, a bounded amount, and write outcomes as far as the gate reads."""
        self._flush()
        try:
            data = self._end.recv(_CHUNK)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        if not data:
            self.hung_up = True
            return errors.GateError("the tool gate hung up")
        self._in += data
        while len(self._in) >= wire.SPAWN.size:
            number, size = wire.SPAWN.unpack_from(self._in)
            if size > wire.SPAWN_BYTES or (size and number in self._under_way):
                return errors.GateError("the tool gate asks for a child as it may not")
            if len(self._in) < wire.SPAWN.size + size:
                break
            raw = bytes(self._in[wire.SPAWN.size : wire.SPAWN.size + size])
            del self._in[: wire.SPAWN.size + size]
            if not self._take(number, raw):
                return errors.GateError("the tool gate asks for a child as it may not")
        return None

    def _take(self, number: int, raw: bytes) -> bool:
        if not raw:
            self._cancel(number)
            return True
        try:
            fields = json.loads(raw)
        except (ValueError, RecursionError):
            return False
        if not isinstance(fields, dict) or set(fields) != {"agent", "text"}:
            return False
        if not all(isinstance(one, str) for one in fields.values()):
            return False
        if len(self._under_way) >= UNDER_WAY:
            self._done(number, _too_many(f"{UNDER_WAY} children are under way"))
            return True
        self._under_way[number] = _nothing
        stop = self._spawn(fields, functools.partial(self._done, number))
        if number in self._under_way:  # it has no outcome yet
            self._under_way[number] = stop
        return True

    def _cancel(self, number: int) -> None:
        """Stop a child whose client no longer waits. Its outcome may be on its way to the gate already."""
        if number in self._under_way:
            self._under_way[number]()

    def _done(self, number: int, outcome: Mapping[str, Any]) -> None:
        self._under_way.pop(number, None)
        message = json.dumps(outcome, separators=(",", ":")).encode()
        if len(self._out) + len(message) > _WAITING:
            message = json.dumps(_too_many("too many results wait for the agent")).encode()
        self._out += wire.SPAWN.pack(number, len(message)) + message
        self._flush()

    def _flush(self) -> None:
        try:
            while self._out:
                del self._out[: self._end.send(self._out[:_CHUNK])]
        except BlockingIOError:
            pass
        except OSError:  # it is gone, which the end of its line tells
            self._out.clear()
        self._writes(bool(self._out))


def _nothing() -> None:
    """Stop no child: it has ended, or was not started."""


def _too_many(said: str) -> dict[str, Any]:
    return {"error": {"code": "too_many_requests", "message": said}}
