#!/usr/bin/env python3
"""Measure many agents, all but two of them frozen, while no request comes. Needs root.

    .venv/bin/python benchmarks/standby_100.py [agents] [seconds]

Prints the memory of the supervisor's own processes (proportional set size, which divides shared pages) and of the
sandboxes. Also prints the processor time of everything, and the time of a dispatch among so many.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from sandbox.kernel.cgroup import cgroup
from sandbox.rundir import registry
from sandbox.serve import standby_worker
from sandbox.standby import dispatch
from sandbox.storage import package_reader as packages
from tests.kernel.serving import Served, children_of, open_place, reader_of
from tests.kernel.world import HEAD, TAIL, World

_MOST = 50  # of one package, so that there is more than one manifest
_BUSY = 2
_HZ = os.sysconf("SC_CLK_TCK")
_CODE = HEAD + "import time\nif intent['text'] == 'stay': time.sleep(86400)\nanswer = 1\n" + TAIL


def made(world: World, counts: list[int]) -> list[Path]:
    """Packages that ask for so many instances each."""
    paths = []
    for index, count in enumerate(counts):
        path = world.package({"main.py": _CODE}, name=f"many-{index}", id=f"many-{index}", memory_mb=32, cpu_ms=600000)
        manifest = path / "agent.toml"
        manifest.write_text(manifest.read_text().replace("[sandbox]\n", f"[sandbox]\nstandby = {count}\n"))
        paths.append(world.sign(path))
    return paths


def pss_kb(pid: int) -> int:
    """The proportional set size of a process, 0 when it has gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    return 0


def holders_of(pids: list[int]) -> list[int]:
    """Those of these processes that hold instances."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().strip() == standby_worker.NAME:
                found.append(pid)
    return found


def private_kb(pid: int) -> int:
    """Return the KiB that a process shares with no other, 0 if it has gone."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
    return 0


def cpu_seconds(pids: list[int]) -> float:
    """Return the processor time of these processes so far, in seconds."""
    used = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            used += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
    return used / _HZ


def main() -> None:
    agents = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 20.0
    counts = [min(_MOST, left) for left in range(agents - _BUSY, 0, -_MOST)]
    with open_place() as place:
        world = World(place)
        paths = made(world, counts)
        with Served(world) as served:
            runs = world.state / "runs"
            begin = time.monotonic()
            for path in paths:
                assert served.run(path).error is None
            await_all(runs, paths, counts)
            print(f"{sum(counts)} instances after {time.monotonic() - begin:.0f} s")
            stay = [threading.Thread(target=left_alone, args=(served, paths[0]), daemon=True) for _ in range(_BUSY)]
            for one in stay:
                one.start()
            time.sleep(2)
            await_all(runs, paths, counts)
            report(served, runs, seconds)
            dispatches(served, runs, paths[0], counts[0])


def left_alone(served: Served, path: Path) -> None:
    """A run that lasts until the supervisor ends."""
    with contextlib.suppress(Exception):
        served.run(path, "stay")


def await_all(runs: Path, paths: list[Path], counts: list[int]) -> None:
    """Until every package has what it asks for."""
    for path, count in zip(paths, counts, strict=True):
        package = packages.read(path)
        until = time.monotonic() + 1200
        while (there := dispatch.ready(runs, package)) < count:
            assert time.monotonic() < until, f"{there} of {count}"
            time.sleep(0.2)


def report(served: Served, runs: Path, seconds: float) -> None:
    """Print the cost of everything while no request comes."""
    entries = list(registry.agents(registry.live(runs)))
    own = [served.pid, reader_of(served.pid), *children_of(served.pid)]
    leaves = []
    for entry in entries:
        leaf = cgroup.Leaf(cgroup.Hierarchies.read(), entry.run_id)
        leaf.adopt(entry.cgroups)
        leaves.append(leaf)
    inside = sum(pss_kb(pid) for leaf in leaves for pid in leaf.pids())
    frozen = sum(leaf.frozen() for leaf in leaves)
    before, at = cpu_seconds(own) + sum(leaf.cpu_time_us() for leaf in leaves) / 1e6, time.monotonic()
    busy = {leaf.name: leaf.cpu_time_us() for leaf in leaves if not leaf.frozen()}
    time.sleep(seconds)
    used = cpu_seconds(own) + sum(leaf.cpu_time_us() for leaf in leaves) / 1e6 - before
    took = time.monotonic() - at
    running = sum(leaf.cpu_time_us() - busy[leaf.name] for leaf in leaves if leaf.name in busy) / 1e6
    kb, holding = sum(map(pss_kb, own)), holders_of(own)
    document = {
        "agents": len(entries),
        "frozen": frozen,
        "supervisor_mib_each": round(kb / 1024 / len(entries), 2),
        "holders": len(holding),
        "holders_private_mib_each": round(sum(map(private_kb, holding)) / 1024 / (len(entries)), 2),
        "sandbox_mib_each": round(inside / 1024 / len(entries), 2),
        "idle_percent_of_a_core": round(100 * used / took, 1),
        "of_that_the_running": round(100 * running / took, 1),
        "of_that_the_supervisor": round(100 * (used - running) / took, 1),
    }
    print(json.dumps(document))


def dispatches(served: Served, runs: Path, path: Path, count: int) -> None:
    """Print the time of a dispatch among `count` standbys."""
    package, lines, whole = packages.read(path), [], []
    for _ in range(10):
        while dispatch.ready(runs, package) < count - 1:
            time.sleep(0.05)
        time.sleep(1)
        begin = time.perf_counter()
        answer = served.run(path)
        whole.append(time.perf_counter() - begin)
        assert answer.error is None, answer
        lines.append(answer.timings["answer line"])
    print(f"line {statistics.median(lines) * 1000:.2f} ms, accepted {statistics.median(whole) * 1000:.1f} ms")


if __name__ == "__main__":
    main()
