"""The lines of a recorded terminal."""

from __future__ import annotations

import hashlib
import json

from sandbox.shim.recording import Recording


def _lines(data: bytes) -> list[list[object]]:
    return [json.loads(line) for line in data.splitlines()]


def test_size_is_recorded_once() -> None:
    made = Recording((24, 80))
    made.resize(24, 80)
    made.resize(44, 120)
    made.resize(44, 120)
    written = made.feed(b"hi")
    _, *events = _lines(written)
    assert [event[1:] for event in events] == [["r", "120x44"], ["o", "hi"]]
    made.resize(24, 80)
    later = made.feed(b"x")
    assert [event[1:] for event in _lines(later)] == [["r", "80x24"], ["o", "x"]]
    assert made.sha256 == hashlib.sha256(written + later).hexdigest()


def test_sizes_without_output_leave_the_last() -> None:
    made = Recording((24, 80))
    for rows in range(1, 2000):
        made.resize(rows, 80)
    written = made.feed(b"hi")
    assert [event[1:] for event in _lines(written)[1:]] == [["r", "80x1999"], ["o", "hi"]]
    assert len(written) < 250
