#!/usr/bin/env python3
"""A cold run of agents/hello through the supervisor beside `runsc run` of the very bundle that it wrote, as root.

    .venv/bin/python benchmarks/dispatch_cold.py [pairs]

In turn, each a ratio to the raw tool in the same minute:
    raw       `runsc run` of the bundle, alone
    resident  a client that is running already: connect, ask, the accepted answer
    whole     `covenant run` as a command that asks the supervisor, with the start of Python
    here      `covenant run` as a command without a supervisor, which does all of it itself
and where the time of a resident run goes; then what a keeper costs in memory while its agent runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import run_hello
from sandbox.kernel import libc
from tests.kernel import serving
from tests.kernel.serving import Served
from tests.kernel.world import HEAD, TAIL, World

KEEPERS = 8
LONG = HEAD + "import time\ntime.sleep(60)\nanswer = 1\n" + TAIL


def command(served: Served, package: Path, more: Mapping[str, str]) -> float:
    """`covenant run`; seconds."""
    environment = {**os.environ, "COVENANT_HOME": str(served.world.home), **more}
    begin = time.perf_counter()
    program = [str(ROOT / ".venv" / "bin" / "covenant"), "run", str(package), "hi", "--json"]
    subprocess.run(program, env=environment, check=True, capture_output=True)
    return time.perf_counter() - begin


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    # The raw tool reads the same mounts: attached in a namespace of this process, gone with it.
    libc.private_mounts()
    with serving.open_place() as base, contextlib.ExitStack() as stack:
        world = World(base)
        hello = world.sign(world.copy("hello"))
        flags: dict[str, str] = {}
        with run_hello.captured(world, flags) as kept:
            assert world.run(hello).error is None
        for place in ("rootfs", *(name for name in kept if name.startswith("mounts/"))):
            libc.mount(str(kept[place]), str(kept["bundle"] / place), flags=libc.MS_BIND)
            stack.callback(libc.umount2, str(kept["bundle"] / place), libc.MNT_DETACH)
        world.configure(self_test=True)  # as an installation has it; the raw tool's bundle was kept without
        with Served(world) as served:
            times: dict[str, list[float]] = {name: [] for name in ("raw", "resident", "whole", "here")}
            phases: dict[str, list[float]] = {}
            for index in range(pairs + 2):
                taken = {"raw": run_hello.raw(kept, flags, b'{"text": "hi"}\n', index)}
                begin = time.perf_counter()
                answer = served.run(hello)
                taken["resident"] = time.perf_counter() - begin
                assert answer.error is None, (answer.error, answer.stderr)
                taken["whole"] = command(served, hello, {"COVENANT_SOCKET": str(served.path)})
                taken["here"] = command(served, hello, {})
                if index >= 2:
                    for name, seconds in taken.items():
                        times[name].append(seconds)
                    for name, seconds in answer.timings.items():
                        phases.setdefault(name, []).append(seconds)
            run_hello.report(times, phases)
            memory(served)


def memory(served: Served) -> None:
    """Print the private memory of each shim while its agent runs, and of the supervisor."""
    package = served.world.sign(served.world.package({"main.py": LONG}, name="long", id="long", cpu_ms=60000))
    started = sum(row["kind"]["type"] == "run_started" for row in served.world.rows())
    with contextlib.ExitStack() as stack:
        for _ in range(KEEPERS):
            stack.enter_context(serving.asked(served.path, package))
        while sum(row["kind"]["type"] == "run_started" for row in served.world.rows()) < started + KEEPERS:
            time.sleep(0.1)
        time.sleep(2)
        private = [_private_kb(pid) / 1024 for pid in served.children()]
        print(f"memory of its own, MiB: a keeper {statistics.median(private):.1f} (of {len(private)}), ", end="")
        print(f"the supervisor {_private_kb(served.pid) / 1024:.1f}")
        print(json.dumps({"keeper_mib": statistics.median(private), "supervisor_mib": _private_kb(served.pid) / 1024}))
    served.quiet()


def _private_kb(pid: int) -> int:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(kb) for kb in re.findall(r"^Private_(?:Clean|Dirty): +(\d+)", text, re.MULTILINE))


if __name__ == "__main__":
    main()
