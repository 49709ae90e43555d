"""Numbers of a source as limits of a manifest: rounded down, and refused where the least limit would be more."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Final

from policy.importing.vocabulary import malformed, shown

_MIB: Final = 1024 * 1024
_UNITS: Final = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_SIZE: Final = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([KMGTP]?)(?:I?B)?", re.IGNORECASE)
_NUMBER: Final = re.compile(r"[0-9]{1,15}(?:\.[0-9]{1,9})?")
_SPAN: Final = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)\s*([a-z]*)\s*")
_MS: Final = {
    **dict.fromkeys(("", "s", "sec", "second", "seconds"), Decimal(1000)),
    **dict.fromkeys(("ms", "msec"), Decimal(1)),
    **dict.fromkeys(("us", "usec"), Decimal("0.001")),
    **dict.fromkeys(("m", "min", "minute", "minutes"), Decimal(60_000)),
    **dict.fromkeys(("h", "hr", "hour", "hours"), Decimal(3_600_000)),
    **dict.fromkeys(("d", "day", "days"), Decimal(86_400_000)),
    **dict.fromkeys(("w", "week", "weeks"), Decimal(7 * 86_400_000)),
}
_MOST: Final = {
    "memory_mb": 16_777_216,
    "cpu_millis": 1_024_000,
    "pids_max": 4_194_304,
    "cpu_weight": 10_000,
    "cpu_ms_per_task": 604_800_000,
    "cpu_time_ms": 31_536_000_000,
}
_LEAST: Final = {**dict.fromkeys(_MOST, 1), "cpu_millis": 10}


def mebibytes(value: str, place: str) -> int | None:
    """Return a size as memory_mb; None where it has no end.

    Raises:
        errors.ImportSourceError: it is no size, or less than one MiB.
    """
    size = _bytes(value, place)
    return None if size is None else _within("memory_mb", size // _MIB, value, place)


def swap_mebibytes(value: str, place: str) -> int | None:
    """Return a size as swap_mb, which may be 0; None where it has no end.

    Raises:
        errors.ImportSourceError: it is no size.
    """
    size = _bytes(value, place)
    return None if size is None else min(size // _MIB, _MOST["memory_mb"])


def _bytes(value: str, place: str) -> int | None:
    if value.lower() in ("infinity", "-1"):
        return None
    match = _SIZE.fullmatch(value)
    if match is None:
        message = f"{shown(value)} is no size in bytes; a share of a machine's memory is none"
        raise malformed(message, where=place, hint="write bytes, or a number with K, M or G, such as 512M")
    return int(Decimal(match[1]) * 1024 ** _UNITS[match[2].upper()])


def cpu_share(value: str, place: str) -> int | None:
    """Return a quota such as ``20%`` as cpu_millis.

    Raises:
        errors.ImportSourceError: it is none, or less than 1 %.
    """
    share = _decimal(value.removesuffix("%") if value.endswith("%") else "", value, place, "write it as 20%")
    return _within("cpu_millis", int(share * 10), value, place)


def cpus(value: str, place: str) -> int | None:
    """Return a number of processors such as ``0.5`` as cpu_millis.

    Raises:
        errors.ImportSourceError: it is none, or less than a hundredth.
    """
    number = _decimal(value, value, place, "write a number of processors, such as 0.5")
    return None if number == 0 else _within("cpu_millis", int(number * 1000), value, place)


def cpu_weight(value: str, place: str) -> int | None:
    """Return a weight as cpu_weight; ``idle`` is the least.

    Raises:
        errors.ImportSourceError: it is none.
    """
    number = Decimal(1) if value.lower() == "idle" else _decimal(value, value, place, "write 1 to 10000, or idle")
    return _within("cpu_weight", int(number), value, place)


def tasks(value: str, place: str) -> int | None:
    """Return a number of tasks as pids_max; None where it has no end.

    Raises:
        errors.ImportSourceError: it is none, or less than one.
    """
    if value.lower() == "infinity":
        return None
    hint = "write a number of tasks; a share of the machine's is none"
    return _within("pids_max", int(_decimal(value, value, place, hint)), value, place)


def cpu_seconds(value: str, place: str) -> int | None:
    """Return seconds of CPU time as cpu_time_ms; None where it has no end.

    Raises:
        errors.ImportSourceError: they are none.
    """
    if value.lower() == "infinity":
        return None
    hint = "write a number of seconds"
    return _within("cpu_time_ms", int(_decimal(value.partition(":")[0], value, place, hint)) * 1000, value, place)


def span_ms(value: str, place: str) -> int | None:
    """Return a time span such as ``5min 20s`` as milliseconds; None where it has no end.

    Raises:
        errors.ImportSourceError: it is none, or less than a millisecond.
    """
    if value.lower() == "infinity":
        return None
    rest, total = value.strip(), Decimal(0)
    while rest:
        match = _SPAN.match(rest)
        if match is None or match[2] not in _MS:
            raise malformed(f"{shown(value)} is no time span", where=place, hint="write it as 90s, 5min or 2h")
        total += Decimal(match[1]) * _MS[match[2]]
        rest = rest[match.end() :]
    return _within("cpu_ms_per_task", int(total), value, place)


def _decimal(number: str, value: str, place: str, hint: str) -> Decimal:
    if not _NUMBER.fullmatch(number):
        raise malformed(f"{shown(value)} is not accepted", where=place, hint=hint)
    try:
        return Decimal(number)
    except InvalidOperation:
        raise malformed(f"{shown(value)} is no number", where=place, hint=hint) from None


def _within(name: str, number: int, value: str, place: str) -> int:
    if number < _LEAST[name]:
        # INVARIANT: the least limit of a manifest would be more than the source gives.
        message = f"{shown(value)} is less than the least {name}, {_LEAST[name]}"
        raise malformed(message, where=place, hint="take the limit out there, and write the one that you want")
    return min(number, _MOST[name])
