"""Tries mutants, each in a forked child, as many at once as there are processors."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tests.mutants import baseline, draw, inside, operators, swap

# How a child ended -> how it is called. What is not here died by a signal, which is a kill too.
NAMES = {inside.SURVIVED: "survived", inside.TIMED_OUT: "timed out", inside.MEMORY: "out of memory", 5: "no test"}
_WALL_SECONDS = 600


@dataclass(frozen=True)
class Result:
    """The result of one mutant; ``tests`` is the number of tests that could have noticed it."""

    site: operators.Site
    outcome: str
    tests: int
    seconds: float

    @property
    def survived(self) -> bool:
        """Whether no test noticed it; true also when no test executes it."""
        return self.outcome in ("survived", "no test")


@dataclass
class _Live:
    site: operators.Site
    tests: int
    started: float


def preload(names: Sequence[str]) -> None:
    """Import what the tests import of others, once: children that fork from here find it there."""
    for name in names:
        try:
            importlib.import_module(name)
        except Exception:  # a part of a package that only imports in a way of its own
            continue
    gc.collect()
    gc.freeze()


def attempt(
    sites: Sequence[operators.Site], found: baseline.Baseline, *, jobs: int, tell: Callable[[Result], None]
) -> list[Result]:
    """Try each site; the results in the order of ``sites``."""
    selector = baseline.Selector(found)
    files = draw.sources()
    results: dict[str, Result] = {}

    def note(tried: Iterator[swap.Tried]) -> None:
        for site, tests, seconds, status in tried:
            results[site.key] = Result(site, NAMES.get(status, "killed"), tests, seconds)
            tell(results[site.key])

    late = [site for site in sites if selector.is_called_late(site, str(files[site.module]))]
    note(swap.attempt(late, found.seconds, lambda starter: _each(late, selector, jobs, starter)))
    rest = [site for site in sites if site.key not in results]
    note(_each(rest, selector, jobs, _importing(found)))
    return [results[site.key] for site in sites]


def _each(
    sites: Sequence[operators.Site], selector: baseline.Selector, jobs: int, starter: swap.Starter
) -> Iterator[swap.Tried]:
    """Try each site for which ``starter`` has a child, ``jobs`` at once."""
    files = draw.sources()
    live: dict[int, _Live] = {}
    waiting = list(reversed(sites))
    while waiting or live:
        while waiting and len(live) < jobs:
            site = waiting.pop()
            tests = selector.tests(site, str(files[site.module]))
            if not tests:
                yield site, 0, 0.0, 5
            elif (work := starter(site, tests)) is not None:
                live[inside.forked(work)] = _Live(site, len(tests), time.monotonic())
        if live:
            pid, status = _next(live)
            done = live.pop(pid)
            yield done.site, done.tests, time.monotonic() - done.started, status


def _importing(found: baseline.Baseline) -> swap.Starter:
    """Children that import policy and the tests anew, with the mutant in the place of its module."""
    files = draw.sources()
    known = frozenset(found.seconds)

    def start(site: operators.Site, tests: tuple[str, ...]) -> Callable[[], int]:
        path = files[site.module]
        tree = draw.mutated(path, site.module, site.key)
        return lambda: inside.try_mutant(site.module, tree, str(path), tests, known, found.seconds)

    return start


def _next(live: dict[int, _Live]) -> tuple[int, int]:
    """The next child that ends; one that sleeps past all patience is ended."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in live:
            return pid, os.waitstatus_to_exitcode(status)
        for one, state in live.items():
            if time.monotonic() - state.started > _WALL_SECONDS:
                os.kill(one, signal.SIGKILL)
        time.sleep(0.005)
