"""Run the year day by day, check every invariant at its end, and write the report."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import anyio

from tests import hermes_double
from tests.kernel import serving
from tests.year import invariants, report
from tests.year.acts import REAL, Year, calendar
from tests.year.clock import Clock
from tests.year.intents import Intents
from tests.year.machine import Machine


def year(clock: Clock, *, days: int, intents: int, real: int, seed: int, page: Path | None) -> int:
    """Run it all; returns the exit status."""
    began = time.monotonic()
    with serving.open_place() as base, _hermes() as url, Machine(base, url) as machine:
        chance = random.Random(seed)
        wrong: list[str] = []
        made = Year(machine, clock, Intents(machine, chance, wrong), chance, days=days)
        made.begin()
        samples = _days(made, days=days, intents=intents, real=real)
        at_end = invariants.at_end(made, samples)
        text = report.page(made, samples, at_end, days=days, seed=seed, seconds=time.monotonic() - began)
    if page is not None:
        page.write_text(text)
    print(text)
    return 0 if not wrong and all(one.holds for one in at_end) else 1


def _days(made: Year, *, days: int, intents: int, real: int) -> list[invariants.Sample]:
    acts, samples = calendar(days, made.chance), []
    for day in range(days):
        for act in acts.get(day, ()):
            made.do(act)
        made.intents.batch(_share(intents - real, day, days))
        for agent in REAL:
            made.intents.batch(_share(real // len(REAL), day, days), agent=agent)
        made.daily()
        made.pass_time(24)
        samples.append(invariants.Sample.of(made, day))
    return samples


def _share(count: int, day: int, days: int) -> int:
    """How many of the year's are this day's."""
    return count * (day + 1) // days - count * day // days


@contextlib.contextmanager
def _hermes() -> Iterator[str]:
    """Yield the address of a Hermes API's double, which a thread serves."""
    ready, found, end = threading.Event(), [], threading.Event()

    async def serve() -> None:
        async with hermes_double.serving() as double:
            found.append(double.url)
            ready.set()
            while not end.is_set():
                await anyio.sleep(0.2)
                double.requests.clear()

    thread = threading.Thread(target=anyio.run, args=(serve,), daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield found[0]
    finally:
        end.set()
        thread.join(30)
