"""Tries mutants, each in a forked child, as many at once as there are processors."""

from __future__ import annotations

import ast
import gc
import importlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tests.mutants import baseline, draw, inside, operators

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
    known = frozenset(found.seconds)
    results: dict[str, Result] = {}
    for site, tests, seconds, status in _each(sites, selector, known, jobs):
        result = Result(site, NAMES.get(status, "killed"), tests, seconds)
        results[site.key] = result
        tell(result)
    return [results[site.key] for site in sites]


def _each(
    sites: Sequence[operators.Site], selector: baseline.Selector, known: frozenset[str], jobs: int
) -> Iterator[tuple[operators.Site, int, float, int]]:
    files = draw.sources()
    live: dict[int, _Live] = {}
    waiting = list(reversed(sites))
    while waiting or live:
        while waiting and len(live) < jobs:
            site = waiting.pop()
            path = str(files[site.module])
            tests = selector.tests(site, path)
            if not tests:
                yield site, 0, 0.0, 5
                continue
            tree = draw.mutated(files[site.module], site.module, site.key)
            pid = inside.forked(_work(site.module, tree, path, tests, known, selector.baseline.seconds))
            live[pid] = _Live(site, len(tests), time.monotonic())
        if live:
            pid, status = _next(live)
            done = live.pop(pid)
            yield done.site, done.tests, time.monotonic() - done.started, status


def _work(
    module: str, tree: ast.Module, path: str, tests: tuple[str, ...], known: frozenset[str], seconds: dict[str, float]
) -> Callable[[], int]:
    return lambda: inside.try_mutant(module, tree, path, tests, known, seconds)


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
