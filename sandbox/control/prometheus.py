"""Numbers in the text format that Prometheus reads: families of samples, and histograms.

prometheus_client writes the text. Its import costs 110 ms and 14 MiB, so only a process that answers a scraper imports
it, with its first answer: the daemon and the supervisor's metrics worker, never the supervisor's main loop.
https://prometheus.io/docs/instrumenting/exposition_formats/ (text format 0.0.4)
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import Metric

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


def text(families: Iterable[Metric]) -> str:
    """Return the text of families."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(_Collector(list(families)))
    return generate_latest(registry).decode()


# The registry keeps collectors by their identity.
@dataclass(frozen=True, eq=False)
class _Collector:
    families: list[Metric]

    def collect(self) -> list[Metric]:
        """Return what is registered (prometheus_client's Collector)."""
        return self.families


def family(name: str, kind: str, about: str, samples: Iterable[tuple[Labels, float]]) -> Metric:
    """Return one family of counters (a name that ends in `_total`) or gauges."""
    from prometheus_client import Metric

    # The library writes the suffix of a counter itself.
    made = Metric(name.removesuffix("_total"), about, kind)
    for labels, value in samples:
        made.add_sample(name, _printable(labels), value)
    return made


def histograms(name: str, about: str, series: Iterable[tuple[Labels, Histogram]]) -> Metric:
    """Return one family of histograms."""
    from prometheus_client import Metric

    made = Metric(name, about, "histogram")
    for labels, one in series:
        plain = _printable(labels)
        below = 0
        for bound, count in zip((*map(str, one.bounds), "+Inf"), one.counts, strict=True):
            below += count
            made.add_sample(f"{name}_bucket", {**plain, "le": bound}, below)
        made.add_sample(f"{name}_sum", plain, one.total)
        made.add_sample(f"{name}_count", plain, below)
    return made


def _printable(labels: Labels) -> dict[str, str]:
    """Replace control, bidi and lone surrogate characters; the library escapes quotes and backslashes."""
    return {key: "".join(c if c.isprintable() else "?" for c in word) for key, word in labels.items()}
