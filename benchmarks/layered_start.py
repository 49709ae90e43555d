#!/usr/bin/env python3
"""Measure starts with a root of layers, as a directory and as an EROFS file, beside agents/hello; in turns, as root.

    .venv/bin/python benchmarks/layered_start.py [rounds] [files]

The layer has ``files`` files (26,000 without it) in packages of 20, as a large virtual environment has. Each round runs
agents/hello, and an agent of that layer in both kinds of root. A figure is the median of all rounds in milliseconds:
    whole    from the request to the answer
    inside   what the agent measures itself: an import of 200 modules of the layer, and a walk over it
The time that each image took to make is printed once; so is its size.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from sandbox.host import erofs_roots
from sandbox.layers.images import RootImages
from sandbox.layers.store import LayerStore
from sandbox.run_result import RunResult
from sandbox.storage import package_reader
from sandbox.supervisor import Request, Supervisor
from tests.kernel.world import World

SITE = "/opt/venv/site-packages"
AGENT = f"""
import json, os, sys, time
sys.stdin.readline()
sys.path.insert(0, {SITE!r})
begin = time.perf_counter()
for at in range(10):
    for n in range(20):
        __import__(f"package{{at}}.module{{n}}")
imports = time.perf_counter()
files = 0
for at, _, names in os.walk({SITE!r}):
    for name in names:
        os.stat(os.path.join(at, name))
        files += 1
took = {{"imports": (imports - begin) * 1e3, "walk": (time.perf_counter() - imports) * 1e3, "files": files}}
print(json.dumps({{"text": json.dumps(took)}}))
"""
KINDS = ("directory", "EROFS file")


def venv(top: Path, files: int) -> None:
    """Write packages of 20 modules, 28 KiB each, which is the mean of a virtual environment with numpy and torch."""
    body = "\n".join(f"def f{at}(x):\n    return x + {at}\n" for at in range(40)) + "#" * 27_000 + "\n"
    for at in range(files // 20):
        folder = top / f"package{at}"
        folder.mkdir(parents=True)
        for n in range(20):
            (folder / f"module{n}.py").write_text(body)


def run(world: World, supervisor: Supervisor, package: Path, kind: str) -> tuple[float, RunResult]:
    """Run a package with roots of one kind. Returns the milliseconds and the result."""
    known = erofs_roots.program
    if kind == KINDS[0]:
        erofs_roots.program = lambda: None
    try:
        begin = time.perf_counter()
        answer = supervisor.run(Request(package_reader.read(package), "go", world.issuer))
        took = (time.perf_counter() - begin) * 1e3
    finally:
        erofs_roots.program = known
    assert answer.error is None, (answer.error, answer.stderr)
    return took, answer


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    files = int(sys.argv[2]) if len(sys.argv) > 2 else 26_000
    base = Path(tempfile.mkdtemp(prefix="covenant-benchmark-", dir="/var/tmp"))
    try:
        measure(base, rounds, files)
    finally:
        shutil.rmtree(base)


def measure(base: Path, rounds: int, files: int) -> None:
    """Print the table."""
    world = World(base)
    venv(base / "venv", files)
    ref = LayerStore(world.state).pack_tree(base / "venv", "venv", prefix=SITE).ref
    shutil.rmtree(base / "venv")
    hello = world.sign(world.copy("hello"))
    more = f'[root]\nlayers = ["{ref}"]\n'
    layered = world.sign(world.package({"main.py": AGENT}, memory_mb=512, cpu_ms=250_000, more=more))
    figures: dict[str, list[float]] = {}
    with Supervisor(world.state) as supervisor:
        run(world, supervisor, hello, KINDS[1])
        for kind in KINDS:
            print(
                f"first run, {kind}: {run(world, supervisor, layered, kind)[0]:.0f} ms, with the self-test in the first"
            )
        for one in RootImages(world.state).made_of(ref.digest).values():
            print(f"image: {one.kind}, {one.files} paths" + (f", {one.bytes >> 20} MiB" if one.bytes else ""))
        for _ in range(rounds):
            took, _ = run(world, supervisor, hello, KINDS[1])
            figures.setdefault("hello whole", []).append(took)
            for kind in KINDS:
                took, answer = run(world, supervisor, layered, kind)
                assert answer.result is not None
                inside = json.loads(answer.result.text)
                assert inside["files"] >= files // 20 * 20
                figures.setdefault(f"{kind} whole", []).append(took)
                for what in ("imports", "walk"):
                    figures.setdefault(f"{kind} {what}", []).append(inside[what])
    for name, values in figures.items():
        print(f"{name:<22} median {statistics.median(values):7.0f} ms   least {min(values):7.0f} ms")


if __name__ == "__main__":
    main()
