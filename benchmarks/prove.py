#!/usr/bin/env python3
"""Prove compiled artefacts in one warm process, beside one Ed25519 verification in the same run.

    agents/librarian, and of it reading alone; a network of six destinations; 256 destinations, each with 32 ranges of
    ports

Processor time: on a busy machine it says more than the clock.

.venv/bin/python benchmarks/prove.py [runs]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from cryptography.hazmat.primitives.asymmetric import ed25519

from policy.decompile import read
from policy.decompile.network import network
from policy.manifest import parse
from tests import proof_kit
from tests.unit.policy.compile import sample


def median_ms(action: Callable[[], object], runs: int) -> float:
    """The median processor time of ``runs`` calls after three that do not count, in milliseconds."""
    times = []
    for index in range(runs + 3):
        begin = time.process_time()
        action()
        if index >= 3:
            times.append((time.process_time() - begin) * 1000)
    return statistics.median(times)


def wide() -> str:
    """256 destinations of every kind, each with 32 ranges of ports."""
    hosts = ("h{}.example.com", "*.w{}.example.org", "9.{}.2.3", "11.{}.0.0/16", "10.{}.0.0/16")
    ports = ", ".join(f'"{100 + 60 * i}-{130 + 60 * i}"' for i in range(32))
    kinds = ("tcp", "tls", "udp")
    return sample.entries(*((hosts[i % 5].format(i), f"[{ports}]", kinds[i % 3]) for i in range(256)))


def main() -> None:
    """Print each median and its ratio to one verification."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    librarian = proof_kit.case(parse.parse((ROOT / "agents" / "librarian" / "agent.toml").read_bytes()))
    some = proof_kit.CASES["network"]()
    many = proof_kit.case(sample.manifest(network="full", more=wide()))
    key = ed25519.Ed25519PrivateKey.generate()
    message = b"x" * 1000
    signature, public = key.sign(message), key.public_key()
    medians = {
        "Ed25519 verify alone": median_ms(lambda: public.verify(signature, message), 10 * runs),
        "read librarian back": median_ms(lambda: read.read(librarian.artefacts.files), runs),
        "prove librarian": median_ms(librarian.prove, runs),
        "prove six destinations": median_ms(some.prove, runs),
        "read the network of 256": median_ms(lambda: network.read(many.artefacts.files), max(runs // 20, 3)),
        "prove 256 destinations": median_ms(many.prove, max(runs // 20, 3)),
    }
    base = medians["Ed25519 verify alone"]
    for name, took in medians.items():
        print(f"{name:28} {took:8.3f} ms  {took / base:8.1f} of Ed25519 verify")


if __name__ == "__main__":
    main()
