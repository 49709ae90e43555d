#!/usr/bin/env python3
"""Verify, validate, compile and prove in one warm process, beside one Ed25519 verification in the same run.

    agents/librarian, and 1,000 different manifests, half of them with a network, each signed.

Processor time: all of this is computing, and a busy machine would show in the wall clock.

.venv/bin/python benchmarks/decide.py [runs]
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from policy import decide
from policy.compile import plan
from policy.host import HostFacts
from policy.package import Package
from policy.signing import trust
from sandbox import config
from sandbox.host import facts as host_facts
from sandbox.storage import package_reader
from sandbox.storage.trust_state import State
from tests import signing_kit
from tests.kernel.world import World
from tests.unit.policy.compile import sample

MANY = 1000


def median_ms(action: Callable[[], object], runs: int) -> float:
    """The median of ``runs`` calls after three that do not count, in milliseconds."""
    times = []
    for index in range(runs + 3):
        begin = time.process_time()
        action()
        if index >= 3:
            times.append((time.process_time() - begin) * 1000)
    return statistics.median(times)


def compiled(
    trusted: trust.TrustedPackage, facts: HostFacts, now_ms: int, *, compiler: Callable[..., object] = plan.compile
) -> None:
    """Parse, the nine rules, and what ``compiler`` does; without the question whether a run could hold it yet."""
    manifest = decide.manifest_of(trusted.package)
    effective = decide.rules(trusted, manifest, host=facts, now_ms=now_ms).effective
    compiler(effective, manifest, facts, package_digest=trusted.package.digest)


def librarian(runs: int) -> dict[str, float]:
    """Medians for agents/librarian, in milliseconds."""
    with tempfile.TemporaryDirectory(prefix="covenant-benchmark-") as base:
        world = World(Path(base))
        read = package_reader.read(world.sign(world.copy("librarian")))
        settings = config.load(world.state)
        manifest = decide.manifest_of(read)
        facts = host_facts.for_manifest(host_facts.probe(settings), manifest, config=settings, package=read.files)
        now_ms = int(time.time() * 1000)
        signature, message = world.key.sign(b"x" * 1000), b"x" * 1000
        public = world.key.public_key()
        with State(world.state) as state:
            root = state.trust_root(now_ms)

            def verify() -> trust.TrustedPackage:
                return trust.verify(read, root, now_ms=now_ms, audience=settings.host, serials=trust.NoSerials())

            def whole(policies: decide.Policies | None = None) -> decide.Decision:
                trusted = verify()
                parsed = decide.manifest_of(trusted.package)
                return decide.authorise(trusted, parsed, host=facts, now_ms=now_ms, policies=policies)

            known, kept = verify(), decide.Policies()
            effective = decide.rules(known, manifest, host=facts, now_ms=now_ms).effective
            rest = {"package_digest": known.package.digest}
            return {
                "Ed25519 verify alone": median_ms(lambda: public.verify(signature, message), runs),
                "verify the package": median_ms(verify, runs),
                "parse the manifest": median_ms(lambda: decide.manifest_of(read), runs),
                "verify + validate + compile": median_ms(lambda: compiled(verify(), facts, now_ms), runs),
                "the same, and prove": median_ms(whole, runs),
                "compile and prove again, cached": median_ms(
                    lambda: kept.compile(effective, manifest, facts, **rest), runs
                ),
                "all of it again, cached": median_ms(lambda: whole(kept), runs),
            }


def _manifest(rng: random.Random, number: int) -> bytes:
    """One of many: limits, paths, programs and calls of its own, and every other one a network."""
    limits = f"memory_mb = {rng.randrange(64, 256)}\npids_max = {rng.randrange(8, 64)}\n"
    more = "[permissions.filesystem]\nread = [{}]\n".format(
        ", ".join(f'"{path}"' for path in rng.sample(sorted(sample.host().granted), rng.randrange(4)))
    )
    calls = rng.sample(["getcpu", "sched_yield", "sync", "chmod", "umask"], rng.randrange(4))
    more += "[permissions.syscalls]\nallow = [{}]\n".format(", ".join(f'"{name}"' for name in calls))
    mode = "off"
    if number % 2:
        mode = "full"
        more += sample.entries(
            *((f"h{number}-{n}.example.com", "[443]", "tls") for n in range(rng.randrange(1, 5))),
            *((f"10.{rng.randrange(256)}.{n}.0/24", "[5432, 8080]", "tcp") for n in range(rng.randrange(4))),
        )
    text = sample.TOML.format(runtime="python3", resources=limits, filesystem="ephemeral", more=more)
    text = text.replace('network = "off"', f'network = "{mode}"', 1)
    return text.replace('id = "sample"', f'id = "sample-{number}"', 1).encode()


def _signed(rng: random.Random, number: int) -> Package:
    files = {"agent.toml": _manifest(rng, number), "main.py": b"print(1)\n"}
    return signing_kit.signed(files=files, agent_id=f"sample-{number}")


def many() -> dict[str, float]:
    """Different manifests a second of one core, without and with proof."""
    rng = random.Random(1)
    packages = [_signed(rng, number) for number in range(MANY)]
    facts, root = sample.host(), signing_kit.root()
    out = {}
    for name, compiler in (("without prove", plan.compile), ("with prove", decide.Policies().compile)):
        begin = time.process_time()
        for one in packages:
            trusted = signing_kit.verify(one, root, audience="machine")
            compiled(trusted, facts, signing_kit.NOW, compiler=compiler)
        out[name] = MANY / (time.process_time() - begin)
    return out


def main() -> None:
    figures = librarian(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
    bare = figures["Ed25519 verify alone"]
    for name, value in figures.items():
        print(f"{name:32} {value:7.3f} ms   {value / bare:6.1f} of Ed25519 verify")
    for name, rate in many().items():
        each = 1000 / rate
        print(f"{MANY} manifests, {name:15} {rate:7.0f} a second   {each / bare:6.1f} of Ed25519 verify each")


if __name__ == "__main__":
    main()
