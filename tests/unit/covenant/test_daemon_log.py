"""The bound on the daemon's own log: so many lines of one place, then their number."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from covenant import daemon_log


class Kept(logging.Handler):
    """Keeps what it is given; ``summed`` is set by a line that sums up."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.summed = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        if "were not written" in record.getMessage():
            self.summed.set()


@pytest.fixture
def kept() -> Kept:
    return Kept()


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    made = logging.getLogger("tests.bounded")
    made.propagate = False
    yield made
    for handler in made.handlers[:]:
        made.removeHandler(handler)
        handler.close()


def bad(logger: logging.Logger, number: int) -> None:
    logger.error("bad %d", number)


def test_flood_has_few_lines_and_one_number(kept: Kept, logger: logging.Logger) -> None:
    bounded = daemon_log.Bounded(kept, most=3, seconds=60)
    logger.addHandler(bounded)
    for number in range(1000):
        bad(logger, number)
    logger.error("another place")
    assert kept.lines == ["bad 0", "bad 1", "bad 2", "another place"]
    bounded.close()
    assert kept.lines[4:] == ["997 more of these in 60 s were not written"]


def test_what_fits_has_no_number(kept: Kept, logger: logging.Logger) -> None:
    bounded = daemon_log.Bounded(kept, most=3, seconds=60)
    logger.addHandler(bounded)
    for number in range(3):
        bad(logger, number)
    bounded.close()
    assert kept.lines == ["bad 0", "bad 1", "bad 2"]


def test_number_comes_without_further_line(kept: Kept, logger: logging.Logger) -> None:
    logger.addHandler(daemon_log.Bounded(kept, most=1, seconds=0.2))
    bad(logger, 0)
    bad(logger, 1)
    bad(logger, 2)
    assert kept.summed.wait(60)
    assert kept.lines == ["bad 0", "2 more of these in 0.2 s were not written"]
    bad(logger, 3)
    assert kept.lines[2:] == ["bad 3"]


def test_long_message_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before = root.handlers[:]
    root.handlers.clear()
    try:
        daemon_log.configure()
        logging.getLogger("tests.long").error("x" * 100_000)
        logging.getLogger("tests.long").error("short\x1b")
        root.handlers[0].close()
    finally:
        root.handlers[:] = before
    long, short = capsys.readouterr().err.splitlines()
    assert len(long) < daemon_log.MOST_CHARACTERS + 100
    assert long.endswith("more characters)")
    assert short.endswith("short\\x1b")
