#!/usr/bin/env python3
"""The cost of learning: `covenant run --learn DIR` beside `covenant run` of the same package, in turn, as root.

    hello    agents/hello: what a start costs more, with its trace session and the proposal at the end
    opens    a program that opens a file 20,000 times: the cost of one traced call

.venv/bin/python benchmarks/learn.py [pairs]
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.kernel.world import HEAD, TAIL, World

OPENS = 20_000
_PROGRAM = f"""
import os, time
begin = time.perf_counter()
for _ in range({OPENS}):
    os.close(os.open("main.py", os.O_RDONLY))
answer = str(time.perf_counter() - begin)
"""


def _took(world: World, package: Path, learnt: Path | None) -> float:
    more = [] if learnt is None else ["--learn", str(learnt)]
    command = [sys.executable, "-m", "covenant", "run", *more, str(package), "hi"]
    environment = {**os.environ, "COVENANT_HOME": str(world.home), "PYTHONPATH": str(ROOT)}
    begin = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    took = time.perf_counter() - begin
    if done.returncode:
        raise SystemExit(done.stderr)
    return took


def main() -> None:
    """Measure both programs."""
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    base = Path(tempfile.mkdtemp(prefix="covenant-benchmark-"))
    world = World(base)
    opens = world.package({"main.py": HEAD + _PROGRAM + TAIL}, id="opens", cpu_ms=300_000)
    for name, package in (("hello", world.sign(world.copy("hello"))), ("opens", world.sign(opens))):
        plain, traced = list[float](), list[float]()
        for n in range(pairs + 1):
            first, second = _took(world, package, None), _took(world, package, base / f"learnt-{name}-{n}")
            if n:  # the first pair fills the caches
                plain.append(first)
                traced.append(second)
        ratio = statistics.median(two / one for one, two in zip(plain, traced, strict=True))
        before, after = statistics.median(plain), statistics.median(traced)
        print(f"{name}: run {1000 * before:.0f} ms, learn {1000 * after:.0f} ms, {ratio:.2f} of the run", flush=True)
        if name == "opens":
            print(f"  {1e6 * (after - before) / OPENS:.0f} us more for each open and close")
    shutil.rmtree(base)


if __name__ == "__main__":
    main()
