"""A strict reader of Prometheus' text format 0.0.4, as promtool reads it: what it takes, a scraper takes."""

from __future__ import annotations

import re

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\["\\n])*"'
_SAMPLE = re.compile(rf"({_NAME})(?:\{{({_LABEL}(?:,{_LABEL})*)\}})? (-?[0-9.]+(?:e[+-]?[0-9]+)?|\+Inf|NaN)")
_HELP = re.compile(rf"# HELP ({_NAME}) ([^\n]+)")
_TYPE = re.compile(rf"# TYPE ({_NAME}) (counter|gauge)")


def parse(text: str) -> dict[str, dict[str, float]]:
    """Each family's samples by their labels as they stand; every line must be of the format, and no series twice.

    Raises:
        ValueError: a line that is none, a family without help or type, a counter that does not end in _total.
    """
    families: dict[str, dict[str, float]] = {}
    helped: set[str] = set()
    if not text.endswith("\n"):
        raise ValueError("the last line has no end")
    current = ""
    for line in text.splitlines():
        if match := _HELP.fullmatch(line):
            if match[1] in helped:
                raise ValueError(f"{match[1]} is explained twice")
            helped.add(match[1])
        elif match := _TYPE.fullmatch(line):
            current = match[1]
            if current not in helped or current in families:
                raise ValueError(f"{current} has no help, or two types")
            if (match[2] == "counter") != current.endswith("_total"):
                raise ValueError(f"{current} is a {match[2]}")
            families[current] = {}
        elif match := _SAMPLE.fullmatch(line):
            if match[1] != current or (match[2] or "") in families[current]:
                raise ValueError(f"out of its family, or twice: {line}")
            families[current][match[2] or ""] = float(match[3])
        else:
            raise ValueError(f"no line of the format: {line!r}")
    return families
