#!/usr/bin/env python3
"""Verify, validate and compile of agents/librarian in one warm process, beside one Ed25519 verification.

.venv/bin/python benchmarks/decide.py [runs]
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

from policy import decide  # noqa: E402
from policy.signing import trust  # noqa: E402
from sandbox import config, host, package  # noqa: E402
from sandbox.state import State  # noqa: E402
from tests.kernel.world import World  # noqa: E402


def median_ms(action: Callable[[], object], runs: int) -> float:
    """The median of ``runs`` calls after three that do not count, in milliseconds."""
    times = []
    for index in range(runs + 3):
        begin = time.perf_counter()
        action()
        if index >= 3:
            times.append((time.perf_counter() - begin) * 1000)
    return statistics.median(times)


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    with tempfile.TemporaryDirectory(prefix="covenant-benchmark-") as base:
        world = World(Path(base))
        read = package.read(world.sign(world.copy("librarian")))
        settings = config.load(world.state)
        manifest = decide.manifest_of(read)
        facts = host.for_manifest(host.probe(settings), manifest, config=settings, package=read.files)
        now_ms = int(time.time() * 1000)
        signature, message = world.key.sign(b"x" * 1000), b"x" * 1000
        public = world.key.public_key()
        with State(world.state) as state:
            root = state.trust_root(now_ms)

            def verify() -> trust.TrustedPackage:
                return trust.verify(read, root, now_ms=now_ms, audience=settings.host, serials=trust.NoSerials())

            def whole() -> decide.Decision:
                trusted = verify()
                return decide.authorise(trusted, decide.manifest_of(trusted.package), host=facts, now_ms=now_ms)

            bare = median_ms(lambda: public.verify(signature, message), runs)
            figures = {
                "Ed25519 verify alone": bare,
                "verify the package": median_ms(verify, runs),
                "parse the manifest": median_ms(lambda: decide.manifest_of(read), runs),
                "verify + validate + compile": median_ms(whole, runs),
            }
    for name, value in figures.items():
        print(f"{name:28} {value:7.3f} ms   {value / bare:6.1f} of Ed25519 verify")


if __name__ == "__main__":
    main()
