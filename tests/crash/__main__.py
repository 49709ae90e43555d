"""kill -9 everywhere: ``python -m tests.crash [--points N] [--seed S]``. As root, on a machine with runsc.

Every step within the writing of each audit row, and as many random points as asked for, over every way of running; and
every step of a vault's life.
Exit status 1 when anything was left, lost or touched; the points are printed, and the seed repeats them.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.crash import scenes, vaults
from tests.crash.campaign import Campaign, Foreign, Tally, summary
from tests.crash.server import Server


def main() -> int:
    """0 when nothing was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description="Kill a run at every point.")
    parser.add_argument("--points", type=int, default=1000, help="random points, over all scenes (1000)")
    parser.add_argument("--seed", type=int, default=None)
    names = (*scenes.NAMES, "vault")
    parser.add_argument("--scenes", nargs="+", default=list(names), choices=names)
    parser.add_argument("--no-rows", action="store_true", help="leave out the points within each audit row")
    options = parser.parse_args()
    # Told to end, it takes away what it planted.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    seed = random.randrange(2**32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    tally, began = Tally(), time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="crash-") as scratch,
        Server() as server,
        scenes.made(Path(scratch), *(one for one in options.scenes if one != "vault")) as made,
    ):
        if "vault" in options.scenes:
            _vault(Path(scratch) / "vault", server, tally)
        for number, scene in enumerate(made):
            share = options.points // len(made) + (number < options.points % len(made))
            _one(Campaign(scene, server, tally), share, random.Random(seed + number), rows=not options.no_rows)
        if any(scene.internet is not None for scene in made):
            for role in tally.spared():
                tally.wrong.append(f"no {role} was killed")
                print(tally.wrong[-1], flush=True)
    print(summary(tally, time.monotonic() - began))
    return int(bool(tally.wrong))


def _vault(base: Path, server: Server, tally: Tally) -> None:
    """Every step of all that writes it."""
    with vaults.made(base, server, tally) as campaign:
        print(f"vault: its life takes {campaign.steps} steps", flush=True)
        for step in range(1, campaign.steps + 2):
            for line in campaign.attempt(step):
                print(line, flush=True)
            if step % 200 == 0:
                print(f"vault: {step} of {campaign.steps}", flush=True)
        for line in campaign.verified():
            tally.wrong.append(line)
            print(line, flush=True)


def _one(campaign: Campaign, points: int, chance: random.Random, *, rows: bool) -> None:
    with Foreign(campaign.scene) as foreign:
        campaign.calibrate()
        print(f"{campaign.scene.name}: a run takes {campaign.steps} steps, a start {campaign.start_steps}", flush=True)
        chosen = [*(campaign.rows() if rows else ()), *(campaign.random(chance) for _ in range(points))]
        chosen += campaign.roles() if campaign.scene.internet is not None else ()
        for number, point in enumerate(chosen, 1):
            for line in campaign.attempt(point):
                print(line, flush=True)
            if number % 50 == 0:
                print(f"{campaign.scene.name}: {number} of {len(chosen)}", flush=True)
        for line in [*campaign.verified(), *foreign.touched()]:
            campaign.tally.wrong.append(line)
            print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
