#!/usr/bin/env python3
"""Attest one agent under real runsc, with a network and without, beside `nft -j list ruleset` of its gateway.

    the first look of a run (which also asks for gVisor's filters), a look while the rules rest, one after a name was
    answered, and the program alone, in turns, so that a busy machine is busy for all of them; a look at a run with
    100 connections open

An internet of namespaces of its own, as the tests have; needs root, and leaves nothing.

.venv/bin/python benchmarks/attest.py [looks]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from sandbox.attest import verifier
from sandbox.kernel.net import conntrack, netns, nft
from sandbox.rundir import directory as rundir_directory
from sandbox.storage import artefact_reader
from tests.kernel import internet
from tests.kernel.live_runs import Live, live, until
from tests.kernel.world import World

GRANTS = internet.entries(
    ("93.184.216.34", "[80]", "tcp"), ("10.0.0.0/8", "[22, 5432]", "tcp"), ("api.example.com", "[443]", "tls"),
    ("*.example.org", "[443]", "tls"), ("9.9.9.9", "[123]", "udp"),
)  # fmt: skip


def took_ms(action: Callable[[], object]) -> float:
    """How long one call takes, in milliseconds."""
    begin = time.perf_counter()
    action()
    return (time.perf_counter() - begin) * 1000


class Looks:
    """Looks at one live run from here, as its supervisor does."""

    def __init__(self, one: Live) -> None:
        self.one, self.state = one, one.world.state
        self.policy = artefact_reader.read(one.directory / rundir_directory.POLICY)
        self.known = verifier.VerifierCache()

    def look(self) -> None:
        """One look, which must find everything as it was made."""
        report = verifier.examine(self.one.made, self.policy, self.known, state=self.state)
        assert report.holds, [layer for layer in report.layers if not layer.holds]

    def first(self) -> None:
        """A look that knows nothing yet."""
        self.known = verifier.VerifierCache()
        self.look()


def networked(base: Path, looks: int) -> dict[str, list[float]]:
    """The figures of a run with a network."""
    out: dict[str, list[float]] = {"nft -j list ruleset alone": [], "first look": [], "look, rules at rest": []}
    out["look, a name answered"] = []
    binary = Path("/usr/sbin/nft")
    with internet.made() as net:
        world = internet.configured(internet.NetworkedWorld(base), net, attest_seconds=3600)
        with live(world, network="full", more=GRANTS) as one:
            seen, network = Looks(one), one.made.network
            assert network is not None
            fd = network.gateway.fd
            rules = seen.policy.files["firewall.nft"].decode().split()
            names = next(word for word in rules if word.startswith("n4"))
            element = f"add element inet covenant {names} {{ 93.184.216.34 timeout 300s }}\n".encode()
            for _ in range(looks):
                out["nft -j list ruleset alone"].append(
                    netns.within(fd, lambda: took_ms(lambda: nft.listed(binary, "ruleset")))
                )
                out["first look"].append(took_ms(seen.first))
                out["look, rules at rest"].append(took_ms(seen.look))
                netns.within(fd, lambda: nft.apply(binary, element))
                out["look, a name answered"].append(took_ms(seen.look))
    return out


HOLDS = """
import socket, time
held = [socket.create_connection(("93.184.216.34", 80), timeout=10) for _ in range(100)]
time.sleep(300)
"""


def connected(base: Path, looks: int) -> dict[str, list[float]]:
    """The figures of a run that has 100 connections open."""
    out: dict[str, list[float]] = {"look, 100 connections": []}
    with internet.made() as net:
        world = internet.configured(internet.NetworkedWorld(base), net, attest_seconds=3600)
        with live(world, HOLDS, network="full", more=GRANTS) as one:
            seen, network = Looks(one), one.made.network
            assert network is not None
            fd = network.gateway.fd
            until(lambda: len(netns.within(fd, conntrack.connections)) >= 100)
            for _ in range(looks):
                out["look, 100 connections"].append(took_ms(seen.look))
    return out


def alone(base: Path, looks: int) -> dict[str, list[float]]:
    """The figures of a run without one."""
    out: dict[str, list[float]] = {"first look, no network": [], "look, no network": []}
    world = World(base)
    world.configure(attest_seconds=3600)
    with live(world) as one:
        seen = Looks(one)
        for _ in range(looks):
            out["first look, no network"].append(took_ms(seen.first))
            out["look, no network"].append(took_ms(seen.look))
    return out


def main() -> None:
    """Print each median and its ratio to the program alone."""
    looks = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    with tempfile.TemporaryDirectory() as directory:
        bases = [Path(directory, name) for name in ("networked", "connected", "alone")]
        for base in bases:
            base.mkdir()
        figures = {
            **networked(bases[0], looks),
            **connected(bases[1], looks),
            **alone(bases[2], looks),
        }
    base_ms = statistics.median(figures["nft -j list ruleset alone"])
    for name, times in figures.items():
        median = statistics.median(times)
        print(f"{name:28} {median:8.2f} ms  {median / base_ms:6.2f} of nft -j list ruleset")


if __name__ == "__main__":
    main()
