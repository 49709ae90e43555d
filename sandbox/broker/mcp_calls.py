"""Messages of MCP over the agent's broker: it passes them on to the tool gate, and the gate's replies back.

    agent -> broker -> MESSAGE, text -> [ the tool gate ]      as the service gate passes on those over HTTP
    agent <- broker <- REPLY, text   <- [ the tool gate ]

A message and its reply are texts here: the tool gate alone reads them, which has no rights (sandbox.network.tools).
"""

from __future__ import annotations

import re
import socket
from typing import Final

from policy import errors
from sandbox.broker.server import Broker, BrokerCall
from sandbox.network.tools import wire

KIND: Final = "mcp"
_ALIAS: Final = re.compile(r"[a-z0-9_-]{1,64}")
_CHUNK: Final = 1 << 18
# Bytes that wait for the gate, which reads no more while replies wait for the agent.
_WAITING: Final = 2 * wire.MESSAGE_BYTES


class McpCalls:
    """Serve the requests ``mcp`` of one run. ``gate_end`` is the tool gate's; ``started`` closes it here."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._line, self._gate = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._line.setblocking(False)
        self._calls: dict[int, BrokerCall] = {}
        self._number = 0
        self._in, self._out = bytearray(), bytearray()
        self._open, self._begun, self._watched = True, False, False
        broker.add({KIND: self.take}, begin=self._watch, close=self.close, look=self._look)

    @property
    def gate_end(self) -> int:
        """Return the gate's descriptor."""
        return self._gate.fileno()

    def started(self) -> None:
        """Close the gate's end here: the gate has it."""
        self._gate.close()

    def take(self, call: BrokerCall) -> None:
        """``mcp``: pass a message on. Answered with the reply, or without one where the message has none."""
        message, alias = call.fields.get("message"), call.fields.get("server", "")
        if not isinstance(message, str) or not isinstance(alias, str) or call.fields.keys() - {"message", "server"}:
            call.refuse("malformed_request", f"`{KIND}` takes `message`, a text, and perhaps `server`, an alias")
            return
        raw = message.encode("utf-8", "backslashreplace")
        if alias and not _ALIAS.fullmatch(alias):
            call.refuse("malformed_request", "tools.json has no server of this alias")
        elif not self._open:
            call.failed(errors.GateError("the tool gate is gone"))
        elif len(self._out) + len(raw) > _WAITING:
            call.refuse("too_many_requests", "too many messages wait for the tool gate")
        else:
            self._number = (self._number + 1) & wire.BROKERS - 1
            self._calls[self._number] = call
            name = alias.encode()
            self._out += wire.REQUEST.pack(self._number, wire.MESSAGE, len(name), 0, len(raw)) + name + raw
            self._flush()

    def close(self) -> None:
        """End with the run."""
        self._hang_up()
        self._gate.close()

    def _watch(self) -> None:
        """Take replies from now on: the agent is about to be given its intent."""
        if self._open:
            self._begun = self._watched = True
            self._broker.watch(self._line.fileno(), self._on_line)

    def _look(self) -> None:
        """Take replies again, once the agent reads its answers."""
        if self._begun and not self._watched and self._broker.room:
            self._watch()
        self._flush()

    def _on_line(self) -> None:
        self._flush()
        if not self._open:
            return
        if not self._broker.room:
            # The gate has limits for what waits, and the shim holds no more than one answer beyond its own.
            self._watched = False
            self._broker.forget(self._line.fileno())
            return
        try:
            data = self._line.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._hang_up()
            return
        self._in += data
        self._take_replies()

    def _take_replies(self) -> None:
        while self._open and len(self._in) >= wire.REPLY.size:
            number, said, size = wire.REPLY.unpack_from(self._in)
            if size > wire.REPLY_BYTES or number not in self._calls:
                self._hang_up()  # an honest gate says none of this
                return
            if len(self._in) < wire.REPLY.size + size:
                return
            raw = bytes(self._in[wire.REPLY.size : wire.REPLY.size + size])
            del self._in[: wire.REPLY.size + size]
            self._replied(self._calls.pop(number), said, raw)

    def _replied(self, call: BrokerCall, said: int, raw: bytes) -> None:
        if said == wire.UNKNOWN:
            call.refuse("malformed_request", "tools.json has no server of this alias")
        else:
            call.answer({} if said == wire.NOTHING else {"message": raw.decode("utf-8", "replace")})

    def _flush(self) -> None:
        try:
            while self._out and self._open:
                del self._out[: self._line.send(self._out[:_CHUNK], socket.MSG_NOSIGNAL)]
        except BlockingIOError:
            return
        except OSError:
            self._hang_up()

    def _hang_up(self) -> None:
        if not self._open:
            return
        self._open = False
        if self._watched:
            self._broker.forget(self._line.fileno())
        self._watched = False
        self._line.close()
        self._out.clear()
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.failed(errors.GateError("the tool gate is gone"))
