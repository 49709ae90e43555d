"""The daemon's own log, on stderr: what happens to itself. What it did for whom is in the audit log."""

from __future__ import annotations

import logging
import os
from typing import Final

# journald adds the time and the process itself (systemd.exec(5), $JOURNAL_STREAM).
_PLAIN: Final = "%(levelname)s %(name)s: %(message)s"
_TIMED: Final = f"%(asctime)s {_PLAIN}"


class _Visible(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def visible(text: str) -> str:
    """Text with what could steer a terminal, or make a line look like two, made visible as ``\\x1b``; lines stay."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def configure() -> None:
    """Write to stderr from now on."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Visible(_PLAIN if os.environ.get("JOURNAL_STREAM") else _TIMED))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    # It counts what changed in a directory; what came of that is a row.
    logging.getLogger("watchfiles").setLevel(logging.WARNING)
