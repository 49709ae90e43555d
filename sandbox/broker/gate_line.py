"""A line of bytes between a run's shim and one of its gates, which a handler of the broker serves."""

from __future__ import annotations

import socket
from collections.abc import Callable

from sandbox.broker.server import Broker
from sandbox.kernel.proc import pipes


class GateLine:
    """Hold the shim's end. ``gate_end`` is the gate's; ``started`` closes it here.

    ``take`` is called with bytes of the gate, once the agent is about to be given its intent, and ``gone`` once at the
    line's end, for any cause. ``room`` says whether more can be taken now; while not, the gate waits.
    """

    def __init__(
        self,
        broker: Broker,
        take: Callable[[bytes], None],
        gone: Callable[[], None],
        *,
        room: Callable[[], bool] = lambda: True,
    ) -> None:
        self._broker, self._take, self._gone, self._room = broker, take, gone, room
        self._line, self._gate = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._line.setblocking(False)
        self._out = bytearray()
        self._open, self._begun, self._watched = True, False, False

    @property
    def gate_end(self) -> int:
        """Return the gate's descriptor."""
        return self._gate.fileno()

    def started(self) -> None:
        """Close the gate's end here: the gate has it."""
        self._gate.close()

    @property
    def is_open(self) -> bool:
        """Whether the gate is there."""
        return self._open

    @property
    def waiting(self) -> int:
        """Return the number of bytes that the gate has not read."""
        return len(self._out)

    def begin(self) -> None:
        """Take bytes from now on."""
        if self._open:
            self._begun = self._watched = True
            self._broker.watch(self._line.fileno(), self._ready)

    def look(self) -> None:
        """Take bytes again once there is room, and send what waits. Called periodically."""
        if self._begun and not self._watched and self._room():
            self.begin()
        self._flush()

    def send(self, data: bytes) -> None:
        """Send it, now or when the gate reads. Dropped where the gate is gone."""
        if self._open:
            self._out += data
            self._flush()

    def hang_up(self) -> None:
        """End the line."""
        if not self._open:
            return
        self._open = False
        self._forget()
        self._line.close()
        self._out.clear()
        self._gone()

    def close(self) -> None:
        """End the line, and close the gate's end where it was not started."""
        self.hang_up()
        self._gate.close()

    def _forget(self) -> None:
        if self._watched:
            self._watched = False
            self._broker.forget(self._line.fileno())

    def _ready(self) -> None:
        self._flush()
        if not self._open:
            return
        if not self._room():
            self._forget()
            return
        try:
            data = self._line.recv(pipes.CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._take(data)
        else:
            self.hang_up()

    def _flush(self) -> None:
        try:
            while self._out and self._open:
                del self._out[: self._line.send(self._out[: pipes.CHUNK_BYTES], socket.MSG_NOSIGNAL)]
        except BlockingIOError:
            return
        except OSError:
            self.hang_up()
