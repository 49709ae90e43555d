#!/usr/bin/env python3
"""A run of agents/hello beside `runsc run` of the very bundle that it wrote, in turn, as root.

    .venv/bin/python benchmarks/run_hello.py [pairs]

Three figures, each a ratio to the raw tool in the same minute:
    warm     one process that runs the package again and again: verify to answer
    whole    `covenant run` as a command, with the start of Python and the clean-up
    raw      `runsc run` of the bundle, alone
and where the time of a warm run goes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from sandbox.kernel import libc
from sandbox.kernel.proc import launch
from sandbox.kernel.runsc import command as runsc_command
from sandbox.rundir.directory import RunDirectory
from sandbox.runner import gvisor
from sandbox.storage import package_reader
from sandbox.supervisor import Request, Supervisor
from tests.kernel.world import World


@contextlib.contextmanager
def captured(world: World, flags: dict[str, str]) -> Iterator[dict[str, Path]]:
    """Keep the bundle that a run wrote, with its mounts resolved to what they were made from."""
    kept: dict[str, Path] = {}
    original = gvisor._launch  # noqa: SLF001 - the bundle exists only while the run does

    def keep(job: gvisor.SandboxSpec, directory: RunDirectory, *rest: Any) -> launch.Launch:
        if kept:
            return original(job, directory, *rest)
        bundle = world.base / "raw"
        shutil.copytree(directory.bundle, bundle)
        kept["bundle"] = bundle
        kept["rootfs"] = job.files.rootfs
        for index, mount in enumerate(job.artefacts.json("mounts.json")["mounts"]):
            if mount["type"] == "bind":
                source = Path(os.readlink(f"/proc/self/fd/{job.files.sources[mount['destination']]}"))
                if source.is_relative_to(directory.path):  # gone with the run
                    source = Path(shutil.copytree(source, world.base / f"raw-mount-{index}"))
                kept[f"mounts/{index}"] = source
        flags.update(job.artefacts.json("runtime.json")["flags"])
        return original(job, directory, *rest)

    gvisor._launch = keep  # type: ignore[assignment]  # noqa: SLF001
    try:
        yield kept
    finally:
        gvisor._launch = original  # noqa: SLF001


def raw(kept: dict[str, Path], flags: dict[str, str], intent: bytes, index: int) -> float:
    """`runsc run` of the bundle, with the flags that we use; seconds."""
    stated = [f"{name}={value}" for name, value in flags.items()]
    state = kept["bundle"].parent / "raw-state"
    state.mkdir(exist_ok=True)
    command = ["/usr/bin/runsc", f"--root={state}", *stated, "run", f"--bundle={kept['bundle']}", f"raw{index}"]
    begin = time.perf_counter()
    done = subprocess.run(command, input=intent, capture_output=True, env=runsc_command.ENVIRONMENT, timeout=60)
    seconds = time.perf_counter() - begin
    assert done.returncode == 0, done
    return seconds


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    base = Path(tempfile.mkdtemp(prefix="covenant-benchmark-"))
    # The raw tool reads the same mounts: attached in a namespace of this process, gone with it.
    libc.private_mounts()
    world = World(base)
    hello = world.sign(world.copy("hello"))
    command = [sys.executable, "-m", "covenant", "run", str(hello), "hi", "--json"]
    environment = {**os.environ, "COVENANT_HOME": str(world.home), "PYTHONPATH": str(ROOT)}
    times: dict[str, list[float]] = {"raw": [], "warm": [], "whole": []}
    phases: dict[str, list[float]] = {}
    flags: dict[str, str] = {}
    with Supervisor(world.state) as supervisor, captured(world, flags) as kept:
        for index in range(pairs + 2):
            begin = time.perf_counter()
            answer = supervisor.run(Request(package_reader.read(hello), "hi", world.issuer))
            warm = time.perf_counter() - begin
            assert answer.error is None, (answer.error, answer.stderr)
            if index == 0:
                for place in ("rootfs", *(k for k in kept if k.startswith("mounts/"))):
                    libc.mount(str(kept[place]), str(kept["bundle"] / place), flags=libc.MS_BIND)
            seconds = raw(kept, flags, b'{"text": "hi"}\n', index)
            begin = time.perf_counter()
            subprocess.run(command, env=environment, check=True, capture_output=True)
            whole = time.perf_counter() - begin
            if index >= 2:
                times["raw"].append(seconds)
                times["warm"].append(warm)
                times["whole"].append(whole)
                for name, value in answer.timings.items():
                    phases.setdefault(name, []).append(value)
    report(times, phases)
    for place in ("rootfs", *(k for k in kept if k.startswith("mounts/"))):
        libc.umount2(str(kept["bundle"] / place), libc.MNT_DETACH)
    shutil.rmtree(base)


def report(times: dict[str, list[float]], phases: dict[str, list[float]]) -> None:
    """Medians, and the median of the ratios pair by pair."""
    for name, values in times.items():
        ratio = statistics.median(v / r for v, r in zip(values, times["raw"], strict=True))
        print(f"{name:6} {statistics.median(values) * 1000:7.1f} ms   {ratio:.2f} of runsc run")
    print("where a warm run's time goes (median, ms):")
    for name, values in phases.items():
        print(f"  {name:14} {statistics.median(values) * 1000:7.1f}")
    print(json.dumps({name: statistics.median(values) for name, values in times.items()}))


if __name__ == "__main__":
    main()
