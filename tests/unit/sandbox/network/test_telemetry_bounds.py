"""Bounds of a request of OTLP, which hold before protobuf reads it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sandbox.network.service.telemetry import bounds, reader, records, wire

STAMP = {"covenant.run.id": "run-1"}
# Field 2047, which no message of OTLP has.
ODD = b"\xf8\x7f\x01"
# The address space of a reader, of which it needs some 60 MiB to begin. All gates of a run have 256 MiB.
IN_LITTLE = """
import resource, sys
from sandbox.network.service.telemetry import reader, wire
resource.setrlimit(resource.RLIMIT_AS, (200 << 20, 200 << 20))
body = sys.stdin.buffer.read()
sys.stdout.buffer.write(reader.done(wire.STAMP, sys.argv[1], body, {}, is_json=False, is_gzip=False))
"""


def field(number: int, content: bytes) -> bytes:
    """A field of bytes."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + _varint(number >> 7)


@pytest.mark.parametrize(
    ("signal", "path", "leaf"),
    [("traces", (1, 2), 2), ("logs", (1, 2), 2), ("metrics", (1, 2, 2, 10), 1), ("traces", (1, 1), 31)],
)
def test_reader_lives_through_millions_of_parts(signal: str, path: tuple[int, ...], leaf: int) -> None:
    body = field(leaf, b"") * ((wire.BODY_BYTES - 64) // len(field(leaf, b"")))
    for number in reversed(path):
        body = field(number, body)
    found = subprocess.run(
        [sys.executable, "-c", IN_LITTLE, signal], input=body, capture_output=True, timeout=120, check=False
    )
    assert found.returncode == 0, found.stderr.decode()
    assert wire.OUTCOME.unpack_from(found.stdout)[0] == wire.LARGE


def _deep(levels: int) -> bytes:
    """A log record of lists in one another, with an unknown field in the innermost."""
    value = ODD + field(1, b"text")
    for _ in range(levels):
        value = field(5, field(1, value))
    return field(1, field(2, field(2, field(5, value))))


@pytest.mark.parametrize("levels", [1, 20, 27])
def test_unknown_field_goes_on_at_no_depth(levels: int) -> None:
    made = records.stamped("logs", _deep(levels), STAMP, is_json=False, is_gzip=False)
    assert ODD not in made.body
    assert b"text" in made.body


@pytest.mark.parametrize("levels", [28, 30, 46, 60])
def test_value_that_is_too_deep_is_refused(levels: int) -> None:
    with pytest.raises(records.MalformedTelemetryError) as refused:
        records.stamped("logs", _deep(levels), STAMP, is_json=False, is_gzip=False)
    assert not refused.value.large, "as any other body that protobuf does not read"


@pytest.mark.parametrize(
    "body", [b"\x0b\x0c", b"\x0a\x05a", b"\x0a", b"\x80", b"\x0a" + b"\xff" * 11, b"\x08" + b"\xff" * 11, b"\x0d\x00"]
)
def test_body_that_breaks_off_is_malformed(body: bytes) -> None:
    found = reader.done(wire.STAMP, "logs", body, STAMP, is_json=False, is_gzip=False)
    assert wire.OUTCOME.unpack_from(found)[0] == wire.MALFORMED


def test_messages_are_counted_where_they_are() -> None:
    known = bounds.tree([records.SIGNALS["traces"].request().DESCRIPTOR])
    root = records.SIGNALS["traces"].request().DESCRIPTOR.full_name
    # A name is no message, however long it is.
    bounds.check(field(1, field(2, field(2, field(5, b"\x12\x00" * 300_000)))), root, known)
    with pytest.raises(bounds.ExceededError):
        bounds.check(field(1, field(2, b"\x12\x00" * 300_000)), root, known)
