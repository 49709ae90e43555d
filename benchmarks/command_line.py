#!/usr/bin/env python3
"""`covenant --help` beside `python -c 'import click'` of the same environment, with bare python, in turn.

.venv/bin/python benchmarks/command_line.py [rounds]
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON = sys.executable
COMMANDS = {
    "python -c pass": [PYTHON, "-c", "pass"],
    "python -c 'import click'": [PYTHON, "-c", "import click"],
    "covenant --help": [str(ROOT / ".venv" / "bin" / "covenant"), "--help"],
    "import sandbox.supervisor": [PYTHON, "-c", "import sandbox.supervisor"],
}


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for index in range(rounds + 2):
        for name, command in COMMANDS.items():
            begin = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
            if index >= 2:
                times[name].append((time.perf_counter() - begin) * 1000)
    base = times["python -c 'import click'"]
    for name, values in times.items():
        ratio = statistics.median(v / b for v, b in zip(values, base, strict=True))
        print(f"{name:28} {statistics.median(values):7.1f} ms   {ratio:.2f} of import click")


if __name__ == "__main__":
    main()
