"""A strict reader of Prometheus' text format 0.0.4, as promtool reads it: what it takes, a scraper takes."""

from __future__ import annotations

import re

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\["\\n])*"'
_SAMPLE = re.compile(rf"({_NAME})(?:\{{({_LABEL}(?:,{_LABEL})*)\}})? (-?[0-9.]+(?:e[+-]?[0-9]+)?|\+Inf|NaN)")
_HELP = re.compile(rf"# HELP ({_NAME}) ([^\n]+)")
_TYPE = re.compile(rf"# TYPE ({_NAME}) (counter|gauge|histogram)")
_PARTS = (frozenset({""}), frozenset({"_bucket", "_sum", "_count"}))
_BOUND = re.compile(r',?le="([^"]*)"')


def parse(text: str) -> dict[str, dict[str, float]]:
    """Each family's samples by their labels as they stand (a histogram's by part and labels); every line must be of
    the format, and no series twice.

    Raises:
        ValueError: a line that is none, a family without help or type, a counter that does not end in _total.
    """
    families: dict[str, dict[str, float]] = {}
    helped: set[str] = set()
    if not text.endswith("\n"):
        raise ValueError("the last line has no end")
    current = kind = ""
    for line in text.splitlines():
        if match := _HELP.fullmatch(line):
            if match[1] in helped:
                raise ValueError(f"{match[1]} is explained twice")
            helped.add(match[1])
        elif match := _TYPE.fullmatch(line):
            current, kind = match[1], match[2]
            if current not in helped or current in families:
                raise ValueError(f"{current} has no help, or two types")
            if (match[2] == "counter") != current.endswith("_total"):
                raise ValueError(f"{current} is a {match[2]}")
            families[current] = {}
        elif match := _SAMPLE.fullmatch(line):
            # What a histogram consists of stands under names of its own, each of which is unique by its labels.
            part = match[1].removeprefix(current) if kind == "histogram" else ""
            key = part + (match[2] or "")
            if match[1] != current + part or part not in _PARTS[kind == "histogram"] or key in families[current]:
                raise ValueError(f"out of its family, or twice: {line}")
            families[current][key] = float(match[3])
        else:
            raise ValueError(f"no line of the format: {line!r}")
    for name, samples in families.items():
        _check_histogram(name, samples)
    return families


def _check_histogram(name: str, samples: dict[str, float]) -> None:
    """Buckets grow with their bounds, the last one is +Inf and what _count says, and _sum is there."""
    series: dict[str, list[tuple[float, float]]] = {}
    for key, value in samples.items():
        if key.startswith("_bucket"):
            bound = _BOUND.search(key)
            if bound is None:
                raise ValueError(f"a bucket of {name} has no bound")
            series.setdefault(_BOUND.sub("", key.removeprefix("_bucket")), []).append((float(bound[1]), value))
    for labels, buckets in series.items():
        counts = [count for _, count in buckets]
        if buckets != sorted(buckets) or counts != sorted(counts) or buckets[-1][0] != float("inf"):
            raise ValueError(f"the buckets of {name}{labels} are no histogram")
        if samples.get(f"_count{labels}") != counts[-1] or f"_sum{labels}" not in samples:
            raise ValueError(f"{name}{labels} has no count and sum of its buckets")
