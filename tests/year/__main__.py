"""``python -m tests.year [--days N] [--intents N] [--real N] [--seed N] [--report FILE]``: as root.

The process starts itself again in a mount namespace of its own, under the clock that it moves.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.kernel import serving
from tests.year import run
from tests.year.clock import Clock, inherited


def main() -> int:
    """Run the year, print the report, and return 1 if anything was wrong."""
    parser = argparse.ArgumentParser(prog="tests.year")
    parser.add_argument("--days", type=int, default=365)
    parser.add_argument("--intents", type=int, default=20_000)
    parser.add_argument("--real", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=Path, default=None)
    asked = parser.parse_args()
    clock = inherited()
    if clock is not None:
        # Both services and both disks are taken away on SIGTERM as well.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        return run.year(clock, days=asked.days, intents=asked.intents, real=asked.real, seed=asked.seed,
                        page=asked.report)  # fmt: skip
    with serving.open_place() as place:
        command = ["unshare", "--mount", sys.executable, "-m", "tests.year", *sys.argv[1:]]
        return subprocess.run(command, env=os.environ | Clock(place).environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
