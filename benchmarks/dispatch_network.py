#!/usr/bin/env python3
"""A cold run with a network through the supervisor beside `runsc run` of the very bundle in a ready namespace, as root.

    .venv/bin/python benchmarks/dispatch_network.py [pairs]

In turn, for a grant by address and one by names (which needs the name and TLS gates beside it):
    raw       `runsc run` of the bundle in a network namespace with a link, addresses and routes, which is made before
    tools     the same, with the time in which `ip`, `sysctl` and `nft` make that namespace, its gateway and its rules
    resident  a client that is running already: connect, ask, the accepted answer
and where the time of a resident run goes. An internet of namespaces of its own, as the tests have; leaves nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import network_setup, run_hello
from policy.compile.artefacts import Artefacts
from sandbox.kernel import libc
from sandbox.kernel.net import netns
from sandbox.kernel.runsc import command as runsc_command
from sandbox.runner import gvisor
from tests.kernel import internet, serving
from tests.kernel.internet import Internet, NetworkedWorld
from tests.kernel.serving import Served
from tests.kernel.world import HEAD, TAIL

AGENT = HEAD + "answer = 'hi'\n" + TAIL
SETTLE_SECONDS = 0.5
GRANTS = {
    "by address": internet.entries(("93.184.216.34", "[80]", "tcp")),
    "by names": internet.entries(("api.example.com", "[80]", "tcp"), ("www.example.com", "[443]", "tls")),
}


@dataclass
class Subject:
    """A signed package with a network, the bundle that a run of it wrote, and what was compiled for it."""

    package: Path
    kept: dict[str, Path]
    flags: dict[str, str]
    artefacts: Artefacts


@contextlib.contextmanager
def subject(world: NetworkedWorld, name: str) -> Iterator[Subject]:
    """One that has run once; its bundle's mounts are attached in this process's namespace while the block lasts."""
    package = world.sign(
        world.package({"main.py": AGENT}, name=name.replace(" ", "-"), network="full", more=GRANTS[name])
    )
    flags: dict[str, str] = {}
    compiled: list[Artefacts] = []
    launch = gvisor._launch  # noqa: SLF001 - as run_hello.captured does

    def seen(job: gvisor.SandboxSpec, *rest: object, **named: object) -> object:
        compiled.append(job.artefacts)
        return launch(job, *rest, **named)  # type: ignore[arg-type]

    gvisor._launch = seen  # type: ignore[assignment]  # noqa: SLF001
    try:
        with run_hello.captured(world, flags) as kept:
            answer = world.run(package)
            assert answer.error is None, (answer.error, answer.stderr)
    finally:
        gvisor._launch = launch  # noqa: SLF001
    moved = {**kept, "bundle": kept["bundle"].rename(world.base / f"raw-{package.name}")}
    with contextlib.ExitStack() as stack:
        for place in ("rootfs", *(key for key in moved if key.startswith("mounts/"))):
            libc.mount(str(moved[place]), str(moved["bundle"] / place), flags=libc.MS_BIND)
            stack.callback(libc.umount2, str(moved["bundle"] / place), libc.MNT_DETACH)
        yield Subject(package, moved, flags, compiled[0])


def raw(one: Subject, net: Internet, number: int) -> dict[str, float]:
    """`runsc run` in a namespace that the tools made: alone, and with the time that they took; seconds."""

    def both() -> dict[str, float]:
        with network_setup.raw(one.artefacts, number) as made, _covered(f"/run/netns/bench-{number}-a") as space:
            begin = time.perf_counter()
            _runsc(["nsenter", f"--net={space}"], one, number)
            seconds = time.perf_counter() - begin
        return {"raw": seconds, "tools": seconds + made / 1000}

    return net.within("host", both)


@contextlib.contextmanager
def _covered(space: str) -> Iterator[str]:
    """Hide the directory that some runsc take as the sign of the machine's own namespace (runsc_network.py)."""
    place = "/proc/sys/net/core"
    with open(space, "rb") as entry:
        # /proc/sys/net shows the network namespace of the process that reads it, and so does a mount on it.
        netns.within(entry.fileno(), lambda: libc.mount("none", place, "tmpfs"))
        try:
            yield space
        finally:
            netns.within(entry.fileno(), lambda: libc.umount2(place, libc.MNT_DETACH))


def _runsc(before: list[str], one: Subject, number: int) -> None:
    state = one.kept["bundle"].parent / "raw-state"
    state.mkdir(exist_ok=True)
    stated = [f"{name}={value}" for name, value in one.flags.items()]
    command = [*before, "/usr/bin/runsc", f"--root={state}", *stated, "run", f"--bundle={one.kept['bundle']}"]
    environment = {**runsc_command.ENVIRONMENT, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    intent = b'{"text": "hi"}\n'
    done = subprocess.run([*command, f"raw{number}"], input=intent, capture_output=True, env=environment, timeout=60)
    assert done.returncode == 0, done


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    libc.private_mounts()
    # `ip netns` mounts names: in a mount namespace of our own they stay here.
    libc.mount("none", "/run", "tmpfs")
    Path("/run/netns").mkdir()
    with serving.open_place() as base, internet.made() as net:
        world = internet.configured(NetworkedWorld(base), net)
        settings = {"uplink": "eth0", "resolvers": [internet.RESOLVER]}
        host = ["nsenter", f"--net=/proc/{os.getpid()}/fd/{net.spaces['host']}"]
        for name in GRANTS:
            with subject(world, name) as one, Served(world, before=host, **settings) as served:
                measure(name, one, net, served, pairs)
                served.quiet()


def measure(name: str, one: Subject, net: Internet, served: Served, pairs: int) -> None:
    """One kind of grant, in turn with the raw tool."""
    times: dict[str, list[float]] = {"raw": [], "tools": [], "resident": []}
    phases: dict[str, list[float]] = {}
    for index in range(pairs + 2):
        taken = raw(one, net, index)
        begin = time.perf_counter()
        answer = served.run(one.package)
        taken["resident"] = time.perf_counter() - begin
        assert answer.error is None, (answer.error, answer.stderr)
        # What is done once the answer was given must not be what the raw tool waits for.
        time.sleep(SETTLE_SECONDS)
        if index >= 2:
            for key, seconds in taken.items():
                times[key].append(seconds)
            for key, seconds in answer.timings.items():
                phases.setdefault(key, []).append(seconds)
    print(f"-- granted {name}, {len(times['raw'])} pairs, load {os.getloadavg()[0]:.1f}")
    run_hello.report(times, phases)
    print(json.dumps({"granted": name}))


if __name__ == "__main__":
    main()
