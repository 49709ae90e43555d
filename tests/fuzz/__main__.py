"""Give every parser its share of two million inputs; fail when one of them breaks or accepts what it must not.

What is found lies in build/fuzz afterwards, one file an input.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import multiprocessing
import os
import pathlib
import sys
import time

from tests.fuzz import drive, targets

ROOT = pathlib.Path(__file__).resolve().parents[2]
INPUTS = 2_000_000
SEED = "covenant-fuzz-1"
_SHARD = 20_000


def main() -> int:
    """0 when nothing was found and every target accepted something."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Fuzz every parser.")
    parser.add_argument("--inputs", type=int, default=INPUTS)
    parser.add_argument("--seed", default=SEED)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", nargs="+", choices=[t.name for t in targets.ALL])
    options = parser.parse_args()
    chosen = [t for t in targets.ALL if options.only is None or t.name in options.only]
    started = time.monotonic()
    found = _all(chosen, options.inputs, options.seed, options.jobs)
    print(f"{'target':24} {'inputs':>9} {'accepted':>9} {'answers':>8}  finds")
    for one in found.values():
        print(f"{one.name:24} {one.inputs:9} {one.accepted:9} {len(one.answers):8}  {len(one.finds)}")
    total = sum(one.inputs for one in found.values())
    print(f"{'all':24} {total:9} {sum(o.accepted for o in found.values()):9}  in {time.monotonic() - started:.0f} s")
    problems = [f"{o.name}: nothing was accepted, so nothing was checked" for o in found.values() if not o.accepted]
    for one in found.values():
        problems += [f"{one.name}: {_store(one.name, data)}\n{said}" for data, said in one.finds.values()]
    for problem in problems:
        print(problem, file=sys.stderr)
    return int(bool(problems) or total < options.inputs)


def _all(chosen: list[drive.Target], inputs: int, seed: str, jobs: int) -> dict[str, drive.Outcome]:
    """Each target's share, in parts that processes of their own work off."""
    shares = sum(t.share for t in chosen)
    parts: list[tuple[str, int, str]] = []
    for target in chosen:
        left = -(-inputs * target.share // shares)
        sizes = [min(_SHARD, left - start) for start in range(0, left, _SHARD)]
        parts += [(target.name, size, f"{seed}:{at}") for at, size in enumerate(sizes)]
    found = {target.name: drive.Outcome(target.name) for target in chosen}
    context = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        for outcome in pool.map(_part, parts):
            whole = found[outcome.name]
            whole.inputs += outcome.inputs
            whole.accepted += outcome.accepted
            whole.answers += outcome.answers
            whole.finds = outcome.finds | whole.finds
    return found


def _part(part: tuple[str, int, str]) -> drive.Outcome:
    name, inputs, seed = part
    return drive.run(next(t for t in targets.ALL if t.name == name), inputs, seed)


def _store(name: str, data: bytes) -> str:
    directory = ROOT / "build" / "fuzz"
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}-{hashlib.sha256(data).hexdigest()[:12]}"
    path.write_bytes(data)
    return str(path.relative_to(ROOT))


if __name__ == "__main__":
    sys.exit(main())
