"""Try the drawn mutants, write docs/mutants.md, and fail when the tests are not good enough.

With names of mutants as arguments only those are tried, and the page is left alone.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
import tempfile
import time

from tests.mutants import baseline, draw, inside, operators, page, records, run


def main() -> int:
    """0 when enough were drawn, enough were killed, and every survivor has its reason."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Try mutants of the deciding half.")
    parser.add_argument("keys", nargs="*", help="try these mutants only")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rooms", nargs="+", default=list(draw.ROOMS), choices=draw.ROOMS)
    parser.add_argument("--records", type=pathlib.Path, help="file of results: keep new ones, trust its kills")
    options = parser.parse_args()
    os.chdir(draw.ROOT)
    inside.few_examples()
    possible = draw.all_sites()
    chosen = [s for s in draw.drawn(possible) if s.module.split(".")[1] in options.rooms]
    if options.keys:
        chosen = [s for s in possible if s.key in options.keys]
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        found = baseline.record(pathlib.Path(directory))
    print(f"{len(found.seconds)} tests, {time.monotonic() - started:.0f} s; {len(chosen)} mutants", flush=True)
    run.preload(found.modules)
    kept = records.Records(options.records, draw.sources()) if options.records else None
    results = _attempt(chosen, found, options.jobs, kept)
    why = page.reasons()
    for result in results:
        if result.survived and (options.keys or result.site.key not in why):
            _show(result)
    if options.keys or set(options.rooms) != set(draw.ROOMS):
        return int(any(r.survived for r in results))
    page.PAGE.write_text(page.page(results, len(possible)))
    page.SURVIVORS.write_text(page.survivors(results, why))
    idle = sorted(set(why) - {r.site.key for r in results if r.survived})
    if idle:
        print(f"reasons without a survivor: {' '.join(idle)}")
    print(f"{page.killed_percent(results):.1f} % of {len(results)} killed in {time.monotonic() - started:.0f} s")
    problems = page.faults(results, why)
    for problem in problems:
        print(f"mutants: {problem}", file=sys.stderr)
    return int(bool(problems))


def _attempt(
    chosen: list[operators.Site], found: baseline.Baseline, jobs: int, kept: records.Records | None
) -> list[run.Result]:
    """Try the mutants that no record says are killed; the results of all, in the order of ``chosen``."""
    done = {result.site.key: result for result in (kept.kills(chosen) if kept else ())}
    if done:
        print(f"{len(done)} kills are on record", flush=True)
    due = [site for site in chosen if site.key not in done]
    done |= {r.site.key: r for r in run.attempt(due, found, jobs=jobs, tell=_Teller(len(due), kept))}
    return [done[site.key] for site in chosen]


class _Teller:
    """Records each result, and prints a line of progress now and then."""

    def __init__(self, total: int, kept: records.Records | None) -> None:
        self.total, self.kept, self.done, self.alive = total, kept, 0, 0

    def __call__(self, result: run.Result) -> None:
        if self.kept:
            self.kept.add(result)
        self.done += 1
        self.alive += result.survived
        if self.done % 100 == 0 or self.done == self.total:
            print(f"{self.done} of {self.total}, {self.alive} alive", flush=True)


def _show(result: run.Result) -> None:
    site = result.site
    print(
        f"{site.key} {site.module}:{site.line} {site.scope} ({site.operator}, {result.outcome}, {result.tests} tests)"
    )
    print(f"    - {site.before}\n    + {site.after}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
