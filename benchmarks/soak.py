#!/usr/bin/env python3
"""Runs without end through one supervisor, beside `runsc run` of the very bundle, by two workers each, as root.

    .venv/bin/python benchmarks/soak.py [runs]

Blocks in turn, so that both see the same minute: starts a second of either, their ratio, and after each block what
must not grow: memory and descriptors of the supervisor, cgroups, namespaces, files of the state.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.run_hello import captured, raw
from sandbox.kernel import libc
from sandbox.kernel.cgroup import cgroup
from sandbox.kernel.cgroup.delegation import BASE
from sandbox.storage import package_reader
from sandbox.supervisor import Request, Supervisor
from tests.kernel.serving import Served, reader_of
from tests.kernel.world import World

WORKERS, BLOCK = 2, 10
# What grows with each run by design, and is bounded or is the log itself.
_GROWS = ("audit", "archive", "audit-head")


def main() -> None:
    """Print a line a block, and what came of it."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    base = Path(tempfile.mkdtemp(prefix="covenant-soak-"))
    # The raw tool reads the same mounts: attached in a namespace of this process, gone with it.
    libc.private_mounts()
    world = World(base)
    hello = world.sign(world.copy("hello"))
    flags: dict[str, str] = {}
    with Supervisor(world.state) as supervisor, captured(world, flags) as kept:
        assert supervisor.run(Request(package_reader.read(hello), "hi", world.issuer)).error is None
    places = ("rootfs", *(name for name in kept if name.startswith("mounts/")))
    for place in places:
        libc.mount(str(kept[place]), str(kept["bundle"] / place), flags=libc.MS_BIND)
    world.configure(self_test=True)  # as an installation has it; the raw tool's bundle was kept without

    def ours(number: int) -> None:
        answer = served.run(hello, "hi")
        assert answer.error is None, (answer.error, answer.stderr)

    def theirs(number: int) -> None:
        raw(kept, flags, b'{"text": "hi"}\n', number)

    rates: list[tuple[float, float]] = []
    held: list[dict[str, int]] = []
    with Served(world, journal=True) as served, ThreadPoolExecutor(WORKERS) as pool:
        _rate(pool, ours, 0)
        for block in range(max(1, runs // BLOCK)):
            rates.append((_rate(pool, ours, block), _rate(pool, theirs, block)))
            held.append(gauges(served))
            mine, others = rates[-1]
            print(f"{(block + 1) * BLOCK:5} runs  {mine:5.2f}/s  raw {others:5.2f}/s  {mine / others:.2f}  {held[-1]}")
    print(
        f"starts a second: {statistics.median(m for m, _ in rates):.2f}, "
        f"raw {statistics.median(r for _, r in rates):.2f}, "
        f"ratio {statistics.median(m / r for m, r in rates):.2f} (median of {len(rates)} blocks of {BLOCK})"
    )
    quarter = max(1, len(held) // 4)
    for name in held[0]:
        first, last = (statistics.median(one[name] for one in part) for part in (held[:quarter], held[-quarter:]))
        print(f"  {name:22} first quarter {first:10.0f}   last quarter {last:10.0f}")
    for place in places:
        libc.umount2(str(kept["bundle"] / place), libc.MNT_DETACH)
    shutil.rmtree(base)


def _rate(pool: ThreadPoolExecutor, one: Callable[[int], None], block: int) -> float:
    begin = time.perf_counter()
    list(pool.map(one, range(block * BLOCK, (block + 1) * BLOCK)))
    return BLOCK / (time.perf_counter() - begin)


def gauges(served: Served) -> dict[str, int]:
    """Return the figures that must stay constant. Memory is in KiB, of the supervisor and its resident children."""
    until = time.monotonic() + 10
    runs = served.world.state / "runs"
    while time.monotonic() < until and any(path.is_dir() for path in runs.iterdir()):
        time.sleep(0.01)
    # Keepers that wait for their next request are bounded, and count.
    processes = [served.pid, reader_of(served.pid), *served.children(), *served.waiting()]
    memory = sum(_pss(pid) for pid in processes)
    mounts = set(cgroup.Hierarchies.read().mounts.values())
    ids = {row["kind"].get("run_id") for row in served.world.rows()[-40:]} - {None}
    state = served.world.state
    files = sum(1 for path in state.rglob("*") if path.relative_to(state).parts[0] not in _GROWS)
    spaces = {os.readlink(f"/proc/{pid}/ns/{kind}") for pid in processes for kind in ("net", "mnt", "user")}
    return {
        "memory_kib": memory,
        "descriptors": served.descriptors() - 2 * len(served.waiting()),
        "processes": len(processes),
        "namespaces": len(spaces),
        "cgroups": sum((mount / BASE / str(one)).exists() for mount in mounts for one in ids),
        "files": files,
    }


def _pss(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    return 0


if __name__ == "__main__":
    main()
