"""Numbers in the text that Prometheus reads: families of samples, and histograms.

https://prometheus.io/docs/instrumenting/exposition_formats/ (text format 0.0.4)
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Seconds. The usual ones, with more at both ends: a ping takes microseconds, a run minutes.
SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

Labels = Mapping[str, str]


@dataclass
class Histogram:
    """How many of what was observed were at most each of ``bounds``, and their sum."""

    bounds: Sequence[float] = SECONDS
    total: float = 0.0
    counts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count one."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value


def family(name: str, kind: str, about: str, samples: Iterable[tuple[Labels, float]]) -> Iterator[str]:
    """The lines of one family of counters or gauges."""
    yield _head(name, kind, about)
    for labels, value in samples:
        yield _sample(name, labels, value)


def histograms(name: str, about: str, series: Iterable[tuple[Labels, Histogram]]) -> Iterator[str]:
    """The lines of one family of histograms."""
    yield _head(name, "histogram", about)
    for labels, one in series:
        below = 0
        for bound, count in zip((*map(str, one.bounds), "+Inf"), one.counts, strict=True):
            below += count
            yield _sample(f"{name}_bucket", {**labels, "le": bound}, below)
        yield _sample(f"{name}_sum", labels, one.total)
        yield _sample(f"{name}_count", labels, below)


def _head(name: str, kind: str, about: str) -> str:
    return f"# HELP {name} {about}\n# TYPE {name} {kind}\n"


def _sample(name: str, labels: Labels, value: float) -> str:
    inside = ",".join(f'{key}="{_escaped(word)}"' for key, word in labels.items())
    braced = f"{{{inside}}}" if inside else ""
    return f"{name}{braced} {value!r}\n"


def _escaped(word: str) -> str:
    """A label's value. Agent ids are plain by their grammar; this does not rest on it."""
    plain = "".join(c if c.isprintable() else "?" for c in word)
    return plain.replace("\\", "\\\\").replace('"', '\\"').encode("utf-8", "replace").decode()
