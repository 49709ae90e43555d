"""Read an agent's telemetry in a process without rights, network, files and keys: the parser of protobuf is in C.

The messages are those of sandbox.network.service.telemetry.wire.
"""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from typing import NoReturn

from sandbox.network.gate.main import GateInput
from sandbox.network.service.telemetry import records, wire


def serve(gate: GateInput) -> NoReturn:
    """The reader's life."""
    stamp = {str(key): str(value) for key, value in gate.plan["stamp"].items()}
    _warm(stamp)
    gate.answer(lambda message: _answer(message, stamp), max_bytes=wire.ORDER_BYTES)


def _answer(message: bytes, stamp: Mapping[str, str]) -> bytes:
    order, signal, is_json, is_gzip = wire.ORDER.unpack_from(message)
    body = message[wire.ORDER.size :]
    return done(order, wire.SIGNALS[signal], body, stamp, is_json=is_json, is_gzip=is_gzip)


def done(order: int, signal: str, body: bytes, stamp: Mapping[str, str], *, is_json: bool, is_gzip: bool) -> bytes:
    """Do what the gate asks for. Returns the outcome's head and bytes."""
    if order == wire.ANSWER:
        rejected, answered = records.answer(signal, body, is_json=is_json)
        return wire.OUTCOME.pack(wire.DONE, min(rejected, 2**32 - 1), 0) + answered
    try:
        made = records.stamped(signal, body, stamp, is_json=is_json, is_gzip=is_gzip)
    except records.MalformedTelemetryError as e:
        message = str(e).encode("utf-8", "replace")
        return wire.OUTCOME.pack(wire.LARGE if e.large else wire.MALFORMED, 0, 0) + message
    return wire.OUTCOME.pack(wire.DONE, made.records, made.size) + made.body


def _warm(stamp: Mapping[str, str]) -> None:
    """Use every part once: what is imported late cannot be imported once the process is sealed."""
    value = b'{"doubleValue": 1.5, "arrayValue": {"values": [{"bytesValue": "YQ=="}, {"intValue": "1"}]}}'
    resource = b'{"resource": {"attributes": [{"key": "covenant.x", "value": %b}]}}' % value
    for text in (b"{", b'{"a": "\xff"}', b'{"resourceLogs": 1}', b'{"resourceLogs": [%b]}' % resource):
        for signal, name in (("logs", b"Logs"), ("metrics", b"Metrics"), ("traces", b"Spans")):
            body = text.replace(b"Logs", name)
            done(wire.STAMP, signal, body, stamp, is_json=True, is_gzip=False)
            done(wire.STAMP, signal, gzip.compress(body), stamp, is_json=False, is_gzip=True)
            done(wire.ANSWER, signal, b"\x0a\x02\x08\x01", stamp, is_json=True, is_gzip=False)
