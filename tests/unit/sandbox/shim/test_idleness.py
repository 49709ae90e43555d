"""The last word of a peer counts, and its end wakes."""

from __future__ import annotations

import os

from sandbox.run_io import BUSY, IDLE
from sandbox.shim.idleness import IdleSwitch


def test_last_word_counts_and_end_wakes_once() -> None:
    read, write = os.pipe()
    heard: list[str] = []
    switch = IdleSwitch(read, rest=lambda: heard.append("rest"), wake=lambda: heard.append("wake"))
    ((fd, hear),) = switch.watches.items()
    assert fd != read
    for said in (IDLE, BUSY, IDLE + BUSY, BUSY + IDLE):
        os.write(write, said)
        assert hear() is None
    hear()
    assert heard == ["rest", "wake", "wake", "rest"]
    os.close(write)
    hear()
    assert heard[4:] == ["wake"]
    switch.close()
    os.close(read)
