"""A test that would wait for ever fails."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

SECONDS = 60


def _late(*_: object) -> None:
    pytest.fail(f"not done after {SECONDS} s")


@pytest.fixture
def promptly() -> Iterator[None]:
    """Interrupt a system call that blocks, as the open of a FIFO."""
    before = signal.signal(signal.SIGALRM, _late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
