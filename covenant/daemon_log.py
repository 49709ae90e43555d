"""The daemon's own log, on stderr: what happens to itself. What it did for whom is in the audit log.

A client can cause lines without limit, as by HTTP heads that cannot be read. So each place in the code writes at most
``MOST`` records in ``SECONDS``; one line then says how many were left out.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass
from typing import Final

# journald adds the time and the process itself (systemd.exec(5), $JOURNAL_STREAM).
_PLAIN: Final = "%(levelname)s %(name)s: %(message)s"
_TIMED: Final = f"%(asctime)s {_PLAIN}"

MOST: Final = 20
SECONDS: Final = 60.0
# Of a record with its traceback; a message may quote what a client sent.
MOST_CHARACTERS: Final = 16_384


class _Visible(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if len(text) > MOST_CHARACTERS:
            text = f"{text[:MOST_CHARACTERS]} ({len(text) - MOST_CHARACTERS} more characters)"
        return visible(text)


def visible(text: str) -> str:
    """Text with what could steer a terminal, or make a line look like two, made visible as ``\\x1b``; lines stay."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


@dataclass
class _Window:
    record: logging.LogRecord
    until: float
    passed: int = 0
    left_out: int = 0


class Bounded(logging.Handler):
    """Passes at most ``most`` records of one place in ``seconds`` to ``inner``, then one with the number of the others.

    A place is a logger and a line of code, so their number is bounded by the code. The number is written when the time
    is over, by a timer's thread, and by ``close``, which logging calls when the process ends.
    """

    def __init__(self, inner: logging.Handler, *, most: int = MOST, seconds: float = SECONDS) -> None:
        super().__init__()
        self._inner = inner
        self._most = most
        self._seconds = seconds
        self._windows: dict[tuple[str, str, int], _Window] = {}
        self._timer: threading.Timer | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """logging.Handler; called with its lock held."""
        self._sum_up(time.monotonic())
        place = (record.name, record.pathname, record.lineno)
        window = self._windows.get(place)
        if window is None:
            window = self._windows[place] = _Window(_bare(record), time.monotonic() + self._seconds)
        if window.passed < self._most:
            window.passed += 1
            self._inner.handle(record)
            return
        window.left_out += 1
        self._wake_at(window.until)

    def close(self) -> None:
        """logging.Handler: write every number that was not written."""
        with self.lock or threading.RLock():
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._sum_up(float("inf"))
        self._inner.close()
        super().close()

    def _sum_up(self, now: float) -> None:
        for place, window in list(self._windows.items()):
            if now < window.until:
                continue
            del self._windows[place]
            if window.left_out:
                record = window.record
                record.msg, record.args = "%d more of these in %g s were not written", (window.left_out, self._seconds)
                record.created = time.time()
                self._inner.handle(record)

    def _wake_at(self, until: float) -> None:
        if self._timer is None:
            self._timer = threading.Timer(max(0.0, until - time.monotonic()), self._wake)
            self._timer.daemon = True
            self._timer.start()

    def _wake(self) -> None:
        with self.lock or threading.RLock():
            self._timer = None
            self._sum_up(time.monotonic())
            if waiting := [window.until for window in self._windows.values() if window.left_out]:
                self._wake_at(min(waiting))


def _bare(record: logging.LogRecord) -> logging.LogRecord:
    """The record without its message, arguments and traceback, which may be large."""
    return logging.LogRecord(record.name, record.levelno, record.pathname, record.lineno, "", (), None)


def configure() -> None:
    """Write to stderr from now on."""
    inner = logging.StreamHandler()
    inner.setFormatter(_Visible(_PLAIN if os.environ.get("JOURNAL_STREAM") else _TIMED))
    logging.basicConfig(level=logging.INFO, handlers=[Bounded(inner)])
    # It counts what changed in a directory; what came of that is a row.
    logging.getLogger("watchfiles").setLevel(logging.WARNING)
