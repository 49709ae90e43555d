"""Times on the command line: now, ``90d``, and a moment as people read it."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime

from policy import errors

_UNITS_MS = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_MAX_MS = 3650 * _UNITS_MS["d"]
_FORM = re.compile(r"([0-9]{1,9})([smhd])")


def now_ms() -> int:
    """The clock in Unix milliseconds."""
    return time.time_ns() // 1_000_000


def duration_ms(text: str, *, option: str) -> int:
    """Milliseconds of a whole number and one of s, m, h, d; at least one second, at most 3,650 days.

    Raises:
        errors.UsageError: another form or size.
    """
    match = _FORM.fullmatch(text)
    value = int(match[1]) * _UNITS_MS[match[2]] if match else 0
    if not _UNITS_MS["s"] <= value <= _MAX_MS:
        from policy.manifest.text import quote

        raise errors.UsageError(f"{option} {quote(text)} is no duration", hint="90d, 12h, 30m or 45s; at most 3650d")
    return value


def since_ms(text: str, *, option: str) -> int:
    """Unix milliseconds of a moment: a duration before now, or an ISO 8601 time. A time without a zone is UTC.

    Raises:
        errors.UsageError: another form or size.
    """
    if _FORM.fullmatch(text):
        return now_ms() - duration_ms(text, option=option)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as e:
        from policy.manifest.text import quote

        raise errors.UsageError(
            f"{option} {quote(text)} is no time", hint="90d, 12h, 30m or 45s, or 2026-11-29T18:55:26Z"
        ) from e
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


def age(ms: float) -> str:
    """Return a length of time in its largest whole unit: ``3d``, ``5h``, ``0s``."""
    for unit, size in reversed(_UNITS_MS.items()):
        if ms >= size:
            return f"{int(ms // size)}{unit}"
    return "0s"


def utc(moment_ms: int) -> str:
    """``2026-11-21 23:08 UTC``, or the number itself where the calendar ends."""
    try:
        return datetime.fromtimestamp(moment_ms / 1000, tz=UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (OverflowError, ValueError, OSError):
        return f"{moment_ms} ms"
