"""Messages of MCP over the agent's broker: it passes them on to the tool gate, and the gate's replies back.

    agent -> broker -> MESSAGE, text -> [ the tool gate ]      as the service gate passes on those over HTTP
    agent <- broker <- REPLY, text   <- [ the tool gate ]

A message and its reply are texts here: the tool gate alone reads them, which has no rights (sandbox.network.tools).
"""

from __future__ import annotations

import re
from typing import Final

from policy import errors
from sandbox.broker.gate_line import GateLine
from sandbox.broker.server import Broker, BrokerCall
from sandbox.network.tools import wire

KIND: Final = "mcp"
_ALIAS: Final = re.compile(r"[a-z0-9_-]{1,64}")
# Bytes that wait for the gate, which reads no more while replies wait for the agent.
_WAITING: Final = 2 * wire.MESSAGE_BYTES


class McpCalls:
    """Serve the requests ``mcp`` of one run over ``line``, whose other end is the tool gate's."""

    def __init__(self, broker: Broker) -> None:
        # The gate has limits for what waits, and the shim holds no more than one answer beyond its own.
        self.line = GateLine(broker, self._taken, self._gone, room=lambda: broker.room)
        self._calls: dict[int, BrokerCall] = {}
        self._number = 0
        self._in = bytearray()
        broker.add({KIND: self.take}, begin=self.line.begin, close=self.line.close, look=self.line.look)

    def take(self, call: BrokerCall) -> None:
        """``mcp``: pass a message on. Answered with the reply, or without one where the message has none."""
        message, alias = call.fields.get("message"), call.fields.get("server", "")
        if not isinstance(message, str) or not isinstance(alias, str) or call.fields.keys() - {"message", "server"}:
            call.refuse("malformed_request", f"`{KIND}` takes `message`, a text, and perhaps `server`, an alias")
            return
        raw = message.encode("utf-8", "backslashreplace")
        if alias and not _ALIAS.fullmatch(alias):
            call.refuse("malformed_request", "tools.json has no server of this alias")
        elif not self.line.is_open:
            call.failed(errors.GateError("the tool gate is gone"))
        elif self.line.waiting + len(raw) > _WAITING:
            call.refuse("too_many_requests", "too many messages wait for the tool gate")
        else:
            self._number = (self._number + 1) & wire.BROKERS - 1
            self._calls[self._number] = call
            name = alias.encode()
            self.line.send(wire.REQUEST.pack(self._number, wire.MESSAGE, len(name), 0, len(raw)) + name + raw)

    def _taken(self, data: bytes) -> None:
        self._in += data
        self._take_replies()

    def _take_replies(self) -> None:
        while self.line.is_open and len(self._in) >= wire.REPLY.size:
            number, said, size = wire.REPLY.unpack_from(self._in)
            if size > wire.REPLY_BYTES or number not in self._calls:
                self.line.hang_up()  # an honest gate says none of this
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

    def _gone(self) -> None:
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.failed(errors.GateError("the tool gate is gone"))
