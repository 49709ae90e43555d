#!/usr/bin/env python3
"""Standby, cold, `runsc run` and bwrap for one python agent, as `covenant bench dispatch` has it, as root.

    .venv/bin/python benchmarks/dispatch.py [pairs]

Beside it: where the time of a dispatch goes.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from sandbox.standby import dispatch
from sandbox.storage import package_reader as packages
from tests.kernel.serving import Served, covenant, open_place
from tests.kernel.world import World


def hello(world: World, *, standby: int) -> Path:
    """agents/hello, with standby."""
    path = world.copy("hello")
    manifest = path / "agent.toml"
    manifest.write_text(manifest.read_text().replace("# standby = 1", f"standby = {standby}"))
    return world.sign(path)


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    with open_place() as place:
        world = World(place)
        package = hello(world, standby=1)
        with Served(world) as served:
            done = covenant("bench", "dispatch", str(package), "--pairs", str(pairs), "--json", served=served)
            assert done.returncode == 0, (done.stdout, done.stderr, served.log())
            document = json.loads(done.stdout)
            for kind, figure in document["figures"].items():
                print(f"{kind:8} {figure['median_ms']:8.2f} ms  {figure['of_raw']:.3f} of runsc run")
            print(", ".join(f"{name} is not installed" for name in document["missing"]))
            phases(served, package, pairs)
            print(json.dumps(document))


def phases(served: Served, package: Path, pairs: int) -> None:
    """The parts of a dispatch, as the run itself timed them."""
    read, laps = packages.read(package), {}  # type: ignore[var-annotated]
    for _ in range(pairs):
        while not dispatch.ready(served.world.state / "runs", read):
            time.sleep(0.02)
        time.sleep(0.2)
        answer = served.run(package)
        assert answer.error is None, answer
        for name, seconds in answer.timings.items():
            laps.setdefault(name, []).append(seconds)
    print("where a dispatch's time goes (median, ms; `answer line` and `sandbox` count from its arrival):")
    for name, values in laps.items():
        print(f"  {name:14} {statistics.median(values) * 1000:7.2f}")


if __name__ == "__main__":
    main()
